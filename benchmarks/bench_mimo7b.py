"""MiMo-7B's shape on one card, random weights in bf16: what a push costs.

    push        all 7.8 B parameters to target and drafter, plain, sampled, verified (fix 5)
    push-ipc    the same with the engine in a process of its own, over CUDA IPC

Each part runs in a process of its own. A push's rate is bytes of weights by seconds; a copy of the
same bytes on the same card stands beside it.

Run   python benchmarks/bench_mimo7b.py push     all parts if none is named; --tiny: does it run?
Out   OUT/mimo7b_PART.json
"""

import functools
import sys
import time

import common  # isort: skip, before torch: it sets paths
import torch
from common import GB, copy_rate, random_tensors

import toy.model
from drafter_sync import sync_weights


def start(options, hf_config, dtype, folder=None, **settings):
    """vLLM, eager, small batches: its trial run at start is short then."""
    small = dict(max_num_seqs=8, max_model_len=256, max_num_batched_tokens=2048)
    folder = folder or f"{options.work}/dummy"
    return common.start_engine(folder, hf_config, dtype, **(small | settings))


def bench_push(options, hf_config, device, dtype, save, process=False):
    """sync_weights with each kind of check, and of the target alone."""
    tensors = random_tensors(hf_config, device, dtype)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    rate = copy_rate(tensors, device, options.repeats)
    print(f"{num_bytes:,} bytes in {len(tensors)} tensors; a copy: {rate:,.0f} GB/s", flush=True)
    save(bytes=num_bytes, tensors=len(tensors), copy_gb_s=rate)
    llm, facts = start(options, hf_config, dtype, process=process)
    rows = []
    hows = [dict(verify=verify) for verify in (False, "sample", True)]
    for how in [*hows, dict(verify=False, drafter=False)]:
        push = functools.partial(sync_weights, llm, tensors, **how)
        row = {"verify": str(how["verify"]), "drafter": how.get("drafter", True)}
        row["seconds"] = common.median_seconds(device, push, options.repeats)
        row["gb_s"] = num_bytes / row["seconds"] / GB
        # Of this process: with push-ipc what the worker needs is not seen.
        rows.append(row | {"peak_bytes": common.peak_bytes(device, push)})
        save(rows=rows, engine=facts)
    common.table(rows)


PARTS = {  # and the seconds after which a part is cut off
    "push": (bench_push, 300),
    "push-ipc": (functools.partial(bench_push, process=True), 300),
}


def main():
    parser = common.parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    hf_config = toy.model.mimo_config(**(common.TINY if options.tiny else common.MIMO_7B))
    if options.part:
        run = functools.partial(PARTS[options.part][0], options, hf_config, options.device, dtype)
        common.child_main(run, options)

    began, failed = time.perf_counter(), []
    about = {"model": hf_config} | common.provenance(options)
    for part in options.parts or PARTS:
        print(f"\n== {part}", flush=True)
        left = options.limit_s - (time.perf_counter() - began)
        at = time.perf_counter()
        result = common.run_child(part, min(left, PARTS[part][1]))
        result["part_s"] = time.perf_counter() - at
        path = f"{options.out}/mimo7b_{part}.json"
        common.write_json(path, {"benchmark": f"mimo7b {part}"} | about | result)
        failed += [f"{part}: {result['error']}"] if "error" in result else []
        print(f"{result.get('error', 'done')}; {result['part_s']:.0f} s; {path}", flush=True)
    sys.exit("\n".join(failed) or 0)


if __name__ == "__main__":
    main()
