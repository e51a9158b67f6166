"""Several ranks on one node train as one does: data parallel, tensor parallel, and what they cannot do is refused."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_faults import children, command_line, shared_memory, wait_until_gone
from test_resume import ROOT, TINY, Run, without_times

import train_mimo

# What torchrun sets, for processes that are forked off the first one.
RANKS = """
import socket
with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
os.environ.update(WORLD_SIZE="{0}", LOCAL_WORLD_SIZE="{0}", MASTER_ADDR="localhost", MASTER_PORT=str(port))
rank = next((rank for rank in range(1, {0}) if not os.fork()), 0)
os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
"""
ARGV = [*TINY, "--steps", "5", "--response-tokens", "20"]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("one") / "out", *ARGV).wait()
    assert run.code == 0 and run.stderr == ""
    return run


@pytest.mark.engine
@pytest.mark.parametrize(
    "ranks, tensor_parallel",
    [
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
        (4, 2),  # both ways at once
    ],
)
def test_several_ranks_give_the_metrics_of_one(one_rank, tmp_path, ranks, tensor_parallel):
    before = shared_memory()
    argv = [*ARGV, "--tensor-parallel", str(tensor_parallel)]
    run = Run(tmp_path / "out", *argv, setup=RANKS.format(ranks)).wait()
    wait_until_gone(run.pid)
    assert run.code == 0 and run.stderr == "" and shared_memory() <= before
    assert len(run.lines()) == 5
    for line, of_one in zip(
        without_times(run.lines()), without_times(one_rank.lines()), strict=True
    ):
        assert line == pytest.approx(of_one, rel=1e-4, abs=1e-4)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_two_ranks_go_on_from_a_save_bit_for_bit(tmp_path, tensor_parallel):
    argv = [*ARGV, "--tensor-parallel", str(tensor_parallel)]
    whole = Run(tmp_path / "whole", *argv, setup=RANKS.format(2)).wait()
    before = shared_memory()
    killed = Run(tmp_path / "out", *argv, setup=RANKS.format(2)).wait_for_step(3)
    ranks = [pid for pid in [killed.pid, *children(killed.pid)] if "server.py" in command_line(pid)]
    assert len(ranks) == 2
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    killed.wait()
    wait_until_gone(killed.pid)
    assert shared_memory() <= before
    run = Run(killed.out, "--resume", str(killed.out), setup=RANKS.format(2)).wait()
    assert (
        run.code == 0
        and run.stderr == ""
        and without_times(run.lines()) == without_times(whole.lines())
    )


FAILING = """
import os, sys
import train_mimo

def fail(*args):
    raise RuntimeError("planted")

if __name__ == "__main__":
    if os.environ["RANK"] in sys.argv.pop(1):
        train_mimo.update = fail
    sys.exit(train_mimo.main())
"""


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("failing", ["0", "1", "01"])
def test_a_failure_of_any_rank_ends_all_of_them_with_one_message(tmp_path, failing):
    before, file = shared_memory(), tmp_path / "failing.py"
    file.write_text(FAILING)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        str(file),
        failing,
        *ARGV,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    torchrun = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")], cwd=ROOT, env=environment, **pipes
    )
    stderr = torchrun.communicate()[1]
    assert torchrun.returncode != 0
    assert re.findall(r"^train_mimo\.py: .*$", stderr, re.M) == [
        f"train_mimo.py: RuntimeError: planted; go on from the last save with --resume {tmp_path}/out"
    ], stderr
    wait_until_gone(torchrun.pid)
    assert shared_memory() <= before


@pytest.mark.parametrize(
    "ranks, argv, text",
    [
        (3, "--tensor-parallel 2", "--tensor-parallel 2 must divide .* 3 ranks"),
        (1, "--tensor-parallel 2", "--tensor-parallel 2 must divide .* 1 ranks"),
        (4, "--tensor-parallel 4", "--groups"),  # 2 of them
        (2, "--tensor-parallel 2 --vocab 65", "--vocab"),
        (2, "--tensor-parallel 0", "--tensor-parallel"),
        (2, "--prompts 12", "--prompts is 12, give a multiple of 8"),
        (4, "--prompts 12 --tensor-parallel 2", "--prompts is 12, give a multiple of 8"),
        (2, "--unfix loss", "--unfix loss wants one rank"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_several_ranks_cannot_do_is_refused_once_and_nothing_is_written(
    ranks, argv, text, rank, tmp_path, monkeypatch, capsys
):
    for name, value in dict(RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    assert train_mimo.main(argv.split()) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(rf"train_mimo\.py: .*{text}.*\n", said) if rank == 0 else said == ""
    assert list(Path(tmp_path).iterdir()) == []


def test_ranks_on_several_nodes_are_refused(tmp_path, monkeypatch, capsys):
    for name, value in dict(RANK=0, WORLD_SIZE=4, LOCAL_WORLD_SIZE=2).items():
        monkeypatch.setenv(name, str(value))
    assert train_mimo.main(["--out", str(tmp_path / "out")]) == 2
    assert "several nodes" in capsys.readouterr().err
