"""A checkpoint laid out as MiMo-7B's: tensors in several files, and an index that says which."""

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import toy.engine
from drafter_sync import DrafterSyncError, hf_to_megatron, megatron_to_hf
from toy.model import build_model, mimo_config

# Hugging Face, XiaomiMiMo/MiMo-7B-RL: names and shapes of a layer, of the MTP layer, of the rest.
LAYER_7B = {
    "input_layernorm.weight": (4096,),
    "self_attn.q_proj.weight": (4096, 4096),
    "self_attn.q_proj.bias": (4096,),
    "self_attn.k_proj.weight": (1024, 4096),
    "self_attn.k_proj.bias": (1024,),
    "self_attn.v_proj.weight": (1024, 4096),
    "self_attn.v_proj.bias": (1024,),
    "self_attn.o_proj.weight": (4096, 4096),
    "post_attention_layernorm.weight": (4096,),
    "mlp.gate_proj.weight": (11008, 4096),
    "mlp.up_proj.weight": (11008, 4096),
    "mlp.down_proj.weight": (4096, 11008),
}
MTP_7B = LAYER_7B | {
    "token_layernorm.weight": (4096,),
    "hidden_layernorm.weight": (4096,),
    "input_proj.weight": (4096, 8192),
    "final_layernorm.weight": (4096,),
}
REST_7B = {
    "model.embed_tokens.weight": (151680, 4096),
    "model.norm.weight": (4096,),
    "lm_head.weight": (151680, 4096),
}

# What tests.conftest.build_tiny builds.
CONFIG = mimo_config(hidden_size=64, num_heads=2, num_groups=2, ffn_size=96)


def write_sharded(folder, tensors, shards):
    """shards: for each file the names that lie in it."""
    weight_map = {}
    for i, names in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(
            {name: tensors[name].contiguous() for name in names},
            folder / file,
            metadata={"format": "pt"},
        )
        weight_map |= dict.fromkeys(names, file)
    total = sum(tensors[name].nbytes for name in weight_map)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_sharded(folder, on_open=lambda: None):
    """What a trainer does: one file after the other, one tensor at a time."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name in sorted(set(weight_map.values())):
        on_open()
        with safe_open(folder / name, "pt") as file:
            for tensor_name in file.keys():
                yield tensor_name, file.get_tensor(tensor_name)


def hf_tensors(model):
    return dict(megatron_to_hf(model.named_parameters(), CONFIG))


def in_shards(names, num):
    """Cut anywhere, so that fused parameters lie in two files: q in one, k and v in the next."""
    names = list(names)
    return [names[len(names) * i // num : len(names) * (i + 1) // num] for i in range(num)]


def fill(model, named_tensors):
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in hf_to_megatron(named_tensors, CONFIG, parameters):
            parameters[name].copy_(tensor)


def test_names_and_shapes_are_those_of_mimo_7b(megatron):
    config = mimo_config(
        num_layers=2,
        hidden_size=4096,
        num_heads=32,
        num_groups=8,
        ffn_size=11008,
        vocab_size=151_680,
    )
    with torch.device("meta"):  # the real shapes without their 3.7 GB
        model = build_model(config, perform_initialization=False)
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in megatron_to_hf(model.named_parameters(), config)
    }
    layers = [f"model.layers.{i}.{name}" for i in range(2) for name in LAYER_7B]
    assert shapes == REST_7B | dict(zip(layers, [*LAYER_7B.values()] * 2, strict=True)) | {
        f"model.mtp_layers.0.{name}": shape for name, shape in MTP_7B.items()
    }


@pytest.mark.parametrize("num_shards", [1, 4, 9])
def test_a_sharded_checkpoint_fills_the_model_bit_for_bit(tiny, tmp_path, num_shards):
    source, target = tiny(seed=0), tiny(seed=1)
    write_sharded(tmp_path, hf_tensors(source), in_shards(hf_tensors(source), num_shards))
    fill(target, read_sharded(tmp_path))
    came = dict(target.named_parameters())
    for name, wanted in source.named_parameters():
        assert torch.equal(came[name], wanted), name


def test_a_tensor_is_let_go_once_its_parameter_is_filled(tiny, tmp_path):
    model = tiny()
    tensors, alive, most = hf_tensors(model), [], []
    write_sharded(tmp_path, tensors, in_shards(tensors, 4))

    def count():
        most.append(sum(reference() is not None for reference in alive))

    def watched():
        for name, tensor in read_sharded(tmp_path, on_open=count):
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    fill(model, watched())
    assert len(most) == 4
    # At most what waits for its other pieces (q, k; gate), and the tensor in the loop's hand.
    assert max(most) <= 4


def test_a_tensor_that_no_file_holds_is_named(tiny, tmp_path):
    model = tiny()
    tensors = hf_tensors(model)
    shards = in_shards(tensors, 3)
    shards[1].remove("model.layers.1.mlp.down_proj.weight")
    write_sharded(tmp_path, tensors, shards)
    with pytest.raises(DrafterSyncError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
        fill(model, read_sharded(tmp_path))


STARTS = """
import os, pathlib, sys
from safetensors.torch import load_file
import toy.engine
from drafter_sync import drafter_fingerprint, sync_weights
folder = pathlib.Path(sys.argv[1])
llm = toy.engine.start_engine(str(folder), max_num_seqs=4)

def seen():
    prompts = [[i, i + 1, i + 2] for i in range(4)]
    samples = toy.engine.sample(llm, prompts, [12] * 4, range(4), temperature=0.0)
    return [sample["response"] for sample in samples], drafter_fingerprint(llm)

before = seen()
tensors = [pair for path in folder.glob("*.safetensors") for pair in load_file(path).items()]
sync_weights(llm, tensors)
assert seen() == before
print("the same", len(tensors), flush=True)
os._exit(0)
"""


@pytest.mark.engine
@pytest.mark.slow  # an engine of its own: 30 to 60 s on two cores
def test_vllm_starts_from_the_sharded_directory_and_a_push_of_its_tensors_changes_nothing(
    tiny, tmp_path
):
    tensors = hf_tensors(tiny())
    toy.engine.write_config(tmp_path, CONFIG, torch.float32)
    write_sharded(tmp_path, tensors, in_shards(tensors, 4))
    root = str(Path(toy.engine.__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": root}
    command = [sys.executable, "-c", STARTS, str(tmp_path)]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert f"the same {len(tensors)}" in run.stdout, run.stdout + run.stderr
