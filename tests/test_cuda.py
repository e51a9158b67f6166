"""On a GPU, in bf16: pushes over CUDA IPC to both of vLLM's runners, FP8, sleep: pytest -m cuda.

Every engine starts from the checkpoint of a trained policy, is pushed other weights, and then the
trained ones again: what it holds, drafts and samples must be bit for bit what it held, drafted and
sampled as a fresh engine.
"""

import pytest
import torch
import torch.nn.functional as F
from conftest import random_weights

import toy.engine
import toy.model
import toy.task
from drafter_sync import (
    DrafterSyncError,
    drafter_fingerprint,
    match_vllm_mimo,
    megatron_to_hf,
    sync_weights,
)
from mtp_loss import draft_tokens, patch_mtp_loss
from mtp_mask import depth_mask, depth_targets
from spec_metrics import replay_agreement

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.engine,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: see benchmarks/results for an H200's"
    ),
]
DEVICE = "cuda"
DTYPE = torch.bfloat16
CONFIG = toy.model.mimo_config(hidden_size=256, num_heads=4, num_groups=2, ffn_size=512)
VOCAB = CONFIG["vocab_size"]
LENGTH = 28  # of the longest response
MOST_DRAFTS = 3


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """(model, folder): bf16, trained a little so that few drafts are near-ties; its checkpoint."""
    if torch.distributed.is_initialized():
        pytest.skip("Megatron runs on CPU in this process: run pytest -m cuda by itself")
    toy.model.init_megatron(DEVICE)
    torch.manual_seed(0)
    model = toy.model.build_model(CONFIG)
    random_weights(model, 0)
    model.to(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        # 9 to 1: drafts that bf16 cannot tell apart are rare.
        patch.setattr(toy.task, "WARMUP_SHARE_OF_PLUS_TWO", 0.1)
        train(model)
    model.to(DTYPE)
    folder = str(tmp_path_factory.mktemp("policy"))
    toy.engine.write_checkpoint(folder, CONFIG, megatron_to_hf(model.named_parameters(), CONFIG))
    yield model, folder
    torch.distributed.destroy_process_group()


def train(model, num_steps=150):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator, length = torch.Generator().manual_seed(0), toy.task.MAX_PROMPT + LENGTH
    position_ids = torch.arange(length, device=DEVICE).expand(64, -1)
    loss_mask = depth_mask(position_ids >= 2, 0)
    for _ in range(num_steps):
        tokens = toy.task.make_sequences(64, length, VOCAB, generator).to(DEVICE)
        labels = depth_targets(tokens, 0)
        with match_vllm_mimo(model), patch_mtp_loss(model, num_drafts=MOST_DRAFTS, scale=1.0):
            logits = model(tokens, position_ids, None, labels=labels, loss_mask=loss_mask)
        F.cross_entropy(logits[loss_mask], labels[loss_mask]).backward()
        optimizer.step()
        optimizer.zero_grad()


def start(folder, **settings):
    """In a process of its own, so that tensors travel by IPC; with CUDA graphs."""
    # Piecewise: vLLM 0.25.1's V2 runner died of an illegal memory access capturing its drafter's
    # prefill as one graph.
    sizes = dict(cudagraph_mode="PIECEWISE", cudagraph_capture_sizes=[4, 8, 16, 32, 64, 128, 256])
    graphs = dict(enforce_eager=False, compilation_config=sizes)
    memory = dict(gpu_memory_utilization=0.1, kv_cache_memory_bytes=1 << 30)
    settings = graphs | memory | settings
    return toy.engine.start_engine(
        folder, process=True, dtype="bfloat16", max_num_seqs=64, **settings
    )


def sampled(llm):
    pairs = toy.task.make_prompts(64, LENGTH, VOCAB, torch.Generator().manual_seed(1))
    prompts, lengths = zip(*pairs, strict=True)
    return toy.engine.sample(llm, prompts, lengths, range(64))


def tokens_and_decisions(samples):
    return [(sample["response"], sample["accepted"]) for sample in samples]


def predicted(model, samples, num_drafts):
    """(share of the engine's decisions that the trainer predicts, share of drafts accepted)."""
    sequences = [sample["prompt"] + sample["response"] for sample in samples]
    input_ids, position_ids, packed = toy.model.pack(sequences, DEVICE)
    inputs = input_ids, position_ids, None
    with match_vllm_mimo(model):
        drafts = draft_tokens(model, *inputs, packed_seq_params=packed, num_drafts=num_drafts)
    of_sequences = drafts[:, 0].cpu().split([len(sequence) for sequence in sequences], dim=1)
    agreed = total = accepted = drafted = 0
    for sequence, sample, of_sequence in zip(sequences, samples, of_sequences, strict=True):
        decisions = sample["accepted"], sample["drafted"]
        pair = replay_agreement(sequence, len(sample["prompt"]), of_sequence, *decisions)
        agreed, total = agreed + pair[0], total + pair[1]
        known = [pair for pair in zip(*decisions, strict=True) if pair[0] is not None]
        accepted, drafted = accepted + sum(a for a, _ in known), drafted + sum(d for _, d in known)
    return agreed / total, accepted / drafted


def push(llm, model, **settings):
    return sync_weights(llm, megatron_to_hf(model.named_parameters(), CONFIG), **settings)


def push_others(llm):
    """Random weights, so that everything that the engine holds changes."""
    other = toy.model.build_model(CONFIG)
    random_weights(other, 1)
    return push(llm, other.to(DEVICE, DTYPE))


@pytest.mark.parametrize(("v2_runner", "num_drafts"), [("0", 1), ("1", MOST_DRAFTS)])
def test_a_push_leaves_what_a_fresh_engine_has_and_the_trainer_predicts_its_decisions(
    policy, monkeypatch, v2_runner, num_drafts
):
    model, folder = policy
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", v2_runner)
    llm = start(folder, num_drafts=num_drafts)
    fresh, before = drafter_fingerprint(llm), sampled(llm)
    agreement, accept_rate = predicted(model, before, num_drafts)
    assert agreement >= 0.99 and 0.3 < accept_rate < 1
    report = push_others(llm)
    assert (report.target_loaded, report.drafter_loaded) == (17, 11)
    held = drafter_fingerprint(llm)
    assert all(held[name] != fresh[name] for name in fresh)
    assert tokens_and_decisions(sampled(llm)) != tokens_and_decisions(before)
    push(llm, model, bucket_bytes=100_000)  # smaller than a matrix, so that layers are split
    assert drafter_fingerprint(llm) == fresh
    assert tokens_and_decisions(sampled(llm)) == tokens_and_decisions(before)
    llm.llm_engine.engine_core.shutdown()


def test_fp8_weights_and_scales_after_a_push_are_those_of_an_engine_that_quantised_at_load(policy):
    model, folder = policy
    llm = start(folder, quantization="fp8")
    fresh, before = drafter_fingerprint(llm), sampled(llm)
    scales = sum(name.endswith("weight_scale") for name in fresh)
    assert scales >= 4, "no layer of the drafter is quantised"
    push_others(llm)
    assert drafter_fingerprint(llm).keys() == fresh.keys() and drafter_fingerprint(llm) != fresh
    push(llm, model)
    assert drafter_fingerprint(llm) == fresh
    assert tokens_and_decisions(sampled(llm)) == tokens_and_decisions(before)
    llm.llm_engine.engine_core.shutdown()


def test_after_sleep_a_whole_push_restores_all_and_the_target_alone_raises_where_weights_are_gone(
    policy,
):
    model, folder = policy
    llm = start(folder, enable_sleep_mode=True)
    fresh, before = drafter_fingerprint(llm), sampled(llm)
    for level in (1, 2):
        llm.sleep(level=level)
        llm.wake_up(tags=["weights"])
        if level == 2:
            with pytest.raises(DrafterSyncError, match="mtp_layers"):
                push(llm, model, drafter=False)
        push(llm, model)
        llm.wake_up(tags=["kv_cache"])
        assert drafter_fingerprint(llm) == fresh
        assert tokens_and_decisions(sampled(llm)) == tokens_and_decisions(before)
    llm.llm_engine.engine_core.shutdown()


def test_packed_documents_give_the_drafts_of_one_document_alone(policy):
    model, _ = policy

    def drafts(*documents):
        input_ids, position_ids, packed = toy.model.pack(documents, DEVICE)
        inputs = input_ids, position_ids, None
        return draft_tokens(model, *inputs, packed_seq_params=packed, num_drafts=MOST_DRAFTS)

    documents = [[3, 4, 5, 7, 8, 9], [60, 62, 63, 1, 3], [10, 11, 12, 14, 15, 17, 18, 19]]
    alone = torch.cat([drafts(document) for document in documents], dim=2)
    assert torch.equal(drafts(*documents), alone)
