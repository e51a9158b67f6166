"""Long runs and large loads: memory stays flat, every push arrives, every request is explained."""

import statistics
import time
from pathlib import Path

import pytest
import torch
from conftest import random_weights
from test_resume import Run

import toy.engine
import train_mimo
from drafter_sync import megatron_to_hf, sync_weights
from toy.model import forward
from toy.ppo import label_logprobs
from toy.task import make_prompts
from train_mimo import Args

pytestmark = [pytest.mark.slow, pytest.mark.engine]


def resident_bytes(pid="self"):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def test_three_hundred_steps_leave_memory_flat(tmp_path):
    """Resident memory grows by less than 5 % after step 20; drift of seconds is only reported."""
    argv = "--steps 300 --warmup-steps 20 --prompts 16 --save-every 20".split()
    run = Run(tmp_path / "out", *argv)
    at_step = {}
    for step in range(0, 300, 10):
        run.wait_for_step(step)
        at_step[step] = resident_bytes(run.pid)
    run.finish()
    seconds = [line["rollout_s"] + line["train_s"] + line["sync_s"] for line in run.lines()]
    early, late = statistics.median(seconds[20:70]), statistics.median(seconds[-50:])
    growth = max(at_step.values()) / at_step[20] - 1
    print(f"{at_step[20] / 2**20:.0f} MiB at step 20, growth at most {growth:.2%}")
    print(f"{early:.3f} s a step early, {late:.3f} s late")
    assert growth < 0.05, at_step
    assert all(line["replay_agreement"] == 1.0 for line in run.lines())
    assert all(line["logprob_gap"] < 1e-3 for line in run.lines())


def push(engine, seed):
    llm, model, hf_config = engine
    random_weights(model, seed)
    return sync_weights(llm, megatron_to_hf(model.named_parameters(), hf_config), verify=True)


def test_two_hundred_verified_pushes_in_a_row_leave_memory_flat(engine):
    for seed in range(200):
        report = push(engine, seed)
        assert report.target_loaded and report.drafter_loaded
        if seed == 20:
            early = resident_bytes()
    print(f"{early / 2**20:.0f} MiB after 20 pushes, {resident_bytes() / early - 1:.2%} later")
    assert resident_bytes() < 1.05 * early


def check_rollout(engine, prompts):
    """Every request has the length it asked for, and its decisions are those predicted."""
    llm, model, _ = engine
    push(engine, 31)
    tokens, lengths = zip(*prompts, strict=True)
    started = time.perf_counter()
    samples = toy.engine.sample(llm, tokens, lengths, range(len(prompts)))
    print(f"{len(prompts)} requests in {time.perf_counter() - started:.1f} s")
    assert [(s["prompt"], len(s["response"])) for s in samples] == prompts
    for sample in samples:
        sample["counts"] = train_mimo.count(sample.pop("output"), sample)
    batch = train_mimo.make_batch(samples, "cpu")
    drafts = train_mimo.trainer_drafts(model, batch, Args())
    metrics = train_mimo.acceptance(model, batch, samples, drafts, Args())
    assert metrics["replay_agreement"] == 1.0 and metrics["spec/requests"] == len(prompts)
    with torch.no_grad():
        logprobs = label_logprobs(forward(model, batch), batch, 1.0)
    engines = torch.tensor([logprob for sample in samples for logprob in sample["logprobs"]])
    assert (logprobs - engines).abs().max() < 1e-3


def test_two_thousand_requests_in_one_rollout(engine):
    check_rollout(engine, make_prompts(2000, 28, 64, torch.Generator().manual_seed(0)))


def test_prompts_from_two_tokens_to_the_models_limit(engine):
    """At the limit itself vLLM makes no last draft; of one-token prompts see make_prompts."""
    limit = engine[2]["max_position_embeddings"] - 1
    tokens = torch.randint(64, (limit,), generator=torch.Generator().manual_seed(0)).tolist()
    check_rollout(engine, [(tokens[:n], limit - n) for n in range(2, limit)])
