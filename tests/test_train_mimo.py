"""The smoke run: what it refuses, its files and numbers, its PPO step, planted faults named."""

import contextlib
import inspect
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import random_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_resume import ROOT, Run, without_times

import toy.engine
import train_mimo
from drafter_sync import hf_to_megatron, megatron_to_hf, sync_weights
from ref_disable import skip_mtp
from spec_metrics import counts_from_vllm, counts_from_vllm_counters, replay_acceptance, summarize
from toy.before import unswap
from toy.model import build_model, copies, forward, mimo_config
from toy.ppo import estimate_advantages, label_logprobs
from toy.report import columns, read_baseline, report
from toy.task import make_prompts, token_rewards
from train_mimo import Args


# ---- Arguments -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "argv",
    [
        "--out full",
        "--symbols 65 --out full --overwrite",
        "--unfix loss --trained-drafts 2",
        "--unfix loss --drafts 2",
    ],
)
def test_what_would_go_wrong_in_silence_is_refused_before_anything_is_touched(
    tmp_path, monkeypatch, argv
):
    monkeypatch.setattr(train_mimo, "train", lambda *args: pytest.fail("it started"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("mine")
    with pytest.raises(SystemExit) as refusal:
        train_mimo.main(argv.split())
    assert refusal.value.code not in (None, 0)
    assert sorted(map(str, Path().rglob("*"))) == ["full", "full/precious"]


def test_overwrite_deletes_nothing_before_what_the_run_needs_is_there(tmp_path):
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(FileNotFoundError):
        train_mimo.main(["--out", str(tmp_path), "--overwrite", "--baseline", "nowhere"])
    assert (tmp_path / "precious").read_text() == "mine"


def test_every_argument_has_a_sentence_for_help():
    fields = inspect.getsource(Args).split('"""')[2].strip().splitlines()
    assert len(fields) > 40 and all(re.search(r" = .*  # \w", field) for field in fields)


@pytest.mark.parametrize("saved", [False, True])
def test_an_error_says_how_to_resume_if_there_is_a_save(monkeypatch, tmp_path, saved):
    def fail(*args):
        (tmp_path / "state.pt").touch() if saved else None
        raise RuntimeError("planted")

    monkeypatch.setattr(train_mimo, "train", fail)
    with pytest.raises(RuntimeError, match="planted") as error:
        train_mimo.main(["--out", str(tmp_path)])
    assert (f"--resume {tmp_path}" in "".join(getattr(error.value, "__notes__", []))) == saved


# ---- A short run ---------------------------------------------------------------------------------
KEYS = """
    step reward accept_rate accept_length replay_agreement logprob_gap mtp_loss mtp_top1 kl entropy
    clip_fraction policy_grad_norm mtp_grad_norm rollout_s train_s sync_s rollout_tokens_per_s
""".split()
SHORT = "--steps 3 --warmup-steps 20 --prompts 16 --seed 5".split()


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """The command itself; the other runs are forked off a process that has imported everything."""
    out = tmp_path_factory.mktemp("run") / "out"
    command = [sys.executable, "train_mimo.py", "--out", str(out), *SHORT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    stdout = done.stdout.splitlines()
    return SimpleNamespace(out=out, stdout=stdout, stderr=done.stderr, lines=lines)


@pytest.mark.engine
def test_each_step_has_a_line_with_every_number_and_the_same_numbers_on_the_screen(short_run):
    assert [line["step"] for line in short_run.lines] == [0, 1, 2]
    for line in short_run.lines:
        assert set(KEYS) <= set(line) and all(math.isfinite(value) for value in line.values())
    forms = columns(Args())
    header = short_run.stdout.index(" ".join(forms))
    for line, printed in zip(short_run.lines, short_run.stdout[header + 1 :], strict=True):
        cells, left = printed.split()[: len(forms)], printed.split()[len(forms) :]
        assert cells == [form.format(line[name]).strip() for name, form in forms.items()]
        assert re.fullmatch(r"\d+ s left", " ".join(left))
    starts = {len(re.match(r"\s*\S+", printed)[0]) for printed in short_run.stdout[header:]}
    assert len(starts) == 1, "the columns are aligned"


@pytest.mark.engine
def test_trainer_and_engine_agree_on_every_step_and_nothing_is_said_on_stderr(short_run):
    for line in short_run.lines:
        assert line["replay_agreement"] == 1.0 and line["logprob_gap"] < 1e-3
        assert line["accept_length"] == pytest.approx(1 + line["spec/accept_rate_pos_1"])
    assert short_run.lines[0]["kl"] == 0, "before the first update actor and reference are equal"
    assert short_run.stderr == ""


@pytest.mark.engine
def test_the_run_leaves_curves_and_a_hugging_face_checkpoint_that_fills_a_model(
    short_run, megatron
):
    assert (short_run.out / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")
    folder = short_run.out / "checkpoint"
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "mimo" and config["architectures"] == ["MiMoForCausalLM"]
    assert config["num_nextn_predict_layers"] == 1 and config["max_position_embeddings"] >= 128
    tensors = load_file(folder / "model.safetensors")
    parameters = dict(build_model(config).named_parameters())
    assert dict(hf_to_megatron(tensors, config, parameters)).keys() == parameters.keys()
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    start = load_file(short_run.out / "reference" / "model.safetensors")
    untrained = [name for name in tensors if torch.equal(tensors[name], start[name])]
    assert untrained == []


@pytest.mark.engine
def test_the_screen_says_what_the_reference_saves(short_run, megatron):
    mtp = build_model(mimo_config()).mtp
    saved = sum(parameter.numel() for parameter in mtp.parameters())
    assert any(f"{saved:,} parameters of MTP" in line for line in short_run.stdout)


@pytest.mark.engine
def test_the_same_arguments_twice_give_the_same_numbers(short_run, tmp_path):
    again = Run(tmp_path / "out", *SHORT).finish()
    assert without_times(again.lines()) == without_times(short_run.lines)


def test_with_a_baseline_each_step_reports_the_speed_up(megatron, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    rates = [90, 100, 400]
    lines = [json.dumps({"rollout_tokens_per_s": rate}) + "\n" for rate in rates]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    args = Args(out=str(out), baseline=str(tmp_path))
    samples = [{"response": [1] * 300}]
    report(0, {}, samples, [0.0, 2.0, 2.5, 3.5], read_baseline(args), args)
    line = json.loads((out / "metrics.jsonl").read_text())
    assert line.pop("rollout_tokens_per_s") == 150 and line.pop("spec/speedup_measured") == 1.5
    assert line == dict(step=0, rollout_s=2.0, train_s=0.5, sync_s=1.0)


QUICK = "--steps 3 --warmup-steps 40 --prompts 16 --lr 4e-3".split()


@pytest.mark.engine
def test_a_frozen_drafter_is_soon_out_of_step_and_that_is_what_was_asked_for(tmp_path):
    lines = Run(tmp_path / "out", "--drafter", "frozen", *QUICK).finish().lines()
    assert lines[0]["replay_agreement"] == 1.0 and lines[-1]["replay_agreement"] < 0.95
    assert lines[-1]["logprob_gap"] < 1e-3, "the target is pushed all the same"


@pytest.mark.engine
def test_a_push_that_forgets_the_drafter_is_a_warning_that_names_it(tmp_path):
    run = Run(tmp_path / "out", "--unfix", "sync", *QUICK).wait()
    assert run.code == 0 and re.search("WARNING.*stale drafter", run.stderr)


@pytest.mark.engine
def test_without_speculation_the_push_goes_to_the_target_alone(tmp_path):
    argv = "--drafter none --steps 2 --warmup-steps 5 --prompts 8 --lr 4e-3"
    lines = Run(tmp_path / "out", *argv.split()).finish().lines()
    assert [line["accept_rate"] for line in lines] == [None] * 2
    assert [line["replay_agreement"] for line in lines] == [None] * 2
    assert lines[1]["kl"] != 0 and lines[1]["logprob_gap"] < 1e-4, "the pushed policy samples"


@pytest.mark.engine
def test_of_three_drafts_a_verify_step_every_decision_is_predicted(tmp_path):
    argv = "--drafts 3 --steps 2 --warmup-steps 40 --prompts 16"
    for line in Run(tmp_path / "out", *argv.split()).finish().lines():
        assert line["replay_agreement"] == 1.0
        rates = [line[f"spec/accept_rate_pos_{j}"] for j in (1, 2, 3)]
        assert 1 > rates[0] > rates[1] > rates[2] > 0
        assert line["accept_length"] == pytest.approx(1 + sum(rates))


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_with_the_defaults_the_reward_rises_and_only_a_synced_drafter_keeps_up(tmp_path, seed):
    synced, frozen = (
        Run(tmp_path / drafter, "--seed", str(seed), "--drafter", drafter).finish().lines()
        for drafter in ("synced", "frozen")
    )
    assert synced[0]["reward"] < 0.5 and synced[-1]["reward"] >= 0.9
    assert synced[-1]["accept_rate"] >= max(0.75, frozen[-1]["accept_rate"] + 0.25)
    assert all(line["replay_agreement"] >= 0.999 for line in synced)
    assert frozen[-1]["replay_agreement"] < 0.95


# ---- The PPO step, without an engine -------------------------------------------------------------
SMALL = dict(
    layers=1, hidden=64, heads=2, groups=1, ffn=64, prompts=6, minibatches=2, response_tokens=8
)


def build(**arguments):
    """train_mimo's arguments and its trainer, with every weight random."""
    args = Args(**SMALL | arguments)
    trainer = train_mimo.build_trainer(args)
    random_weights(trainer.actor, 1)
    return args, trainer


def scored_samples(actor, num=6):
    """Samples as roll_out and score make them, with random tokens, advantages and returns."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for i in range(num):
        tokens = torch.randint(64, (2 + i % 3 + 4 + i,), generator=generator).tolist()
        samples.append({"prompt": tokens[: 2 + i % 3], "response": tokens[2 + i % 3 :]})
    batch = train_mimo.make_batch(samples, "cpu")
    with torch.no_grad(), skip_mtp(actor):
        old_N = label_logprobs(forward(actor, batch), batch, 1.0)
    pieces = old_N.split([len(sample["response"]) for sample in samples])
    for sample, old in zip(samples, pieces, strict=True):
        advantages, returns = torch.randn(2, len(old), generator=generator)
        sample |= dict(old=old, advantages=advantages, returns=returns)
    return samples


def updated(**arguments):
    """Every parameter after the PPO epochs, the metrics, every parameter before."""
    args, trainer = build(**arguments)
    before = copies(trainer.actor)
    metrics = train_mimo.update(trainer, scored_samples(trainer.actor), 0, args)
    return copies(trainer.actor), metrics, before


def changed(first, second, of_mtp):
    """Names of the parameters of MTP layer or policy that are not bitwise equal."""
    names = {name for name in first if name.startswith("mtp.") == of_mtp}
    return {name for name in names if not torch.equal(first[name], second[name])}


@pytest.fixture(scope="module")
def usual_update(megatron):
    return updated(mtp_scale=0.2)


def test_the_policys_update_is_bitwise_the_same_with_the_mtp_loss_on_and_off(usual_update):
    on, _, before = usual_update
    off, metrics, _ = updated(mtp_scale=0.0)
    assert changed(on, off, of_mtp=False) == set() and metrics["mtp_grad_norm"] == 0
    assert changed(on, before, False) | changed(on, before, True) == set(on), "all is trained"
    assert changed(off, before, of_mtp=True) == set() and metrics["mtp_loss"] > 0


def test_before_the_mtp_loss_moved_the_policys_head(usual_update):
    moved = changed(usual_update[0], updated(mtp_scale=0.2, unfix=("loss",))[0], of_mtp=False)
    assert {"output_layer.weight", "embedding.word_embeddings.weight"} <= moved


def test_before_prompt_tokens_trained_the_mtp_layer(usual_update):
    metrics = updated(unfix=("mask",))[1]
    assert metrics["mtp_prompt_share"] > 0 and usual_update[1]["mtp_prompt_share"] == 0


def test_recompute_changes_no_bit_of_the_update(usual_update):
    with_it, without = usual_update[0], updated(recompute=False)[0]
    assert changed(with_it, without, False) | changed(with_it, without, True) == set()


def test_the_first_ratio_is_one_and_clipping_starts_with_the_second_update(megatron):
    assert updated(epochs=1, minibatches=1)[1]["clip_fraction"] == 0
    assert updated(epochs=8, minibatches=1, lr=1e-2)[1]["clip_fraction"] > 0


def test_case_17_a_large_mtp_gradient_does_not_shrink_the_policys(megatron):
    (_, trainer), seen = build(max_grad_norm=1.0), {}
    actor = trainer.actor
    head, of_mtp = actor.output_layer.weight, actor.mtp.layers[0].eh_proj.weight
    trainer.optimizer.adam.step = lambda: seen.update({p: p.grad.clone() for p in (head, of_mtp)})
    to_head, to_mtp = (torch.randn(p.shape) for p in (head, of_mtp))
    to_head, to_mtp = 0.8 * to_head / to_head.norm(), 20.0 * to_mtp / to_mtp.norm()
    norms = trainer.optimizer.step((head * to_head).sum() + (of_mtp * to_mtp).sum())
    assert norms == pytest.approx({"policy": 0.8, "mtp": 20.0})
    torch.testing.assert_close(seen[head], to_head)  # untouched: 0.8 is below the limit
    torch.testing.assert_close(seen[of_mtp], to_mtp / 20)
    assert head.grad is None and of_mtp.grad is None, "no gradient is left for the next step"


def slow_advantages(rewards, values, gamma, lam):
    """By its definition: the discounted sum of all later temporal differences."""
    values = [*values, 0.0]
    deltas = [reward + gamma * values[t + 1] - values[t] for t, reward in enumerate(rewards)]
    return [
        sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:]))
        for t in range(len(deltas))
    ]


def test_advantages_by_hand():
    args = Args(gamma=0.5, gae_lambda=0.5)
    advantages, returns = estimate_advantages([1.0, 0.0, 1.0], [0.0, 1.0, 0.5], args)
    # Differences 1.5, -0.75, 0.5; each later one counts a quarter.
    assert advantages.tolist() == [1.34375, -0.625, 0.5]
    assert returns.tolist() == [1.34375, 0.375, 1.0]


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=9),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_advantages_equal_the_definition(steps, gamma, lam):
    rewards, values = map(list, zip(*steps, strict=True))
    got, returns = estimate_advantages(rewards, values, Args(gamma=gamma, gae_lambda=lam))
    wanted = slow_advantages(rewards, values, gamma, lam)
    assert got.tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-6)  # float32
    assert (returns - got).tolist() == pytest.approx(values, rel=1e-5, abs=1e-5)


def test_a_batch_packs_the_samples_and_masks_what_each_slot_may_learn():
    samples = [{"prompt": [9, 1, 2], "response": [3, 4, 5]}, {"prompt": [6], "response": [7]}]
    batch = train_mimo.make_batch(samples, "cpu")
    assert batch["input_ids"].tolist() == [[9, 1, 2, 3, 4, 5, 6, 7]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 0, 1]]
    assert batch["packed"].cu_seqlens_q.tolist() == [0, 6, 8]
    assert batch["token_mask"].tolist() == [[0, 0, 0, 1, 1, 1, 0, 1]]
    assert batch["labels"].tolist() == [[1, 2, 3, 4, 5, 0, 7, 0]]
    assert batch["loss_mask"].int().tolist() == [[0, 0, 1, 1, 1, 0, 1, 0]]
    assert torch.equal(batch["mtp_loss_mask"], batch["loss_mask"]) and batch["prompt_targets"] == 0
    before = train_mimo.make_batch(samples, "cpu", unfix=("mask",))
    assert torch.equal(before["loss_mask"], batch["loss_mask"]), "the policy's own mask was right"
    assert before["mtp_loss_mask"].int().tolist() == [[1, 1, 1, 1, 1, 0, 1, 0]]
    assert before["prompt_targets"] == 1, "depth 1 at slot 0 learns token 2"


def test_log_probs_are_those_of_the_response_tokens_under_the_tempered_policy():
    samples = [{"prompt": [1], "response": [2, 0]}, {"prompt": [0], "response": [1]}]
    logits_TV = torch.tensor([[0.0, 0, 2], [2, 0, 0], [9, 9, 9], [0, 2, 0], [9, 9, 9]])
    got = label_logprobs(logits_TV, train_mimo.make_batch(samples, "cpu"), 2.0)
    assert got.tolist() == pytest.approx([1 - math.log(2 + math.e)] * 3)


def test_a_token_is_rewarded_iff_it_is_the_one_before_plus_two():
    assert token_rewards({"prompt": [3, 4], "response": [6, 7, 9]}, 64) == [1, 0, 1]
    assert token_rewards({"prompt": [63], "response": [1, 3, 2]}, 64) == [1, 1, 0]


def test_prompts_follow_the_seed_and_keep_to_the_lengths_asked_for():
    first, again, other = (
        make_prompts(200, 10, 64, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert {len(prompt) for prompt, _ in first} == {2, 3, 4, 5, 6}
    assert {length for _, length in first} == {5, 6, 7, 8, 9, 10}
    pairs = [pair for prompt, _ in first for pair in zip(prompt, prompt[1:], strict=False)]
    assert {(b - a) % 64 for a, b in pairs} == {1, 2}


@pytest.mark.parametrize("seed", [0, 1, 20261202, 2**40])
def test_every_request_has_a_seed_of_its_own_that_vllm_takes(megatron, monkeypatch, seed):
    args = Args(seed=seed, prompts=5)
    trainer = SimpleNamespace(generator=torch.Generator())
    seeds = []
    monkeypatch.setattr(toy.engine, "sample", lambda *a, **k: seeds.extend(a[3]) or [])
    for step in range(3):
        train_mimo.roll_out("an engine", trainer, step, args)
    assert len(set(seeds)) == 15 and all(0 <= seed < 2**63 for seed in seeds)


def test_the_reference_builds_no_mtp_layer_reads_no_mtp_tensor_and_is_the_actors_trunk(
    megatron, tmp_path, monkeypatch
):
    args, trainer = build(out=str(tmp_path))
    train_mimo.write_checkpoint(trainer, tmp_path / "reference")
    read, safe_open = [], train_mimo.safe_open

    @contextlib.contextmanager
    def watched(*args):
        with safe_open(*args) as file:
            get = lambda name: read.append(name) or file.get_tensor(name)  # noqa: E731
            yield SimpleNamespace(keys=file.keys, get_tensor=get)

    monkeypatch.setattr(train_mimo, "safe_open", watched)
    reference = train_mimo.load_reference(trainer, args)
    assert not [name for name, _ in reference.named_parameters() if "mtp" in name]
    written = load_file(tmp_path / "reference" / "model.safetensors")
    assert sorted(read) == sorted(name for name in written if "mtp" not in name) != sorted(written)
    batch = train_mimo.make_batch(scored_samples(trainer.actor), "cpu")
    with torch.no_grad(), skip_mtp(trainer.actor):
        assert torch.equal(forward(reference, batch), forward(trainer.actor, batch))
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert trainer.hf_config["num_nextn_predict_layers"] == 1, "the actor's config is left alone"
    args.unfix = ("ref",)
    before = train_mimo.load_reference(trainer, args)
    assert [name for name, _ in before.named_parameters() if "mtp" in name]


@pytest.mark.parametrize(
    "metrics, arguments, device, num_problems",
    [
        ({}, {}, "cpu", 0),
        (dict(accept_rate=0.0), dict(drafter="frozen"), "cpu", 1),
        (dict(accept_rate=None, replay_agreement=None), dict(drafter="none"), "cpu", 0),
        (dict(replay_agreement=0.98), {}, "cpu", 1),
        (dict(replay_agreement=0.98), dict(drafter="frozen"), "cpu", 0),
        (dict(logprob_gap=0.02), {}, "cpu", 1),
        (dict(logprob_gap=0.02), {}, "cuda", 0),  # bf16 on both sides
        (dict(accept_rate=0.0, replay_agreement=0.5, logprob_gap=1.0), {}, "cpu", 3),
    ],
)
def test_what_a_run_must_not_pass_over_in_silence(metrics, arguments, device, num_problems):
    usual = dict(accept_rate=0.5, replay_agreement=1.0, logprob_gap=1e-6)
    problems = list(train_mimo.problems_of(usual | metrics, Args(**arguments), device))
    assert len(problems) == num_problems


# ---- Faults planted in the running engine --------------------------------------------------------
@pytest.fixture
def trainer(engine):
    """train_mimo's trainer around the model of the shared engine."""
    _, model, hf_config = engine
    norm = model.decoder.final_layernorm
    hook = norm.register_forward_hook(lambda m, _, out: setattr(model, "trunk_state", out))
    yield SimpleNamespace(
        actor=model,
        value_head=torch.nn.Linear(hf_config["hidden_size"], 1),
        drafter=copies(model.mtp),
        generator=torch.Generator().manual_seed(7),
        hf_config=hf_config,
        device="cpu",
        dtype=torch.float32,
    )
    hook.remove()


def push(engine, trainer, seed, **settings):
    random_weights(trainer.actor, seed)
    named_tensors = megatron_to_hf(trainer.actor.named_parameters(), trainer.hf_config)
    sync_weights(engine[0], named_tensors, **settings)
    trainer.drafter = copies(trainer.actor.mtp)


def roll_out(engine, trainer, **arguments):
    """A real rollout: arguments, samples, their batch, the trainer's drafts."""
    args = Args(**dict(prompts=48, response_tokens=40) | arguments)
    samples = train_mimo.roll_out(engine[0], trainer, 0, args)
    batch = train_mimo.make_batch(samples, "cpu")
    return args, samples, batch, train_mimo.trainer_drafts(trainer.actor, batch, args)


def plant_stale_drafter(engine, trainer, monkeypatch):
    pushed = trainer.drafter
    push(engine, trainer, 22, drafter=False)
    trainer.drafter = pushed


def plant_unswapped_halves(engine, trainer, monkeypatch):
    named_tensors = megatron_to_hf(trainer.actor.named_parameters(), trainer.hf_config)
    sync_weights(engine[0], unswap(named_tensors))


def drafter_layer(engine):
    runner = engine[0].llm_engine.model_executor.driver_worker.worker.model_runner
    return runner.drafter.model.model.mtp_layers["2"], runner.model.model.norm


def plant_state_after_the_norm(engine, trainer, monkeypatch):
    layer, norm = drafter_layer(engine)
    stock = layer.forward

    def forward(embeds, positions, hidden, *rest):
        return stock(embeds, positions, norm(hidden))

    monkeypatch.setattr(layer, "forward", forward)


def plant_embedding_at_position_0(engine, trainer, monkeypatch):
    layer, _ = drafter_layer(engine)

    def forward(embeds, positions, hidden, *rest):  # vLLM's, but for the embedding that it zeroes
        both = torch.cat([layer.hidden_layernorm(hidden), layer.token_layernorm(embeds)], -1)
        hidden, residual = layer.mtp_block(
            positions=positions, hidden_states=layer.input_proj(both), residual=None
        )
        return layer.final_layernorm(residual + hidden)

    monkeypatch.setattr(layer, "forward", forward)


FAULTS = {
    "stale drafter": plant_stale_drafter,
    "halves of input_proj not swapped": plant_unswapped_halves,
    "MTP layer fed the state after the final norm": plant_state_after_the_norm,
    "embedding at position 0 not zeroed": plant_embedding_at_position_0,
}


@pytest.mark.engine
@pytest.mark.parametrize("cause", FAULTS)
def test_a_fault_planted_in_the_engine_is_named_by_its_decisions(
    engine, trainer, monkeypatch, cause
):
    push(engine, trainer, 21)
    FAULTS[cause](engine, trainer, monkeypatch)
    args, samples, batch, drafts = roll_out(engine, trainer)
    weights = copies(trainer.actor)
    causes = train_mimo.drafts_by_cause(trainer, batch, args)
    assert set(causes) == set(FAULTS)
    assert changed(weights, copies(trainer.actor), of_mtp=True) == set(), "all is put back"
    agreement = {
        name: train_mimo.acceptance(trainer.actor, batch, samples, of, args)["replay_agreement"]
        for name, of in {"none": drafts, **causes}.items()
    }
    assert agreement.pop(cause) == 1.0 and max(agreement.values()) < 1.0, "no other explains all"
    assert cause in train_mimo.explain_first(samples, drafts, causes)


@pytest.mark.engine
def test_without_a_fault_every_decision_is_explained_and_nothing_is_named(engine, trainer):
    push(engine, trainer, 23)
    args, samples, batch, drafts = roll_out(engine, trainer)
    metrics = train_mimo.acceptance(trainer.actor, batch, samples, drafts, args)
    assert metrics["replay_agreement"] == 1.0 and 0 < metrics["accept_rate"] < 1
    causes = train_mimo.drafts_by_cause(trainer, batch, args)
    assert train_mimo.explain_first(samples, drafts, causes) == ""
    args.unfix = ("metrics",)
    before = train_mimo.acceptance(trainer.actor, batch, samples, drafts, args)
    assert before["accept_rate"] == (1 + metrics["accept_rate"]) / 2  # sglang#23530


@pytest.mark.engine
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_replay_is_vllms_own_list_of_decisions(engine, trainer, temperature):
    push(engine, trainer, 24)
    _, samples, _, drafts = roll_out(engine, trainer, temperature=temperature)
    for sample, drafted in zip(samples, drafts, strict=True):
        tokens, prompt_length = sample["prompt"] + sample["response"], len(sample["prompt"])
        assert replay_acceptance(tokens, prompt_length, drafted) == sample["accepted"]
    assert sum(len(sample["accepted"]) for sample in samples) > 1000


@pytest.mark.engine
def test_several_completions_a_prompt_have_a_record_each_and_their_sum_is_the_counters(
    engine, trainer
):
    from vllm import SamplingParams

    push(engine, trainer, 25)
    llm = engine[0]
    params = SamplingParams(n=3, max_tokens=20, seed=4, ignore_eos=True, detokenize=False)
    before = llm.get_metrics()
    prompts = [{"prompt_token_ids": [i, 1 + i, 2 + i]} for i in range(8)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    records, total = counts_from_vllm(outputs), counts_from_vllm_counters(before, llm.get_metrics())
    assert len(records) == 24 and None not in records
    for name in ("draft_tokens", "accepted_tokens", "verify_steps"):
        assert getattr(total, name) == sum(getattr(record, name) for record in records)
    # 20 tokens, less prefill's own; the stop may cut the last bonus token off.
    assert {r.accepted_tokens + r.verify_steps for r in records} <= {19, 20}
    summary = summarize(records)
    assert json.loads(json.dumps(summary)) == summary and summary["spec/requests"] == 24
    rate, length = summary["spec/accept_rate_pos_1"], summary["spec/accept_length_micro"]
    assert rate == pytest.approx(length - 1)


@pytest.mark.engine
def test_scoring_a_rollout_runs_no_mtp_layer_and_gives_the_engines_own_log_probs(
    engine, trainer, tmp_path
):
    push(engine, trainer, 26)
    model = trainer.actor
    arguments = dict(temperature=0.7, prompts=8, out=str(tmp_path))
    args, samples, batch, _ = roll_out(engine, trainer, **arguments)
    train_mimo.write_checkpoint(trainer, tmp_path / "reference")
    reference = train_mimo.load_reference(trainer, args)
    hook = model.mtp.layers[0].register_forward_hook(lambda *_: pytest.fail("an MTP layer ran"))
    try:
        metrics = train_mimo.score(trainer, reference, batch, samples, args)
    finally:
        hook.remove()
    assert metrics["logprob_gap"] < 1e-4 and metrics["kl"] == 0  # case 33: the first ratio is 1
    rewards = [token_rewards(sample, 64) for sample in samples]
    means = [sum(of_sample) / len(of_sample) for of_sample in rewards]
    assert metrics["reward"] == pytest.approx(sum(means) / len(means))
    for sample in samples:
        lengths = {len(sample[key]) for key in ("old", "advantages", "returns", "response")}
        assert len(lengths) == 1
