"""What a run shows: a line a step on the screen, metrics.jsonl, curves.png."""

import json
import statistics

import torch


def read_baseline(args):
    """Tokens a second of a run without a drafter, if one is given."""
    if args.baseline:
        with open(f"{args.baseline}/metrics.jsonl") as file:
            return statistics.median(json.loads(line)["rollout_tokens_per_s"] for line in file)


def speedup_estimate(accept_length, draft_cost_ratio):
    """Did it pay: tokens a second with speculation over those without, and where it breaks even.

    A plain decode step costs 1 and emits 1 token; a verify step costs 1 + draft_cost_ratio and
    emits accept_length. break_even_accepted_per_step is a rate with one draft a step.
    """
    return {
        "spec/speedup_estimate": accept_length / (1 + draft_cost_ratio),
        "spec/break_even_accept_length": 1 + draft_cost_ratio,
        "spec/break_even_accepted_per_step": draft_cost_ratio,
    }


def columns(args):
    """{name: format} of what is printed each step; metrics.jsonl has everything."""
    rates = {f"spec/accept_rate_pos_{j}": "{:.3f}" for j in range(1, 1 + args.drafts)}
    return {
        "step": "{:4d}",
        "reward": "{:6.3f}",
        "accept_rate": "{:.3f}",
        **(rates if args.drafts > 1 else {}),
        "replay_agreement": "{:.4f}",
        "mtp_loss": "{:.3f}",
        "kl": "{:6.3f}",
        "logprob_gap": "{:.1e}",
        "rollout_s": "{:.2f}",
        "train_s": "{:.2f}",
        "sync_s": "{:.2f}",
    }


def short(name):
    return name.removeprefix("spec/accept_rate_")


def report(step, metrics, samples, clock, baseline, args):
    """One aligned line on the screen; all of it, with seconds, in metrics.jsonl."""
    if torch.distributed.get_rank():
        return
    line = {"step": step} | metrics
    for i, name in enumerate(("rollout_s", "train_s", "sync_s")):
        line[name] = clock[i + 1] - clock[i]
    rate = sum(len(sample["response"]) for sample in samples) / line["rollout_s"]
    line["rollout_tokens_per_s"] = rate
    if baseline:
        line["spec/speedup_measured"] = rate / baseline
    with open(f"{args.out}/metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    cells = ((name, line.get(name), form) for name, form in columns(args).items())
    cells = (
        ("-" if x is None else form.format(x)).rjust(len(short(name))) for name, x, form in cells
    )
    left = (clock[-1] - clock[0]) * (args.steps - step - 1)
    print(*cells, f" {left:.0f} s left", flush=True)


def draw(folder):
    """curves.png, from metrics.jsonl."""
    from matplotlib.figure import Figure  # not pyplot, which would look for a screen

    if torch.distributed.get_rank():
        return
    with open(f"{folder}/metrics.jsonl") as file:
        lines = [json.loads(line) for line in file]
    figure = Figure(figsize=(6, 3.5))
    axes = figure.add_subplot(xlabel="PPO step", ylim=(0, 1))
    for name, label in (("reward", "reward"), ("accept_rate", "acceptance")):
        if lines[0][name] is not None:
            axes.plot([line[name] for line in lines], label=label)
    axes.legend()
    figure.savefig(f"{folder}/curves.png", dpi=120, bbox_inches="tight")
