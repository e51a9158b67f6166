"""What drafting k tokens gives a rollout at MiMo-7B's shape, if acceptance is as given.

    none             no drafter               all engines start at once, one process each; then they
    k1, k2, k3       so many drafts a step    are measured in turn, while the others wait
    k3-dynamic       3 up to batch 32, then 0 (num_speculative_tokens_per_batch_size)

Weights are dummies, so acceptance is drawn (README.md here: "What drawn acceptance means"). Time is
real: target, drafter, rejection sampler and scheduler do what they always do. Rates: SkyRL's
published ones and those of a run of this repository.

Each arm samples TOKENS tokens a request (equal), and a mix whose lengths are lognormal, the longest
8 times the median, since real rollouts end in a small batch.

Run   python benchmarks/bench_rollout7b.py               about 5 minutes on an H200
Out   OUT/rollout7b.json
"""

import json
import math
import os
import pathlib
import sys
import tempfile
import time

import common  # isort: skip, before torch: it sets paths
import torch

import toy.model
from drafter_sync import DrafterSyncExtension

ARMS = ("none", "k1", "k2", "k3", "k3-dynamic")
SKYRL = (0.886, 0.770, 0.663)  # its per-position rates; unconditional, or their ratios would rise
DYNAMIC = [(1, 32, 3), (33, 1024, 0)]  # first batch size, last, drafts
PROMPT = 32  # tokens
TOKENS = 512  # of a response; in the mix up to twice as many
SPREAD = 8  # longest response by the median one, in the mix
AT_ONCE = 4  # engines of 30 GB on a card of 141 GB


class RatesWorker(DrafterSyncExtension):
    """vLLM reads the rates once, at its start; one engine serves several sets of them here."""

    def bench_set_rates(self, conditional):
        rates = self.model_runner.rejection_sampler.synthetic_conditional_rates
        rates.copy_(torch.tensor(conditional))


def conditional(rates):
    """Of a step that accepted all before it, the share that accepts this position too."""
    return [rate / before for rate, before in zip(rates, [1.0, *rates], strict=False)]


def measured_rates(path, num):
    """The synced arm's rates at batch 32 in a JSON of bench_rollout.py, if it drafted `num`."""
    if not os.path.exists(path):
        return None
    rows = json.loads(pathlib.Path(path).read_text()).get("synced", [])
    last = f"spec/accept_rate_pos_{num}"
    rows = [row for row in rows if last in row and row["batch"] == 32]
    return rows and [rows[0][last[:-1] + str(j + 1)] for j in range(num)]


def lognormal_lengths(num, longest):
    """`num` quantiles of a lognormal, shuffled; median longest / SPREAD, the last one `longest`."""
    quantiles = torch.distributions.Normal(0, 1).icdf((torch.arange(num) + 0.5) / num)
    lengths = (longest / SPREAD) * torch.exp(math.log(SPREAD) * quantiles / quantiles[-1])
    shuffled = lengths[torch.randperm(num, generator=torch.Generator().manual_seed(0))]
    return shuffled.round().clamp(min=1).int().tolist()


def measure(llm, arm, options, hf_config, rate_sets, save):
    rows, vocab = [], hf_config["vocab_size"]
    for source, rates in rate_sets.items():
        if rates:
            llm.collective_rpc("bench_set_rates", args=(conditional(rates),))
        for batch in options.batches:
            kinds = {"equal": [options.tokens] * batch}
            kinds["mix"] = lognormal_lengths(batch, 2 * options.tokens)
            generator = torch.Generator().manual_seed(0)
            prompts = torch.randint(vocab, (batch, PROMPT), generator=generator).tolist()
            common.timed_rollout(llm, prompts, [16] * batch, 1)  # compiles kernels
            for kind, lengths in kinds.items():
                row = {"arm": arm, "rates": source, "batch": batch, "lengths": kind}
                row |= common.timed_rollout(llm, prompts, lengths, options.repeats)
                rows.append(row)
                save(rows=rows)


def run_arm(options, hf_config, dtype, save):
    """In a child. Its part is named ARM or ARM/piecewise."""
    arm, _, piecewise = options.part.partition("/")
    num_drafts = int(arm[1]) if arm != "none" else 0
    rate_sets = {"none": None}
    if num_drafts:
        rate_sets = {"SkyRL": SKYRL[:num_drafts], "ours": options.rates[:num_drafts]}
        if options.device == "cpu":  # vLLM's CPU backend knows no synthetic acceptance
            rate_sets = {"real": None}
    settings = dict(num_drafts=num_drafts, max_num_seqs=max(options.batches))
    settings |= dict(max_model_len=PROMPT + 2 * options.tokens + 16, disable_log_stats=False)
    settings["worker_extension_cls"] = "bench_rollout7b.RatesWorker"
    speculative = {}
    if options.device == "cuda":
        speculative["rejection_sample_method"] = "synthetic"
        speculative["synthetic_acceptance_rates"] = list(SKYRL[:num_drafts])
    if arm.endswith("dynamic"):
        rate_sets.pop("ours", None)
        speculative["num_speculative_tokens_per_batch_size"] = DYNAMIC
    if num_drafts:
        settings["speculative_config"] = speculative
    if options.device == "cuda":
        settings |= common.cuda_graphs(num_drafts, max(options.batches), bool(piecewise))
        settings |= dict(gpu_memory_utilization=0.1, kv_cache_memory_bytes=int(10.75 * 2**30))
    os.environ["VLLM_CACHE_ROOT"] = f"{options.work}/{arm}"  # of its own: several start at once
    folder = f"{options.work}/{options.part}/model"
    llm, facts = common.start_engine(folder, hf_config, dtype, **settings)
    save(engine=facts, ready=True)
    sys.stdin.readline()  # the parent's word that the card is free
    measure(llm, arm, options, hf_config, rate_sets, save)


def start_all(arms, work, deadline):
    """{arm: (child, part)} of those that got ready, {arm: result} of those that did not.

    CUDA graphs of the whole step have died in vLLM 0.25.1's capture of the drafter: what died is
    tried once more with piecewise graphs.
    """
    waiting = {arm: (common.start_child(arm, work), arm) for arm in arms}
    ready, failed = {}, {}
    while waiting and time.perf_counter() < deadline:
        time.sleep(0.5)
        for arm, (child, part) in list(waiting.items()):
            path = pathlib.Path(f"{work}/{part}.json")
            if path.exists() and json.loads(path.read_text()).get("ready"):
                ready[arm] = waiting.pop(arm)
            elif child.poll() is not None:
                failed[arm] = common.end_child(*waiting.pop(arm), work, 1)
                if part == arm:
                    os.makedirs(f"{work}/{arm}", exist_ok=True)
                    part = f"{arm}/piecewise"
                    waiting[arm] = common.start_child(part, work), part
    for arm, (child, part) in waiting.items():
        failed[arm] = common.end_child(child, part, work, 1)
    return {arm: ready[arm] for arm in arms if arm in ready}, failed


def main():
    parser = common.parser(__doc__)
    parser.add_argument("--rates-from", default=f"{common.RESULTS}/rollout_medium.json")
    options = parser.parse_args()
    # Without such a run: the trained toy's, at temperature 1.
    options.rates = measured_rates(options.rates_from, 3) or (0.993, 0.987, 0.975)
    options.batches, options.tokens = [8, 32, 128], TOKENS
    if options.tiny:
        options.batches, options.tokens, options.repeats = [2, 4], 16, 1
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    hf_config = toy.model.mimo_config(**(common.TINY if options.tiny else common.MIMO_7B))
    if options.part:
        common.child_main(lambda save: run_arm(options, hf_config, dtype, save), options)

    began, rows, parts = time.perf_counter(), [], {}
    result = {"benchmark": "rollout7b", "tokens": options.tokens}
    result |= {"skyrl": SKYRL, "ours": options.rates} | common.provenance(options)
    at_once = AT_ONCE if options.device == "cuda" else 1
    with tempfile.TemporaryDirectory(prefix="bench_") as work:
        for first in range(0, len(ARMS), at_once):
            deadline = began + options.limit_s
            children, failed = start_all(ARMS[first : first + at_once], work, deadline)
            parts |= failed
            print(f"{len(children)} engines after {time.perf_counter() - began:.0f} s", flush=True)
            for arm, (child, part) in children.items():
                common.go_on(child)
                left = deadline - time.perf_counter()
                parts[arm] = common.end_child(child, part, work, left)
                rows += parts[arm].pop("rows", [])
                result |= {"seconds": time.perf_counter() - began, "parts": parts}
                result["rows"] = common.with_speedups(rows, "batch", "lengths")
                common.write_json(f"{options.out}/rollout7b.json", result)
    columns = ["arm", "rates", "batch", "lengths", "tokens_per_s", "spec/accept_length_micro"]
    common.table(rows, [*columns, "speedup"])
    print(f"{result.get('seconds', 0):.0f} s")
    failures = [f"{arm}: {part['error']}" for arm, part in parts.items() if "error" in part]
    sys.exit("\n".join(failures) or 0)


if __name__ == "__main__":
    main()
