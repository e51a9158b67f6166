"""A run that is killed goes on from its last save and ends as if nothing had happened, bit for bit.

`Run` is what the tests of the loop start runs with. A process that has imported everything forks
for each of them, so that a run starts in 3 s instead of 15. `setup` is code for that run alone.
"""

import atexit
import contextlib
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train_mimo

ROOT = Path(train_mimo.__file__).parent

# A file, since an engine in a process of its own imports the main file, as it does train_mimo.py.
SERVER = """
import gc, json, logging, os, signal, sys
import multiprocessing.resource_tracker as tracker
logging.disable(logging.WARNING)  # as train_mimo.py does where it is the main file
import train_mimo, matplotlib.figure, megatron.core.models.gpt.gpt_layer_specs
import vllm.v1.engine.llm_engine, vllm.v1.worker.cpu_worker
import vllm.model_executor.models.mimo, vllm.model_executor.models.mimo_mtp
import vllm.model_executor.model_loader.reload
vllm.LLM, vllm.SamplingParams
gc.freeze()
if __name__ == "__main__":
    for line in sys.stdin:
        argv, setup, log = json.loads(line)
        pid = os.fork()
        if not pid:
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job ignores it
            tracker._resource_tracker._fd = None  # one of its own, which tidies up as it ends
            for fd, name in ((0, os.devnull), (1, log + ".stdout"), (2, log + ".stderr")):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), fd)
            exec(setup)
            sys.exit(train_mimo.main(argv))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@functools.cache
def server():
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    file = Path(folder, "server.py")
    file.write_text(SERVER)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, str(file)], cwd=ROOT, env=environment, **pipes)


class Run:
    """One run of train_mimo.py in a session of its own; stdout and stderr stand beside `out`."""

    def __init__(self, out, *argv, setup=""):
        self.out = Path(out)
        server().stdin.write(json.dumps([["--out", str(out), *argv], setup, str(out)]) + "\n")
        server().stdin.flush()
        self.pid = int(server().stdout.readline())

    def wait(self):
        self.code = int(server().stdout.readline())
        self.stderr = Path(f"{self.out}.stderr").read_text()
        return self

    def finish(self):
        """Waits for a run that is to end well and to say nothing on stderr."""
        self.wait()
        assert (self.code, self.stderr) == (0, ""), self.stderr
        return self

    def kill(self, which=signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self.pid, which)
        return self.wait()

    def lines(self):
        path = self.out / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]  # the last may be half-written

    def wait_until(self, condition):
        while not condition():
            if not Path(f"/proc/{self.pid}").exists():
                pytest.fail(f"it ended before: {self.wait().stderr}")
            time.sleep(0.01)
        return self

    def wait_for_step(self, step):
        return self.wait_until(lambda: len(self.lines()) > step)


TINY = """
    --layers 1 --hidden 64 --heads 2 --groups 2 --ffn 64 --vocab 16 --symbols 8 --warmup-steps 10
    --steps 7 --prompts 4 --minibatches 2 --epochs 1 --response-tokens 12 --save-every 2
""".split()


@functools.cache
def whole(folder):
    """The run without a fault, with the seconds it took."""
    Run(folder / "help", "--help").finish()  # waits for the server
    started = time.perf_counter()
    run = Run(folder / "whole", *TINY).finish()
    run.seconds = time.perf_counter() - started
    return run


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory):
    return whole(tmp_path_factory.getbasetemp())


def without_times(lines):
    """What the seed decides: all but seconds and tokens a second, whose names end in _s."""
    return [{key: value for key, value in line.items() if not key.endswith("_s")} for line in lines]


def bits(value):
    """Tensors as bytes, so that == compares bit for bit."""
    if isinstance(value, torch.Tensor):
        return value.detach().numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(of) for key, of in value.items()}
    return [bits(of) for of in value] if isinstance(value, list) else value


def saved_state(out):
    return torch.load(out / "state.pt", weights_only=True)


def check_equal(run, whole_run):
    """Every number of every step once, every weight, Adam's state, the random generator."""
    assert [line["step"] for line in run.lines()] == list(range(7))
    assert without_times(run.lines()) == without_times(whole_run.lines())
    state, wanted = saved_state(run.out), saved_state(whole_run.out)
    for key in ("step", "generator", "shards"):
        assert bits(state[key]) == bits(wanted[key]), key
    for file in ("checkpoint/model.safetensors", "reference/model.safetensors"):
        assert bits(load_file(run.out / file)) == bits(load_file(whole_run.out / file)), file
    names, of_whole = (sorted(p.name for p in r.out.rglob("*")) for r in (run, whole_run))
    assert names == of_whole


def go_on(out, **how):
    """Resumed if there is a save, else begun anew; a run may be killed before its first save."""
    if (out / "state.pt").exists():
        return Run(out, "--resume", str(out), **how)
    return Run(out, *TINY, "--overwrite", **how)


def kill_at_random(num_kills, out, whole_run):
    moments = []
    while len(moments) < num_kills:
        run = go_on(out)
        moment = random.uniform(0, whole_run.seconds)
        time.sleep(moment)
        run.kill()
        if run.code == 0:  # it was quicker
            check_equal(run, whole_run)
            out = out.with_name(f"{out.name}+")
        else:
            moments.append(moment)
            assert run.code == -signal.SIGKILL, (moments, run.stderr)
    run = go_on(out).wait()
    assert (run.code, run.stderr) == (0, ""), moments
    check_equal(run, whole_run)


@pytest.mark.engine
def test_a_run_killed_three_times_at_random_ends_as_one_that_was_not(whole_run, tmp_path):
    kill_at_random(3, tmp_path / "out", whole_run)


@pytest.mark.slow
@pytest.mark.engine
def test_a_run_killed_twenty_times_at_random_ends_as_one_that_was_not(whole_run, tmp_path):
    kill_at_random(20, tmp_path / "out", whole_run)


KILL_IN_THE_SECOND_SAVE = """
import signal
real, paths = train_mimo.torch.save, []

def save(state, file, **how):
    paths.extend([file] if isinstance(file, str) else [])  # gathering writes to memory
    if len(paths) < 2:
        return real(state, file, **how)
    open(file, "wb").write(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

train_mimo.torch.save = save
"""

# A step is trained and pushed, its line not written.
KILL_BEFORE_THE_FOURTH_REPORT = """
import signal
real, steps = train_mimo.report, []

def report(*args):
    steps.append(args[0])
    if len(steps) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    real(*args)

train_mimo.report = report
"""


@pytest.mark.engine
def test_a_run_killed_at_its_worst_moments_ends_as_one_that_was_not(whole_run, tmp_path):
    out = tmp_path / "out"
    for setup in (KILL_IN_THE_SECOND_SAVE, KILL_BEFORE_THE_FOURTH_REPORT):
        killed = go_on(out, setup=setup).wait()
        assert killed.code == -signal.SIGKILL, killed.stderr
    check_equal(go_on(out).finish(), whole_run)
