"""Three drafts from one MTP layer: which training do they want? Runs, a figure and a table.

    arms      frozen     never pushed after warm-up
              depth 1    the layer is trained at depth 1 alone, as with one draft
              repeated   Megatron's mtp_use_repeated_layer: depth j attends to depth j alone
              exact      the recursion that the engine runs (mtp_recursion.py), cross entropy
              exact, TV  the same, with acceptance itself as objective (total variation)
    drafts    arg-max or sampled (vLLM's draft_sample_method)
    policy    plain; with an entropy bonus that keeps its entropy near 1 nat; and of two counters
              that take turns, where the last token alone does not tell the next
    seeds     0, 1, 2; each arm gets the same number of updates

Run     python figures/compare_drafts.py           measures what figures/data/drafts.jsonl lacks
                                                   (all of it: about an hour on 2 cores), and draws
        python figures/compare_drafts.py --draw    only draws, from seeds that are complete
"""

import collections
import concurrent.futures
import itertools
import json
import pathlib
import statistics
import subprocess
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = pathlib.Path(__file__).resolve().parents[1]
DATA, OUT = ROOT / "figures" / "data" / "drafts.jsonl", ROOT / "runs" / "drafts"
ARMS = {
    "frozen": "--drafter frozen",
    "depth 1": "--trained-drafts 1",
    "repeated": "--unfix recursion",
    "exact": "",
    "exact, TV": "--objective total_variation",
}
SAMPLING = {"arg-max": "greedy", "sampled": "probabilistic"}
POLICIES = {"two counters": "--lag 2", "plain": "", "entropy": "--entropy-coef 0.17"}
SEEDS = 0, 1, 2
GRID = POLICIES, SEEDS, SAMPLING, ARMS
KEPT = (
    "accept_length",
    "spec/accept_rate_pos_1",
    "spec/accept_rate_pos_2",
    "spec/accept_rate_pos_3",
    "replay_agreement",
    "entropy",
    "reward",
    "train_s",
)
LAST = 10  # steps whose mean is the table's number


def measure(run):
    """One training run of 20 steps at three drafts; a line of lists, one entry a step."""
    arm, sampling, policy, seed = run
    out = OUT / "-".join(map(str, run)).replace(" ", "_").replace(",", "")
    flags = f"--drafts 3 {ARMS[arm]} --draft-sampling {SAMPLING[sampling]} {POLICIES[policy]}"
    command = [sys.executable, "train_mimo.py", *flags.split(), "--seed", str(seed)]
    command += ["--steps", "20", "--save-every", "0", "--out", str(out), "--overwrite"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    line = dict(arm=arm, drafts=sampling, policy=policy, seed=seed, flags=" ".join(flags.split()))
    for key in KEPT:
        line[key] = [step[key] and float(f"{step[key]:.4g}") for step in steps]
    return line


def measure_all():
    """Whatever is missing in the data file, two runs at a time; each is kept as soon as it ends."""
    OUT.mkdir(parents=True, exist_ok=True)
    done = {run_of(line) for line in read()} if DATA.exists() else set()
    # Seed by seed: a measurement that is cut short has all arms with fewer seeds.
    runs = [(arm, how, policy, seed) for policy, seed, how, arm in itertools.product(*GRID)]
    todo = [run for run in runs if run not in done]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = [pool.submit(measure, run) for run in todo]
        for i, future in enumerate(concurrent.futures.as_completed(running), 1):
            with DATA.open("a") as file:
                file.write(json.dumps(future.result()) + "\n")
            print(f"{i} of {len(todo)}", flush=True)


def read():
    return [json.loads(line) for line in DATA.read_text().splitlines()]


def complete(lines):
    """Those of seeds for which every arm was measured, so that arms are compared on equal seeds."""
    arms = collections.Counter((x["policy"], x["drafts"], x["seed"]) for x in lines)
    return [x for x in lines if arms[x["policy"], x["drafts"], x["seed"]] == len(ARMS)]


def run_of(line):
    return line["arm"], line["drafts"], line["policy"], line["seed"]


def mean_of(lines, key, steps):
    """Mean over seeds and the given steps."""
    return statistics.fmean(x for line in lines for x in line[key][steps])


def table(lines):
    """Accepted length and the share of steps that accepted 1, 2, 3 drafts, over the last steps."""
    print("| task | drafts | training | seeds | length | pos 1 | pos 2 | pos 3 | entropy |")
    print("|---|---|---|---|---|---|---|---|---|")
    for policy, sampling, arm in itertools.product(POLICIES, SAMPLING, ARMS):
        of = [line for line in lines if run_of(line)[:3] == (arm, sampling, policy)]
        cells = [f"{mean_of(of, key, slice(-LAST, None)):.2f}" for key in KEPT[:4]]
        cells += [f"{mean_of(of, 'entropy', slice(-LAST, None)):.2f}"]
        print("|", " | ".join([policy, sampling, arm, str(len(of)), *cells]), "|")


def draw(lines):
    colours = dict(zip(ARMS, ("#6e6e6e", "#D55E00", "#CC79A7", "#0072B2", "#009E73"), strict=True))
    figure, axes = plt.subplots(
        3, 2, figsize=(7.6, 7.2), layout="constrained", sharex=True, sharey=True
    )
    for (row, policy), (column, sampling) in itertools.product(
        enumerate(POLICIES), enumerate(SAMPLING)
    ):
        panel = axes[row][column]
        for arm in ARMS:
            of = [
                line["accept_length"]
                for line in lines
                if run_of(line)[:3] == (arm, sampling, policy)
            ]
            panel.plot(
                [statistics.fmean(at) for at in zip(*of, strict=True)],
                color=colours[arm],
                label=arm,
            )
        name = {"plain": "plain policy", "entropy": "entropy near 1 nat"}.get(policy, policy)
        panel.set_title(f"{name}, {sampling} drafts", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes[0][0].set(ylim=(1, 4))
    axes[0][0].legend(fontsize=8)
    figure.supylabel("tokens a verify step (at most 4)")
    figure.supxlabel("PPO step, mean of the seeds measured")
    figure.savefig(ROOT / "figures" / "fix7_drafts.png", dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    if "--draw" not in sys.argv:
        measure_all()
    table(complete(read()))
    draw(complete(read()))
