"""Time and peak memory of one depth's loss and its backward pass: chunked, full logits, and Megatron's own way.

    chunked           mtp_cross_entropy, at 100 % and 50 % of the slots counted
    full, trained     all logits at once, plain torch; the head gets a gradient
    full, detached    the same with the head's weight detached
    Megatron          ColumnParallelLinear and vocab_parallel_cross_entropy, as process_mtp_loss calls them
    floor             the two projections of each chunk and nothing else

All in one process, in turns, median time. Peak memory is what the call adds to what was there: on CUDA by torch's
allocator, on CPU by the kernel's own high-water mark of this process (Linux). "Full" costs the same whatever counts.

Run: python benchmarks/bench_mtp_loss.py (about 2 minutes on 2 cores), or with --device cuda (MiMo-7B's head, bf16).
The last line is the table as JSON.
"""

import argparse
import importlib.util
import json
import pathlib
import statistics
import sys
import time

import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from mtp_loss import mtp_cross_entropy  # noqa: E402

SIZES = {
    "cpu": dict(hidden=512, vocab=32_000, tokens=4096),
    "cuda": dict(hidden=4096, vocab=151_680, tokens=8192),
}


def plain_head(hidden, weight=None):
    return hidden @ weight.t(), None


def megatron_head(hidden_size, vocab, device, dtype):
    """The stock head, on one rank. Its weight is replaced by the one that all others use."""
    import toy.model

    toy.model.init_megatron(device)
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden_size,
        num_attention_heads=1,
        params_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )
    return ColumnParallelLinear(
        hidden_size,
        vocab,
        config=config,
        init_method=torch.nn.init.zeros_,
        bias=False,
        skip_weight_param_allocation=True,
    )


def contestants(hidden, weight, targets, masks, chunk_tokens):
    """name -> (share of slots that count, a function that runs one forward and backward)."""

    def chunked(mask):
        loss, _ = mtp_cross_entropy(
            hidden, plain_head, targets, mask, output_weight=weight, chunk_tokens=chunk_tokens
        )
        (loss.sum() / mask.sum()).backward()

    def full(head_weight):
        logits = (hidden @ head_weight.t()).flatten(0, 1)
        loss = F.cross_entropy(logits.float(), targets.t().flatten(), reduction="none")
        (loss.view(-1, 1) * masks[1.0].t()).sum().div(masks[1.0].sum()).backward()

    def floor(mask):
        rows = hidden.detach()[mask[0].bool(), 0]
        for chunk in rows.split(chunk_tokens):
            (chunk @ weight.detach().t()) @ weight.detach()

    runs = {
        ("full, trained", 1.0): lambda: full(weight),
        ("full, detached", 1.0): lambda: full(weight.detach()),
        ("chunked", 1.0): lambda: chunked(masks[1.0]),
        ("chunked", 0.5): lambda: chunked(masks[0.5]),
        ("floor", 1.0): lambda: floor(masks[1.0]),
        ("floor", 0.5): lambda: floor(masks[0.5]),
    }
    if importlib.util.find_spec("megatron") is None:
        return runs
    head = megatron_head(weight.shape[1], weight.shape[0], weight.device.type, weight.dtype)
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    def megatron():
        logits, _ = head(hidden, weight=weight)
        loss = vocab_parallel_cross_entropy(logits.float(), targets.t().contiguous()).t()
        (loss * masks[1.0]).sum().div(masks[1.0].sum()).backward()

    return {("Megatron", 1.0): megatron} | runs


def peak_bytes(device, run):
    """How far memory rises above what is held before the call."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - held
    pathlib.Path("/proc/self/clear_refs").write_text(
        "5"
    )  # sets the high-water mark back to what is held now
    held = _status("VmRSS")
    run()
    return _status("VmHWM") - held


def _status(field):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; wanted Linux: measure memory elsewhere")


def seconds(device, run):
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(device, *, hidden, vocab, tokens, chunk_tokens=1024, repeats=3):
    """One row a contestant: name, share counted, milliseconds, MiB, both also relative to full logits, head trained."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    weight = (
        (torch.randn(vocab, hidden, generator=generator) / hidden**0.5)
        .to(device, dtype)
        .requires_grad_()
    )
    states = torch.randn(tokens, 1, hidden, generator=generator).to(device, dtype).requires_grad_()
    targets = torch.randint(vocab, (1, tokens), generator=generator).to(device)
    masks = {
        share: (torch.arange(tokens, device=device)[None] * share % 1 == 0).float()
        for share in (1.0, 0.5)
    }
    runs = contestants(states, weight, targets, masks, chunk_tokens)
    times, peaks = {key: [] for key in runs}, {}

    def fresh(run):
        weight.grad = states.grad = None
        return run

    for key, run in runs.items():  # warm up, compile
        fresh(run)()
        peaks[key] = peak_bytes(device, fresh(run))
    for _ in range(repeats):
        for key, run in runs.items():
            times[key].append(seconds(device, fresh(run)))
    base = ("full, trained", 1.0)
    medians = {key: statistics.median(of_key) for key, of_key in times.items()}
    return [
        {
            "name": name,
            "counted": share,
            "ms": round(medians[name, share] * 1e3, 1),
            "time_ratio": round(medians[name, share] / medians[base], 3),
            "peak_mib": round(peaks[name, share] / 2**20, 1),
            "memory_ratio": round(peaks[name, share] / peaks[base], 3),
        }
        for name, share in runs
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda uses MiMo-7B's sizes and bf16",
    )
    parser.add_argument(
        "--tokens", type=int, help="slots in the buffer (4096 on cpu, 8192 on cuda)"
    )
    parser.add_argument("--chunk-tokens", type=int, default=1024, help="slots projected at a time")
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed rounds, of which the median counts"
    )
    args = parser.parse_args()
    sizes = SIZES[args.device] | ({"tokens": args.tokens} if args.tokens else {})
    rows = measure(args.device, **sizes, chunk_tokens=args.chunk_tokens, repeats=args.repeats)
    print(f"{sizes}, chunks of {args.chunk_tokens}, {args.device}, torch {torch.__version__}")
    print(f"{'':<16}{'counted':>8}{'ms':>10}{'ratio':>8}{'peak MiB':>11}{'ratio':>8}")
    for row in rows:
        print(
            f"{row['name']:<16}{row['counted']:>8.0%}{row['ms']:>10,}{row['time_ratio']:>8.2f}"
            f"{row['peak_mib']:>11,}{row['memory_ratio']:>8.2f}"
        )
    print(
        json.dumps(
            {"device": args.device, **sizes, "chunk_tokens": args.chunk_tokens, "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
