"""Does drafting pay: tokens a second with no drafter, a frozen one and a synced one.

    warm-up      policy and MTP layer learn to count, the layer at as many depths as it will draft
    shift        PPO with train_mimo's functions, only the target pushed: the drafter falls behind
    frozen       the same prompts in batches of 8, 32 and 128, temperature 1, CUDA graphs
    synced       the same again in the same engine, after a push to target and drafter (fix 5)
    none         the same again in an engine without drafter, in a process of its own

If PPO is not done in its time, supervised steps towards "+2" finish the shift; the result says so.
Measured is plain `llm.generate`; acceptance comes from the engine's own counters.

Run   python benchmarks/bench_rollout.py --drafts 3     5 minutes on an H200, 0.53 B parameters
Out   OUT/rollout_medium.json, or rollout_medium_k3.json for 3 drafts; rewritten after each arm
"""

import dataclasses
import sys
import tempfile
import time
import unittest.mock

import common  # isort: skip, before torch: it sets paths
import torch

import toy.model
import toy.task
import train_mimo
from drafter_sync import megatron_to_hf, sync_weights
from mtp_loss import draft_tokens
from spec_metrics import replay_acceptance, summarize

# Heads of 128, as MiMo-7B's. Learning rates: the usual ones of a model of this size.
SIZES = {
    "tiny": dict(prompts=16, response_tokens=24),
    "medium": dict(
        layers=16, hidden=1536, heads=12, groups=4, ffn=4096, vocab=32768, symbols=512, lr=3e-4,
        mtp_lr=6e-4, prompts=32, response_tokens=512,
    ),
}  # fmt: skip
CHUNK = 25  # supervised steps between two looks at what they reached
WARMUP_PROMPTS = 16  # sequences a step
SHIFTED = 0.9  # share of "+2" in the responses


# ---- Warm-up and shift --------------------------------------------------------------------------
@torch.no_grad()
def look(actor, args, device, num=4):
    """How far training is, over a whole response, without an engine; probabilities and rates.

    greedy      "+1" is the policy's arg-max (warm-up teaches it in 70 % of steps)
    accepted    of the drafts for such a greedy response, decided step by step as the engine does
    plus_two    the policy's probability of "+2"
    """
    length, first = toy.task.MAX_PROMPT + args.response_tokens, toy.task.MAX_PROMPT - 1
    starts = torch.arange(num)[:, None] * (args.symbols // num)
    tokens_BS = ((starts + torch.arange(length)) % args.symbols).to(device)
    position_ids = torch.arange(length, device=device).expand(num, -1)
    with train_mimo.skip_mtp(actor):
        probs_BSV = actor(tokens_BS, position_ids, None).float().softmax(-1)
    with train_mimo.match_vllm_mimo(actor):
        drafts_KBS = draft_tokens(actor, tokens_BS, position_ids, None, num_drafts=args.drafts)
    decisions = []
    for tokens, drafts in zip(tokens_BS.tolist(), drafts_KBS.cpu().unbind(1), strict=True):
        decisions += replay_acceptance(tokens, toy.task.MAX_PROMPT, drafts)
    two = probs_BSV[:, first:].gather(2, (tokens_BS[:, first:, None] + 2) % args.symbols)
    greedy = probs_BSV.argmax(-1)[:, first:-1] == tokens_BS[:, first + 1 :]
    return {
        "greedy": greedy.float().mean().item(),
        "accepted": sum(decisions) / (len(decisions) * args.drafts),
        "plus_two": two.mean().item(),
    }


def supervised(name, done, trainer, args, limit_s):
    """train_mimo's warm-up until `done(look())`, args.warmup_steps or `limit_s` seconds."""
    began, steps, seen = time.perf_counter(), 0, {}
    chunk = dataclasses.replace(args, warmup_steps=CHUNK, prompts=WARMUP_PROMPTS)
    while steps < args.warmup_steps and time.perf_counter() - began < limit_s:
        ramp = min(1.0, (1 + steps / CHUNK) / 3)  # Adam's first steps are the wildest
        groups = trainer.optimizer.adam.param_groups
        for group, rate in zip(groups, (args.lr, args.mtp_lr), strict=True):
            group["lr"] = ramp * rate
        with unittest.mock.patch.object(train_mimo, "write_checkpoint", lambda *unused: None):
            train_mimo.warm_up(trainer, chunk)
        steps, seen = steps + CHUNK, look(trainer.actor, args, trainer.device)
        print(f"{name} {steps:4d}", *(f"{key} {value:.3f}" for key, value in seen.items()))
        if done(seen):
            break
    return {"steps": steps, "seconds": time.perf_counter() - began} | seen


def shift(trainer, reference, llm, args, options):
    """PPO, target pushed alone, until most steps are "+2"; supervision if that is too slow."""
    lines, began = [], time.perf_counter()
    rate = args.lr / 4  # warm-up's would throw the policy far
    frozen = dataclasses.replace(args, drafter="frozen")
    for step in range(options.ppo_steps):
        now = dataclasses.replace(frozen, lr=rate)
        samples = train_mimo.roll_out(llm, trainer, step, now)
        batch = train_mimo.make_batch(samples, trainer.device)
        metrics = train_mimo.score(trainer, reference, batch, samples, now)
        metrics |= summarize([sample["counts"] for sample in samples])
        metrics |= train_mimo.update(trainer, samples, 0, now)  # 0: the rate is set here
        train_mimo.push(llm, trainer, now)
        lines.append({"step": step, "lr": rate} | metrics)
        columns = ["step", "reward", "spec/accept_rate_micro", "clip_fraction", "kl"]
        print(*(f"{column} {lines[-1][column]:.3f}" for column in columns), flush=True)
        # The share of clipped tokens says how far a step went.
        if metrics["clip_fraction"] < 0.1:
            rate *= 1.5
        elif metrics["clip_fraction"] > 0.3:
            rate *= 0.67
        if metrics["reward"] > SHIFTED or time.perf_counter() - began > options.ppo_limit_s:
            break
    if lines[-1]["reward"] > 0.5:
        return {"ppo": lines, "shift": f"PPO, {len(lines)} steps"}
    softer = dataclasses.replace(args, lr=args.lr / 2)
    with unittest.mock.patch.object(toy.task, "WARMUP_SHARE_OF_PLUS_TWO", 0.95):
        done = "supervised shift", lambda seen: seen["plus_two"] > 0.9
        reached = supervised(*done, trainer, softer, options.shift_limit_s)
    train_mimo.push(llm, trainer, frozen)
    how = f"PPO, {len(lines)} steps, then {reached['steps']} supervised steps towards +2"
    return {"ppo": lines, "shift": how, "supervised": reached}


# ---- Measuring ----------------------------------------------------------------------------------
def measure(llm, arm, args, options, save):
    """One row a batch size: tokens a second, acceptance by position."""
    rows = []
    for batch in options.batches:
        generator = torch.Generator().manual_seed(7)  # the same prompts for every arm
        pairs = toy.task.make_prompts(batch, 4, args.symbols, generator)
        batches = [prompt for prompt, _ in pairs], [args.response_tokens] * batch
        common.timed_rollout(llm, *batches, 1)  # compiles, captures, grows caches
        row = {"arm": arm, "batch": batch} | common.timed_rollout(llm, *batches, options.repeats)
        rows.append(row)
        print(f"{arm} batch {batch}: {row['tokens_per_s']:,.0f} tokens/s", flush=True)
        save(**{arm: rows})


def engine_settings(args, options, num_drafts):
    num_seqs = max(args.prompts, *options.batches)
    settings = dict(num_drafts=num_drafts, max_num_seqs=num_seqs, disable_log_stats=False)
    if options.device == "cuda":
        settings |= common.cuda_graphs(num_drafts, num_seqs)
        settings["kv_cache_memory_bytes"] = 8 << 30
    return settings


def speculating(options, args, dtype, save):
    """The first process: warm-up, shift, the frozen and the synced arm."""

    def build(*config, **settings):  # norms too: Megatron's local ones are float32, vLLM's are not
        return toy.model.build_model(*config, **settings).to(dtype)

    unittest.mock.patch.object(train_mimo, "build_model", build).start()
    trainer = train_mimo.build_trainer(args)
    save(parameters=toy.model.num_parameters(trainer.actor))

    def warm(seen):
        return min(seen["accepted"], seen["greedy"]) > 0.95

    warmup = supervised("warm-up", warm, trainer, args, options.warmup_limit_s)
    save(warmup=warmup)
    train_mimo.write_checkpoint(trainer, f"{args.out}/reference")
    reference = train_mimo.load_reference(trainer, args)
    settings = engine_settings(args, options, args.drafts)
    llm, facts = common.start_engine(f"{args.out}/reference", trainer.hf_config, dtype, **settings)
    save(engine=facts, **shift(trainer, reference, llm, args, options))
    save(shifted=look(trainer.actor, args, trainer.device))
    measure(llm, "frozen", args, options, save)
    sync_weights(llm, megatron_to_hf(trainer.actor.named_parameters(), trainer.hf_config))
    measure(llm, "synced", args, options, save)
    # After the push the trainer's drafts must predict what the engine accepts.
    samples = train_mimo.roll_out(llm, trainer, 1_000_000, args)
    batch = train_mimo.make_batch(samples, trainer.device)
    drafts = train_mimo.trainer_drafts(trainer.actor, batch, args)
    save(after_push=train_mimo.acceptance(trainer.actor, batch, samples, drafts, args))


def none(options, args, dtype, save):
    """The second process: no speculation. What the weights say does not change the speed."""
    hf_config = toy.model.mimo_config(
        num_layers=args.layers, hidden_size=args.hidden, num_heads=args.heads,
        num_groups=args.groups, ffn_size=args.ffn, vocab_size=args.vocab,
        max_positions=max(128, 2 * args.response_tokens),
    )  # fmt: skip
    settings = engine_settings(args, options, 0)
    llm, facts = common.start_engine(f"{options.work}/none", hf_config, dtype, **settings)
    save(engine_of_none=facts)
    sys.stdin.readline()  # the parent's word that the card is free
    measure(llm, "none", args, options, save)


# ---- The run ------------------------------------------------------------------------------------
def main():
    parser = common.parser(__doc__)
    parser.add_argument("--drafts", type=int, default=1, help="k")
    parser.add_argument("--warmup-limit-s", type=float, default=60)
    parser.add_argument("--ppo-limit-s", type=float, default=50)
    parser.add_argument("--shift-limit-s", type=float, default=20)
    options = parser.parse_args()
    options.batches, warmup_steps, options.ppo_steps = [8, 32, 128], 600, 24
    if options.tiny:
        options.batches, warmup_steps, options.ppo_steps, options.repeats = [2, 4], 50, 2, 1
    size = "tiny" if options.tiny else "medium"
    args = train_mimo.Args(
        device=options.device, drafts=options.drafts, warmup_steps=warmup_steps,
        out=f"{options.work}/run", **SIZES[size],
    )  # fmt: skip
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    if options.part:
        run = none if options.part == "none" else speculating
        common.child_main(lambda save: run(options, args, dtype, save), options)

    began, errors = time.perf_counter(), {}
    drafts = f"_k{options.drafts}" if options.drafts > 1 else ""
    path = f"{options.out}/rollout_{size}{drafts}.json"
    result = {"benchmark": "rollout", "drafts": options.drafts, "args": vars(args)}
    result |= common.provenance(options)
    with tempfile.TemporaryDirectory(prefix="bench_") as work:
        children = {part: common.start_child(part, work) for part in ("speculating", "none")}
        for part, child in children.items():
            if part == "none":
                common.go_on(child)
            kept = 40 if part == "speculating" else 0  # seconds for the arm that all are set beside
            left = options.limit_s - kept - (time.perf_counter() - began)
            found = common.end_child(child, part, work, left)
            errors |= {part: found["error"]} if "error" in found else {}
            result |= found | {"seconds": time.perf_counter() - began}
            common.write_json(path, result)
    rows = [row for arm in ("none", "frozen", "synced") for row in result.get(arm, [])]
    common.with_speedups(rows, "batch")
    common.write_json(path, result)
    rates = [f"spec/accept_rate_pos_{j + 1}" for j in range(options.drafts)]
    columns = ["arm", "batch", "tokens_per_s", "spec/accept_length_micro"]
    common.table(rows, [*columns, *rates, "speedup"])
    agreement = result.get("after_push", {}).get("replay_agreement")
    print(f"{result.get('shift')}; decisions predicted after the push: {agreement}")
    sys.exit("\n".join(f"{part}: {error}" for part, error in errors.items()) or 0)


if __name__ == "__main__":
    main()
