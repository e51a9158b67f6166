"""Bytes that one MTP layer keeps for backward, with and without full recompute, and the time.

Counted with saved-tensor hooks while the layer's forward runs, each storage once, without the
parameters. What autograd saves depends on the device only inside the attention kernel.

Run   python benchmarks/bench_recompute.py --device cpu        20 s
      python benchmarks/bench_recompute.py                     on CUDA: MiMo-7B's layer, timed too
Out   OUT/recompute_DEVICE.json
"""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])  # where a test loads this file by its path
import common  # noqa: E402  isort: skip, before torch: it sets paths
import torch  # noqa: E402

import toy.model  # noqa: E402
from mtp_recompute import patch_mtp_recompute  # noqa: E402


def measure(*, hidden_size=256, num_tokens=1024, head_size=32, device="cpu", repeats=0):
    """Four packed documents through a MiMo-shaped MTP layer; needs init_megatron first."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hf_config = toy.model.mimo_config(
        hidden_size=hidden_size, num_heads=hidden_size // head_size,
        num_groups=hidden_size // head_size // (2 if head_size == 32 else 4),
        ffn_size=hidden_size * 11008 // 4096, max_positions=num_tokens,  # MiMo-7B's proportions
    )  # fmt: skip
    model = toy.model.build_model(hf_config, dtype=dtype).to(device, dtype)
    input_ids, position_ids, packed = toy.model.pack([[1] * (num_tokens // 4)] * 4, device)
    calls, row = [], {"hidden_size": hidden_size, "num_tokens": num_tokens}

    def remember(module, args, kwargs):
        state = kwargs["hidden_states"].detach().requires_grad_()
        calls.append(kwargs | {"hidden_states": state})

    handle = model.mtp.register_forward_pre_hook(remember, with_kwargs=True)
    masks = dict(labels=input_ids, loss_mask=torch.ones_like(input_ids))
    model(input_ids, position_ids, None, packed_seq_params=packed, **masks)
    handle.remove()

    def run():
        out = model.mtp(**calls[0])
        out.backward(torch.ones_like(out))

    for way, method in (("plain", None), ("recompute", "uniform")):
        model.config.recompute_granularity = method and "full"
        model.config.recompute_method, model.config.recompute_num_layers = method, method and 1
        with patch_mtp_recompute():
            row[f"bytes_{way}"] = saved_bytes(model, calls[0])
            if repeats:
                row[f"ms_{way}"] = 1e3 * common.median_seconds(device, run, repeats)
    return row | {"ratio": round(row["bytes_recompute"] / row["bytes_plain"], 4)}


def saved_bytes(model, inputs):
    storages = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage  # kept, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.mtp(**inputs)
    return sum(storage.nbytes() for storage in storages.values())


def main():
    options = common.parser(__doc__).parse_args()
    toy.model.init_megatron(options.device)
    sizes = [(256, 1024, 32, 0), (512, 1024, 32, 0), (512, 4096, 32, 0)]
    if options.device == "cuda":
        sizes = [(4096, 8192, 128, options.repeats)]
    names = "hidden_size", "num_tokens", "head_size", "repeats"
    sizes = [dict(zip(names, size, strict=True)) for size in sizes[: 1 if options.tiny else None]]
    rows = [measure(device=options.device, **size) for size in sizes]
    common.table(rows)
    result = {"benchmark": "recompute", "rows": rows} | common.provenance(options)
    common.write_json(f"{options.out}/recompute_{options.device}.json", result)


if __name__ == "__main__":
    main()
