"""The house: fixes stand on the ground, toy/ beside them, train_mimo.py on top."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FIXES = (
    "mtp_loss mtp_mask mtp_recompute ref_disable drafter_sync spec_metrics mtp_recursion".split()
)
HOUSE = {*FIXES, "toy", "train_mimo", "figures", "benchmarks", "tests", "conftest"}
ON_TOP = {  # what really runs the loop
    "tests/test_train_mimo.py",
    "tests/test_faults.py",
    "tests/test_resume.py",
    "tests/test_ranks.py",
    "tests/test_soak.py",
    "tests/test_cuda.py",
    "benchmarks/bench_rollout.py",
    "benchmarks/bench_mimo7b.py",
}


def imports(path):
    """What of the project a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names & HOUSE


@pytest.mark.parametrize("fix", FIXES)
def test_a_fix_imports_nothing_of_the_project(fix):
    allowed = {"mtp_recursion"} if fix == "mtp_loss" else set()  # for more drafts than layers
    assert imports(ROOT / f"{fix}.py") <= allowed


def test_the_loss_imports_the_recursion_only_where_it_is_asked_for():
    tree = ast.parse((ROOT / "mtp_loss.py").read_text())
    at_the_top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert at_the_top and "mtp_recursion" not in ast.unparse(at_the_top)


@pytest.mark.parametrize("path", sorted(ROOT.glob("toy/*.py")), ids=lambda path: path.name)
def test_the_toy_imports_no_fix_and_not_the_loop(path):
    assert imports(path) <= {"toy"}


@pytest.mark.parametrize("folder", ["tests", "figures", "benchmarks"])
def test_only_what_runs_the_loop_imports_it(folder):
    paths = [path for path in ROOT.glob(f"{folder}/*.py") if "train_mimo" in imports(path)]
    assert {str(path.relative_to(ROOT)) for path in paths} <= ON_TOP


def test_the_copies_of_a_helper_are_the_same():
    copies = {}
    for fix in FIXES:
        source = (ROOT / f"{fix}.py").read_text()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name == "_chunk_with_head":
                copies[fix] = ast.get_source_segment(source, node)
    assert {"mtp_loss", "ref_disable", "drafter_sync"} <= copies.keys()
    assert len(set(copies.values())) == 1
