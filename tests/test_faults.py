"""What goes wrong ends a run with one clear message, a code of its own, a whole last save, and nothing left behind."""

import contextlib
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_resume import TINY, Run, go_on, tensors_of, whole

import train_mimo


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    return whole(tmp_path_factory.getbasetemp())


def children(pid):
    """Ids of the living processes of a run's session, but for the run itself; they stay in it when it has ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(session) == pid and state != "Z" and int(stat.parent.name) != pid:
                found.append(int(stat.parent.name))
    return found


def command_line(pid):
    with contextlib.suppress(OSError):  # it has ended meanwhile
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def wait_until_gone(pid):
    while children(pid):
        time.sleep(0.1)


def shared_memory():
    """Names in /dev/shm that no living process has mapped: what was left behind, here or by others before."""
    maps = ""
    for file in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            maps += file.read_text()
    return {name for name in os.listdir("/dev/shm") if f"/dev/shm/{name}" not in maps}


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def check_ended(run, code, text, saved_step):
    """One line on stderr, and a save that load_state takes, with a line for each step before it."""
    assert run.code == code, run.stderr
    assert re.fullmatch(
        rf"train_mimo\.py: .*{text}.*; go on from the last save with --resume \S+\n", run.stderr
    )
    _, step_number, saved, *_ = train_mimo.load_state(run.out)
    assert step_number == saved_step and all(
        t.isfinite().all() for t in saved.values() if t.is_floating_point()
    )


# ------------------------------------------------------------------------------------------------------------------
# In the middle of a run
# ------------------------------------------------------------------------------------------------------------------

NAN_REWARD = """
real = train_mimo.token_rewards
calls = []
def token_rewards(*args):
    calls.append(1)
    return real(*args) if len(calls) < 10 else [float("nan")] * len(real(*args))  # 4 a step: in the third one
train_mimo.token_rewards = token_rewards
"""


@pytest.mark.engine
def test_a_reward_that_is_nan_ends_the_run_before_it_is_learned_from(tmp_path):
    run = Run(tmp_path / "out", *TINY, setup=NAN_REWARD).wait()
    check_ended(run, 1, "the reward is not finite", saved_step=2)
    assert len(run.lines()) == 2


@pytest.mark.engine
def test_ctrl_c_ends_the_run_with_its_last_save_whole(whole_run, tmp_path):
    run = Run(tmp_path / "out", *TINY, "--steps", "1000").wait_for_step(2).kill(signal.SIGINT)
    check_ended(run, 130, "interrupted", saved_step=len(run.lines()) // 2 * 2)
    assert children(run.pid) == []


@pytest.mark.engine
def test_ctrl_c_while_vllm_starts_says_no_more_than_that(tmp_path):
    run = Run(tmp_path / "out", *TINY)
    run.wait_until((run.out / "checkpoint" / "model.safetensors").exists)
    run.kill(signal.SIGINT)
    assert run.code == 130 and run.stderr == "train_mimo.py: interrupted\n"


KILL_ENGINE = """
import threading
real = train_mimo.generate
calls = []
def generate(llm, inputs, params):
    calls.append(1)
    if len(calls) == 2:
        pid = llm.llm_engine.engine_core.resources.engine_manager.processes[0].pid
        for param in params:
            param.max_tokens = 120  # long enough to be killed in its midst
        threading.Timer(0.1, os.kill, (pid, 9)).start()
    return real(llm, inputs, params)
train_mimo.generate = generate
"""


@pytest.mark.engine
def test_an_engine_killed_in_the_middle_of_a_rollout_ends_the_run(tmp_path):
    before = shared_memory()
    run = Run(tmp_path / "out", *TINY, "--engine", "process", setup=KILL_ENGINE).wait()
    check_ended(run, 1, "EngineDeadError", saved_step=0)
    assert len(run.lines()) == 1
    wait_until_gone(run.pid)
    assert shared_memory() <= before


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("moment", ["in a step", "as vLLM starts", "while vLLM loads"])
def test_no_signal_leaves_a_process_or_shared_memory(tmp_path, which, moment):
    before = shared_memory()
    run = Run(tmp_path / "out", *TINY, "--engine", "process", "--steps", "1000")
    if moment == "in a step":
        run.wait_for_step(1)
    else:  # the engine's process is there, or vLLM has imported itself and given it a name
        name = "spawn_main" if moment == "as vLLM starts" else "VLLM"
        run.wait_until(lambda: any(name in command_line(pid) for pid in children(run.pid)))
    if which == signal.SIGINT:  # a terminal sends it to all
        run.kill(which)
        said = run.stderr.splitlines()
        if (
            moment == "as vLLM starts"
        ):  # a Python that has not come to our first line yet has words of its own for it
            said = [line for line in said if line.startswith("train_mimo.py")]
        assert (
            run.code == 130 and len(said) == 1 and said[0].startswith("train_mimo.py: interrupted")
        ), run.stderr
    else:
        os.kill(run.pid, which)
        assert run.wait().code == -which
    wait_until_gone(run.pid)
    assert shared_memory() <= before


# ------------------------------------------------------------------------------------------------------------------
# A save that is none
# ------------------------------------------------------------------------------------------------------------------


def cut(path, share):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def other_metadata(path, **changes):
    metadata = {"step": "2", "args": "{}"} | changes
    save_file(
        load_file(path),
        path,
        metadata={key: value for key, value in metadata.items() if value is not None},
    )


def without(path, name):
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file(
        {key: tensor for key, tensor in load_file(path).items() if key != name}, path, metadata
    )


SPOILT = {
    "no state": lambda out: (out / "state.safetensors").unlink(),
    "an empty state": lambda out: cut(out / "state.safetensors", 0),
    "a state cut in its header": lambda out: cut(out / "state.safetensors", 0.01),
    "a state cut in its tensors": lambda out: cut(out / "state.safetensors", 0.9),
    "a state that is text": lambda out: (out / "state.safetensors").write_text("state"),
    "a foreign safetensors": lambda out: shutil.copy(
        out / "checkpoint" / "model.safetensors", out / "state.safetensors"
    ),
    "a step that is no number": lambda out: other_metadata(out / "state.safetensors", step="two"),
    "no step": lambda out: other_metadata(out / "state.safetensors", step=None),
    "arguments of another program": lambda out: other_metadata(
        out / "state.safetensors", args='{"colour": "red"}'
    ),
    "no random state": lambda out: without(out / "state.safetensors", "generator"),
    "no metrics": lambda out: without(out / "state.safetensors", "metrics"),
    "no reference": lambda out: shutil.rmtree(out / "reference"),
    "a reference cut short": lambda out: cut(out / "reference" / "model.safetensors", 0.5),
}


@pytest.mark.engine
@pytest.mark.parametrize("how", SPOILT)
def test_a_save_that_is_none_is_refused_by_name_and_nothing_is_written(
    whole_run, tmp_path, capsys, how
):
    out = tmp_path / "out"
    shutil.copytree(whole_run.out, out)
    SPOILT[how](out)
    before = contents(tmp_path)
    assert train_mimo.main(["--resume", str(out)]) == 2
    said = capsys.readouterr()
    assert re.fullmatch(
        rf"train_mimo\.py: --resume {out}: {out}/\S+ is not that of a run .*\n", said.err
    ), said.err
    assert said.out == "" and contents(tmp_path) == before


@pytest.mark.engine
def test_metrics_that_were_lost_come_back_from_the_save(whole_run, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(whole_run.out, out)
    (out / "metrics.jsonl").unlink()
    run = go_on(out).wait()
    assert run.code == 0 and run.stderr == "" and run.lines() == whole_run.lines()


@pytest.mark.engine
def test_a_state_of_another_model_is_refused_and_nothing_is_written(whole_run, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(whole_run.out, out)
    tensors = load_file(out / "state.safetensors")
    name = next(name for name in tensors if "actor.decoder" in name)
    args = train_mimo.load_state(out)[0]
    save_file(
        tensors | {name: torch.zeros(3)},
        out / "state.safetensors",
        {"step": "2", "args": json.dumps(vars(args))},
    )
    before = contents(out)
    run = go_on(out).wait()
    assert run.code == 2 and re.fullmatch(
        r"train_mimo\.py: --resume .*another model's tensors.*\n", run.stderr
    )
    assert contents(out) == before and tensors_of(out / "state.safetensors") != tensors_of(
        whole_run.out / "state.safetensors"
    )
