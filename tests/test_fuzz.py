"""Whatever comes in: the right answer, or an error of ours that says what came, what was wanted and what to do.

Each attempt draws good arguments, spoils up to two of them (junk, another shape, dtype, length, sign, one part of a
list) and calls. An answer is compared with a slow loop written from the rule; an error must be raised by one of our own
lines. Never an IndexError, KeyError or AttributeError from inside, never an answer that is silently wrong.
"""

import contextlib
import copy
import inspect
import json
import re
import traceback
import warnings
from collections import Counter
from dataclasses import asdict
from functools import cache, partial
from itertools import accumulate, pairwise
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import UnsatisfiedAssumption

import drafter_sync
import mtp_loss
import mtp_mask
import mtp_recompute
import ref_disable
import spec_metrics
import toy.model
from spec_metrics import SpecCounts

pytestmark = pytest.mark.filterwarnings("ignore")
MODULES = (mtp_mask, mtp_loss, mtp_recompute, ref_disable, drafter_sync, spec_metrics)
OUR_FILES = {__file__, *(module.__file__ for module in MODULES)}

# ------------------------------------------------------------------------------------------------------------------
# Good arguments, and how they are spoiled
# ------------------------------------------------------------------------------------------------------------------

JUNK = [
    None, True, -1, 0, 3, 2**31, 2**63, -(2**70), 10**400, 0.5, -2.0, float("nan"), float("inf"), 1j, "", "12", b"1",
    [], [[]], {}, (), [None], {"x": 1}, object(), np.array([1, 2]), np.array(2), np.float32(2), np.zeros((2, 2)),
    torch.tensor(2), torch.tensor([2, 1]), torch.ones(2, 3), torch.ones(0), torch.tensor([True]), torch.ones(1, 1, 1),
    torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
]  # fmt: skip
with warnings.catch_warnings(action="ignore"):  # torch advises against this kind
    JUNK.append(torch.nested.nested_tensor([torch.ones(2)]))
BENT_TENSORS = [
    lambda t: t[None], lambda t: t[..., :0], lambda t: t[..., :-1], lambda t: t[..., None], lambda t: t.flatten(),
    lambda t: t.t(), lambda t: t.flip(-1), lambda t: torch.cat([t, t], -1), lambda t: -t, lambda t: t * 2,
    lambda t: t.bool(), lambda t: t.double(), lambda t: t.half(), lambda t: t.bfloat16(), lambda t: t.int(),
    lambda t: t.long(), lambda t: t.to(torch.uint8), lambda t: t.to(torch.uint16), lambda t: t.to(torch.complex64),
    lambda t: t * float("nan"), lambda t: t.double() * 1e300, lambda t: t.to_sparse(), lambda t: t.to("meta"),
    lambda t: t.numpy(), lambda t: t.tolist(),
]  # fmt: skip
BENT_LISTS = [
    lambda x: x[:-1], lambda x: x[1:], lambda x: x + x, lambda x: x[::-1], lambda x: [-1, *x], lambda x: [*x, 2**62],
    lambda x: [*x, None], lambda x: [x], tuple, torch.tensor, np.array, lambda x: [float(item) for item in x],
]  # fmt: skip
BENT_DICTS = [
    lambda x: dict(list(x.items())[1:]),
    lambda x: x | {"x": 1},
    lambda x: list(x.items()) * 2,
]


def spoil(draw, value):
    """Junk, or `value` bent, or `value` with one of its parts spoiled."""
    has_parts = isinstance(value, (list, tuple, dict, SimpleNamespace, SpecCounts))
    if has_parts and draw(st.integers(0, 2)):
        parts = (
            dict(value)
            if isinstance(value, dict)
            else getattr(value, "__dict__", None) or dict(enumerate(value))
        )
        if parts:
            part = draw(st.sampled_from(list(parts)))
            parts = {**parts, part: spoil(draw, parts[part])}
            if isinstance(value, (SimpleNamespace, SpecCounts)):
                return type(value)(**parts)
            return parts if isinstance(value, dict) else type(value)(parts.values())
    bends = {torch.Tensor: BENT_TENSORS, list: BENT_LISTS, dict: BENT_DICTS}.get(type(value), [])
    if bends and draw(st.booleans()):
        with contextlib.suppress(Exception):  # not every bend fits every value
            return draw(st.sampled_from(bends))(value)
    return draw(st.sampled_from(JUNK))


REFUSED = object()


def attempt(draw, function, /, **good):
    """Spoils up to two arguments and calls: (the arguments, the answer or REFUSED)."""
    given, spoiled = (
        dict(good),
        draw(st.lists(st.sampled_from(sorted(good)), max_size=2, unique=True)),
    )
    for name in spoiled:
        given[name] = spoil(draw, good[name])
    try:
        return given, function(**given)
    except UnsatisfiedAssumption:
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        is_ours = where.filename in OUR_FILES and where.line.startswith("raise ")
        assert is_ours and isinstance(error, (ValueError, TypeError, RuntimeError)), (
            f"from inside: {error!r}, {where}"
        )
        assert re.search(r"(?s)\bwant(ed|s) .{3,}[:;,] .{4}", str(error)), (
            f"not in three parts: {error}"
        )
        assert spoiled, f"good arguments were refused: {error}"
        return given, REFUSED


mask_bits = st.lists(st.integers(0, 1), max_size=5)
small = st.integers(0, 4)
rules = st.sampled_from(["target", "drafted"])


# ------------------------------------------------------------------------------------------------------------------
# mtp_mask.py
# ------------------------------------------------------------------------------------------------------------------


def ints(values):
    return values.tolist() if isinstance(values, torch.Tensor) else [int(value) for value in values]


def same_numbers(tensor, numbers):
    return np.array_equal(
        tensor.double().numpy(),
        np.array(numbers, dtype=float).reshape(tensor.shape),
        equal_nan=True,
    )


def slow_rows(tensor, cu_seqlens, cu_seqlens_padded, of_document, empty):
    """Row by row and document by document: of_document(its tokens), and `empty` where no real token lies."""
    rows = []
    for row in tensor.reshape(-1, tensor.shape[-1]).tolist() if tensor.numel() else []:
        real = [0, len(row)] if cu_seqlens is None else ints(cu_seqlens)
        room = real if cu_seqlens_padded is None else ints(cu_seqlens_padded)
        out = [empty] * len(row)
        for start, (first, last) in zip(room, pairwise(real), strict=False):
            out[start : start + last - first] = of_document(row[start : start + last - first])
        rows += out
    return rows


def draw_pack(draw):
    """Token-aligned bits of a few documents: dense rows, packed, or packed with padding; and where they lie."""
    documents, layout = (
        draw(st.lists(mask_bits, max_size=3)),
        draw(st.sampled_from(["dense", "packed", "padded"])),
    )
    room = [len(document) + (draw(small) if layout == "padded" else 0) for document in documents]
    if layout == "dense":
        width = max(room, default=0)
        rows = [document + [0] * (width - len(document)) for document in documents]
        where = dict(cu_seqlens=None, cu_seqlens_padded=None)
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width), where
    flat = sum(
        (
            document + [1] * (size - len(document))
            for document, size in zip(documents, room, strict=True)
        ),
        [],
    )
    offsets = [0, *accumulate(map(len, documents))]
    where = dict(
        cu_seqlens=offsets, cu_seqlens_padded=[0, *accumulate(room)] if layout == "padded" else None
    )
    return torch.tensor(flat, dtype=torch.int64), where


def try_expand_response_mask(draw, model):
    rows, nested = draw(st.lists(mask_bits, max_size=3)), draw(st.booleans())
    lengths = [len(row) + draw(small) for row in rows]
    width = max(map(len, rows), default=0)
    padded, attention = (
        torch.tensor([row + [0] * (width - len(row)) for row in of], dtype=torch.int64).reshape(
            len(rows), width
        )
        for of in (rows, [[1] * len(row) for row in rows])
    )
    if nested and rows:
        values, offsets = (
            torch.tensor(sum(rows, []), dtype=torch.int64),
            torch.tensor([0, *accumulate(map(len, rows))]),
        )
        padded, attention = torch.nested.nested_tensor_from_jagged(values, offsets), None
    given, answer = attempt(
        draw, mtp_mask.expand_response_mask,
        response_mask=padded, sequence_lengths=lengths, response_attention_mask=attention,
    )  # fmt: skip
    if answer is not REFUSED:
        mask, attention = given["response_mask"], given["response_attention_mask"]
        rows = (
            mask.unbind()
            if attention is None
            else [m[: int(a.sum())] for m, a in zip(mask, attention, strict=True)]
        )
        assert answer.dtype == mask.dtype
        for length, row, whole in zip(
            ints(given["sequence_lengths"]), rows, answer.unbind(), strict=True
        ):
            assert same_numbers(whole, [0] * (length - len(row)) + row.tolist())


def try_depth_mask(draw, model):
    mask, where = draw_pack(draw)
    given, answer = attempt(
        draw, mtp_mask.depth_mask, token_mask=mask, depth=draw(small), rule=draw(rules), **where
    )
    if answer is not REFUSED:
        ahead, drafted = 1 + given["depth"], given["rule"] == "drafted"

        def counts(m):
            needed = [m[t + 1 if drafted else t + ahead : t + ahead + 1] for t in range(len(m))]
            return [t + ahead < len(m) and all(tokens) for t, tokens in enumerate(needed)]

        wanted = slow_rows(
            given["token_mask"], given["cu_seqlens"], given["cu_seqlens_padded"], counts, False
        )
        assert answer.shape == given["token_mask"].shape and answer.flatten().tolist() == wanted


def try_depth_targets(draw, model):
    ids, where = draw_pack(draw)
    ids = ids + 10 * torch.arange(ids.numel()).view(ids.shape)
    given, answer = attempt(
        draw, mtp_mask.depth_targets, token_ids=ids, depth=draw(small), fill=draw(small), **where
    )
    if answer is not REFUSED:
        ids, ahead, fill = given["token_ids"], 1 + given["depth"], given["fill"]

        def targets(row):
            return [row[t + ahead] if t + ahead < len(row) else fill for t in range(len(row))]

        wanted = slow_rows(ids, given["cu_seqlens"], given["cu_seqlens_padded"], targets, fill)
        assert (
            answer.dtype == ids.dtype
            and answer.shape == ids.shape
            and same_numbers(answer.flatten(), wanted)
        )


def try_context_parallel_slice(draw, model):
    size = draw(st.integers(1, 3))
    offsets = [0, *accumulate(2 * size * n for n in draw(st.lists(st.integers(0, 2), max_size=3)))]
    rank = draw(st.integers(0, size - 1))
    given, answer = attempt(
        draw, mtp_mask.context_parallel_slice,
        tensor=torch.arange(offsets[-1]), cu_seqlens=offsets, cp_size=size, cp_rank=rank,
    )  # fmt: skip
    if answer is not REFUSED:
        tensor, size, rank = given["tensor"], given["cp_size"], given["cp_rank"]
        slots = []
        for start, end in pairwise(ints(given["cu_seqlens"])):
            chunk = (end - start) // (2 * size)
            for part in (rank, 2 * size - 1 - rank):
                slots += range(start + part * chunk, start + (part + 1) * chunk)
        assert answer.dtype == tensor.dtype and same_numbers(answer, tensor[..., slots].tolist())


# ------------------------------------------------------------------------------------------------------------------
# mtp_loss.py
# ------------------------------------------------------------------------------------------------------------------


def head(hidden, weight=None):
    if hidden.shape[2:] != (4,) or hidden.dtype != torch.float32:
        raise ValueError(
            "the head got other input; wanted float32 [n, 1, 4]: it is the caller's own to say so"
        )
    return hidden @ weight.t(), None


def try_mtp_cross_entropy(draw, model):
    s, b = draw(small), draw(st.integers(0, 2))
    generator = torch.Generator().manual_seed(draw(small))
    weight = torch.randn(7, 4, generator=generator)
    given, answer = attempt(
        draw, partial(mtp_loss.mtp_cross_entropy, output_weight=weight),
        hidden=torch.randn(s, b, 4, generator=generator).requires_grad_(),
        output_layer=head,
        targets=torch.randint(7, (b, s), generator=generator),
        mask=torch.randint(2, (b, s), generator=generator),
        chunk_tokens=draw(st.integers(1, 4)),
    )  # fmt: skip
    if answer is not REFUSED:
        loss, correct = answer
        on, targets = given["mask"].bool(), given["targets"]
        wanted, top1 = torch.zeros(targets.shape), torch.zeros_like(on)
        if on.any():
            logits = head(given["hidden"].detach().transpose(0, 1)[on][:, None], weight)[0][:, 0]
            wanted[on] = F.cross_entropy(logits, targets[on], reduction="none")
            top1[on] = logits.argmax(-1) == targets[on]
        torch.testing.assert_close(loss.detach().float(), wanted, equal_nan=True)
        assert torch.equal(correct, top1)


def draw_batch(draw):
    """Two rows of tokens with label-aligned labels and loss mask."""
    generator = torch.Generator().manual_seed(draw(small))
    input_ids = torch.randint(64, (2, 6), generator=generator)
    position_ids = torch.arange(6).expand(2, -1)
    labels, token_mask = (
        mtp_mask.depth_targets(input_ids, 0),
        torch.randint(2, (2, 6), generator=generator),
    )
    return (input_ids, position_ids, None), dict(
        labels=labels, loss_mask=mtp_mask.depth_mask(token_mask, 0).float()
    )


def try_patch_mtp_loss(draw, model):
    inputs, targets = draw_batch(draw)

    def forward_and_backward(labels, loss_mask, **options):
        with mtp_loss.patch_mtp_loss(**options) as mtp:
            logits = model(*inputs, labels=labels, loss_mask=loss_mask)
            logits.sum().backward()
        return logits.detach(), mtp.depths

    given, answer = attempt(
        draw, forward_and_backward, **targets,
        model=model, detach_trunk=draw(st.booleans()), rule=draw(rules), scale=0.5,
        denominator=draw(st.sampled_from([None, 4, [4]])), chunk_tokens=draw(st.integers(1, 4)),
    )  # fmt: skip
    assert "_postprocess" not in vars(model) and model.config.mtp_num_layers == 1  # as it was found
    if answer is not REFUSED:
        logits, depths = answer
        with ref_disable.skip_mtp(model), torch.no_grad():
            assert torch.equal(logits, model(*inputs))
        for depth in depths:
            on = given["loss_mask"].bool()
            counted = on[:, 1:] & (on[:, :-1] if given["rule"] == "drafted" else True)
            assert depth["tokens"] == counted.sum() and given["labels"][:, 1:][counted].lt(64).all()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    model.zero_grad()


def try_draft_tokens(draw, model):
    (input_ids, position_ids, mask), _ = draw_batch(draw)
    given, answer = attempt(
        draw, mtp_loss.draft_tokens, model=model, input_ids=input_ids, position_ids=position_ids, attention_mask=mask,
    )  # fmt: skip
    assert model.training
    if answer is not REFUSED:
        assert answer.shape == given["input_ids"].shape and answer.dtype == torch.int64
        alone = mtp_loss.draft_tokens(
            model, given["input_ids"][:1], given["position_ids"][:1], None
        )
        assert torch.equal(answer[:1], alone)


# ------------------------------------------------------------------------------------------------------------------
# mtp_recompute.py and ref_disable.py
# ------------------------------------------------------------------------------------------------------------------


def try_checkpoint_tensors(draw, model):
    def function(*args, **kwargs):
        return args, kwargs

    def checkpoint(run, *tensors):
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
        return run(*tensors)

    good = dict(x=[torch.ones(2), None], y=({"z": torch.zeros(1)}, 3))
    given, answer = attempt(
        draw, lambda checkpoint, function, **rest: mtp_recompute.checkpoint_tensors(checkpoint, function, **rest),
        checkpoint=checkpoint, function=function, **good,
    )  # fmt: skip
    if answer is not REFUSED and given["function"] is function:
        assert flat(answer) == flat(((), {name: given[name] for name in good}))


def flat(tree):
    """Types and identities of all that a structure holds."""
    if type(tree) in (list, tuple, dict):
        return [type(tree), *(flat(x) for x in (tree.items() if isinstance(tree, dict) else tree))]
    return id(tree) if isinstance(tree, torch.Tensor) else repr(tree)


HF_CONFIG = {
    "num_nextn_predict_layers": 1,
    "text_config": {"mtp_num_hidden_layers": 2, "hidden_size": 8},
    "layers": [1, 2],
}


def switched_off(tree):
    counts = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    return {
        k: 0 if k in counts else switched_off(v) if k == "text_config" and v else v
        for k, v in tree.items()
    }


def try_without_mtp_config(draw, model):
    given, answer = attempt(
        draw, ref_disable.without_mtp_config, hf_config=copy.deepcopy(HF_CONFIG)
    )
    if answer is not REFUSED:
        plain = partial(re.sub, r"0x[0-9a-f]+", "")  # objects are copied
        assert plain(repr(answer)) == plain(repr(switched_off(given["hf_config"])))


def try_mtp_layer_count(draw, model):
    config = {"num_nextn_predict_layers": 2, "text_config": {"mtp_num_hidden_layers": 2}}
    given, answer = attempt(draw, ref_disable.mtp_layer_count, hf_config=config)
    if answer is not REFUSED:
        config = given["hf_config"]
        counts = {
            config.get("num_nextn_predict_layers"),
            (config.get("text_config") or {}).get("mtp_num_hidden_layers"),
        }
        assert type(answer) is int and counts - {None, 0} == {answer}


def try_reference_transformer_config(draw, model):
    given, answer = attempt(draw, ref_disable.reference_transformer_config, config=model.config)
    if answer is not REFUSED:
        assert (
            vars(answer) == vars(model.config) | {"mtp_num_layers": None}
            and model.config.mtp_num_layers == 1
        )


def try_drop_mtp_weights(draw, model):
    names = [
        "model.layers.0.q",
        "model.layers.2.eh_proj",
        "mtp.layers.0.x",
        "model.mtp_layers.0.q",
        "lm_head.weight",
    ]
    pairs = [(name, torch.ones(1)) for name in draw(st.lists(st.sampled_from(names), max_size=4))]
    given, answer = attempt(
        draw,
        lambda **given: list(ref_disable.drop_mtp_weights(**given)),
        named_tensors=pairs,
        num_hidden_layers=2,
    )
    if answer is not REFUSED:
        pairs = given["named_tensors"]
        pairs = pairs.items() if isinstance(pairs, dict) else pairs
        dropped = [name for name, _ in pairs if "mtp" in name or "eh_proj" in name]
        assert [name for name, _ in answer] == [name for name, _ in pairs if name not in dropped]


def try_skip_mtp(draw, model):
    inputs, _ = draw_batch(draw)

    def run(model):
        with ref_disable.skip_mtp(model), torch.no_grad():
            return model(*inputs)

    given, answer = attempt(draw, run, model=model)
    assert "_postprocess" not in vars(model) and model.config.mtp_num_layers == 1
    if answer is not REFUSED:
        assert given["model"] is model and answer.shape == (2, 6, 64)


# ------------------------------------------------------------------------------------------------------------------
# drafter_sync.py
# ------------------------------------------------------------------------------------------------------------------


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
PARAMETERS = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(3))
    for name, shape in SHAPES.items()
}

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def bits(tensor):
    return (
        tensor.dtype,
        tensor.shape,
        tensor.is_meta or tensor.contiguous().view(-1).view(torch.uint8).tolist(),
    )


def same(pairs, others):
    """The same names and, bit for bit, the same tensors."""
    first, second = dict(pairs), dict(others)
    return first.keys() == second.keys() and all(
        bits(first[name]) == bits(second[name]) for name in first
    )


def as_pairs(draw, tensors):
    return dict(tensors) if draw(st.booleans()) else list(tensors.items())


def try_megatron_to_hf(draw, model):
    def to_hf(named_params, hf_config):
        return list(drafter_sync.megatron_to_hf(named_params, hf_config))

    given, answer = attempt(
        draw, to_hf, named_params=as_pairs(draw, PARAMETERS), hf_config=dict(MIMO)
    )
    if answer is not REFUSED:
        vocab_size, kept = given["hf_config"]["vocab_size"], dict(given["named_params"])
        kept |= {
            name: kept[name][:vocab_size] for name in VOCABULARY if name in kept
        }  # what is beyond is padding
        if given["hf_config"]["tie_word_embeddings"]:
            kept.pop("output_layer.weight", None)
        assert same(drafter_sync.hf_to_megatron(answer, given["hf_config"], list(kept)), kept)


@cache
def hf_tensors():
    return dict(drafter_sync.megatron_to_hf(PARAMETERS.items(), MIMO))


def try_hf_to_megatron(draw, model):
    def to_megatron(named_tensors, hf_config, megatron_names):
        return list(drafter_sync.hf_to_megatron(named_tensors, hf_config, megatron_names))

    given, answer = attempt(
        draw, to_megatron,
        named_tensors=as_pairs(draw, hf_tensors()), hf_config=dict(MIMO),
        megatron_names=dict(PARAMETERS) if draw(st.booleans()) else list(PARAMETERS),
    )  # fmt: skip
    if answer is not REFUSED:
        assert same(drafter_sync.megatron_to_hf(answer, given["hf_config"]), given["named_tensors"])


def try_match_vllm_mimo(draw, model):
    inputs, _ = draw_batch(draw)

    def run(**given):
        with drafter_sync.match_vllm_mimo(**given):
            return mtp_loss.draft_tokens(model, *inputs)

    given, answer = attempt(
        draw, run, model=model, pre_norm=draw(st.booleans()), zero_position0=draw(st.booleans())
    )
    assert "forward" not in vars(model.mtp) and not model.decoder.final_layernorm._forward_pre_hooks
    assert answer is REFUSED or given["model"] is model


def try_sync_weights(draw, model, engine):
    llm, actor, hf_config = engine
    tensors = {
        name: t.detach().clone()
        for name, t in drafter_sync.megatron_to_hf(actor.named_parameters(), hf_config)
    }
    given, answer = attempt(
        draw, drafter_sync.sync_weights, llm=llm, named_tensors=as_pairs(draw, tensors), drafter=draw(st.booleans()),
        verify=draw(st.sampled_from([True, False, "sample"])), bucket_bytes=draw(st.sampled_from([50_000, 2**20])),
    )  # fmt: skip
    if answer is not REFUSED:
        came, sizes = (
            dict(given["named_tensors"]),
            {name: tensor.nbytes for name, tensor in tensors.items()},
        )
        wanted = {name for name in sizes if given["drafter"] or ".mtp_layers." not in name}
        assert wanted <= came.keys() and answer.bytes == sum(sizes[name] for name in wanted)
        assert all(
            came[name].float().isfinite().all() and came[name].is_floating_point()
            for name in wanted
        )
    drafter_sync.sync_weights(
        llm, tensors
    )  # whatever was refused, and however late, a whole push heals


def try_drafter_fingerprint(draw, model, engine):
    wanted = drafter_sync.drafter_fingerprint(engine[0])
    _, answer = attempt(draw, drafter_sync.drafter_fingerprint, llm=engine[0])
    assert answer is REFUSED or answer == wanted


# ------------------------------------------------------------------------------------------------------------------
# spec_metrics.py
# ------------------------------------------------------------------------------------------------------------------


records = st.lists(
    st.tuples(small, small).map(lambda bins: SpecCounts(sum(bins), bins[1], sum(bins), (bins[1],))),
    max_size=3,
)


def dumped(answer):
    """What json makes of it; NaN and infinity are no numbers to log."""
    return json.loads(json.dumps(answer, default=asdict, allow_nan=False))


def check_records(answer):
    for record in answer:
        assert record is None or 0 <= record.accepted_tokens <= record.draft_tokens
        if record and record.accepted_per_position is not None:
            assert sum(record.accepted_per_position) == record.accepted_tokens
    dumped(answer)


def try_counts_from_vllm(draw, model):
    def completion(rejected, accepted):
        metrics = SimpleNamespace(
            histogram=[rejected, accepted], num_draft_tokens=rejected + accepted
        )
        return SimpleNamespace(
            spec_decode_metrics=metrics, token_ids=[5] * (1 + rejected + 2 * accepted)
        )

    completions = st.lists(st.builds(completion, small, small), min_size=1, max_size=2)
    outputs = [SimpleNamespace(outputs=of) for of in draw(st.lists(completions, max_size=2))]
    _, answer = attempt(draw, spec_metrics.counts_from_vllm, request_outputs=outputs)
    if answer is not REFUSED:
        check_records(answer)


def try_counts_from_vllm_counters(draw, model):
    def snapshot(rejected, accepted):
        of_engine = partial(SimpleNamespace, labels={"engine": "0"})
        counts = zip(
            spec_metrics.VLLM_COUNTERS,
            (rejected + accepted, accepted, rejected + accepted),
            strict=True,
        )
        metrics = [of_engine(name=name, value=value) for name, value in counts]
        return [*metrics, of_engine(name=spec_metrics.VLLM_PER_POSITION, values=[accepted])]

    rejected, accepted = draw(small), draw(small)
    _, answer = attempt(
        draw, spec_metrics.counts_from_vllm_counters,
        before=snapshot(rejected, accepted), after=snapshot(rejected + draw(small), accepted + draw(small)),
    )  # fmt: skip
    if answer is not REFUSED:
        check_records([answer])


def try_counts_from_sglang(draw, model):
    names = draw(st.sampled_from(spec_metrics.SGLANG_NAMES))
    rejected, accepted = draw(small), draw(small)
    meta = dict(
        zip(
            (*names, "spec_verify_ct"),
            (rejected + accepted, accepted, rejected + accepted),
            strict=True,
        )
    )
    given, answer = attempt(draw, spec_metrics.counts_from_sglang, meta_infos=[meta, None])
    if answer is not REFUSED:
        check_records(answer)
        for meta, record in zip(given["meta_infos"], answer, strict=True):
            drafted, accepted = ((meta or {}).get(name) for name in names)
            assert record is None or (record.draft_tokens, record.accepted_tokens) == (
                drafted,
                accepted,
            )


def try_add_counts(draw, model):
    given, answer = attempt(draw, spec_metrics.add_counts, segments=draw(records))
    if answer is not REFUSED:
        known = [record for record in given["segments"] if record is not None]
        assert (
            answer is None
            if not known
            else answer.draft_tokens == sum(record.draft_tokens for record in known)
        )


def try_compute_spec_decode_metrics(draw, model):
    counts = draw(records)
    columns = zip(
        *((c.draft_tokens, c.accepted_tokens, c.verify_steps) for c in counts), strict=True
    )
    drafts, accepts, verifies = columns if counts else ([], [], [])
    given, answer = attempt(
        draw, spec_metrics.compute_spec_decode_metrics, drafts=list(drafts), accepts=list(accepts),
        verifies=list(verifies), non_padding_mask=draw(st.sampled_from([None, [True] * len(counts)])),
    )  # fmt: skip
    if answer is not REFUSED and dumped(answer):
        mask = given["non_padding_mask"]
        kept = (
            range(len(given["drafts"]))
            if mask is None
            else [i for i, keep in enumerate(mask) if keep]
        )
        rates = [
            given["accepts"][i] / given["drafts"][i] if given["drafts"][i] else 0.0 for i in kept
        ]
        assert answer["rollout/spec_accept_rate"] == pytest.approx(fmean(map(float, rates)))


def try_summarize(draw, model):
    given, answer = attempt(draw, spec_metrics.summarize, counts=draw(records))
    if answer is not REFUSED:
        known = [record for record in given["counts"] if record is not None]
        drafted = sum(record.draft_tokens for record in known)
        assert answer["spec/requests_missing"] == len(given["counts"]) - len(known)
        assert ("spec/accept_rate_micro" in dumped(answer)) == (drafted > 0)
        if drafted:
            rate = sum(record.accepted_tokens for record in known) / drafted
            assert answer["spec/accept_rate_micro"] == pytest.approx(float(rate))


def try_conditional_rates(draw, model):
    _, answer = attempt(draw, spec_metrics.conditional_rates, counts=draw(records))
    assert answer is REFUSED or all(0 <= rate <= 1 for rate in dumped(answer).values())


def slow_replay(tokens, prompt_length, drafts):
    decisions, index = [], int(prompt_length) + 1
    while index < len(tokens):
        decisions.append(int(tokens[index] == drafts[index - 2]))
        index += 1 + decisions[-1]
    return decisions


def draw_sequence(draw):
    tokens = draw(st.lists(st.integers(0, 2), min_size=1, max_size=9))
    drafts = draw(st.lists(st.integers(0, 2), min_size=len(tokens), max_size=len(tokens)))
    return dict(
        token_ids=tokens, prompt_length=draw(st.integers(1, len(tokens))), draft_token_ids=drafts
    )


def try_replay_acceptance(draw, model):
    given, answer = attempt(draw, spec_metrics.replay_acceptance, **draw_sequence(draw))
    assert answer is REFUSED or dumped(answer) == slow_replay(*given.values())


def try_decisions_from_gains(draw, model):
    gains = [1, *draw(st.lists(st.integers(0, 2), max_size=4))]
    given, answer = attempt(draw, spec_metrics.decisions_from_gains, gains=gains)
    if answer is not REFUSED:
        gains = [gain for gain in given["gains"] if gain]
        assert dumped(answer) == [gain - 1 for gain in gains[1:-1]] + (
            [gains[-1] - 1 or None] if gains[1:] else []
        )


def try_explain_disagreement(draw, model):
    good = draw_sequence(draw)
    stale = draw_sequence(draw)["draft_token_ids"] + good["draft_token_ids"]
    decisions = (
        draw(st.lists(st.integers(0, 1), max_size=4))
        if draw(st.booleans())
        else slow_replay(*good.values())
    )
    given, answer = attempt(
        draw,
        spec_metrics.explain_disagreement,
        **good,
        decisions=decisions,
        drafts_by_cause={"stale": stale},
    )
    if answer is not REFUSED:
        replay = slow_replay(given["token_ids"], given["prompt_length"], given["draft_token_ids"])
        decisions = list(given["decisions"])
        if decisions[-1:] == [None] and len(replay) == len(
            decisions
        ):  # what the last one was is unknown
            decisions[-1] = replay[-1]
        assert answer["agrees"] == (replay == decisions)
        assert answer["message"] and dumped(answer)


def try_speedup_estimate(draw, model):
    good = dict(accept_length=1 + draw(small), draft_cost_ratio=draw(small))
    given, answer = attempt(draw, spec_metrics.speedup_estimate, **good)
    if answer is not REFUSED:
        wanted = float(given["accept_length"]) / (1 + float(given["draft_cost_ratio"]))
        assert dumped(answer)["spec/speedup_estimate"] == pytest.approx(wanted)


# ------------------------------------------------------------------------------------------------------------------
# The tests
# ------------------------------------------------------------------------------------------------------------------


ATTEMPTS = {
    name.removeprefix("try_"): function
    for name, function in globals().items()
    if name.startswith("try_")
}


def test_every_public_function_that_takes_arguments_is_tried():
    public = {
        name
        for module in MODULES
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
    }
    assert public - {"main", "measure_gradients", "patch_mtp_recompute"} == set(ATTEMPTS)


@pytest.fixture(scope="module")
def num_inputs(request):
    counts = Counter()
    yield counts
    if counts:
        plugins = request.config.pluginmanager
        with plugins.getplugin("capturemanager").global_and_fixture_disabled():
            said = f"\nfuzz: {sum(counts.values()):,} inputs to {len(counts)} functions"
            plugins.getplugin("terminalreporter").write_line(said)


ON_ENGINE = ("sync_weights", "drafter_fingerprint")


def cases():
    for name in ATTEMPTS:
        marks = [pytest.mark.engine] * (name in ON_ENGINE)
        yield pytest.param(name, 30 if marks else 100, marks=marks)
        yield pytest.param(name, 300 if marks else 5000, marks=[pytest.mark.slow, *marks])


@pytest.mark.parametrize("name, examples", list(cases()))
def test_anything_gives_the_right_answer_or_an_error_of_ours_in_three_parts(
    name, examples, tiny, num_inputs, request
):
    subjects = [tiny()] + [request.getfixturevalue("engine")] * (name in ON_ENGINE)

    # Not shrunk: with tensors that takes minutes, and what was drawn is printed.
    @settings(
        derandomize=True, deadline=None, database=None, max_examples=examples, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def run(data):
        num_inputs[name] += 1
        ATTEMPTS[name](data.draw, *subjects)

    run()
