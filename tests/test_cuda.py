"""On a GPU, in bf16: pushes over CUDA IPC to both of vLLM's runners with CUDA graphs, FP8, sleep. Run: pytest -m cuda.

Every engine starts from the checkpoint of a trained policy, is pushed other weights, and then the trained ones again:
what it holds, drafts and samples must be bit for bit what it held, drafted and sampled as a fresh engine.
"""

import pytest
import torch
from conftest import random_weights

import toy.engine
import toy.model
import train_mimo
from drafter_sync import DrafterSyncError, drafter_fingerprint, megatron_to_hf, sync_weights
from mtp_loss import draft_tokens

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.engine,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: see benchmarks/results for an H200's"
    ),
]
CONFIG = toy.model.mimo_config(
    hidden_size=256, num_heads=4, num_groups=2, ffn_size=512
)  # heads of 64
ARGS = train_mimo.Args(hidden=256, ffn=512, prompts=64, warmup_steps=150, temperature=1.0)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """(model, folder): bf16, trained for a few seconds, so that few drafts are near-ties, and its checkpoint."""
    if torch.distributed.is_initialized():
        pytest.skip("Megatron runs on CPU in this process: run pytest -m cuda by itself")
    toy.model.init_megatron("cuda")
    torch.manual_seed(0)
    model = toy.model.build_model(CONFIG)
    random_weights(model, 0)
    model.cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with (
        pytest.MonkeyPatch.context() as patch
    ):  # 9 to 1: drafts that bf16 cannot tell apart are rare
        patch.setattr(train_mimo, "WARMUP_SHARE_OF_PLUS_TWO", 0.1)
        train_mimo.warm_up(model, step, ARGS, torch.Generator().manual_seed(0), "cuda")
    model.to(torch.bfloat16)
    folder = str(tmp_path_factory.mktemp("policy"))
    train_mimo.write_checkpoint(model, CONFIG, folder)
    yield model, folder
    torch.distributed.destroy_process_group()


def start(folder, **settings):
    """In a process of its own, so that tensors travel by IPC and its memory is free afterwards; with CUDA graphs."""
    # Piecewise: vLLM 0.25.1's V2 runner died of an illegal memory access capturing its drafter's prefill as one graph.
    sizes = dict(cudagraph_mode="PIECEWISE", cudagraph_capture_sizes=[1, 2, 4, 8, 16, 32, 64, 128])
    graphs = dict(enforce_eager=False, compilation_config=sizes)
    memory = dict(gpu_memory_utilization=0.1, kv_cache_memory_bytes=1 << 30)
    settings = graphs | memory | settings
    return toy.engine.start_engine(
        folder, process=True, dtype="bfloat16", max_num_seqs=64, **settings
    )


def sampled(llm):
    prompts = train_mimo.make_prompts(
        64, ARGS.response_tokens, ARGS.symbols, torch.Generator().manual_seed(1)
    )
    return train_mimo.sample(llm, prompts, ARGS, 0)


def tokens_and_decisions(samples):
    return [(s["response"], s["decisions"]) for s in samples]


def push(llm, model, **settings):
    return sync_weights(llm, megatron_to_hf(model.named_parameters(), CONFIG), **settings)


def push_others(llm):
    """Random weights, so that everything that the engine holds changes."""
    other = toy.model.build_model(CONFIG)
    random_weights(other, 1)
    return push(llm, other.to("cuda", torch.bfloat16))


@pytest.mark.parametrize("v2_runner", ["0", "1"])
def test_a_push_leaves_what_a_fresh_engine_has_and_the_trainer_predicts_its_decisions(
    policy, monkeypatch, v2_runner
):
    model, folder = policy
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", v2_runner)
    llm = start(folder)
    fresh, before = drafter_fingerprint(llm), sampled(llm)
    batch = train_mimo.make_batch(before, "cuda")
    metrics = train_mimo.acceptance(before, train_mimo.trainer_drafts(model, batch), ARGS)
    assert metrics["replay_agreement"] >= 0.99 and 0.3 < metrics["accept_rate"] < 1
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
    assert sum(name.endswith("weight_scale") for name in fresh) >= 4, (
        "no layer of the drafter is quantised"
    )
    push_others(llm)
    assert drafter_fingerprint(llm).keys() == fresh.keys() and drafter_fingerprint(llm) != fresh
    push(llm, model)
    assert drafter_fingerprint(llm) == fresh
    assert tokens_and_decisions(sampled(llm)) == tokens_and_decisions(before)
    llm.llm_engine.engine_core.shutdown()


def test_after_sleep_1_and_2_a_whole_push_restores_all_and_one_of_the_target_alone_raises_where_weights_are_gone(
    policy,
):
    model, folder = policy
    llm = start(folder, enable_sleep_mode=True)
    fresh, before = drafter_fingerprint(llm), sampled(llm)
    for level in (1, 2):
        llm.sleep(level=level)
        llm.wake_up(tags=["weights"])
        if level == 2:
            with pytest.raises(DrafterSyncError, match="sleep level 2.*mtp_layers"):
                push(llm, model, drafter=False)
        push(llm, model)
        llm.wake_up(tags=["kv_cache"])
        assert drafter_fingerprint(llm) == fresh
        assert tokens_and_decisions(sampled(llm)) == tokens_and_decisions(before)
    llm.llm_engine.engine_core.shutdown()


def test_packed_documents_give_the_drafts_of_one_document_alone(policy):
    model, _ = policy
    documents = [[3, 4, 5, 7, 8, 9], [60, 62, 63, 1, 3], [10, 11, 12, 14, 15, 17, 18, 19]]
    input_ids, position_ids, packed = toy.model.pack(documents, "cuda")
    together = draft_tokens(model, input_ids, position_ids, None, packed_seq_params=packed)[
        0
    ].tolist()
    alone = []
    for document in documents:
        input_ids, position_ids, packed = toy.model.pack([document], "cuda")
        alone += draft_tokens(model, input_ids, position_ids, None, packed_seq_params=packed)[
            0
        ].tolist()
    assert together == alone
