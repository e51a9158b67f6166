"""What the smoke run promises: its arguments, its files and numbers, its PPO step, and that it names planted faults."""

import contextlib
import dataclasses
import json
import math
import os
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

import toy.model
import train_mimo
from drafter_sync import hf_to_megatron, megatron_to_hf, sync_weights
from ref_disable import skip_mtp
from spec_metrics import counts_from_vllm, counts_from_vllm_counters, replay_acceptance, summarize
from train_mimo import Args

ROOT = Path(train_mimo.__file__).parent

# ------------------------------------------------------------------------------------------------------------------
# Arguments
# ------------------------------------------------------------------------------------------------------------------


def files_under(folder):
    return sorted(str(path) for path in Path(folder).rglob("*"))


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """refused(*argv): what stderr says of arguments that are refused with exit code 2 and nothing written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(train_mimo, "train", lambda *args: pytest.fail(f"it started, with {args}"))

    def call(*argv):
        before = files_under(tmp_path)
        try:
            code = train_mimo.main(list(argv))
        except SystemExit as error:
            code = error.code
        assert code == 2 and files_under(tmp_path) == before
        return capsys.readouterr().err

    return call


ABOVE_0 = ("lr", "mtp-lr", "clip", "temperature", "max-grad-norm")


@pytest.mark.parametrize(
    "argv, text",
    [
        ("--steps 0", "--steps"),
        ("--steps -3", "--steps"),
        ("--prompts 0", "--prompts"),
        ("--epochs 0", "--epochs"),
        ("--minibatches 0", "--minibatches"),
        ("--minibatches 65", "--minibatches is 65, give --prompts at the most"),
        ("--prompts 3", "--minibatches is 4, give --prompts at the most"),
        ("--layers 0", "--layers"),
        ("--ffn 0", "--ffn"),
        ("--heads 0", "--heads"),
        ("--hidden 100", "--hidden is 100, give 32, 64, 96, 128 a head"),
        ("--hidden 64", "--hidden is 64, give 32, 64, 96, 128 a head"),  # heads of 16: vLLM's CPU attention refuses
        ("--groups 3", "--heads is 4, give a multiple of --groups (3"),
        ("--symbols 65", "--symbols"),
        ("--vocab 7", "--vocab"),
        ("--response-tokens 3", "--response-tokens"),
        ("--warmup-steps -1", "--warmup-steps"),
        ("--save-every -1", "--save-every"),
        *((f"--{name} {value}", f"--{name}") for name in ABOVE_0 for value in ("nan", "inf", "0", "-1")),
        *((f"--mtp-scale {value}", "--mtp-scale") for value in ("nan", "inf", "-0.1")),
        *((f"--{name} nan", f"--{name}") for name in ("gamma", "gae-lambda", "kl-coef")),
        ("--temperature 0.001", "--temperature"),  # vLLM would sample at 0.01, in silence
        ("--seed 99999999999999999999", "--seed"),
        ("--device cuda", "torch sees 0 CUDA devices"),
        ("--baseline nowhere", "--baseline nowhere"),
        ("--resume nowhere", "--resume nowhere"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_in_one_sentence_that_names_the_argument(refused, argv, text):
    said = refused(*argv.split())
    assert re.fullmatch(rf"train_mimo\.py: .*{re.escape(text)}\b.*\n", said), said


@pytest.mark.parametrize(
    "argv", ["--steps x", "--lr fast", "--device tpu", "--drafter old", "--engine x", "--unfix x"]
)
def test_what_is_no_value_of_an_argument_is_refused_by_name(refused, argv):
    assert re.search(
        rf"error: argument {argv.split()[0]}: invalid .*'{argv.split()[1]}'", refused(*argv.split())
    )


def test_an_unknown_argument_is_refused_by_name(refused):
    assert "--colour" in refused("--colour", "red")


def test_a_folder_that_holds_something_is_left_alone_unless_overwrite_is_given(
    refused, tmp_path, monkeypatch
):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("mine")
    assert re.fullmatch(
        r"train_mimo\.py: --out out is not empty.*--overwrite\n", refused("--out", "out")
    )
    started = []
    monkeypatch.setattr(train_mimo, "train", lambda *args: started.append(args))
    assert train_mimo.main(["--out", "out", "--overwrite"]) == 0 and len(started) == 1


def test_out_must_be_a_folder_that_can_be_made(refused, tmp_path):
    (tmp_path / "file").write_text("")
    for out in ("file", "file/below"):
        assert re.fullmatch(
            rf"train_mimo\.py: --out {out} cannot be written.*\n", refused("--out", out)
        )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_out_must_be_writable(refused, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    assert re.fullmatch(
        r"train_mimo\.py: --out locked/out cannot be written.*\n", refused("--out", "locked/out")
    )


@pytest.mark.parametrize("out", ["", "/proc/nowhere"])
def test_out_must_be_a_place_where_folders_can_be_made_even_for_root(refused, out):
    assert re.fullmatch(r"train_mimo\.py: --out .*\n", refused("--out", out))


def test_help_says_a_sentence_and_a_default_on_every_argument(capsys):
    with pytest.raises(SystemExit) as exit:
        train_mimo.main(["--help"])
    assert exit.value.code == 0
    squeezed = "".join(capsys.readouterr().out.split())  # argparse breaks lines, also at hyphens
    for field in dataclasses.fields(Args):
        assert "--" + field.name.replace("_", "-") in squeezed
        sentence = "".join(field.metadata["help"].split())
        assert sentence and sentence in squeezed


def test_a_fault_during_the_run_is_one_sentence_and_a_code_of_its_own(
    monkeypatch, capsys, tmp_path
):
    def fail(error, *argv):
        def train(*args):
            raise error

        monkeypatch.setattr(train_mimo, "train", train)
        return train_mimo.main(["--out", str(tmp_path / "out"), *argv]), capsys.readouterr().err

    code, said = fail(RuntimeError("the engine is gone"))
    assert (code, said) == (1, "train_mimo.py: RuntimeError: the engine is gone\n")
    (tmp_path / "out" / "state.safetensors").touch()
    code, said = fail(RuntimeError("the engine is gone"), "--overwrite")
    assert code == 1 and said.count("\n") == 1 and "--resume" in said, (
        "there is a save to go on from"
    )
    code, said = fail(KeyboardInterrupt(), "--overwrite")
    assert code == 130 and said.count("\n") == 1 and "interrupted" in said


# ------------------------------------------------------------------------------------------------------------------
# A short run
# ------------------------------------------------------------------------------------------------------------------

KEYS = """
    step reward accept_rate accept_length replay_agreement logprob_gap mtp_loss mtp_top1 kl clip_fraction
    policy_grad_norm mtp_grad_norm rollout_s train_s sync_s rollout_tokens_per_s
""".split()
SHORT = "--steps 3 --warmup-steps 20 --prompts 16 --seed 5".split()


def launch(out, *argv):
    """One run in a process of its own: what it printed, and its lines of metrics.jsonl."""
    command = [sys.executable, "train_mimo.py", "--out", str(out), *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return SimpleNamespace(
        out=out, stdout=done.stdout.splitlines(), stderr=done.stderr, lines=lines
    )


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("run") / "out", *SHORT)


def without_times(lines):
    """All that the seed decides: everything but seconds and tokens a second, whose names end in _s."""
    return [{key: value for key, value in line.items() if not key.endswith("_s")} for line in lines]


@pytest.mark.engine
def test_each_step_has_a_line_with_every_number_and_the_same_numbers_on_the_screen(short_run):
    assert [line["step"] for line in short_run.lines] == [0, 1, 2]
    for line in short_run.lines:
        assert set(KEYS) <= set(line) and all(math.isfinite(value) for value in line.values())
    columns = list(train_mimo.COLUMNS)
    header = short_run.stdout.index(" ".join(columns))
    for line, printed in zip(short_run.lines, short_run.stdout[header + 1 :], strict=True):
        cells, left = printed.split()[: len(columns)], printed.split()[len(columns) :]
        assert cells == [train_mimo.COLUMNS[name].format(line[name]).strip() for name in columns]
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
    model = toy.model.build_model(config)
    parameters = dict(model.named_parameters())
    filled = dict(hf_to_megatron(tensors, config, parameters))
    assert filled.keys() == parameters.keys() and all(
        tensor.isfinite().all() for tensor in tensors.values()
    )
    start = load_file(short_run.out / "reference" / "model.safetensors")
    assert {name for name in tensors if torch.equal(tensors[name], start[name])} == set(), (
        "every tensor was trained"
    )


@pytest.mark.engine
def test_the_screen_says_what_the_reference_saves(short_run, megatron):
    mtp = toy.model.build_model(toy.model.mimo_config()).mtp
    num_bytes = sum(parameter.nbytes for parameter in mtp.parameters())
    assert any(
        f"parameters, {num_bytes:,} bytes of MTP layers not built" in line
        for line in short_run.stdout
    )


@pytest.mark.engine
def test_the_same_seed_gives_the_same_numbers_also_with_the_engine_in_a_process_of_its_own(
    short_run, tmp_path
):
    again = launch(tmp_path / "out", *SHORT, "--engine", "process")
    assert without_times(again.lines) == without_times(short_run.lines)


@pytest.mark.engine
def test_a_frozen_drafter_is_soon_out_of_step_and_that_is_what_was_asked_for(tmp_path):
    run = launch(
        tmp_path / "out",
        *"--drafter frozen --steps 3 --warmup-steps 40 --prompts 16 --lr 4e-3".split(),
    )
    agreement = [line["replay_agreement"] for line in run.lines]
    assert agreement[0] == 1.0 and agreement[-1] < 0.95
    assert run.lines[-1]["logprob_gap"] < 1e-3, "the target is pushed all the same"
    assert run.stderr == ""


@pytest.mark.engine
def test_without_speculation_the_push_goes_to_the_target_alone_and_nothing_is_said_of_drafts(
    tmp_path,
):
    run = launch(
        tmp_path / "out", *"--drafter none --steps 2 --warmup-steps 5 --prompts 8 --lr 4e-3".split()
    )
    assert (
        [line["accept_rate"] for line in run.lines]
        == [line["replay_agreement"] for line in run.lines]
        == [None] * 2
    )
    assert run.lines[1]["kl"] != 0 and run.lines[1]["logprob_gap"] < 1e-4, (
        "the engine samples from the pushed policy"
    )
    assert run.stderr == ""


@pytest.mark.slow
@pytest.mark.engine
def test_the_same_arguments_twice_give_the_same_numbers(short_run, tmp_path):
    assert without_times(launch(tmp_path / "out", *SHORT).lines) == without_times(short_run.lines)


@pytest.mark.slow
@pytest.mark.engine
def test_a_push_that_forgets_the_drafter_is_a_warning_that_names_it(tmp_path):
    run = launch(
        tmp_path / "out", *"--unfix sync --steps 3 --warmup-steps 40 --prompts 16 --lr 4e-3".split()
    )
    assert re.search(
        r"WARNING: The engine does not draft what the trainer would.*stale drafter", run.stderr
    )


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_with_the_defaults_the_reward_rises_and_only_a_synced_drafter_keeps_up(tmp_path, seed):
    synced, frozen = (
        launch(tmp_path / d, "--seed", str(seed), "--drafter", d).lines
        for d in ("synced", "frozen")
    )
    assert synced[0]["reward"] < 0.5 and synced[-1]["reward"] >= 0.9
    assert (
        synced[-1]["accept_rate"] >= 0.75
        and frozen[-1]["accept_rate"] <= synced[-1]["accept_rate"] - 0.25
    )
    assert (
        all(line["replay_agreement"] >= 0.999 for line in synced)
        and frozen[-1]["replay_agreement"] < 0.95
    )


# ------------------------------------------------------------------------------------------------------------------
# The PPO step, without an engine
# ------------------------------------------------------------------------------------------------------------------

SMALL = dict(
    layers=1, hidden=64, heads=2, groups=1, ffn=64, prompts=6, minibatches=2, response_tokens=8
)


def build(args):
    """Actor, value head, optimizer and step of train_mimo.build_trainer, with every weight random."""
    hf_config = toy.model.mimo_config(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_heads=args.heads,
        num_groups=args.groups,
        ffn_size=args.ffn,
    )
    actor, value_head, _, optimizer, step, _ = train_mimo.build_trainer(
        args, hf_config, "cpu", torch.float32
    )
    random_weights(actor, 1)
    return SimpleNamespace(
        actor=actor, value_head=value_head, optimizer=optimizer, step=step, hf_config=hf_config
    )


def rollout(actor, num=6, seed=0):
    """Samples as sample() and score_rollout() make them, with random tokens, advantages and returns."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(num):
        tokens = torch.randint(64, (2 + i % 3 + 4 + i,), generator=generator).tolist()
        samples.append({"prompt": tokens[: 2 + i % 3], "response": tokens[2 + i % 3 :]})
    batch, lengths = train_mimo.make_batch(samples, "cpu"), [len(s["response"]) for s in samples]
    with torch.no_grad(), skip_mtp(actor):
        old_N = train_mimo.label_logprobs(train_mimo.forward(actor, batch), batch, 1.0)
    for s, old in zip(samples, old_N.split(lengths), strict=True):
        advantages, returns = torch.randn(2, len(old), generator=generator)
        s |= {"old": old, "advantages": advantages, "returns": returns}
    return samples


def updated(**arguments):
    """(every parameter after two PPO epochs over the fake rollout, the metrics, every parameter before)."""
    args = Args(**SMALL | arguments)
    built = build(args)
    before = {name: p.detach().clone() for name, p in built.actor.named_parameters()}
    samples, generator = rollout(built.actor), torch.Generator().manual_seed(0)
    metrics = train_mimo.update(
        built.actor, built.value_head, built.step, samples, args, generator, "cpu"
    )
    return dict(built.actor.named_parameters()), metrics, before


def changed(first, second, of_mtp):
    """Names of the parameters of MTP layer or policy that are not bitwise equal."""
    return {
        n for n in first if n.startswith("mtp.") == of_mtp and not torch.equal(first[n], second[n])
    }


@pytest.fixture(scope="module")
def usual_update(megatron):
    return updated(mtp_scale=0.2)


def test_the_policys_update_is_bitwise_the_same_with_the_mtp_loss_on_and_off(usual_update):
    on, _, before = usual_update
    off, metrics, _ = updated(mtp_scale=0.0)
    assert changed(on, off, of_mtp=False) == set() and metrics["mtp_grad_norm"] == 0
    names = set(on)
    assert changed(on, before, of_mtp=False) == {
        name for name in names if not name.startswith("mtp.")
    }
    assert changed(on, before, of_mtp=True) == {name for name in names if name.startswith("mtp.")}
    assert changed(off, before, of_mtp=True) == set() and metrics["mtp_loss"] > 0


def test_before_the_mtp_loss_moved_the_policys_head(usual_update):
    moved = changed(usual_update[0], updated(mtp_scale=0.2, unfix=["loss"])[0], of_mtp=False)
    assert {"output_layer.weight", "embedding.word_embeddings.weight"} <= moved


def test_before_prompt_tokens_trained_the_mtp_layer(usual_update):
    metrics = updated(unfix=["mask"])[1]
    assert metrics["mtp_prompt_share"] > 0 and usual_update[1]["mtp_prompt_share"] == 0


def test_recompute_changes_no_bit_of_the_update(usual_update):
    parameters = updated(recompute=False)[0]
    assert (
        changed(usual_update[0], parameters, False) | changed(usual_update[0], parameters, True)
        == set()
    )


def test_the_first_ratio_is_one_and_clipping_starts_with_the_second_update(megatron):
    assert updated(epochs=1, minibatches=1)[1]["clip_fraction"] == 0
    assert updated(epochs=8, minibatches=1, lr=1e-2)[1]["clip_fraction"] > 0


def test_case_17_a_large_mtp_gradient_does_not_shrink_the_policys(megatron):
    built, seen = build(Args(**SMALL, max_grad_norm=1.0)), {}
    head, of_mtp = built.actor.output_layer.weight, built.actor.mtp.layers[0].eh_proj.weight
    built.optimizer.step = lambda: seen.update({p: p.grad.clone() for p in (head, of_mtp)})
    direction = [torch.randn(p.shape) for p in (head, of_mtp)]
    wanted = [d * norm / d.norm() for d, norm in zip(direction, (0.8, 20.0), strict=True)]
    norms = built.step((head * wanted[0]).sum() + (of_mtp * wanted[1]).sum())
    assert norms == pytest.approx([0.8, 20.0])
    torch.testing.assert_close(seen[head], wanted[0])  # untouched: 0.8 is below the limit
    torch.testing.assert_close(seen[of_mtp], wanted[1] / 20)
    assert head.grad is None and of_mtp.grad is None, "no gradient is left for the next step"


def slow_advantages(rewards, values, gamma, lam):
    """Generalized advantage estimation by its definition: the discounted sum of all later temporal differences."""
    values = [*values, 0.0]
    deltas = [reward + gamma * values[t + 1] - values[t] for t, reward in enumerate(rewards)]
    return [
        sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:]))
        for t in range(len(deltas))
    ]


def test_advantages_by_hand():
    args = Args(gamma=0.5, gae_lambda=0.5)
    advantages, returns = train_mimo.estimate_advantages([1.0, 0.0, 1.0], [0.0, 1.0, 0.5], args)
    assert advantages == [
        1.34375,
        -0.625,
        0.5,
    ]  # differences 1.5, -0.75, 0.5; each later one counts a quarter
    assert returns == [1.34375, 0.375, 1.0]


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=9),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_advantages_equal_the_definition(steps, gamma, lam):
    rewards, values = map(list, zip(*steps, strict=True))
    advantages, returns = train_mimo.estimate_advantages(
        rewards, values, Args(gamma=gamma, gae_lambda=lam)
    )
    assert advantages == pytest.approx(slow_advantages(rewards, values, gamma, lam), abs=1e-9)
    assert returns == pytest.approx(
        [a + value for a, value in zip(advantages, values, strict=True)]
    )


def test_a_batch_packs_the_samples_and_masks_what_each_slot_may_learn():
    samples = [{"prompt": [1, 2], "response": [3, 4, 5]}, {"prompt": [6], "response": [7]}]
    batch = train_mimo.make_batch(samples, "cpu")
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert batch["packed"].cu_seqlens_q.tolist() == [0, 5, 7]
    assert batch["token_mask"].tolist() == [[0, 0, 1, 1, 1, 0, 1]]
    assert batch["labels"].tolist() == [[2, 3, 4, 5, 0, 7, 0]]
    assert batch["loss_mask"].int().tolist() == [[0, 1, 1, 1, 0, 1, 0]]
    assert torch.equal(batch["mtp_loss_mask"], batch["loss_mask"]) and batch["prompt_targets"] == 0
    before = train_mimo.make_batch(samples, "cpu", unfix=["mask"])
    assert torch.equal(before["loss_mask"], batch["loss_mask"]), "the policy's own mask was right"
    assert before["mtp_loss_mask"].int().tolist() == [[1, 1, 1, 1, 0, 1, 0]]


def test_log_probs_are_those_of_the_response_tokens_under_the_tempered_policy():
    samples = [{"prompt": [1], "response": [2, 0]}, {"prompt": [0], "response": [1]}]
    logits_TV = torch.tensor([[0.0, 0, 2], [2, 0, 0], [9, 9, 9], [0, 2, 0], [9, 9, 9]])
    got = train_mimo.label_logprobs(logits_TV, train_mimo.make_batch(samples, "cpu"), 2.0)
    assert got.tolist() == pytest.approx([1 - math.log(2 + math.e)] * 3)


def test_a_token_is_rewarded_iff_it_is_the_one_before_plus_two():
    assert train_mimo.token_rewards({"prompt": [3, 4], "response": [6, 7, 9]}, 64) == [1, 0, 1]
    assert train_mimo.token_rewards({"prompt": [63], "response": [1, 3, 2]}, 64) == [1, 1, 0]


def test_prompts_follow_the_seed_and_keep_to_the_lengths_asked_for():
    def prompts(seed):
        return train_mimo.make_prompts(200, 10, 64, torch.Generator().manual_seed(seed))

    assert prompts(1) == prompts(1) != prompts(2)
    assert {len(prompt) for prompt, _ in prompts(1)} == {2, 3, 4, 5, 6}
    assert {length for _, length in prompts(1)} == {5, 6, 7, 8, 9, 10}
    assert all(
        (b - a) % 64 in (1, 2)
        for prompt, _ in prompts(1)
        for a, b in zip(prompt, prompt[1:], strict=False)
    )


def test_the_reference_builds_no_mtp_layer_reads_no_mtp_tensor_and_is_the_actors_trunk(
    megatron, tmp_path, monkeypatch
):
    built = build(Args(**SMALL))
    train_mimo.write_checkpoint(built.actor, built.hf_config, tmp_path)
    read, safe_open = [], train_mimo.safe_open

    @contextlib.contextmanager
    def watched(*args):
        with safe_open(*args) as file:
            yield SimpleNamespace(
                keys=file.keys, get_tensor=lambda name: read.append(name) or file.get_tensor(name)
            )

    monkeypatch.setattr(train_mimo, "safe_open", watched)
    reference = train_mimo.load_reference(tmp_path, built.hf_config)
    assert not [name for name, _ in reference.named_parameters() if "mtp" in name]
    assert sorted(read) == sorted(
        n for n in load_file(tmp_path / "model.safetensors") if "mtp" not in n
    )
    batch = train_mimo.make_batch(rollout(built.actor), "cpu")
    with torch.no_grad(), skip_mtp(built.actor):
        assert torch.equal(
            train_mimo.forward(reference, batch), train_mimo.forward(built.actor, batch)
        )
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert built.hf_config["num_nextn_predict_layers"] == 1, "the actor's config is left alone"

    before = train_mimo.load_reference(tmp_path, built.hf_config, unfix=["ref"])
    assert [name for name, _ in before.named_parameters() if "mtp" in name]


@pytest.mark.parametrize(
    "metrics, arguments, device, text",
    [
        (dict(), dict(), "cpu", []),
        (dict(accept_rate=0.0), dict(drafter="frozen"), "cpu", ["No draft was accepted"]),
        (dict(accept_rate=None, replay_agreement=None), dict(drafter="none"), "cpu", []),
        (dict(replay_agreement=0.98), dict(), "cpu", ["does not draft what the trainer would"]),
        (dict(replay_agreement=0.98), dict(drafter="frozen"), "cpu", []),
        (dict(logprob_gap=0.02), dict(), "cpu", ["differ in log-probs"]),
        (dict(logprob_gap=0.02), dict(), "cuda", []),  # bf16 on both sides
        (dict(accept_rate=0.0, replay_agreement=0.5, logprob_gap=1.0), dict(), "cpu", ["No", "engine", "log-probs"]),
    ],
)  # fmt: skip
def test_what_a_run_must_not_pass_over_in_silence(metrics, arguments, device, text):
    usual = {"accept_rate": 0.5, "replay_agreement": 1.0, "logprob_gap": 1e-6}
    problems = list(train_mimo.problems_of(usual | metrics, Args(**arguments), device))
    assert len(problems) == len(text) and all(
        part in problem for part, problem in zip(text, problems, strict=True)
    )


# ------------------------------------------------------------------------------------------------------------------
# Faults planted in the running engine
# ------------------------------------------------------------------------------------------------------------------


def roll(engine, temperature=1.0, num=48):
    """A real rollout of the engine: samples and their batch."""
    prompts = train_mimo.make_prompts(num, 40, 64, torch.Generator().manual_seed(7))
    samples = train_mimo.sample(engine[0], prompts, Args(temperature=temperature), 0)
    return samples, train_mimo.make_batch(samples, "cpu")


def push(engine, seed, **settings):
    llm, model, hf_config = engine
    random_weights(model, seed)
    sync_weights(llm, megatron_to_hf(model.named_parameters(), hf_config), **settings)


def mtp_weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.mtp.named_parameters()}


def plant_stale_drafter(engine, monkeypatch):
    random_weights(engine[1], 22)
    sync_weights(engine[0], megatron_to_hf(engine[1].named_parameters(), engine[2]), drafter=False)


def plant_unswapped_halves(engine, monkeypatch):
    sync_weights(
        engine[0], train_mimo.unswap(megatron_to_hf(engine[1].named_parameters(), engine[2]))
    )


def drafter_layer(engine):
    runner = engine[0].llm_engine.model_executor.driver_worker.worker.model_runner
    return runner.drafter.model.model.mtp_layers["2"], runner.model.model.norm


def plant_state_after_the_norm(engine, monkeypatch):
    layer, norm = drafter_layer(engine)
    stock = layer.forward
    monkeypatch.setattr(
        layer,
        "forward",
        lambda embeds, positions, hidden, *rest: stock(embeds, positions, norm(hidden)),
    )


def plant_embedding_at_position_0(engine, monkeypatch):
    layer, _ = drafter_layer(engine)

    def forward(
        embeds, positions, hidden, *rest
    ):  # vLLM's own, but for the embedding that it zeroes
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
def test_a_fault_planted_in_the_engine_is_named_by_its_decisions(engine, monkeypatch, cause):
    model = engine[1]
    push(engine, 21)
    pushed = mtp_weights(model)
    FAULTS[cause](engine, monkeypatch)
    samples, batch = roll(engine)
    drafts, weights = train_mimo.trainer_drafts(model, batch), mtp_weights(model)
    causes = train_mimo.drafts_by_cause(model, batch, pushed)
    assert set(causes) == set(FAULTS) and all(
        torch.equal(w, weights[name]) for name, w in mtp_weights(model).items()
    )
    agreement = {
        name: train_mimo.acceptance(samples, of, Args())["replay_agreement"]
        for name, of in {"none": drafts, **causes}.items()
    }
    assert agreement.pop(cause) == 1.0 and max(agreement.values()) < 1.0, (
        "it explains every decision, nothing else does"
    )
    assert cause in train_mimo.explain_first(samples, drafts, causes)


@pytest.mark.engine
def test_without_a_fault_every_decision_is_explained_and_nothing_is_named(engine):
    push(engine, 23)
    samples, batch = roll(engine)
    drafts = train_mimo.trainer_drafts(engine[1], batch)
    metrics = train_mimo.acceptance(samples, drafts, Args())
    assert metrics["replay_agreement"] == 1.0 and 0 < metrics["accept_rate"] < 1
    causes = train_mimo.drafts_by_cause(engine[1], batch, mtp_weights(engine[1]))
    assert train_mimo.explain_first(samples, drafts, causes) == ""
    before = train_mimo.acceptance(samples, drafts, Args(unfix=["metrics"]))
    assert before["accept_rate"] == (1 + metrics["accept_rate"]) / 2  # sglang#23530


@pytest.mark.engine
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_replay_is_vllms_own_list_of_decisions(engine, temperature):
    push(engine, 24)
    samples, batch = roll(engine, temperature)
    drafts = train_mimo.trainer_drafts(engine[1], batch)
    num_decisions = 0
    for s, of_sample in zip(samples, drafts, strict=True):
        assert (
            replay_acceptance(s["prompt"] + s["response"], len(s["prompt"]), of_sample)
            == s["decisions"]
        )
        num_decisions += len(s["decisions"])
    assert num_decisions > 1000


@pytest.mark.engine
def test_several_completions_a_prompt_have_a_record_each_and_their_sum_is_the_counters(engine):
    from vllm import SamplingParams

    push(engine, 25)
    llm = engine[0]
    params = SamplingParams(
        n=3, temperature=1.0, max_tokens=20, seed=4, ignore_eos=True, detokenize=False
    )
    before = llm.get_metrics()
    outputs = llm.generate(
        [{"prompt_token_ids": [i, 1 + i, 2 + i]} for i in range(8)], params, use_tqdm=False
    )
    records, total = counts_from_vllm(outputs), counts_from_vllm_counters(before, llm.get_metrics())
    assert len(records) == 24 and None not in records
    for name in ("draft_tokens", "accepted_tokens", "verify_steps"):
        assert getattr(total, name) == sum(getattr(record, name) for record in records)
    for (
        record
    ) in records:  # 20 tokens, less prefill's own; the stop may cut the last bonus token off
        assert record.emitted_tokens == 19 and record.accepted_tokens + record.verify_steps in (
            19,
            20,
        )
    summary = summarize(records)
    assert json.loads(json.dumps(summary)) == summary and summary["spec/requests"] == 24
    assert summary["spec/accept_rate_pos_1"] == pytest.approx(
        summary["spec/accept_length_micro"] - 1
    )


@pytest.mark.engine  # for vLLM is imported
@pytest.mark.parametrize("seed", [0, 1, 20261202, 2**40])
def test_every_request_has_a_seed_of_its_own_that_vllm_takes(monkeypatch, seed):
    seeds = []

    def generate(llm, inputs, params):
        seeds.extend(param.seed for param in params)
        return []

    monkeypatch.setattr(train_mimo, "generate", generate)
    for step_number in range(3):
        train_mimo.sample(None, [([1, 2], 4)] * 5, Args(seed=seed), step_number)
    assert len(set(seeds)) == 15 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.engine
def test_scoring_a_rollout_runs_no_mtp_layer_and_gives_the_engines_own_log_probs(engine, tmp_path):
    push(engine, 26)
    _, model, hf_config = engine
    samples, batch = roll(engine, temperature=0.7, num=8)
    train_mimo.write_checkpoint(model, hf_config, tmp_path)
    reference, value_head = (
        train_mimo.load_reference(tmp_path, hf_config),
        torch.nn.Linear(hf_config["hidden_size"], 1),
    )
    hooks = [
        model.mtp.layers[0].register_forward_hook(lambda *unused: pytest.fail("an MTP layer ran")),
        model.decoder.final_layernorm.register_forward_hook(
            lambda m, _, out: setattr(model, "trunk_state", out)
        ),
    ]
    try:
        metrics = train_mimo.score_rollout(
            model, reference, value_head, batch, samples, Args(temperature=0.7)
        )
    finally:
        for hook in hooks:
            hook.remove()
        del model.trunk_state
    assert metrics["logprob_gap"] < 1e-4 and metrics["kl"] == 0  # case 33: the ratio is 1 at step 0
    rewards = [train_mimo.token_rewards(s, 64) for s in samples]
    assert metrics["reward"] == pytest.approx(sum(sum(r) / len(r) for r in rewards) / len(rewards))
    assert all(
        len(s["old"]) == len(s["advantages"]) == len(s["returns"]) == len(s["response"])
        for s in samples
    )
