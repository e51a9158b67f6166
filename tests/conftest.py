"""Shared by all tests: Megatron on one gloo rank, a tiny MiMo, functions run on several ranks."""

import multiprocessing
import os
import tempfile
import zlib

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # small tensors: a second thread costs more than it brings

import toy.engine  # isort: skip  # before torch
import pytest
import torch

from drafter_sync import megatron_to_hf
from toy.model import build_model, init_megatron, mimo_config

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Two workers of vLLM on one NUMA node: it would look for one node each. Read once a process.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def pytest_collection_modifyitems(items):
    """tests/test_drafters.py last: each of its engines takes all process groups down as it ends."""
    items.sort(key=lambda item: "test_drafters.py" in item.nodeid)


@pytest.fixture(scope="session")
def megatron():
    """Megatron's process groups of size 1, on CPU."""
    init_megatron("cpu")
    yield
    # vLLM's engine in this process takes all groups down with its own.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def tiny(megatron):
    """tiny(mtp_layers=1, tied=False, **TransformerConfig overrides): a GPTModel, weights random.

    Norms too: ones hide which hidden state the MTP layer was fed, a zero bias hides a lost bias.
    """
    return build_tiny


def build_tiny(mtp_layers=1, tied=False, seed=0, vocab_size=64, **overrides):
    """The same weights for every tensor-parallel size: drawn whole from the name, then cut."""
    config = mimo_config(
        hidden_size=64,
        num_heads=2,
        num_groups=2,
        ffn_size=96,
        vocab_size=vocab_size,
        mtp_layers=mtp_layers,
        tied=tied,
    )
    model = build_model(config, **overrides)
    tp_size = model.config.tensor_model_parallel_size
    tp_rank = torch.distributed.get_rank() % tp_size
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            name = name.replace(
                "mtp_model_layer", "transformer_layer"
            )  # Megatron 0.16 and 0.17 differ in this name
            generator = torch.Generator().manual_seed(seed * 1000003 + zlib.crc32(name.encode()))
            sharded = getattr(parameter, "tensor_model_parallel", False)
            shape = list(parameter.shape)
            if sharded:
                shape[parameter.partition_dim] *= tp_size
            whole = torch.randn(shape, generator=generator) * 0.1 + (1.0 if "norm" in name else 0.0)
            if sharded and "linear_fc1" in name:  # [gate; up] is cut inside each half
                gate, up = whole.chunk(2)
                whole = torch.cat([gate.chunk(tp_size)[tp_rank], up.chunk(tp_size)[tp_rank]])
            elif sharded:
                whole = whole.chunk(tp_size, parameter.partition_dim)[tp_rank]
            parameter.copy_(whole)
    return model


def run_on_ranks(world_size, function, *args, tensor_parallel=1, context_parallel=1):
    """Runs a top-level `function(rank, *args)` in gloo processes; returns all results."""
    # A fork server imports torch and Megatron once: each further call takes a second, not ten.
    multiprocessing.set_forkserver_preload(
        ["toy.model", "megatron.core.models.gpt.gpt_layer_specs"]
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _rank,
            (world_size, tensor_parallel, context_parallel, folder, function, args),
            nprocs=world_size,
            start_method="forkserver",
        )
        return [torch.load(f"{folder}/{rank}") for rank in range(world_size)]


def _rank(rank, world_size, tensor_parallel, context_parallel, folder, function, args):
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", world_size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    init_megatron("cpu", tensor_parallel, context_parallel)
    result = function(rank, *args)
    torch.save(result, f"{folder}/{rank}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def engine(megatron, tmp_path_factory):
    """(llm, model, hf_config): vLLM in this process on a tiny MiMo, and the trainer's model of it.

    One a session: a start takes 20 s. Each test begins with `random_weights` and a push.
    """
    hf_config = mimo_config()
    model = build_model(hf_config)
    random_weights(model, 0)
    folder = str(tmp_path_factory.mktemp("engine"))
    toy.engine.write_checkpoint(
        folder, hf_config, megatron_to_hf(model.named_parameters(), hf_config)
    )
    llm = toy.engine.start_engine(folder, disable_log_stats=False)
    yield llm, model, hf_config
    llm.llm_engine.engine_core.shutdown()


def random_weights(model, seed):
    """Every weight anew, norms and biases too; large enough that greedy text does not repeat."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 1.0 if "word_embeddings" in name else 0.1
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator) * scale + ("norm" in name)
            )
