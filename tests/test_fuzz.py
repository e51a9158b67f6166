"""Whatever comes in: nothing wrong comes out in silence, and everything is as it was found.

Each attempt draws good arguments, spoils up to two of them as a caller might (another length,
shape, sign, dtype or order, a part missing or there twice, NaN) and calls. Good arguments are never
refused. An error is as good as an answer, whatever its type; an answer must be what a slow loop,
written from the rule, makes of the same arguments. Arguments, model and engine are left alone.
"""

import contextlib
import copy
import math
from functools import cache
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import drafter_sync
import mtp_loss
import mtp_mask
import mtp_recompute
import ref_disable
import spec_metrics
import toy.model

pytestmark = pytest.mark.filterwarnings("ignore")

# --------------------------------------------------------------------------------------------------
# Good arguments, and how they are spoiled
# --------------------------------------------------------------------------------------------------

NUMBERS = [None, -1, 0, 1, 2, 7, 2**62, 0.5, float("nan"), "1", [], torch.ones(2, 3)]
BENT_TENSORS = [
    lambda t: t[None],
    lambda t: t[..., :-1],
    lambda t: t[:1],
    lambda t: t.flatten(),
    lambda t: t.t(),
    lambda t: t.flip(-1),
    lambda t: torch.cat([t, t], -1),
    lambda t: -t,
    lambda t: t * 2,
    lambda t: t * 100,
    lambda t: t.bool(),
    lambda t: t.double(),
    lambda t: t.bfloat16(),
    lambda t: t.int(),
    lambda t: t * float("nan"),
    lambda t: t.tolist(),
    lambda t: None,
]
BENT_LISTS = [
    lambda x: x[:-1],
    lambda x: x[1:],
    lambda x: x + x,
    lambda x: x[::-1],
    lambda x: [-1, *x],
    lambda x: [*x, 2**62],
    lambda x: [*x, None],
    lambda x: [float(item) for item in x],
    lambda x: torch.tensor(x),
    lambda x: None,
]
BENT_DICTS = [
    lambda x: dict(list(x.items())[1:]),
    lambda x: x | {"x": 1},
    lambda x: list(x.items()) * 2,
    lambda x: None,
]


def spoil(draw, value):
    """A bent `value`, or `value` with one of its parts spoiled."""
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**spoil_part(draw, vars(value)))
    if isinstance(value, (list, tuple, dict)) and value and draw(st.booleans()):
        parts = value if isinstance(value, dict) else dict(enumerate(value))
        parts = spoil_part(draw, parts)
        return parts if isinstance(value, dict) else type(value)(parts.values())
    bends = {torch.Tensor: BENT_TENSORS, list: BENT_LISTS, dict: BENT_DICTS}.get(type(value))
    if bends is None:
        return draw(st.sampled_from(NUMBERS))
    with contextlib.suppress(Exception):  # not every bend fits every value
        return draw(st.sampled_from(bends))(value)
    return None


def spoil_part(draw, parts):
    name = draw(st.sampled_from(list(parts)))
    return {**parts, name: spoil(draw, parts[name])}


REFUSED = object()


def attempt(draw, function, *, never=(), **good):
    """Spoils up to two arguments, but none of `never`, and calls: (the arguments, the answer)."""
    names = [name for name in good if name not in never]
    spoiled = draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
    given = good | {name: spoil(draw, good[name]) for name in spoiled}
    before = dump(given)
    try:
        answer = function(**given)
    except Exception:
        if not spoiled:
            raise
        answer = REFUSED
    assert dump(given) == before
    return given, answer


def dump(value):
    """Types and contents, to compare before and after."""
    if isinstance(value, torch.Tensor):
        return bits(value)
    if isinstance(value, (list, tuple)):
        return type(value), [dump(item) for item in value]
    if isinstance(value, dict):
        return [(name, dump(item)) for name, item in value.items()]
    return dump(vars(value)) if isinstance(value, SimpleNamespace) else repr(value)


def bits(tensor):
    if tensor.is_nested:
        return bits(tensor.values()), bits(tensor.offsets())
    flat = tensor.detach().contiguous().view(-1)
    return tensor.dtype, tensor.shape, flat.view(torch.uint8).tolist()


def same_numbers(tensor, numbers):
    wanted = torch.tensor(numbers, dtype=torch.float64).reshape(tensor.shape)
    return torch.equal(tensor.double().nan_to_num(-7), wanted.nan_to_num(-7))


def ints(values):
    return values.tolist() if isinstance(values, torch.Tensor) else list(values)


mask_bits = st.lists(st.integers(0, 1), max_size=5)
small = st.integers(0, 4)
rules = st.sampled_from(["target", "drafted"])


# --------------------------------------------------------------------------------------------------
# mtp_mask.py
# --------------------------------------------------------------------------------------------------


def draw_pack(draw):
    """Token-aligned bits of a few documents, dense, packed or packed with padding; and where."""
    documents = draw(st.lists(mask_bits, max_size=3))
    layout = draw(st.sampled_from(["dense", "packed", "padded"]))
    if layout == "dense":
        width = max(map(len, documents), default=0)
        rows = [document + [0] * (width - len(document)) for document in documents]
        where = dict(cu_seqlens=None, cu_seqlens_padded=None)
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width), where
    padding = [draw(small) if layout == "padded" else 0 for _ in documents]
    flat = []
    for document, size in zip(documents, padding, strict=True):
        flat += document + [1] * size
    room = [len(document) + size for document, size in zip(documents, padding, strict=True)]
    where = dict(cu_seqlens=[0, *accumulate(map(len, documents))], cu_seqlens_padded=None)
    if layout == "padded":
        where["cu_seqlens_padded"] = [0, *accumulate(room)]
    return torch.tensor(flat, dtype=torch.int64), where


def slow_rows(given, tensor, of_document, empty):
    """Row by row, document by document: of_document(its tokens); `empty` where no token lies."""
    numbers = []
    for row in tensor.reshape(-1, tensor.shape[-1]).tolist() if tensor.numel() else []:
        real, room = given["cu_seqlens"], given["cu_seqlens_padded"]
        real = [0, len(row)] if real is None else ints(real)
        room = real if room is None else ints(room)
        out = [empty] * len(row)
        for start, (first, last) in zip(room, pairwise(real), strict=False):
            end = start + last - first
            out[start:end] = of_document(row[start:end])
        numbers += out
    return numbers


def try_expand_response_mask(draw, model):
    rows = draw(st.lists(mask_bits, max_size=3))
    lengths = [len(row) + draw(small) for row in rows]
    width = max(map(len, rows), default=0)
    padded, attention = (
        torch.tensor([row + [0] * (width - len(row)) for row in of]).long().reshape(-1, width)
        if width
        else torch.zeros(len(rows), 0, dtype=torch.int64)
        for of in (rows, [[1] * len(row) for row in rows])
    )
    if rows and draw(st.booleans()):
        values = torch.tensor(sum(rows, []), dtype=torch.int64)
        offsets = torch.tensor([0, *accumulate(map(len, rows))])
        padded, attention = torch.nested.nested_tensor_from_jagged(values, offsets), None
    given, answer = attempt(
        draw,
        mtp_mask.expand_response_mask,
        response_mask=padded,
        sequence_lengths=lengths,
        response_attention_mask=attention,
    )
    if answer is REFUSED:
        return
    mask, attention = given["response_mask"], given["response_attention_mask"]
    if attention is None:
        responses = mask.unbind()
    else:
        responses = [m[: int(a.sum())] for m, a in zip(mask, attention, strict=True)]
    assert answer.dtype == mask.dtype
    wholes = answer.unbind()
    for length, response, whole in zip(
        ints(given["sequence_lengths"]), responses, wholes, strict=True
    ):
        assert same_numbers(whole, [0] * (length - len(response)) + response.tolist())


def try_depth_mask(draw, model):
    mask, where = draw_pack(draw)
    given, answer = attempt(
        draw, mtp_mask.depth_mask, token_mask=mask, depth=draw(small), rule=draw(rules), **where
    )
    if answer is REFUSED:
        return
    ahead, is_drafted = 1 + given["depth"], given["rule"] == "drafted"

    def counts(m):
        needed = [m[t + 1 if is_drafted else t + ahead : t + ahead + 1] for t in range(len(m))]
        return [t + ahead < len(m) and all(tokens) for t, tokens in enumerate(needed)]

    wanted = slow_rows(given, given["token_mask"], counts, False)
    assert answer.shape == given["token_mask"].shape and answer.flatten().tolist() == wanted


def try_depth_targets(draw, model):
    ids, where = draw_pack(draw)
    ids = ids + 10 * torch.arange(ids.numel()).view(ids.shape)
    given, answer = attempt(
        draw, mtp_mask.depth_targets, token_ids=ids, depth=draw(small), fill=draw(small), **where
    )
    if answer is REFUSED:
        return
    ids, ahead, fill = given["token_ids"], 1 + given["depth"], given["fill"]

    def targets(row):
        return [row[t + ahead] if t + ahead < len(row) else fill for t in range(len(row))]

    assert answer.dtype == ids.dtype and answer.shape == ids.shape
    assert same_numbers(answer.flatten(), slow_rows(given, ids, targets, fill))


def try_context_parallel_slice(draw, model):
    size = draw(st.integers(1, 3))
    offsets = [0, *accumulate(2 * size * n for n in draw(st.lists(st.integers(0, 2), max_size=3)))]
    given, answer = attempt(
        draw,
        mtp_mask.context_parallel_slice,
        tensor=torch.arange(offsets[-1]),
        cu_seqlens=offsets,
        cp_size=size,
        cp_rank=draw(st.integers(0, size - 1)),
    )
    if answer is REFUSED:
        return
    tensor, size, rank = given["tensor"], given["cp_size"], given["cp_rank"]
    slots = []
    for start, end in pairwise(ints(given["cu_seqlens"])):
        chunk = (end - start) // (2 * size)
        for part in (rank, 2 * size - 1 - rank):
            slots += range(start + part * chunk, start + (part + 1) * chunk)
    assert answer.dtype == tensor.dtype and same_numbers(answer, tensor[..., slots].tolist())


# --------------------------------------------------------------------------------------------------
# mtp_loss.py
# --------------------------------------------------------------------------------------------------


def try_mtp_cross_entropy(draw, model):
    slots, rows = draw(small), draw(st.integers(0, 2))
    generator = torch.Generator().manual_seed(draw(small))
    weight = torch.randn(7, 4, generator=generator)

    def head(hidden, weight=weight):
        return hidden @ weight.t(), None

    given, answer = attempt(
        draw,
        mtp_loss.mtp_cross_entropy,
        never=("output_layer", "output_weight"),
        hidden=torch.randn(slots, rows, 4, generator=generator),
        output_layer=head,
        targets=torch.randint(7, (rows, slots), generator=generator),
        mask=torch.randint(2, (rows, slots), generator=generator),
        output_weight=weight,
        chunk_tokens=draw(st.integers(1, 4)),
    )
    if answer is REFUSED:
        return
    loss, correct = answer
    on, targets = given["mask"].bool(), given["targets"].long()
    wanted, top1 = torch.zeros(targets.shape), torch.zeros_like(on)
    if on.any():
        logits = head(given["hidden"].transpose(0, 1)[on])[0]
        wanted[on] = F.cross_entropy(logits, targets[on], reduction="none")
        top1[on] = logits.argmax(-1) == targets[on]
    torch.testing.assert_close(loss.float(), wanted, equal_nan=True)
    assert torch.equal(correct, top1)


def draw_batch(draw):
    """Two rows of tokens with label-aligned labels and loss mask."""
    generator = torch.Generator().manual_seed(draw(small))
    input_ids = torch.randint(64, (2, 6), generator=generator)
    token_mask = torch.randint(2, (2, 6), generator=generator)
    labels, loss_mask = mtp_mask.depth_targets(input_ids, 0), mtp_mask.depth_mask(token_mask, 0)
    position_ids = torch.arange(6).expand(2, -1)
    return (input_ids, position_ids, None), dict(labels=labels, loss_mask=loss_mask.float())


def state(model):
    """What contexts may change on a model: attributes, hooks, config."""
    found = [copy.copy(vars(model.config))]
    for module in model.modules():
        for name, value in sorted(vars(module).items()):
            found.append((name, id(value), len(value) if isinstance(value, dict) else None))
    return found


def try_patch_mtp_loss(draw, model):
    inputs, targets = draw_batch(draw)

    def forward_and_backward(model_or_chunks, labels, loss_mask, **options):
        with mtp_loss.patch_mtp_loss(model_or_chunks, **options) as mtp:
            logits = model(*inputs, labels=labels, loss_mask=loss_mask)
            logits.sum().backward()
        return logits.detach(), mtp.depths

    given, answer = attempt(
        draw,
        forward_and_backward,
        never=("detach_trunk", "scale"),
        model_or_chunks=draw(st.sampled_from([model, [model]])),
        detach_trunk=draw(st.booleans()),
        rule=draw(rules),
        scale=0.5,
        denominator=draw(st.sampled_from([None, 4, [4]])),
        **targets,
    )
    model.zero_grad()
    if answer is REFUSED:
        return
    logits, depths = answer
    with ref_disable.skip_mtp(model), torch.no_grad():
        assert torch.equal(logits, model(*inputs))
    if given["labels"] is not None:
        on = given["loss_mask"].bool()
        assert on.shape == given["labels"].shape == inputs[0].shape
        counted = on[:, 1:] & (on[:, :-1] if given["rule"] == "drafted" else True)
        assert depths[0]["tokens"] == counted.sum() and depths[0]["loss_sum"].isfinite()
        assert given["labels"][:, 1:][counted].lt(64).all()


def try_draft_tokens(draw, model):
    (input_ids, position_ids, _), _ = draw_batch(draw)
    given, answer = attempt(
        draw,
        mtp_loss.draft_tokens,
        never=("attention_mask", "position_ids"),  # the model uses neither
        model=draw(st.sampled_from([model, [model]])),
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=None,
    )
    if answer is not REFUSED:
        ids = given["input_ids"]
        assert answer.shape == ids.shape and answer.dtype == torch.int64
        alone = mtp_loss.draft_tokens(model, ids[:1], position_ids[:1], None)
        assert torch.equal(answer[:1], alone)


# --------------------------------------------------------------------------------------------------
# mtp_recompute.py and ref_disable.py
# --------------------------------------------------------------------------------------------------


def try_checkpoint_tensors(draw, model):
    def checkpoint(run, *tensors):
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
        return run(*tensors)

    def call(**given):
        return mtp_recompute.checkpoint_tensors(checkpoint, lambda **seen: seen, **given)

    good = dict(x=[torch.ones(2), None], y=({"z": torch.zeros(1)}, 3), z=torch.ones(1))
    given, answer = attempt(draw, call, **good)
    assert dump(answer) == dump(given)  # there is nothing to refuse


HF_CONFIG = {
    "num_nextn_predict_layers": 1,
    "text_config": {"mtp_num_hidden_layers": 2, "hidden_size": 8},
    "layers": [1, 2],
}


def switched_off(tree):
    counts = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    if not isinstance(tree, dict):
        return tree
    return {
        name: 0 if name in counts else switched_off(value) if name == "text_config" else value
        for name, value in tree.items()
    }


def try_without_mtp_config(draw, model):
    given, answer = attempt(draw, ref_disable.without_mtp_config, hf_config=HF_CONFIG)
    if answer is not REFUSED:
        assert dump(answer) == dump(switched_off(given["hf_config"]))


def try_drop_mtp_weights(draw, model):
    trunk = ["model.layers.0.q", "model.layers.1.mlp.up", "lm_head.weight"]
    mtp = ["model.layers.2.eh_proj", "mtp.layers.0.x", "model.mtp_layers.0.q"]
    names = draw(st.lists(st.sampled_from(trunk + mtp), max_size=4))
    given, answer = attempt(
        draw,
        lambda **given: list(ref_disable.drop_mtp_weights(**given)),
        named_tensors=[(name, torch.ones(1)) for name in names],
        num_hidden_layers=2,
    )
    if answer is not REFUSED:
        kept = [name for name, _ in given["named_tensors"] if name not in mtp]
        if repr(given["num_hidden_layers"]) in ("1", "0.5"):  # layer 1 is then beyond the trunk
            kept = [name for name in kept if ".layers.1." not in name]
        assert [name for name, _ in answer] == kept


def try_skip_mtp(draw, model):
    inputs, targets = draw_batch(draw)
    layer, runs = model.mtp.layers[0], []

    def run(model_or_chunks):
        with ref_disable.skip_mtp(model_or_chunks), torch.no_grad():
            return model(*inputs)

    with torch.no_grad():
        wanted = model(*inputs, **targets)
    handle = layer.register_forward_pre_hook(lambda *unused: runs.append(1))
    _, answer = attempt(draw, run, model_or_chunks=draw(st.sampled_from([model, [model]])))
    handle.remove()
    if answer is not REFUSED:
        loss = F.cross_entropy(answer.flatten(0, 1), targets["labels"].flatten(), reduction="none")
        torch.testing.assert_close(loss, wanted.flatten())
        assert not runs


# --------------------------------------------------------------------------------------------------
# drafter_sync.py
# --------------------------------------------------------------------------------------------------


MIMO = toy.model.mimo_config(
    num_layers=1, hidden_size=8, num_heads=2, num_groups=1, ffn_size=6, vocab_size=5
)
LAYER = {
    "input_layernorm.weight": (8,),
    "self_attention.linear_qkv.weight": (16, 8),
    "self_attention.linear_qkv.bias": (16,),
    "self_attention.linear_proj.weight": (8, 8),
    "pre_mlp_layernorm.weight": (8,),
    "mlp.linear_fc1.weight": (12, 8),
    "mlp.linear_fc2.weight": (8, 6),
}
SHAPES = {
    "embedding.word_embeddings.weight": (5, 8),
    "decoder.final_layernorm.weight": (8,),
    "output_layer.weight": (5, 8),
    "mtp.layers.0.enorm.weight": (8,),
    "mtp.layers.0.hnorm.weight": (8,),
    "mtp.layers.0.eh_proj.weight": (8, 16),
    "mtp.layers.0.final_layernorm.weight": (8,),
    **{f"decoder.layers.0.{name}": shape for name, shape in LAYER.items()},
    **{f"mtp.layers.0.mtp_model_layer.{name}": shape for name, shape in LAYER.items()},
}


@cache
def parameters():
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@cache
def hf_tensors():
    return dict(drafter_sync.megatron_to_hf(parameters().items(), MIMO))


def as_pairs(draw, tensors):
    return dict(tensors) if draw(st.booleans()) else list(tensors.items())


def try_megatron_to_hf(draw, model):
    def to_hf(named_params):
        return list(drafter_sync.megatron_to_hf(named_params, MIMO))

    given, answer = attempt(draw, to_hf, named_params=as_pairs(draw, parameters()))
    if answer is not REFUSED:
        kept = dict(given["named_params"])
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            if name in kept:
                kept[name] = kept[name][:5]  # what is beyond the vocabulary is padding
        back = dict(drafter_sync.hf_to_megatron(answer, MIMO, list(kept)))
        assert {n: bits(t) for n, t in back.items()} == {n: bits(t) for n, t in kept.items()}


def try_hf_to_megatron(draw, model):
    def to_megatron(named_tensors, megatron_names):
        return list(drafter_sync.hf_to_megatron(named_tensors, MIMO, megatron_names))

    names = parameters() if draw(st.booleans()) else list(parameters())
    given, answer = attempt(
        draw, to_megatron, named_tensors=as_pairs(draw, hf_tensors()), megatron_names=names
    )
    if answer is not REFUSED:
        back, came = dict(drafter_sync.megatron_to_hf(answer, MIMO)), dict(given["named_tensors"])
        assert back.keys() == came.keys()
        for name, tensor in back.items():  # a row of another dtype widens those it is laid beside
            assert tensor.shape == came[name].shape and same_numbers(tensor, came[name].tolist())


def try_match_vllm_mimo(draw, model):
    inputs, _ = draw_batch(draw)

    def run(model_or_chunks, **flags):
        with drafter_sync.match_vllm_mimo(model_or_chunks, **flags):
            return mtp_loss.draft_tokens(model, *inputs)

    flags = dict(pre_norm=draw(st.booleans()), zero_position0=draw(st.booleans()))
    _, answer = attempt(draw, run, never=flags, model_or_chunks=model, **flags)
    assert answer is REFUSED or answer.shape == (2, 6)


def try_sync_weights(draw, model, engine):
    llm, actor, hf_config = engine
    pairs = drafter_sync.megatron_to_hf(actor.named_parameters(), hf_config)
    tensors = {name: tensor.detach().clone() for name, tensor in pairs}

    def push(named_tensors, **how):
        return drafter_sync.sync_weights(llm, named_tensors, **how)

    how = dict(drafter=draw(st.booleans()), verify=draw(st.sampled_from([True, "sample"])))
    given, answer = attempt(
        draw, push, never=how, named_tensors=as_pairs(draw, tensors), bucket_bytes=50_000, **how
    )
    if answer is not REFUSED:
        came = dict(given["named_tensors"])
        for name, tensor in tensors.items():
            if how["drafter"] or ".mtp_layers." not in name:
                assert came[name].shape == tensor.shape and came[name].float().isfinite().all()
    drafter_sync.sync_weights(llm, tensors)  # whatever was refused, a whole push heals


# --------------------------------------------------------------------------------------------------
# spec_metrics.py
# --------------------------------------------------------------------------------------------------


def check_summary(records, drafted=None, accepted=None):
    """Whatever the records say: rates from 0 to 1, lengths from 1, or an error; never NaN."""
    with contextlib.suppress(Exception):
        for name, value in spec_metrics.summarize(records).items():
            assert math.isfinite(value) and value >= 0, name
            if "accept_rate" in name:
                assert value <= 1, name
            if "accept_length" in name:
                assert value >= 1, name


def draw_steps(draw):
    """How many of three drafts each verify step accepted."""
    return draw(st.lists(st.integers(0, 3), max_size=5))


def histogram(steps):
    return [steps.count(accepted) for accepted in range(4)]


def totals(steps):
    return 3 * len(steps), sum(steps), len(steps)


def try_counts_from_vllm(draw, model):
    steps = draw_steps(draw)
    record = SimpleNamespace(
        histogram=histogram(steps),
        num_draft_tokens=3 * len(steps),
        per_step_accepted=steps,
        per_step_drafted=[3] * len(steps),
    )
    tokens = [5] * (1 + len(steps) + sum(steps))
    completion = SimpleNamespace(spec_decode_metrics=record, token_ids=tokens)
    output = SimpleNamespace(outputs=[completion], prompt_token_ids=[1, 2], num_cached_tokens=0)
    given, answer = attempt(draw, spec_metrics.counts_from_vllm, request_outputs=[output])
    if answer is not REFUSED:
        check_summary(answer)
        if dump(given) == dump({"request_outputs": [output]}):
            assert [totals_of(counts) for counts in answer] == [totals(steps)]


def totals_of(counts):
    return counts.draft_tokens, counts.accepted_tokens, counts.verify_steps


def try_counts_from_vllm_counters(draw, model):
    def snapshot(steps):
        drafted, accepted, verified = totals(steps)
        values = {"draft_tokens": drafted, "accepted_tokens": accepted, "drafts": verified}
        name = "vllm:spec_decode_num_{}".format
        metrics = [
            SimpleNamespace(name=name(kind), value=value, labels={"engine": "0"})
            for kind, value in values.items()
        ]
        positions = [sum(accepted >= j for accepted in steps) for j in (1, 2, 3)]
        per_position = name("accepted_tokens_per_pos")
        labels = {"engine": "0"}
        return [*metrics, SimpleNamespace(name=per_position, values=positions, labels=labels)]

    first, more = draw_steps(draw), draw_steps(draw)
    good = dict(before=snapshot(first), after=snapshot(first + more))
    given, answer = attempt(draw, spec_metrics.counts_from_vllm_counters, **good)
    if answer is not REFUSED:
        check_summary([answer])
        if dump(given) == dump(good):
            assert totals_of(answer) == totals(more)


def try_counts_from_sglang(draw, model):
    names = draw(
        st.sampled_from(
            [
                ("spec_draft_token_num", "spec_accept_token_num"),
                ("spec_proposed_drafts", "spec_accepted_drafts"),
                ("spec_num_proposed_drafts", "spec_num_correct_drafts"),
            ]
        )
    )
    steps = draw_steps(draw)
    meta = dict(zip((*names, "spec_verify_ct"), totals(steps), strict=True))
    given, answer = attempt(draw, spec_metrics.counts_from_sglang, meta_infos=[meta, None])
    if answer is not REFUSED:
        check_summary(answer)
        if dump(given) == dump({"meta_infos": [meta, None]}):
            assert totals_of(answer[0]) == totals(steps) and answer[1] is None


def try_compute_spec_decode_metrics(draw, model):
    counts = [totals(draw_steps(draw)) for _ in range(draw(st.integers(1, 3)))]
    drafts, accepts, verifies = (list(column) for column in zip(*counts, strict=True))
    given, answer = attempt(
        draw,
        spec_metrics.compute_spec_decode_metrics,
        drafts=drafts,
        accepts=accepts,
        verifies=verifies,
        non_padding_mask=draw(st.sampled_from([None, [True] * len(counts)])),
    )
    if answer is not REFUSED and answer:
        drafts, accepts, mask = (given[name] for name in ("drafts", "accepts", "non_padding_mask"))
        kept = [i for i in range(len(drafts)) if mask is None or mask[i]]
        rates = [accepts[i] / drafts[i] if drafts[i] else 0.0 for i in kept]
        wanted = float(sum(rates)) / len(rates)
        assert answer["rollout/spec_accept_rate"] == pytest.approx(wanted)


def try_summarize(draw, model):
    steps = [draw_steps(draw) for _ in range(draw(st.integers(0, 3)))]

    def summarize(totals, positions):
        counts = [
            spec_metrics.SpecCounts(*of, at) for of, at in zip(totals, positions, strict=True)
        ]
        return spec_metrics.summarize(counts)

    positions = [tuple(sum(n >= j for n in of) for j in (1, 2, 3)) for of in steps]
    given, answer = attempt(
        draw, summarize, totals=[totals(of) for of in steps], positions=positions
    )
    if answer is not REFUSED:
        drafted = sum(of[0] for of in given["totals"])
        assert ("spec/accept_rate_micro" in answer) == (drafted > 0)
        if drafted:
            accepted = sum(of[1] for of in given["totals"])
            assert answer["spec/accept_rate_micro"] == pytest.approx(accepted / drafted)
            assert 0 <= accepted <= drafted


def try_replay_acceptance(draw, model):
    tokens = draw(st.lists(st.integers(0, 2), min_size=1, max_size=9))
    drafts = draw(st.lists(st.integers(0, 2), min_size=len(tokens), max_size=len(tokens)))
    given, answer = attempt(
        draw,
        spec_metrics.replay_acceptance,
        token_ids=tokens,
        prompt_length=draw(st.integers(1, len(tokens))),
        draft_token_ids=drafts,
    )
    if answer is not REFUSED:
        tokens, drafts = ints(given["token_ids"]), ints(given["draft_token_ids"])
        wanted, index = [], int(given["prompt_length"]) + 1
        while index < len(tokens):
            wanted.append(int(tokens[index] == drafts[index - 2]))
            index += 1 + wanted[-1]
        assert list(answer) == wanted


# --------------------------------------------------------------------------------------------------
# The tests
# --------------------------------------------------------------------------------------------------


ATTEMPTS = {
    name.removeprefix("try_"): function
    for name, function in globals().items()
    if name.startswith("try_")
}


def cases():
    for name in ATTEMPTS:
        marks = [pytest.mark.engine] * (name == "sync_weights")
        yield pytest.param(name, 10 if marks else 100, marks=marks)
        yield pytest.param(name, 200 if marks else 1000, marks=[pytest.mark.slow, *marks])


@pytest.mark.parametrize("name, examples", list(cases()))
def test_nothing_wrong_comes_out_in_silence_and_all_is_as_it_was_found(
    name, examples, tiny, request
):
    model = tiny()
    engine = [request.getfixturevalue("engine")] * (name == "sync_weights")
    before = state(model)

    # Not shrunk: with tensors that takes minutes, and what was drawn is printed.
    @settings(
        derandomize=True,
        deadline=None,
        database=None,
        max_examples=examples,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data):
        ATTEMPTS[name](data.draw, model, *engine)
        assert state(model) == before

    run()
