"""A push of every weight to a running vLLM, target and drafter: GB/s beside a plain copy, and peak extra memory.

    copy     the same tensors to others on the same device, in the same run: what the memory allows
    push     sync_weights, engine in this process, with bucket sizes and kinds of verification

A push copies each byte into a bucket, out of it and into place; with verify=True sender and worker
read it once more. Peak memory is what a push adds to what was held before, sender and worker
together: on Linux by the kernel's high-water mark, on CUDA by torch's allocator. It is to stay at
one bucket and two of the largest layer (here the embedding), whatever the model's size.

Run: python benchmarks/bench_sync.py (a minute on 2 cores), or on a GPU with --device cuda. The last line is JSON.
For MiMo-7B's shape, IPC and vLLM's native transfer see bench_mimo7b.py.
"""

import argparse
import functools
import json
import pathlib
import statistics
import sys
import tempfile

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from bench_mimo7b import copy_rate, random_tensors  # noqa: E402
from bench_mtp_loss import peak_bytes, seconds  # noqa: E402

import toy.engine
import toy.model
from drafter_sync import sync_weights  # noqa: E402

SIZES = {  # 37 M and 1.7 B parameters
    "cpu": dict(
        num_layers=6, hidden_size=512, num_heads=8, num_groups=4, ffn_size=2048, vocab_size=16_384
    ),
    "cuda": dict(
        num_layers=24,
        hidden_size=2048,
        num_heads=16,
        num_groups=4,
        ffn_size=8192,
        vocab_size=65_536,
    ),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed pushes, of which the median counts"
    )
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    hf_config = toy.model.mimo_config(**SIZES[args.device])
    tensors = random_tensors(hf_config, args.device, dtype)
    num_bytes, largest = (
        sum(t.nbytes for t in tensors.values()),
        max(t.nbytes for t in tensors.values()),
    )
    copy_gb_s = copy_rate(tensors, args.device, args.repeats)
    about = f"{num_bytes:,} bytes in {len(tensors)} tensors, the largest {largest:,}, {args.device}, {dtype}"
    print(f"{about}, torch {torch.__version__}; a copy: {copy_gb_s:.1f} GB/s")

    settings = dict(max_num_seqs=8, load_format="dummy", dtype=str(dtype).removeprefix("torch."))
    if args.device == "cuda":
        settings |= dict(gpu_memory_utilization=0.3, kv_cache_memory_bytes=1 << 30)
    with tempfile.TemporaryDirectory() as folder:
        toy.engine.write_config(folder, hf_config, dtype)
        llm = toy.engine.start_engine(folder, **settings)
    rows = []
    print(
        f"{'bucket MiB':>10}{'verify':>8}{'drafter':>9}{'s':>8}{'GB/s':>7}{'of copy':>9}{'peak MiB':>10}"
    )
    for bucket_mib, verify, drafter in (
        (8, False, True), (8, "sample", True), (8, True, True), (8, False, False), (64, True, True)
    ):  # fmt: skip
        settings = dict(bucket_bytes=bucket_mib << 20, verify=verify, drafter=drafter)
        push = functools.partial(sync_weights, llm, tensors, **settings)
        sent = push().bytes
        peak = peak_bytes(args.device, push)
        median = statistics.median(seconds(args.device, push) for _ in range(args.repeats))
        row = {
            "bucket_mib": bucket_mib,
            "verify": str(verify),
            "drafter": drafter,
            "seconds": round(median, 4),
        }
        row |= {
            "gb_s": round(sent / median / 1e9, 2),
            "of_copy": round(sent / median / 1e9 / copy_gb_s, 3),
        }
        row |= {"peak_mib": round(peak / 2**20)}
        rows.append(row)
        print(
            f"{bucket_mib:>10}{verify!s:>8}{drafter!s:>9}{median:>8.3f}{row['gb_s']:>7.2f}{row['of_copy']:>9.3f}"
            f"{row['peak_mib']:>10,}"
        )
    print(
        json.dumps(
            {
                "device": args.device,
                "bytes": num_bytes,
                "copy_gb_s": round(copy_gb_s, 1),
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
