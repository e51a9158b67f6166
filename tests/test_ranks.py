"""Several ranks on one node train as one does: data parallel, tensor parallel, or refused."""

import os
import signal
import subprocess
import sys

import pytest
from test_faults import children, command_line, left_behind, shared_memory
from test_resume import ROOT, TINY, Run, whole, without_times

import train_mimo

# What torchrun sets, for processes that are forked off the first one.
RANKS = """
import socket
with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
os.environ.update(WORLD_SIZE="{0}", MASTER_ADDR="localhost", MASTER_PORT=str(port))
rank = next((rank for rank in range(1, {0}) if not os.fork()), 0)
os.environ["RANK"] = str(rank)
"""


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    return whole(tmp_path_factory.getbasetemp())


@pytest.mark.engine
@pytest.mark.parametrize(
    "ranks, tensor_parallel",
    [
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
        (4, 2),  # both ways at once
    ],
)
def test_several_ranks_give_the_metrics_of_one(whole_run, tmp_path, ranks, tensor_parallel):
    before = shared_memory()
    argv = [*TINY, "--tensor-parallel", str(tensor_parallel)]
    run = Run(tmp_path / "out", *argv, setup=RANKS.format(ranks)).finish()
    assert left_behind(run, before) == set()
    pairs = zip(without_times(run.lines()), without_times(whole_run.lines()), strict=True)
    for line, of_one in pairs:
        assert line == pytest.approx(of_one, rel=1e-4, abs=1e-4)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_two_ranks_go_on_from_a_save_bit_for_bit(tmp_path, tensor_parallel):
    argv, ranks = [*TINY, "--tensor-parallel", str(tensor_parallel)], RANKS.format(2)
    wanted = Run(tmp_path / "whole", *argv, setup=ranks).finish()
    before = shared_memory()
    killed = Run(tmp_path / "out", *argv, setup=ranks).wait_for_step(3)
    pids = [pid for pid in [killed.pid, *children(killed.pid)] if "server.py" in command_line(pid)]
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    killed.wait()
    assert left_behind(killed, before) == set()
    run = Run(killed.out, "--resume", str(killed.out), setup=ranks).finish()
    assert without_times(run.lines()) == without_times(wanted.lines())


FAILING = """
import os, sys
import train_mimo

def fail(*args):
    raise RuntimeError("planted")

if __name__ == "__main__":
    if os.environ["RANK"] in sys.argv.pop(1):
        train_mimo.update = fail
    train_mimo.main()
"""


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("failing", ["0", "1", "01"])
def test_a_failure_of_any_rank_ends_all_of_them_and_is_told(tmp_path, failing):
    before, file, out = shared_memory(), tmp_path / "failing.py", tmp_path / "out"
    file.write_text(FAILING)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(file)]
    torchrun = subprocess.Popen(
        [*command, failing, *TINY, "--out", str(out)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    stderr = torchrun.communicate()[1]
    assert torchrun.returncode != 0
    assert "RuntimeError: planted" in stderr and f"--resume {out}" in stderr
    assert left_behind(torchrun, before) == set()


@pytest.mark.parametrize(
    "ranks, argv",
    [
        (2, "--prompts 12"),  # 4 minibatches on each of 2 ranks
        (4, "--prompts 12 --tensor-parallel 2"),
        (2, "--unfix loss"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_several_ranks_would_get_wrong_is_refused_and_nothing_is_written(
    ranks, argv, rank, tmp_path, monkeypatch
):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr(train_mimo, "train", lambda *args: pytest.fail("it started"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as refusal:
        train_mimo.main(argv.split())
    assert refusal.value.code not in (None, 0)
    assert list(tmp_path.iterdir()) == []
