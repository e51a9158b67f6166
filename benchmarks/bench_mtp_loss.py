"""Time, peak memory and gradient error of one depth's loss and its backward, head frozen.

    floor                the two projections of each chunk and nothing else
    chunked N            mtp_cross_entropy (fix 1), N slots at a time
    Liger                liger_kernel's fused linear cross entropy
    cut cross entropy    Apple's cut_cross_entropy, which skips small gradients (filter_eps)
    full logits          all logits at once, plain torch
    Megatron             ColumnParallelLinear and vocab_parallel_cross_entropy; trains its head

All in one process, in turns, median time; each with all and with half of the slots counted, of
which the last two know nothing. Targets have probabilities from 0 to 1, as in a trained model.
Gradient error: largest difference from float64 on 16 slots, relative to the largest gradient there.

Run   python benchmarks/bench_mtp_loss.py     CUDA: MiMo-7B's head in bf16; CPU: a small one in fp32
Out   OUT/mtp_loss_DEVICE.json
"""

import importlib
import importlib.util
import statistics

import common  # isort: skip, before torch: it sets paths
import torch
import torch.nn.functional as F

import toy.model
from mtp_loss import mtp_cross_entropy

SIZES = {
    "tiny": dict(hidden=64, vocab=1000, tokens=128),
    "cpu": dict(hidden=512, vocab=32_000, tokens=4096),
    "cuda": dict(hidden=4096, vocab=151_680, tokens=8192),
}
CHUNKS = (1024, 2048, 512)  # slots; the first is mtp_cross_entropy's default
IGNORE = -100  # what Liger and cut cross entropy call a slot that does not count


def make_problem(device, *, hidden, vocab, tokens):
    """States [s, 1, h], head [V, h], targets and masks; a target's logit is 0 to 20 above noise."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    weight = randn(vocab, hidden) / hidden**0.5
    targets = torch.randint(vocab, (1, tokens), generator=generator, device=device)
    lift = torch.linspace(0, 20, tokens, device=device, dtype=dtype)[:, None]
    states = (randn(tokens, hidden) + lift * weight[targets[0]])[:, None]
    masks = {1.0: torch.ones_like(targets, dtype=torch.bool)}
    masks[0.5] = torch.arange(tokens, device=device)[None] % 2 == 0
    return states.requires_grad_(), weight, targets, masks


def contestants(states, weight, targets, masks, chunks):
    """{(name, share counted): a function that runs one forward and backward}."""
    runs = {}

    def add(name, loss_of_mask, shares=masks):
        for share in shares:
            runs[name, share] = lambda mask=masks[share]: loss_of_mask(mask).backward()

    def plain_head(rows, weight):
        return rows @ weight.t(), None

    def chunked(chunk):
        def loss(mask):
            how = dict(output_weight=weight, chunk_tokens=chunk)
            return mtp_cross_entropy(states, plain_head, targets, mask, **how)[0].sum() / mask.sum()

        return loss

    def floor(mask):
        for rows in states.detach()[mask[0], 0].split(chunks[0]):
            (rows @ weight.t()) @ weight

    def full(mask):
        logits = states[:, 0] @ weight.t()
        loss = F.cross_entropy(logits.float(), targets[0], reduction="none")
        return (loss * mask[0]).sum() / mask.sum()

    for share in masks:
        runs["floor", share] = lambda mask=masks[share]: floor(mask)
    for chunk in chunks:
        add(f"chunked {chunk}", chunked(chunk))
    for name, module, function in (
        ("Liger", "liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"),
        ("cut cross entropy", "cut_cross_entropy", "linear_cross_entropy"),
    ):
        if states.is_cuda and importlib.util.find_spec(module.partition(".")[0]):
            theirs = getattr(importlib.import_module(module), function)

            def loss(mask, theirs=theirs):
                return theirs(states[:, 0], weight, targets[0].where(mask[0], IGNORE))

            add(name, loss)
    add("full logits", full, [1.0])
    add("Megatron", megatron(states, weight, targets), [1.0])
    return runs


def megatron(states, weight, targets):
    """The stock head, on one rank, as process_mtp_loss calls it."""
    toy.model.init_megatron(states.device.type)
    from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
    from megatron.core.transformer.transformer_config import TransformerConfig

    trained = weight.clone().requires_grad_()
    vocab, hidden = weight.shape
    config = TransformerConfig(
        num_layers=1, hidden_size=hidden, num_attention_heads=1, params_dtype=weight.dtype,
        use_cpu_initialization=True, perform_initialization=False,
        gradient_accumulation_fusion=False,
    )  # fmt: skip
    how = dict(config=config, init_method=torch.nn.init.zeros_, bias=False)
    head = ColumnParallelLinear(hidden, vocab, skip_weight_param_allocation=True, **how)

    def loss(mask):
        trained.grad = None
        logits, _ = head(states, weight=trained)
        loss = vocab_parallel_cross_entropy(logits.float(), targets.t().contiguous()).t()
        return (loss * mask).sum() / mask.sum()

    return loss


def exact_gradient(states, weight, targets, mask, num=16):
    """(slots, their gradient in float64), slots spread over those that count."""
    counted = mask[0].nonzero()[:, 0]
    slots = counted[:: max(1, len(counted) // num)][:num]
    wide = weight.double()
    p = (states.detach()[slots, 0].double() @ wide.t()).softmax(1)
    p[torch.arange(len(slots)), targets[0, slots]] -= 1
    return slots, p @ wide / mask.sum()


def measure(device, sizes, chunks, repeats):
    """One row a contestant; one that fails is named in it."""
    problem = states, weight, targets, masks = make_problem(device, **sizes)
    exact = {share: exact_gradient(states, weight, targets, mask) for share, mask in masks.items()}
    runs, rows = contestants(*problem, chunks), {}

    def fresh(run):
        states.grad = None
        return run

    for (name, share), run in runs.items():
        row = rows[name, share] = {"name": name, "counted": share}
        try:
            fresh(run)()  # compiles
            row["peak_mib"] = round(common.peak_bytes(device, fresh(run)) / 2**20)
            if states.grad is not None:
                slots, grad = exact[share]
                error = (states.grad[slots, 0].double() - grad).abs().max() / grad.abs().max()
                row["gradient_error"] = float(f"{error.item():.1e}")
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
            print(f"{name}: {row['error']}", flush=True)
    times = {key: [] for key, row in rows.items() if "error" not in row}
    for _ in range(repeats):
        for key, of_key in times.items():
            of_key.append(1e3 * common.seconds(device, fresh(runs[key])))
    for key, of_key in times.items():
        row, floor = rows[key], statistics.median(times["floor", key[1]])
        row |= {"ms": statistics.median(of_key), "spread_ms": max(of_key) - min(of_key)}
        row["times_floor"] = row["ms"] / floor
    return list(rows.values())


def main():
    options = common.parser(__doc__).parse_args()
    sizes = SIZES["tiny" if options.tiny else options.device]
    rows = measure(options.device, sizes, CHUNKS, options.repeats)
    columns = ["name", "counted", "ms", "spread_ms", "times_floor", "peak_mib", "gradient_error"]
    common.table(rows, columns)
    result = {"benchmark": "mtp loss", **sizes, **common.provenance(options)}
    common.write_json(f"{options.out}/mtp_loss_{options.device}.json", result | {"rows": rows})


if __name__ == "__main__":
    main()
