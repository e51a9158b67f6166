"""A run that is killed goes on from its last save and ends as if nothing had happened, bit for bit (on CPU)."""

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
from safetensors import safe_open

import train_mimo

ROOT = Path(train_mimo.__file__).parent

# A process that has imported everything forks for each run, which then starts in 3 s instead of 15. `setup` is code for
# that run alone. A file, since an engine in a process of its own imports the main file, as it does train_mimo.py.
SERVER = """
import gc, json, logging, multiprocessing.resource_tracker, os, signal, sys
logging.disable(logging.WARNING)  # as train_mimo.py does where it is the main file
import train_mimo, matplotlib.pyplot, megatron.core.models.gpt.gpt_layer_specs
import vllm.v1.engine.llm_engine, vllm.v1.worker.cpu_worker
import vllm.model_executor.models.mimo, vllm.model_executor.models.mimo_mtp, vllm.model_executor.model_loader.reload
vllm.LLM, vllm.SamplingParams
gc.freeze()
if __name__ == "__main__":
    for line in sys.stdin:
        argv, setup, log = json.loads(line)
        pid = os.fork()
        if not pid:
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
            multiprocessing.resource_tracker._resource_tracker._fd = None  # one of its own, which tidies up as it ends
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
    """One run of train_mimo.py in a session of its own, with what it wrote to stdout and stderr beside `out`."""

    def __init__(self, out, *argv, setup=""):
        self.out = Path(out)
        server().stdin.write(json.dumps([["--out", str(out), *argv], setup, str(out)]) + "\n")
        server().stdin.flush()
        self.pid = int(server().stdout.readline())

    def wait(self):
        self.code = int(server().stdout.readline())
        self.stderr = Path(f"{self.out}.stderr").read_text()
        return self

    def kill(self, which=signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self.pid, which)
        return self.wait()

    def lines(self):
        path = self.out / "metrics.jsonl"
        whole = (
            path.read_text().split("\n")[:-1] if path.exists() else []
        )  # the last one may be half-written yet
        return [json.loads(line) for line in whole]

    def wait_until(self, condition):
        while not condition():
            if not Path(f"/proc/{self.pid}").exists():
                pytest.fail(f"it ended before: {self.wait().stderr}")
            time.sleep(0.01)
        return self

    def wait_for_step(self, step):
        return self.wait_until(lambda: len(self.lines()) > step)


TINY = """
    --layers 1 --hidden 64 --heads 2 --groups 2 --ffn 64 --vocab 16 --symbols 8 --warmup-steps 10 --steps 7
    --prompts 4 --minibatches 2 --epochs 1 --response-tokens 12 --save-every 2
""".split()


@functools.cache
def whole(folder):
    """The run without a fault, with the seconds it took."""
    assert Run(folder / "help", "--help").wait().code == 0  # waits for the server
    started = time.perf_counter()
    run = Run(folder / "whole", *TINY).wait()
    assert run.code == 0 and run.stderr == ""
    run.seconds = time.perf_counter() - started
    return run


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory):
    return whole(tmp_path_factory.getbasetemp())


def without_times(lines):
    return [{key: value for key, value in line.items() if not key.endswith("_s")} for line in lines]


def tensors_of(path):
    with safe_open(path, "pt") as file:
        names = [
            name for name in file.keys() if name != "metrics"
        ]  # metrics.jsonl with its seconds
        return {name: file.get_tensor(name).numpy().tobytes() for name in names}


def check_equal(run, whole_run):
    """Every number of every step once, every weight, Adam's state, the random generator."""
    assert [line["step"] for line in run.lines()] == list(range(7))
    assert without_times(run.lines()) == without_times(whole_run.lines())
    for file in (
        "state.safetensors",
        "checkpoint/model.safetensors",
        "reference/model.safetensors",
    ):
        assert tensors_of(run.out / file) == tensors_of(whole_run.out / file), file
    assert sorted(p.name for p in run.out.rglob("*")) == sorted(
        p.name for p in whole_run.out.rglob("*")
    )


def go_on(out, **how):
    """Resumed if there is a save, else begun anew; a run may be killed before its first save."""
    if (out / "state.safetensors").exists():
        return Run(out, "--resume", str(out), **how)
    return Run(out, *TINY, "--overwrite", **how)


def kill_at_random(num_kills, out, whole_run):
    moments, ended = [], 0
    while len(moments) < num_kills:
        run = go_on(out)
        moments.append(random.uniform(0, whole_run.seconds))
        time.sleep(moments[-1])
        if run.kill().code == 0:  # it was quicker
            moments.pop()
        if run.code == 0:
            check_equal(run, whole_run)
            ended, out = ended + 1, out.with_name(f"{out.name}+")
        else:
            assert run.code == -signal.SIGKILL, (moments, run.stderr)
    run = go_on(out).wait()
    assert run.code == 0 and run.stderr == "", moments
    check_equal(run, whole_run)


@pytest.mark.engine
def test_a_run_killed_three_times_at_random_ends_as_one_that_was_not(whole_run, tmp_path):
    kill_at_random(3, tmp_path / "out", whole_run)


@pytest.mark.slow
@pytest.mark.engine
def test_a_run_killed_twenty_times_at_random_ends_as_one_that_was_not(whole_run, tmp_path):
    kill_at_random(20, tmp_path / "out", whole_run)


# Kills itself at the Nth call of FUNCTION, with half of the file written where it writes one.
KILL_AT = """
import itertools, signal
calls, real = itertools.count(1), train_mimo.{function}

def kill(*args, **kwargs):
    if next(calls) < {n}:
        return real(*args, **kwargs)
    if "{function}" == "save_file":
        open(args[1], "wb").write(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

train_mimo.{function} = kill
"""


@pytest.mark.engine
def test_a_run_killed_at_its_worst_moments_ends_as_one_that_was_not(whole_run, tmp_path):
    worst = [
        (
            "save_file",
            4,
        ),  # in the second save; those before are reference/, checkpoint/ and the first one
        ("report", 4),  # a step is trained and pushed, its line not written
    ]
    for function, n in worst:
        killed = go_on(tmp_path / "out", setup=KILL_AT.format(function=function, n=n)).wait()
        assert killed.code == -signal.SIGKILL, killed.stderr
    run = go_on(killed.out).wait()
    assert run.code == 0 and run.stderr == ""
    check_equal(run, whole_run)
