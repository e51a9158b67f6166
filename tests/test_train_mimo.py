"""What the smoke run promises: its arguments, its files and numbers, its PPO step, and that it names planted faults."""

import argparse
import dataclasses
import itertools
import json
import math
import os
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

import train_mimo
from drafter_sync import hf_to_megatron, megatron_to_hf, sync_weights
from ref_disable import skip_mtp
from spec_metrics import counts_from_vllm, replay_acceptance, summarize
from train_mimo import Args

ROOT = Path(train_mimo.__file__).parent

# ------------------------------------------------------------------------------------------------------------------
# Arguments
# ------------------------------------------------------------------------------------------------------------------


def tree(folder):
    return sorted(str(path) for path in Path(folder).rglob("*"))


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """refused(*argv): what stderr says of arguments that must be refused with exit code 2 and nothing written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(train_mimo, "train", lambda *args: pytest.fail("it started"))

    def call(*argv):
        before = tree(tmp_path)
        try:
            code = train_mimo.main(list(argv))
        except SystemExit as error:
            code = error.code
        assert code == 2 and tree(tmp_path) == before
        return capsys.readouterr().err

    return call


@pytest.mark.parametrize(
    "argv, text",
    [
        ("--steps 0", "--steps.* 1 or more"),
        ("--steps -3", "--steps.* 1 or more"),
        ("--prompts 0", "--prompts.* 1 or more"),
        ("--epochs 0", "--epochs.* 1 or more"),
        ("--minibatches 0", "--minibatches.* 1 or more"),
        ("--minibatches 65", "--minibatches.*--prompts"),
        ("--prompts 3", "--minibatches.*--prompts"),
        ("--layers 0", "--layers.* 1 or more"),
        ("--ffn 0", "--ffn.* 1 or more"),
        ("--heads 0", "--heads.* 1 or more"),
        ("--hidden 100", "--hidden must be"),
        ("--hidden 64", "--hidden must be"),  # 4 heads of 16, which vLLM's CPU attention refuses
        ("--groups 3", "--heads a multiple of --groups"),
        ("--symbols 65", "--symbols.*--vocab"),
        ("--vocab 7", "--symbols.*--vocab"),
        ("--response-tokens 3", "--response-tokens must be 4"),
        ("--warmup-steps -1", "--warmup-steps.* 0 or more"),
        ("--save-every -1", "--save-every 0 or more"),
        *((f"{name} {value}", name) for name in ("--lr", "--mtp-lr", "--clip") for value in ("nan", "inf", "0", "-1")),
        *((f"{name} {value}", name) for name in ("--temperature", "--max-grad-norm") for value in ("nan", "inf", "0")),
        *((f"--mtp-scale {value}", "--mtp-scale") for value in ("nan", "inf", "-0.1")),
        ("--device cuda", "torch sees no CUDA device"),
        ("--baseline nowhere", "--baseline nowhere has no metrics.jsonl"),
        ("--resume nowhere", "--resume nowhere"),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence(refused, argv, text):
    said = refused(*argv.split())
    assert len(said.splitlines()) == 1 and said.startswith("train_mimo.py: ")
    assert pytest.raises(ValueError, match=text) and __import__("re").search(text, said), said
