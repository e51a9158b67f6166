"""Draws the README's pictures from figures/data/, after measuring whatever is missing there.

    runs      train_mimo.py ... --out runs/figures/NAME; its metrics become figures/data/NAME.jsonl
    weights   what the MTP loss did to the policy, from the checkpoints of three of these runs
    prints    what figures/gradients.py and others print, as figures/data/mtp_loss.txt and so on

Run     make figures                draws; with figures/data/ complete, as in git, in a few seconds
        make figures ARGS=--fresh   measures all of it again: about 30 minutes on 2 cores; stopped
                                    half-way, `make figures` goes on with what is missing
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = pathlib.Path(__file__).resolve().parents[1]
FIGURES, DATA, OUT = ROOT / "figures", ROOT / "figures" / "data", ROOT / "runs" / "figures"
SEEDS = (0, 1, 2)
RUNS = {
    f"{arm}-{seed}": f"--drafter {arm} --seed {seed}"
    for seed in SEEDS
    for arm in ("synced", "frozen", "none")
}
RUNS |= {f"unfix-{fix}": f"--unfix {fix}" for fix in ("mask", "recompute", "ref", "parity")}
RUNS |= {
    "none-scale0": "--drafter none --mtp-scale 0",
    "none-unfix-loss": "--drafter none --unfix loss",
}
# With --drafter none no rollout depends on the MTP layer: what differs, the MTP loss did.
WEIGHTS_OF = ("none-scale0", "none-0", "none-unfix-loss")
PRINTS = {
    "mtp_loss": "figures/gradients.py",
    "mtp_mask": "mtp_mask.py",
    "bench_recompute": "benchmarks/bench_recompute.py",
    "ref_disable": "figures/demos.py reference",
}
SECONDS_A_RUN = 100  # on 2 idle cores, for the first guess of the time left
RIGHT, WRONG, OTHER = (
    "#0072B2",
    "#D55E00",
    "#6e6e6e",
)  # blue and vermilion of Okabe and Ito: told apart by all eyes
WIDTH, DPI = 7.6, 100  # 760 pixels


# --------------------------------------------------------------------------------------------------
# Measuring
# --------------------------------------------------------------------------------------------------


def call(command, stdout, log):
    """Runs a command of this repository; if it fails, shows the end of what it wrote and stops."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "NO_VCS_VERSION": "1",
        "PYTHONWARNINGS": "ignore",
    }
    with open(stdout, "w") as out, open(log, "w") as err:
        code = subprocess.call(
            [sys.executable, *command.split()], cwd=ROOT, env=environment, stdout=out, stderr=err
        )
    if code:
        tail = (pathlib.Path(stdout).read_text() + pathlib.Path(log).read_text())[-2000:]
        sys.exit(f"{tail}\nmake_figures.py: python {command} ended with exit code {code}")


def train(name):
    """One run; its data file appears only once the run is whole."""
    out = OUT / name
    call(f"train_mimo.py {RUNS[name]} --out {out} --overwrite", f"{out}.stdout", f"{out}.stderr")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = [
        {key: float(f"{v:.6g}") if isinstance(v, float) else v for key, v in line.items()}
        for line in lines
    ]
    put(f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def print_of(name):
    call(PRINTS[name], OUT / f"{name}.stdout", OUT / f"{name}.stderr")
    put(f"{name}.txt", (OUT / f"{name}.stdout").read_text())


def weigh():
    """Frobenius distances of the policy from that of the run whose MTP loss weighs 0."""
    from safetensors.torch import load_file

    loaded = {
        name: load_file(OUT / name / "checkpoint" / "model.safetensors") for name in WEIGHTS_OF
    }
    groups = {
        "embedding": lambda name: name == "model.embed_tokens.weight",
        "trunk": lambda name: name.startswith("model.layers."),
        "norm": lambda name: name == "model.norm.weight",
        "head": lambda name: name == "lm_head.weight",
    }

    def norm(group, change):
        names = [name for name in loaded[WEIGHTS_OF[0]] if groups[group](name)]
        return sum(change(name).double().square().sum().item() for name in names) ** 0.5

    without = loaded[WEIGHTS_OF[0]]
    distances = {
        run: {
            group: norm(group, lambda name, run=run: loaded[run][name] - without[name])
            for group in groups
        }
        for run in WEIGHTS_OF[1:]
    }
    distances["norm of " + WEIGHTS_OF[0]] = {
        group: norm(group, lambda name: without[name]) for group in groups
    }
    put("head_distance.json", json.dumps(distances, indent=2) + "\n")


def put(name, text):
    """Writes a data file in one go, so that a half-written one is never taken for whole."""
    (DATA / f"{name}.part").write_text(text)
    os.replace(DATA / f"{name}.part", DATA / name)


def measure():
    """Whatever is missing in figures/data/, with a line of progress each."""
    DATA.mkdir(exist_ok=True)
    OUT.mkdir(parents=True, exist_ok=True)
    weights_missing = not (DATA / "head_distance.json").exists()
    lost = [
        n
        for n in WEIGHTS_OF
        if weights_missing and not (OUT / n / "checkpoint" / "model.safetensors").exists()
    ]
    runs = [name for name in RUNS if not (DATA / f"{name}.jsonl").exists() or name in lost]
    todo = [(print_of, name) for name in PRINTS if not (DATA / f"{name}.txt").exists()]
    todo += [(train, name) for name in runs]
    seconds = []
    for i, (do, name) in enumerate(todo):
        left = min(len(runs), len(todo) - i) * (
            statistics.fmean(seconds) if seconds else SECONDS_A_RUN
        )
        command = PRINTS[name] if do is print_of else f"train_mimo.py {RUNS[name]}"
        print(
            f"[{i + 1}/{len(todo)}] python {command}  (about {left / 60:.0f} minutes left)",
            flush=True,
        )
        started = time.perf_counter()
        do(name)
        seconds += [time.perf_counter() - started] if do is train else []
    if weights_missing:
        weigh()


# --------------------------------------------------------------------------------------------------
# Drawing
# --------------------------------------------------------------------------------------------------


def series(name, key):
    """One number a step of one run."""
    return [json.loads(line)[key] for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def print_lines(name):
    return (DATA / f"{name}.txt").read_text().splitlines()


def canvas(height, rows=1, columns=1, **how):
    figure, axes = plt.subplots(rows, columns, figsize=(WIDTH, height), layout="constrained", **how)
    return figure, axes


def save(figure, name):
    figure.savefig(FIGURES / f"{name}.png", dpi=DPI, facecolor="white", metadata={"Software": None})
    plt.close(figure)
    print(f"figures/{name}.png", flush=True)


def label(axes, x, y, text, colour, **how):
    axes.annotate(
        text, (x, y), xytext=(6, 0), textcoords="offset points", color=colour, va="center", **how
    )


def steps_axes(axes, ylabel, num_steps, room=1.4):
    """PPO steps along x, with room at the right for the names of the lines."""
    axes.set(
        ylabel=ylabel,
        xlim=(0, (num_steps - 1) * room),
        ylim=(-0.03, 1.05),
        yticks=(0, 0.25, 0.5, 0.75, 1),
    )
    axes.set_xticks(range(0, num_steps, 5))
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def headline():
    figure, (top, bottom) = canvas(5.4, 2, height_ratios=(3, 2), sharex=True)
    arms = {
        "synced": (RIGHT, "pushed each step"),
        "frozen": (WRONG, "never pushed"),
        "none": (OTHER, ""),
    }
    for arm, (colour, text) in arms.items():
        for axes, key in ((top, "accept_rate"), (bottom, "reward")):
            lines = [series(f"{arm}-{seed}", key) for seed in SEEDS]
            if lines[0][0] is None:
                continue
            mean = [statistics.fmean(at) for at in zip(*lines, strict=True)]
            style = {"color": colour, "linestyle": {"none": ":", "frozen": "--"}.get(arm, "-")}
            for line in lines:
                axes.plot(line, linewidth=0.7, alpha=0.5, color=colour)
            axes.plot(mean, linewidth=2.2, **style)
            if axes is top:
                label(
                    axes,
                    len(mean) - 1,
                    mean[-1],
                    f"{text}: {mean[-1]:.2f}",
                    colour,
                    fontweight="bold",
                )
    for y, arm in enumerate(arms):
        text = {"synced": "pushed", "frozen": "never pushed", "none": "no drafter"}[arm]
        reward = statistics.fmean(series(f"{arm}-{seed}", "reward")[-1] for seed in SEEDS)
        label(bottom, len(mean) - 1, 0.9 - 0.17 * y, f"{text}: {reward:.2f}", arms[arm][0])
    steps_axes(top, "drafts accepted", len(mean))
    steps_axes(bottom, "reward", len(mean))
    bottom.set_xlabel(
        f"PPO step (thick: mean, thin: seeds {', '.join(map(str, SEEDS))})", loc="left"
    )
    save(figure, "headline")


def figure_loss():
    """Fix 1: which parameters the MTP loss moves, and how far a whole run's policy was moved."""
    figure, (left, right) = canvas(2.9, 1, 2, width_ratios=(3, 4))
    row = next(
        line for line in print_lines("mtp_loss") if line.split()[:3] == ["untied", "1", "none"]
    ).split()[3:]
    names, marks = (
        ["embedding", "trunk", "norm", "head", "MTP"],
        {"stock": row[:5], "fixed": row[10:]},
    )
    for x, cells in enumerate(marks.values()):
        for y, mark in enumerate(cells):
            moves, is_mtp = mark == "#", y == 4
            colour = (RIGHT if is_mtp else WRONG) if moves else "#eeeeee"
            left.add_patch(plt.Rectangle((x + 0.03, y + 0.05), 0.94, 0.9, color=colour))
            text = "moves" if moves else "0"
            left.text(
                x + 0.5, y + 0.5, text, ha="center", va="center", color="white" if moves else RIGHT
            )
    left.set(xlim=(0, 2), ylim=(5, 0), title="gradient of the MTP loss")
    left.set_xticks([0.5, 1.5], marks)
    left.set_yticks([y + 0.5 for y in range(5)], names)
    left.tick_params(length=0)
    left.spines[:].set_visible(False)

    distances = json.loads((DATA / "head_distance.json").read_text())
    norms, groups = distances["norm of " + WEIGHTS_OF[0]], names[:4]
    for run, colour, shift, text in (
        ("none-unfix-loss", WRONG, -0.2, "stock"),
        ("none-0", RIGHT, 0.2, "fixed"),
    ):
        values = [distances[run][group] / norms[group] for group in groups]
        places = [y + shift for y in range(4)]
        right.barh(places, values, 0.36, color=colour)
        for y, value in zip(places, values, strict=True):
            amount = f"{value:.1%}" if value else "0, bit for bit"
            label(right, value, y, f"{text}: {amount}", colour)
    right.set(
        ylim=(3.6, -0.6),
        title="distance from the policy of a run\nwhose MTP loss weighs 0, after 30 steps",
    )
    right.set_xlim(
        0, 1.5 * max(distances["none-unfix-loss"][group] / norms[group] for group in groups)
    )
    right.set_yticks(range(4), groups)
    right.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, 0))
    right.spines[["top", "right"]].set_visible(False)
    save(figure, "fix1_loss")


def figure_mask():
    """Fix 2: the slots of a document that train depth 1, the share of prompt tokens in a run."""
    figure, (top, bottom) = canvas(4.2, 2, height_ratios=(4, 3))
    rows = {line.split()[0]: line.split()[1:9] for line in print_lines("mtp_mask")[:5]}
    num_prompt = rows["token"].count("P")
    for y, name in enumerate(("token", "before", "target", "drafted")):
        for x, cell in enumerate(rows[name]):
            # Slot x learns token x+2: on a prompt token that is a mistake.
            colour = {
                "#": WRONG if x + 2 < num_prompt else RIGHT,
                "P": "#bbbbbb",
                "R": "#555555",
            }.get(cell, "#f2f2f2")
            top.add_patch(plt.Rectangle((x + 0.04, y + 0.08), 0.92, 0.84, color=colour))
            text = (
                f"learns {x + 2}"
                if cell == "#"
                else {"P": f"prompt {x}", "R": f"response {x}"}.get(cell, "")
            )
            dark = colour not in ("#bbbbbb", "#f2f2f2")
            top.text(
                x + 0.5,
                y + 0.5,
                text,
                ha="center",
                va="center",
                fontsize=9,
                color="white" if dark else "black",
            )
    top.set(xlim=(0, 8), ylim=(4, 0), title="which slot trains draft depth 1, and on which token")
    top.set_yticks([0.5, 1.5, 2.5, 3.5], ["token", "before", 'rule="target"', 'rule="drafted"'])
    top.set_xticks([])
    top.tick_params(length=0)
    top.spines[:].set_visible(False)
    for run, colour, text in (("unfix-mask", WRONG, "--unfix mask"), ("synced-0", RIGHT, "fixed")):
        shares = series(run, "mtp_prompt_share")
        bottom.plot(shares, color=colour, linewidth=2)
        label(
            bottom, len(shares) - 1, shares[-1], f"{text}: {statistics.fmean(shares):.0%}", colour
        )
    bottom.set(
        title="share of the slots that train, whose target is a prompt token", ylim=(-0.02, 0.32)
    )
    bottom.set(
        xlabel="PPO step", xlim=(0, (len(shares) - 1) * 1.3), xticks=range(0, len(shares), 5)
    )
    bottom.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, 0))
    bottom.spines[["top", "right"]].set_visible(False)
    save(figure, "fix2_mask")


def figure_recompute():
    """Fix 3: bytes that one MTP layer keeps for the backward pass."""
    figure, axes = canvas(2.6)
    rows = [line.replace(",", "").split() for line in print_lines("bench_recompute")[1:4]]
    for y, (hidden, tokens, plain, recompute, _) in enumerate(rows):
        for shift, num_bytes, colour, text in (
            (-0.2, int(plain), WRONG, "without recompute"),
            (0.2, int(recompute), RIGHT, "with"),
        ):
            axes.barh(y + shift, num_bytes / 1e6, 0.36, color=colour)
            label(axes, num_bytes / 1e6, y + shift, f"{text}: {num_bytes / 1e6:.1f} MB", colour)
        rows[y] = f"hidden {hidden}\n{tokens} tokens"
    axes.set(xlabel="MB kept by one MTP layer for the backward pass", ylim=(2.5, -0.5))
    axes.set_xlim(0, 1.55 * axes.dataLim.x1)
    axes.set_yticks(range(3), rows)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "fix3_recompute")


def figure_reference():
    """Fix 4: what a reference model is made of, and what it does to the actor."""
    figure, axes = canvas(2.7)
    rows = [line.rsplit(None, 4) for line in print_lines("ref_disable")[1:]]
    parameters = [int(row[2].replace(",", "")) for row in rows]
    trunk = min(parameters)
    for y, (row, count) in enumerate(zip(rows, parameters, strict=True)):
        runs_mtp, keeps_actor = row[3] != "0", row[4] == "yes"
        axes.barh(y, trunk, 0.55, color=OTHER)
        axes.barh(y, count - trunk, 0.55, left=trunk, color=WRONG if runs_mtp else RIGHT)
        axes.text(trunk / 2, y, f"trunk {trunk:,}", ha="center", va="center", color="white")
        if count > trunk:
            text = f"MTP {count - trunk:,}"
            axes.text((trunk + count) / 2, y, text, ha="center", va="center", color="white")
        bad = runs_mtp or not keeps_actor
        text = f"MTP forwards a pass: {row[3]}" + (
            "" if keeps_actor else "\nthe actor built next has no MTP"
        )
        label(axes, max(parameters) * 1.01, y, text, WRONG if bad else RIGHT)
    axes.set(
        xlabel="parameters of a toy MiMo",
        ylim=(len(rows) - 0.5, -0.5),
        xlim=(0, max(parameters) * 1.68),
    )
    axes.set_xticks((0, 50_000, 100_000), ("0", "50,000", "100,000"))
    axes.set_yticks(range(len(rows)), [row[0].strip().replace(", ", ",\n") for row in rows])
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "fix4_reference")


def figure_drafter():
    """Fix 5: how many of the engine's decisions the trainer's drafts predict, and acceptance."""
    figure, panels = canvas(4.6, 2, sharex=True)
    runs = {
        "synced-0": (RIGHT, "-", "fixed"),
        "frozen-0": (WRONG, "--", "--unfix sync"),
        "unfix-parity": (WRONG, ":", "--unfix parity"),
    }
    for axes, key, title in zip(
        panels,
        ("replay_agreement", "accept_rate"),
        ("decisions predicted", "drafts accepted"),
        strict=True,
    ):
        for run, (colour, style, text) in runs.items():
            line = series(run, key)
            axes.plot(line, color=colour, linestyle=style, linewidth=2)
            label(axes, len(line) - 1, line[-1], f"{text}: {line[-1]:.3f}", colour)
        steps_axes(axes, title, len(line))
    panels[1].set_xlabel("PPO step (seed 0)")
    save(figure, "fix5_drafter")


def figure_metrics():
    """Fix 6: what the old formula makes of a drafter that is hardly ever right."""
    figure, axes = canvas(2.8)
    length, rate = series("frozen-0", "accept_length"), series("frozen-0", "accept_rate")
    old = [value / 2 for value in length]  # what --unfix metrics reports
    for line, colour, style, text in (
        (old, WRONG, "--", "bonus token counted"),
        (rate, RIGHT, "-", "accepted / drafted"),
    ):
        axes.plot(line, color=colour, linestyle=style, linewidth=2)
        label(axes, len(line) - 1, line[-1], f"{text}:\n{line[-1]:.2f}", colour)
    steps_axes(axes, "acceptance reported", len(rate))
    axes.set_xlabel("PPO step (--drafter frozen, seed 0)")
    save(figure, "fix6_metrics")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--fresh", action="store_true", help="delete figures/data/ of earlier measurements first"
    )
    if parser.parse_args().fresh:
        names = (
            [f"{name}.jsonl" for name in RUNS]
            + [f"{name}.txt" for name in PRINTS]
            + ["head_distance.json"]
        )
        for name in names:
            (DATA / name).unlink(missing_ok=True)
    measure()
    plt.rcParams.update({"font.size": 10, "axes.titlesize": 10, "axes.titlelocation": "left"})
    for draw in (
        headline,
        figure_loss,
        figure_mask,
        figure_recompute,
        figure_reference,
        figure_drafter,
        figure_metrics,
    ):
        draw()


if __name__ == "__main__":
    main()
