"""How many bytes one MTP layer keeps for the backward pass, with and without full recompute.

Counted with saved-tensor hooks while the layer's forward runs, each storage once, parameters left out (they are there
anyway). It needs no GPU: what autograd saves does not depend on the device, except inside the attention kernel.

Run: python benchmarks/bench_recompute.py (20 s). The last line is the last row again, as JSON.
"""

import json
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import toy.model
from mtp_recompute import patch_mtp_recompute  # noqa: E402


def saved_bytes(model, inputs):
    """Runs one forward; bytes that its first MTP layer saved for backward."""
    storages = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage  # kept, so that no address is used twice
        return tensor

    layer = model.mtp.layers[0]
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    handles = [
        layer.register_forward_pre_hook(lambda *unused: hooks.__enter__()),
        layer.register_forward_hook(lambda *unused: hooks.__exit__()),
    ]
    with patch_mtp_recompute():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return sum(storage.nbytes() for storage in storages.values())


def measure(*, hidden_size=256, num_tokens=1024):
    """One packed buffer of four documents through a MiMo-shaped model; needs toy.model.init_megatron first."""
    hf_config = toy.model.mimo_config(
        hidden_size=hidden_size, num_heads=hidden_size // 32, num_groups=hidden_size // 64,
        ffn_size=hidden_size * 11008 // 4096, max_positions=num_tokens,  # MiMo-7B's proportions
    )  # fmt: skip
    model = toy.model.build_model(hf_config)
    input_ids, position_ids, packed = toy.model.pack([[1] * (num_tokens // 4)] * 4)
    inputs = dict(
        input_ids=input_ids, position_ids=position_ids, attention_mask=None, labels=input_ids,
        loss_mask=torch.ones_like(input_ids, dtype=torch.float32), packed_seq_params=packed,
    )  # fmt: skip
    plain = saved_bytes(model, inputs)
    model.config.recompute_granularity = "full"
    model.config.recompute_method, model.config.recompute_num_layers = "uniform", 1
    recompute = saved_bytes(model, inputs)
    return {
        "hidden_size": hidden_size,
        "num_tokens": num_tokens,
        "bytes_plain": plain,
        "bytes_recompute": recompute,
        "ratio": round(recompute / plain, 4),
    }


def main():
    import megatron.core

    toy.model.init_megatron("cpu")
    print(f"{'hidden':>8}{'tokens':>8}{'plain, bytes':>16}{'recompute, bytes':>18}{'ratio':>8}")
    for hidden_size, num_tokens in ((256, 1024), (512, 1024), (512, 4096)):
        row = measure(hidden_size=hidden_size, num_tokens=num_tokens)
        print(
            f"{hidden_size:>8}{num_tokens:>8}{row['bytes_plain']:>16,}{row['bytes_recompute']:>18,}{row['ratio']:>8}"
        )
    print(
        json.dumps(
            row
            | {"megatron_core": megatron.core.__version__.split("+")[0], "torch": torch.__version__}
        )
    )


if __name__ == "__main__":
    main()
