"""What goes wrong ends a run with an error that says so, a whole save, and nothing left behind."""

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from test_resume import TINY, Run, bits, go_on, saved_state, whole, without_times

import train_mimo


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    return whole(tmp_path_factory.getbasetemp())


def children(pid):
    """Living processes of a run's session but for the run itself; they outlast it there."""
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


def shared_memory():
    """Names in /dev/shm that no living process has mapped: what somebody left behind."""
    names, maps = os.listdir("/dev/shm"), ""
    for file in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            maps += file.read_text()
    unmapped = {name for name in names if f"/dev/shm/{name}" not in maps}
    return unmapped & set(os.listdir("/dev/shm"))  # others come and go meanwhile


def left_behind(run, before):
    """What a run left in shared memory; what others have there comes and goes within seconds."""
    while children(run.pid):
        time.sleep(0.1)
    deadline, left = time.monotonic() + 20, shared_memory() - before
    while left and time.monotonic() < deadline:
        time.sleep(0.5)
        left &= shared_memory()
    return left


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


INTERRUPTED = (-signal.SIGINT, 130)


def check_ended(run, codes, error, saved_step):
    """The error and how to go on are said last, and the save is whole."""
    assert run.code in codes, run.stderr
    assert error in run.stderr and f"--resume {run.out}" in run.stderr.splitlines()[-1]
    state = saved_state(run.out)
    assert state["step"] == saved_step and state["metrics"].count("\n") == saved_step
    weights = [t for t in state["shards"][0]["actor"].values() if isinstance(t, torch.Tensor)]
    assert weights and all(t.isfinite().all() for t in weights)


# ---- In the middle of a run ----------------------------------------------------------------------
NAN_REWARD = """
real, calls = train_mimo.token_rewards, []

def token_rewards(*args):
    calls.append(1)  # 4 a step: the tenth is in the third step
    return real(*args) if len(calls) < 10 else [float("nan")] * len(real(*args))

train_mimo.token_rewards = token_rewards
"""


@pytest.mark.engine
def test_a_reward_that_is_nan_ends_the_run_before_it_is_learned_from(tmp_path):
    run = Run(tmp_path / "out", *TINY, setup=NAN_REWARD).wait()
    check_ended(run, (1,), "the reward is not finite", saved_step=2)
    assert len(run.lines()) == 2


@pytest.mark.engine
def test_ctrl_c_ends_the_run_with_its_last_save_whole(tmp_path):
    run = Run(tmp_path / "out", *TINY, "--steps", "1000").wait_for_step(2).kill(signal.SIGINT)
    check_ended(run, INTERRUPTED, "KeyboardInterrupt", saved_step=len(run.lines()) // 2 * 2)
    assert children(run.pid) == []


@pytest.mark.engine
def test_ctrl_c_while_vllm_starts_ends_the_run(tmp_path):
    run = Run(tmp_path / "out", *TINY)
    run.wait_until((run.out / "checkpoint" / "model.safetensors").exists)
    assert run.kill(signal.SIGINT).code in INTERRUPTED, run.stderr
    assert children(run.pid) == []


KILL_ENGINE = """
import threading
real, calls = train_mimo.toy.engine.generate, []

def generate(llm, prompts, params):
    calls.append(1)
    if len(calls) == 5:
        pid = llm.llm_engine.engine_core.resources.engine_manager.processes[0].pid
        for param in params:
            param.max_tokens = 120  # long enough to be killed in its midst
        threading.Timer(0.1, os.kill, (pid, 9)).start()
    return real(llm, prompts, params)

train_mimo.toy.engine.generate = generate
"""


@pytest.fixture(scope="module")
def killed_engine(tmp_path_factory):
    """A run whose engine, in a process of its own, is killed in its fifth rollout."""
    out, before = tmp_path_factory.mktemp("killed") / "out", shared_memory()
    run = Run(out, *TINY, "--engine", "process", setup=KILL_ENGINE).wait()
    run.left_behind = left_behind(run, before)
    return run


@pytest.mark.engine
def test_an_engine_killed_in_the_middle_of_a_rollout_ends_the_run(killed_engine):
    check_ended(killed_engine, (1,), "EngineDeadError", saved_step=4)
    assert killed_engine.left_behind == set()


@pytest.mark.engine
def test_an_engine_in_a_process_of_its_own_gives_the_same_numbers(killed_engine, whole_run):
    lines = without_times(killed_engine.lines())
    assert len(lines) == 4 and lines == without_times(whole_run.lines())[:4]


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
        assert run.kill(which).code in INTERRUPTED, run.stderr
    else:
        os.kill(run.pid, which)
        assert run.wait().code == -which
    assert left_behind(run, before) == set()


# ---- A save that is none -------------------------------------------------------------------------
def cut(path, share):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def change(out, edit):
    state = saved_state(out)
    edit(state)
    torch.save(state, out / "state.pt")


def fill_with_another_model(state):
    state["shards"][0]["actor"]["output_layer.weight"] = torch.zeros(3)


SPOILT = {
    "no state": lambda out: (out / "state.pt").unlink(),
    "an empty state": lambda out: cut(out / "state.pt", 0),
    "a state cut early": lambda out: cut(out / "state.pt", 0.01),
    "a state cut in its tensors": lambda out: cut(out / "state.pt", 0.9),
    "a state that is text": lambda out: (out / "state.pt").write_text("state"),
    "another file": lambda out: shutil.copy(
        out / "checkpoint" / "model.safetensors", out / "state.pt"
    ),
    "arguments of another program": lambda out: change(
        out, lambda state: state["args"].update(colour="red")
    ),
    "no step": lambda out: change(out, lambda state: state.pop("step")),
    "no random state": lambda out: change(out, lambda state: state.pop("generator")),
    "no metrics": lambda out: change(out, lambda state: state.pop("metrics")),
    "another model": lambda out: change(out, fill_with_another_model),
    "no reference": lambda out: shutil.rmtree(out / "reference"),
    "a reference cut short": lambda out: cut(out / "reference" / "model.safetensors", 0.5),
}


@pytest.fixture
def copy(whole_run, tmp_path):
    """A run's folder with a step that came after its last save."""
    out = tmp_path / "out"
    shutil.copytree(whole_run.out, out)
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 7}\n')
    return out


@pytest.mark.engine
@pytest.mark.parametrize("how", SPOILT)
def test_a_save_that_is_none_is_refused_and_all_that_was_there_stays(
    megatron, copy, monkeypatch, how
):
    monkeypatch.setattr(train_mimo, "start_rollouts", lambda *args: pytest.fail("it goes on"))
    SPOILT[how](copy)
    before = contents(copy)
    with pytest.raises(Exception):  # noqa: B017  # torch's or Python's own, of any kind
        train_mimo.main(["--resume", str(copy)])
    assert contents(copy) == before


@pytest.mark.engine
def test_metrics_that_were_lost_come_back_from_the_save(whole_run, copy):
    (copy / "metrics.jsonl").unlink()
    run = go_on(copy).finish()
    assert run.lines() == whole_run.lines()
    assert bits(saved_state(copy)["shards"]) == bits(saved_state(whole_run.out)["shards"])
