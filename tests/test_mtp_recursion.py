"""k depths of one MTP layer are what an engine drafts, and every draft is predicted."""

import contextlib
import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import build_tiny, random_weights, run_on_ranks

import mtp_recursion
import toy.engine
from drafter_sync import match_vllm_mimo, megatron_to_hf
from mtp_recompute import patch_mtp_recompute
from mtp_recursion import draft_recursion
from toy.model import build_model, mimo_config, pack

DOCUMENTS = (7, 1, 12, 2, 5)  # tokens; one of a single token, which has no depth at all
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def build(num_groups=2, tied=False, **overrides):
    config = mimo_config(hidden_size=64, num_groups=num_groups, ffn_size=96, tied=tied)
    model = build_model(config, **overrides)
    random_weights(model, 0)
    return model


def make_tokens(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(64, (length,), generator=generator) for length in lengths]


def run_block(model, inputs, num_drafts, hidden=None, embedding=None):
    """[trunk, depth 1, ..., depth k] of the MTP block, called as this release calls it.

    num_drafts None: without the recursion.
    """
    stock = model._postprocess

    def postprocess(**given):
        known = inspect.signature(type(model.mtp).forward).parameters
        passed = {name: value for name, value in given.items() if name in known}
        passed["embedding"] = embedding or model.embedding
        if hidden is not None:
            passed["hidden_states"] = hidden
        with draft_recursion(model, num_drafts) if num_drafts else contextlib.nullcontext():
            states = model.mtp(**passed)
        return states.split(len(passed["hidden_states"]))

    model._postprocess = postprocess
    try:
        return model(**inputs)
    finally:
        del model._postprocess
        assert model._postprocess == stock


def run_depths(*args):
    return run_block(*args)[1:]


def dense(documents):
    ids = torch.stack(documents)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return dict(input_ids=ids, position_ids=positions, attention_mask=None)


def packed(documents):
    ids, positions, packed_seq_params = pack(documents)
    inputs = dict(input_ids=ids, position_ids=positions, attention_mask=None)
    return inputs | dict(packed_seq_params=packed_seq_params)


# What an engine does: one slot after the other, a key cache, one depth after the other.


def engine_step(model, embedding, hidden, position, cache):
    """The layer on one slot at the end of `cache`, a list of (key, value) that grows; [h]."""
    layer = model.mtp.layers[0]
    block = getattr(layer, "mtp_model_layer", None) or layer.transformer_layer
    heads, groups = model.config.num_attention_heads, model.config.num_query_groups
    size = model.config.kv_channels
    x = linear(layer.eh_proj, torch.cat([layer.enorm(embedding), layer.hnorm(hidden)]))
    qkv = linear(block.self_attention.linear_qkv, block.input_layernorm(x)).view(groups, -1, size)
    query, key, value = qkv.split([heads // groups, 1, 1], 1)
    angle = position * 10000.0 ** -(torch.arange(0, size, 2) / size)
    angle = torch.cat([angle, angle])

    def rotate(y):
        left, right = y.chunk(2, -1)
        return y * angle.cos() + torch.cat([-right, left], -1) * angle.sin()

    cache.append((rotate(key), value))
    keys, values = (torch.cat(x, 1) for x in zip(*cache, strict=True))  # [groups, seen, size]
    weights = (rotate(query) @ keys.mT / size**0.5).softmax(-1)
    x = x + linear(block.self_attention.linear_proj, (weights @ values).flatten())
    gate, up = linear(block.mlp.linear_fc1, block.pre_mlp_layernorm(x)).chunk(2)
    return layer.final_layernorm(x + linear(block.mlp.linear_fc2, F.silu(gate) * up))


def linear(module, x):
    return F.linear(x, module.weight, module.bias)  # Megatron's own wants [s, b, h]


def engine_depths(model, tokens, hidden, num_drafts, zero_position0=False):
    """{(depth, slot): state [h]} of one document, where token t + depth exists."""
    embedded = model.embedding.word_embeddings.weight[tokens]
    states, verified = {}, []
    for slot in range(len(tokens) - 1):
        first = embedded[slot + 1] * (0 if zero_position0 and slot == 0 else 1)
        state = engine_step(model, first, hidden[slot], slot, verified)
        states[1, slot], chain = state, list(verified)
        for depth in range(2, min(num_drafts, len(tokens) - 1 - slot) + 1):
            position = slot + depth - 1
            state = engine_step(model, embedded[slot + depth], state, position, chain)
            states[depth, slot] = state
    return states


LAYOUTS = ("dense", "packed", "padded")


def lay_out(layout):
    """Model inputs, and each document's (row, first slot, tokens)."""
    if layout == "dense":
        documents = make_tokens([9, 9])
        return dense(documents), [(i, 0, document) for i, document in enumerate(documents)]
    documents = make_tokens(DOCUMENTS)
    starts = [0, *itertools.accumulate(DOCUMENTS)]
    if layout == "packed":
        return packed(documents), [(0, *of) for of in zip(starts[:-1], documents, strict=True)]
    # Padded offsets in both fields: Megatron's roll reads the first, its rotary the second.
    wide = [torch.cat([document, torch.full((4,), 63)]) for document in documents]
    inputs = packed(wide)
    offsets = inputs["packed_seq_params"].cu_seqlens_q
    inputs["packed_seq_params"].cu_seqlens_q_padded = offsets
    inputs["packed_seq_params"].cu_seqlens_kv_padded = offsets
    return inputs, [(0, *of) for of in zip(offsets[:-1].tolist(), documents, strict=True)]


def gradients(model, loss, *inputs):
    for parameter in model.parameters():
        parameter.grad = None
    loss.backward()
    named = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return named | {f"input {i}": x.grad for i, x in enumerate(inputs)}


def assert_close(found, wanted, relative):
    assert found.keys() == wanted.keys() and wanted
    for name in wanted:
        error = (found[name] - wanted[name]).abs().max()
        assert error <= relative * wanted[name].abs().max(), (name, error, wanted[name].abs().max())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_groups, tied", [(4, False), (2, True), (1, False)])
def test_all_slots_at_once_equal_an_engine_that_goes_slot_by_slot(
    megatron, layout, num_groups, tied
):
    model, num_drafts = build(num_groups, tied), 4
    inputs, documents = lay_out(layout)
    generator = torch.Generator().manual_seed(1)
    shape = (inputs["input_ids"].shape[1], inputs["input_ids"].shape[0], 64)
    hidden = torch.randn(shape, generator=generator).requires_grad_()
    found = run_depths(model, inputs, num_drafts, hidden)
    wanted_loss = found_loss = 0
    for row, first, tokens in documents:
        states = engine_depths(model, tokens, hidden[first:, row], num_drafts)
        for (depth, slot), state in states.items():
            at_once = found[depth - 1][first + slot, row]
            assert (at_once - state).abs().max() < 1e-5
            direction = torch.randn(64, generator=generator)
            found_loss = found_loss + at_once @ direction
            wanted_loss = wanted_loss + state @ direction
    found_grads = gradients(model, found_loss, hidden)
    hidden.grad = None
    assert_close(found_grads, gradients(model, wanted_loss, hidden), 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_vllms_conventions_the_embedding_is_zero_at_position_0_and_so_at_depth_1_alone(
    megatron, layout
):
    model = build()
    inputs, documents = lay_out(layout)
    hidden = torch.randn(inputs["input_ids"].shape[1], inputs["input_ids"].shape[0], 64)
    with match_vllm_mimo(model, pre_norm=False):
        found = run_depths(model, inputs, 3, hidden)
    for row, first, tokens in documents:
        states = engine_depths(model, tokens, hidden[first:, row], 3, zero_position0=True)
        for (depth, slot), state in states.items():
            assert (found[depth - 1][first + slot, row] - state).abs().max() < 1e-5


def test_a_slot_sees_earlier_slots_at_depth_1_and_itself_at_later_depths(megatron):
    picture = """
        # . . .   . . . .   . . . .
        # # . .   . . . .   . . . .
        # # # .   . . . .   . . . .
        # # # #   . . . .   . . . .
        # . . .   # . . .   . . . .
        # # . .   . # . .   . . . .
        # # # .   . . # .   . . . .
        # # # #   . . . #   . . . .
        # . . .   # . . .   # . . .
        # # . .   . # . .   . # . .
        # # # .   . . # .   . . # .
        # # # #   . . . #   . . . #
    """
    model, values = build(4), []
    for name, module in model.mtp.named_modules():
        if name.endswith("linear_qkv"):
            module.register_forward_hook(lambda module, args, out: values.append(out[0]))
    states = run_depths(model, dense(make_tokens([4])), 3)
    rows = []
    for state in torch.cat(states):
        grads = torch.autograd.grad(state.sum(), values, retain_graph=True, allow_unused=True)
        grads = [torch.zeros(4, 1, 16) if g is None else g for g in grads]
        seen = torch.stack([g[:, 0, -16:].any(-1) for g in grads])  # the last head's value
        rows.append("   ".join(" ".join(".#"[x] for x in slots) for slots in seen.tolist()))
    assert rows == [line.strip() for line in picture.split("\n") if line.strip()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_draft_is_megatrons_own_forward_bit_for_bit(megatron, layout):
    model = build()
    inputs, _ = lay_out(layout)
    stock = run_depths(model, inputs, None)[0]
    for num_drafts in (1, 3):
        assert torch.equal(run_depths(model, inputs, num_drafts)[0], stock)


@pytest.mark.parametrize("layout", ("dense", "packed"))
def test_rows_of_queries_in_chunks_change_nothing(megatron, monkeypatch, layout):
    model = build()
    inputs, _ = lay_out(layout)
    wanted = run_depths(model, inputs, 3)
    wanted_grads = gradients(model, sum(x.sin().sum() for x in wanted))
    monkeypatch.setattr(mtp_recursion, "CHUNK_ROWS", 4)
    found = run_depths(model, inputs, 3)
    assert all((x - y).abs().max() < 1e-5 for x, y in zip(found, wanted, strict=True))
    assert_close(gradients(model, sum(x.sin().sum() for x in found)), wanted_grads, 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recompute", ("full", "selective"))
def test_recompute_gives_the_same_gradients_after_the_context_has_ended(
    megatron, layout, recompute
):
    inputs, _ = lay_out(layout)
    settings = FULL if recompute == "full" else dict(recompute_granularity="selective")
    found = []
    for overrides in ({}, settings):
        model = build(**overrides)
        hidden = run_trunk(model, inputs).detach().requires_grad_()
        with patch_mtp_recompute():
            states = run_depths(model, inputs, 3, hidden, detached(model))
            found.append(gradients(model, sum(x.sin().sum() for x in states), hidden))
    assert_close(found[1], found[0], 1e-6)


def run_trunk(model, inputs):
    trunk = []
    stock = model._postprocess
    model._postprocess = lambda **given: trunk.append(given["hidden_states"])
    model(**inputs)
    model._postprocess = stock
    del model._postprocess
    return trunk[0]


def detached(model):
    return lambda **given: model.embedding(**given).detach()


@pytest.mark.parametrize("tied", (False, True))
@pytest.mark.parametrize("settings", ({}, FULL))
def test_with_the_trunk_detached_every_mtp_parameter_moves_and_no_other(megatron, tied, settings):
    model = build(tied=tied, **settings)
    inputs, _ = lay_out("dense")
    hidden = run_trunk(model, inputs).detach().requires_grad_()
    with patch_mtp_recompute():
        states = run_depths(model, inputs, 3, hidden, detached(model))
    grads = gradients(model, states[-1].sin().sum())
    moved = {name for name, grad in grads.items() if grad.any()}
    assert moved == {name for name, _ in model.named_parameters() if name.startswith("mtp.")}


def test_an_attention_mask_holds_at_every_depth(megatron):
    """A row padded on the left, with Megatron's own dense core; rotary is relative."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    model = build()
    for module in model.modules():
        if hasattr(module, "core_attention"):
            given = module.config, module.layer_number, AttnMaskType.causal, "self"
            module.core_attention = DotProductAttention(*given)
    tokens = make_tokens([9])[0]
    future = torch.ones(9, 9, dtype=torch.bool).triu(1)[None, None]
    plain = run_depths(model, dense([tokens]) | dict(attention_mask=future), 3)
    inputs = dense([torch.cat([torch.zeros(4, dtype=torch.long), tokens])])
    mask = torch.ones(13, 13, dtype=torch.bool).triu(1)
    mask[:, :4] = True
    padded = run_depths(model, inputs | dict(attention_mask=mask[None, None]), 3)
    for x, y in zip(plain, padded, strict=True):
        assert (x[:-4] - y[4:-4]).abs().max() < 1e-4


@pytest.mark.parametrize(
    "name, value",
    [
        ("context_parallel_size", 2),
        ("sequence_parallel", True),
        ("attention_dropout", 0.1),
        ("multi_latent_attention", True),
        ("window_size", (8, 0)),
        ("softmax_type", "learnable"),
        ("experimental_attention_variant", "dsa"),
        ("cuda_graph_impl", "local"),
        ("mtp_num_layers", 3),  # with mtp_use_repeated_layer, over one layer
    ],
)
def test_an_attention_that_is_another_is_refused_by_name(megatron, name, value):
    model = build()
    setattr(model.config, name, value)
    with pytest.raises(ValueError, match=name), draft_recursion(model, 3):
        pass
    assert "forward" not in vars(model.mtp.layers[0])


def test_several_mtp_layers_and_no_draft_are_refused(megatron, tiny):
    with pytest.raises(ValueError, match="2 MTP layers"), draft_recursion(tiny(mtp_layers=2), 3):
        pass
    with pytest.raises(ValueError, match="num_drafts 0"), draft_recursion(tiny(), 0):
        pass


def test_a_hybrid_model_of_attention_and_mlp_equals_a_gpt_model(megatron):
    hybrid = pytest.importorskip("toy.hybrid")
    pytest.importorskip("megatron.core.models.hybrid.hybrid_model", reason="from 0.18 on")
    gpt, inputs = build(), lay_out("packed")[0]
    config = mimo_config(hidden_size=64, ffn_size=96)
    model = hybrid.build_hybrid_model(config)
    weights = dict(gpt.mtp.named_parameters())
    with torch.no_grad():
        for name, parameter in model.mtp.named_parameters():
            plain = name.replace("mtp_model_layer.layers.0.", "mtp_model_layer.")
            parameter.copy_(weights[plain.replace("mtp_model_layer.layers.1.", "mtp_model_layer.")])
    hidden = torch.randn(sum(DOCUMENTS), 1, 64)
    rotary = gpt.rotary_pos_emb(max(DOCUMENTS))
    given = dict(hidden_states=hidden, rotary_pos_emb=rotary, embedding=gpt.embedding)
    with draft_recursion(model, 3), draft_recursion(gpt, 3):
        assert torch.equal(model.mtp(**inputs | given), gpt.mtp(**inputs | given))
    model.mtp.layers[0].mtp_layer_pattern = "M*-"
    with pytest.raises(ValueError, match="M"), draft_recursion(model, 3):
        pass


def test_a_layer_whose_attention_is_not_called_once_a_depth_is_an_error(megatron):
    model = build()
    attention = [x for x in model.mtp.modules() if hasattr(x, "core_attention")][0]
    attention.forward = lambda hidden_states, *args, **kwargs: (hidden_states, None)
    with pytest.raises(RuntimeError, match="core_attention"):
        run_depths(model, dense(make_tokens([5])), 2)


def test_the_model_is_as_it_was_afterwards_also_after_an_error(megatron):
    model = build()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(KeyError), draft_recursion(model, 3):
        with pytest.raises(RuntimeError, match="already"), draft_recursion(model, 3):
            pass
        raise KeyError
    run_depths(model, dense(make_tokens([5])), 3)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def tensor_parallel_depths(rank, size):
    model = build_tiny(tensor_parallel=size)
    inputs, _ = lay_out("packed")
    states = run_depths(model, inputs, 3)
    grads = gradients(model, sum(x.sin().sum() for x in states))
    whole = {name: grad for name, grad in grads.items() if "norm" in name}
    return torch.stack(states).detach(), whole


def test_tensor_parallel_ranks_get_the_same_states_and_gradients(megatron):
    wanted, wanted_grads = tensor_parallel_depths(0, 1)
    for found, grads in run_on_ranks(2, tensor_parallel_depths, 2, tensor_parallel=2):
        assert (found - wanted).abs().max() < 1e-5
        assert_close(grads, wanted_grads, 1e-5)


# Against vLLM


@pytest.fixture(scope="module")
def trained(megatron):
    """(model, hf_config): a toy trained 1 to 5 deep until some drafts are accepted, not all."""
    torch.manual_seed(0)
    hf_config = mimo_config()
    model = build_model(hf_config)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(15):
        tokens = counting(32, 40, seed=step)
        with match_vllm_mimo(model):
            states = run_block(model, dense(tokens), 5)
        loss = 0
        for depth, state in enumerate(states):
            logits, targets = model.output_layer(state)[0], torch.stack(tokens).T
            logits, targets = logits[: -1 - depth].flatten(0, 1), targets[1 + depth :].flatten()
            loss = loss + F.cross_entropy(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # Counting needs no look back: noise in the attention makes drafts depend on the keys seen.
    with torch.no_grad():
        for name, parameter in model.mtp.named_parameters():
            if "self_attention" in name:
                parameter += 0.15 * torch.randn(parameter.shape)
    return model.eval(), hf_config


def counting(num, length, seed):
    generator = torch.Generator().manual_seed(seed)
    steps = 1 + (torch.rand(num, length, generator=generator) < 0.15).long()
    steps[:, 0] = torch.randint(64, (num,), generator=generator)
    return list(steps.cumsum(1) % 64)


# vLLM's own schedule of drafts by batch size, so that one engine drafts 2, 3 and 5.
SCHEDULE = {2: (1, 16), 3: (17, 40), 5: (41, 64)}


KEPT_ALIVE = []  # engines: one in this process takes all process groups down with it


@pytest.fixture(scope="module")
def drafting_engine(trained, tmp_path_factory):
    """(llm, proposals): the engine with the trained weights, and what its drafter proposes."""
    model, hf_config = trained
    folder = str(tmp_path_factory.mktemp("drafting"))
    named = megatron_to_hf(model.named_parameters(), hf_config)
    toy.engine.write_checkpoint(folder, hf_config, named)
    schedule = [(first, last, drafts) for drafts, (first, last) in SCHEDULE.items()]
    speculative_config = {"num_speculative_tokens_per_batch_size": schedule}
    settings = dict(num_drafts=5, max_num_seqs=64, speculative_config=speculative_config)
    llm, proposals = toy.engine.start_engine(folder, **settings), []

    def record(worker):
        runner = worker.model_runner
        stock = runner.drafter.propose

        def propose(*args, **kwargs):
            drafts = stock(*args, **kwargs)
            proposals.append((list(runner.input_batch.req_ids), drafts.tolist()))
            return drafts

        runner.drafter.propose = propose

    llm.collective_rpc(record)
    yield llm, proposals
    KEPT_ALIVE.append(llm)


@torch.no_grad()
def draft(model, documents, num_drafts):
    """The arg-max tokens [k, T] at each slot of the documents, packed."""
    with match_vllm_mimo(model):
        states = run_depths(model, packed(documents), num_drafts)
    return torch.stack([model.output_layer(state)[0][:, 0].argmax(-1) for state in states])


def before(model, documents, num_drafts):
    """Megatron's mtp_use_repeated_layer (0.17 on): depth j attends to the keys of depth j alone."""
    model.config.mtp_num_layers, model.mtp.mtp_use_repeated_layer = num_drafts, True
    try:
        return draft(model, documents, None)
    finally:
        model.config.mtp_num_layers, model.mtp.mtp_use_repeated_layer = 1, False


def verify_steps(samples, proposals):
    """(tokens, index of the last known, drafts accepted, proposed) of each verify step."""
    for of in samples:
        metrics = of["output"].outputs[0].spec_decode_metrics
        tokens = torch.tensor(of["prompt"] + of["response"])
        newest = len(of["prompt"])  # prefill gave it
        of_request = [
            drafts
            for ids, rows in proposals
            for i, drafts in zip(ids, rows, strict=True)
            if i.split("-")[0] == of["output"].request_id
        ]
        drafted = metrics.per_step_drafted
        for accepted, num, drafts in zip(
            metrics.per_step_accepted, drafted, of_request[: len(drafted)], strict=True
        ):
            assert num == len(drafts)
            yield tokens, newest, accepted, drafts
            newest += accepted + 1


def replay(steps, slots, drafts_KT):
    """(accepted by the replay, by the engine) of each step; its drafts stand at its slot."""
    for (tokens, newest, accepted, drafts), slot in zip(steps, slots, strict=True):
        came = tokens[newest + 1 :][: len(drafts)]
        replayed = (drafts_KT[: len(came), slot] == came).cumprod(0).sum().item()
        # max_tokens cut the last step: what the engine accepted behind the cut can't be seen.
        yield replayed, min(accepted, len(came))


@pytest.mark.engine
@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("num_drafts", SCHEDULE)
def test_every_verify_step_and_every_drafted_token_of_vllm_is_predicted(
    trained, drafting_engine, num_drafts, temperature
):
    (model, _), (llm, proposals) = trained, drafting_engine
    num = SCHEDULE[num_drafts][1]
    prompts = [tokens.tolist() for tokens in counting(num, 5, seed=1000)]
    proposals.clear()
    samples = toy.engine.sample(llm, prompts, [32] * num, range(num), temperature=temperature)
    steps = list(verify_steps(samples, proposals))

    # One pass over what came: later drafts see the tokens that came, not those that were drafted.
    sequences = {id(tokens): tokens for tokens, *_ in steps}
    starts = itertools.accumulate(map(len, sequences.values()), initial=0)
    starts = dict(zip(sequences, starts, strict=False))  # the last is the end
    slots = [starts[id(tokens)] + newest - 1 for tokens, newest, *_ in steps]
    agree = {}
    for form in (before, draft):
        drafts_KT = form(model, list(sequences.values()), num_drafts)
        pairs = list(replay(steps, slots, drafts_KT))
        agree[form.__name__] = sum(replayed == engine for replayed, engine in pairs)
    assert agree["draft"] == len(steps)
    assert agree["before"] < 0.95 * len(steps)
    assert {engine for _, engine in pairs} == set(range(num_drafts + 1))

    # The chain goes on with its own drafts, accepted or not: a document of them gives them all.
    chains = [torch.cat([tokens[: n + 1], torch.tensor(drafts)]) for tokens, n, _, drafts in steps]
    drafts_KT, first = draft(model, chains, num_drafts), 0
    for (_, newest, _, drafts), chain in zip(steps, chains, strict=True):
        assert drafts_KT[: len(drafts), first + newest - 1].tolist() == drafts
        first += len(chain)
    tokens = sum(len(drafts) for *_, drafts in steps)
    print(
        f"\nk {num_drafts}, temperature {temperature}: {len(steps)} steps, {tokens} drafts, {agree}"
    )
