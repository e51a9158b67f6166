"""A push of every weight to a running vLLM: GB/s beside a plain copy, and peak extra memory.

    copy     the same tensors to others on the same device, in the same run: what the memory allows
    push     sync_weights, engine in this process, with bucket sizes and kinds of verification

A push copies each byte into a bucket, out of it and into place; with verify=True sender and worker
read it once more. Peak memory is what a push adds to what was held before, sender and worker
together. It is to stay at one bucket and two of the largest layer (here the embedding), whatever
the model's size. For MiMo-7B's shape and CUDA IPC see bench_mimo7b.py.

Run   python benchmarks/bench_sync.py --device cpu     a minute on 2 cores; --tiny: does it run?
Out   OUT/sync_DEVICE.json
"""

import functools
import tempfile

import common  # isort: skip, before torch: it sets paths
import torch

import toy.model
from drafter_sync import sync_weights

SIZES = {  # 37 M and 1.7 B parameters
    "cpu": dict(
        num_layers=6, hidden_size=512, num_heads=8, num_groups=4, ffn_size=2048, vocab_size=16_384
    ),
    "cuda": dict(
        num_layers=24, hidden_size=2048, num_heads=16, num_groups=4, ffn_size=8192,
        vocab_size=65_536,
    ),
}  # fmt: skip
PUSHES = (  # MiB of a bucket, verify, drafter
    (8, False, True),
    (8, "sample", True),
    (8, True, True),
    (8, False, False),
    (64, True, True),
)


def main():
    options = common.parser(__doc__).parse_args()
    device = options.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hf_config = toy.model.mimo_config(**(common.TINY if options.tiny else SIZES[device]))
    tensors = common.random_tensors(hf_config, device, dtype)
    sizes = [tensor.nbytes for tensor in tensors.values()]
    copy_gb_s = common.copy_rate(tensors, device, options.repeats)
    print(f"{sum(sizes):,} bytes in {len(sizes)} tensors, the largest {max(sizes):,}")
    print(f"a copy: {copy_gb_s:.1f} GB/s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        llm, _ = common.start_engine(folder, hf_config, dtype, max_num_seqs=8)
    rows = []
    for bucket_mib, verify, drafter in PUSHES:
        how = dict(bucket_bytes=bucket_mib << 20, verify=verify, drafter=drafter)
        push = functools.partial(sync_weights, llm, tensors, **how)
        sent = push().bytes
        peak = common.peak_bytes(device, push)
        seconds = common.median_seconds(device, push, options.repeats)
        rate = sent / seconds / common.GB
        row = {"bucket_mib": bucket_mib, "verify": str(verify), "drafter": drafter}
        row |= {"seconds": seconds, "gb_s": rate, "of_copy": rate / copy_gb_s}
        rows.append(row | {"peak_mib": round(peak / 2**20)})
    common.table(rows)
    result = {"benchmark": "sync", "bytes": sum(sizes), "copy_gb_s": copy_gb_s, "rows": rows}
    result |= common.provenance(options)
    common.write_json(f"{options.out}/sync_{device}.json", result)


if __name__ == "__main__":
    main()
