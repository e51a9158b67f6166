"""MTP inside RL, end to end: Megatron trains a small MiMo, vLLM samples with its MTP drafter.

        warm-up  supervised, policy and MTP layer
           |
           v
    +-> rollout  vLLM drafts with the MTP layer, verifies with the policy     toy/engine.py
    |   scores   actor without its MTP block, reference without MTP       ref_disable.py    fix 4
    |   replay   each accept / reject decision, predicted by the trainer  spec_metrics.py   fix 6
    |   update   PPO + MTP loss that never moves the policy               mtp_loss.py       fix 1
    |            on response tokens alone                                 mtp_mask.py       fix 2
    |            with recompute of MTP layers on packed sequences         mtp_recompute.py  fix 3
    +-- push     weights to vLLM's target and drafter, proven             drafter_sync.py   fix 5

Task    Tokens are numbers modulo the vocabulary. Warm-up teaches "+1" (70 %) and "+2" (30 %); the
        reward of a response is its share of "+2" steps. PPO drives the policy away from what the
        drafter learned at first.
Run     python train_mimo.py                2 minutes on 2 cores; --help explains every argument
        python train_mimo.py --drafts 3     three drafts from the one MTP layer, mtp_recursion.py
        python train_mimo.py --unfix loss   the same with a fix taken out
        torchrun --nproc-per-node 4 train_mimo.py --tensor-parallel 2    2 ranks a model, 2 pairs
Output  OUT/metrics.jsonl (one line a step), OUT/curves.png, OUT/checkpoint/ (loads in stock vLLM)
"""

import toy.engine  # isort: skip  # first: torch and vLLM read what it sets when they are imported

import collections
import contextlib
import dataclasses
import logging
import os
import shutil
import sys
import time
import warnings
from types import SimpleNamespace
from typing import Literal

if __name__ in ("__main__", "__mp_main__") and "--verbose" not in sys.argv:
    logging.disable(logging.WARNING)  # errors are still shown
    warnings.simplefilter("ignore")

import torch
import torch.nn.functional as F
import tyro
from safetensors import safe_open

import spec_metrics
from drafter_sync import hf_to_megatron, match_vllm_mimo, megatron_to_hf, sync_weights
from mtp_loss import draft_tokens, patch_mtp_loss
from mtp_mask import depth_mask, depth_targets, expand_response_mask
from mtp_recompute import patch_mtp_recompute
from ref_disable import drop_mtp_weights, skip_mtp, without_mtp_config
from toy.before import repeated_layer, stock_depth, unswap
from toy.model import (
    build_model,
    copies,
    fill,
    forward,
    gather_vocabulary,
    init_megatron,
    mimo_config,
    num_parameters,
    pack,
    torchrun,
)
from toy.optimizer import (
    Optimizer,
    data_parallel_group,
    sum_over_data_parallel,
)
from toy.ppo import estimate_advantages, label_logprobs, mean_entropy
from toy.report import columns, draw, read_baseline, report, short, speedup_estimate
from toy.state import restore, save
from toy.task import MAX_PROMPT, make_prompts, make_sequences, token_rewards

Fix = Literal["loss", "mask", "recompute", "ref", "sync", "metrics", "parity", "recursion"]
Fixes = tuple[Fix, ...]


@dataclasses.dataclass
class Args:
    """PPO on a small MiMo: Megatron trains, vLLM samples with its MTP drafter."""

    steps: int = 30  # PPO steps: a rollout, its updates and a push each
    seed: int = 0  # seed of weights, prompts and sampling; the same seed gives the same numbers
    out: str = "runs/mimo"  # folder for metrics.jsonl, curves.png and checkpoint/
    save_every: int = 10  # steps between saves of the whole state to OUT/state.pt; 0 never saves
    resume: str = ""  # folder of a run to go on with, from its last save and with its arguments
    overwrite: bool = False  # use --out although it holds something, deleting what it holds
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA if there is one
    drafter: Literal["synced", "frozen", "none"] = "synced"  # push to it, never do, or have none
    drafts: int = 1  # tokens that the MTP layer drafts in a verify step
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy"  # vLLM's draft_sample_method
    trained_drafts: int = 0  # draft depths that train the MTP layer; 0: as many as it drafts
    objective: Literal["cross_entropy", "total_variation"] = "cross_entropy"  # of the MTP layer
    engine: Literal["inprocess", "process"] = "inprocess"  # with several ranks always process
    tensor_parallel: int = 1  # how many of the ranks hold a model together
    unfix: Fixes = ()  # take fixes out; parity: match_vllm_mimo, recursion: Megatron's instead
    baseline: str = ""  # folder of a finished --drafter none, to report the speed-up against
    temperature: float = 1.0  # sampling temperature; log-probs are of the tempered distribution
    mtp_scale: float = 0.2  # lambda, the weight of the MTP loss
    mtp_rule: Literal["target", "drafted"] = "drafted"  # which slots train the MTP layer
    recompute: bool = True  # full activation recompute, of trunk and MTP layer
    verbose: bool = False  # show what vLLM and Megatron log
    warmup_steps: int = 100  # supervised steps before PPO
    prompts: int = 64  # prompts a rollout, one response each
    response_tokens: int = 28  # longest response; lengths vary from half of it on
    epochs: int = 2  # passes over a rollout
    minibatches: int = 4  # updates a pass
    lr: float = 1e-3  # of policy and value head, falling linearly to a tenth of it
    mtp_lr: float = 3e-3  # of the MTP layer
    clip: float = 0.2  # PPO clip range of the probability ratio
    kl_coef: float = 0.01  # weight of the KL penalty towards the reference, in the reward
    entropy_coef: float = 0.0  # weight of the entropy bonus, in the policy loss
    gamma: float = 0.3  # discount; small, since a token decides its own reward only
    gae_lambda: float = 0.9  # GAE lambda
    max_grad_norm: float = 1.0  # gradient clip, of policy and MTP layer apart
    layers: int = 2  # transformer layers of the trunk
    hidden: int = 128  # hidden size
    heads: int = 4  # attention heads; vLLM on CPU wants a head size of 32 or more
    groups: int = 2  # query groups, that is key/value heads
    ffn: int = 256  # feed-forward size
    vocab: int = 64  # vocabulary
    symbols: int = 64  # how many tokens of the vocabulary the task counts with
    lag: int = 1  # tokens back that it counts on from; 2: two counters take turns


def train(args, saved=None):
    """The whole run. What it calls follows, in this order."""
    baseline = read_baseline(args)
    trainer = build_trainer(args)
    if not saved:
        warm_up(trainer, args)
    reference = load_reference(trainer, args)  # fix 4: no MTP layer is built, no MTP tensor read
    first_step = restore(trainer, saved, args) if saved else 0
    llm = start_rollouts(trainer, args)

    for step in range(first_step, args.steps):
        if args.save_every and step % args.save_every == 0:
            save(trainer, step, args)
        clock = [time.perf_counter()]

        samples = roll_out(llm, trainer, step, args)
        clock.append(time.perf_counter())

        batch = make_batch(samples, trainer.device)  # fix 2: masks aligned to packed ids
        metrics = score(trainer, reference, batch, samples, args)  # fix 4: runs without MTP
        drafts = trainer_drafts(trainer.actor, batch, args)  # what the engine should have drafted
        metrics |= acceptance(trainer.actor, batch, samples, drafts, args)  # fix 6: and replayed
        warn(trainer, batch, samples, drafts, metrics, args)
        metrics |= update(trainer, samples, step, args)  # fixes 1, 2, 3
        clock.append(time.perf_counter())

        push(llm, trainer, args)  # fix 5: to the target and to the drafter
        clock.append(time.perf_counter())
        report(step, metrics, samples, clock, baseline, args)

    write_checkpoint(trainer, f"{args.out}/checkpoint")
    if args.save_every:
        save(trainer, args.steps, args)
    draw(args.out)


# ---- Before the loop ----------------------------------------------------------------------------
def build_trainer(args):
    """All that changes from step to step: actor, value head, optimizer, generator of prompts."""
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.set_num_threads(1)  # at this size a second thread costs more than it brings
    init_megatron(device, args.tensor_parallel)
    if torch.distributed.get_rank():
        sys.stdout = open(os.devnull, "w")  # the first one speaks for all
    hf_config = mimo_config(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_heads=args.heads,
        num_groups=args.groups,
        ffn_size=args.ffn,
        vocab_size=args.vocab,
        # vLLM stops drafting near its last position: leave room.
        max_positions=max(128, MAX_PROMPT + args.response_tokens + 2 * args.drafts + 6),
    )
    settings = dict(mtp_loss_scaling_factor=args.mtp_scale, tensor_parallel=args.tensor_parallel)
    if args.recompute:
        full = dict(recompute_granularity="full", recompute_method="uniform")
        settings |= full | dict(recompute_num_layers=1)
    torch.manual_seed(args.seed)
    actor = build_model(hf_config, dtype=dtype, **settings).to(device)
    value_head = torch.nn.Linear(args.hidden, 1).to(device)
    norm = actor.decoder.final_layernorm
    norm.register_forward_hook(lambda module, _, out: setattr(actor, "trunk_state", out))
    of_policy = [p for name, p in actor.named_parameters() if not name.startswith("mtp.")]
    of_policy += value_head.parameters()
    groups = {"policy": (of_policy, args.lr), "mtp": (actor.mtp.parameters(), args.mtp_lr)}
    return SimpleNamespace(
        actor=actor,
        value_head=value_head,
        drafter=copies(actor.mtp),  # what the engine drafts with
        optimizer=Optimizer(groups, args.max_grad_norm),  # clips the two groups apart
        generator=torch.Generator().manual_seed(args.seed),
        hf_config=hf_config,
        device=device,
        dtype=dtype,
    )


def warm_up(trainer, args):
    """Supervised training of policy and MTP layer; writes the reference."""
    if args.overwrite and torch.distributed.get_rank() == 0:
        shutil.rmtree(args.out, ignore_errors=True)
    print(f"warm-up, {args.warmup_steps} steps", flush=True)
    rank, ranks = data_parallel_group().rank(), data_parallel_group().size()
    length, num = MAX_PROMPT + args.response_tokens, args.prompts // ranks
    task = args.symbols, trainer.generator, args.lag
    position_ids = torch.arange(length, device=trainer.device).expand(num, -1)
    loss_mask = depth_mask(position_ids >= 2, 0)  # 2: the shortest prompt
    for _ in range(args.warmup_steps):
        everyone = make_sequences(args.prompts, length, *task)
        input_ids = everyone[rank * num :][:num].to(trainer.device)
        labels = depth_targets(input_ids, 0)
        batch = dict(input_ids=input_ids, position_ids=position_ids, packed=None)
        # All shares count as many slots: the mean over all is the sum of each one's over the ranks.
        with train_mtp(trainer.actor, args, scale=args.mtp_scale / ranks):
            logits_TV = forward(trainer.actor, batch, labels, loss_mask)[loss_mask.flatten()]
            loss = F.cross_entropy(logits_TV.float(), labels[loss_mask])
            trainer.optimizer.step(loss / ranks)
    trainer.drafter = copies(trainer.actor.mtp)
    write_checkpoint(trainer, f"{args.out}/reference")


@contextlib.contextmanager
def train_mtp(actor, args, **settings):
    """A forward inside trains the MTP layer as vLLM's drafter uses it; yields the loss's record."""
    if "recursion" not in args.unfix:
        settings["num_drafts"] = num_trained(args)
    settings |= dict(rule=args.mtp_rule, objective=args.objective)
    with as_drafter(actor, args), patch_mtp_loss(actor, **settings) as mtp:  # fix 1
        yield mtp


@contextlib.contextmanager
def as_drafter(actor, args):
    off = contextlib.nullcontext()
    parity = off if "parity" in args.unfix else match_vllm_mimo(actor)  # fix 5
    recompute = off if "recompute" in args.unfix else patch_mtp_recompute()  # fix 3
    repeated = repeated_layer(actor, num_trained(args)) if "recursion" in args.unfix else off
    with parity, recompute, repeated:
        yield


def num_trained(args):
    return args.trained_drafts or args.drafts


def write_checkpoint(trainer, folder, drafter=None):
    """A Hugging Face checkpoint; drafter: MTP weights to write instead of the actor's."""
    parameters = dict(trainer.actor.named_parameters())
    parameters |= {f"mtp.{name}": tensor for name, tensor in (drafter or {}).items()}
    tensors = list(megatron_to_hf(parameters.items(), trainer.hf_config))
    if torch.distributed.get_rank() == 0:  # every rank takes part in gathering
        toy.engine.write_checkpoint(folder, trainer.hf_config, tensors)
    torch.distributed.barrier()


def load_reference(trainer, args):
    """The policy after warm-up, from a checkpoint that has MTP tensors (fix 4)."""
    mtp = "ref" in args.unfix
    hf_config = trainer.hf_config if mtp else without_mtp_config(trainer.hf_config)
    settings = dict(dtype=trainer.dtype, tensor_parallel=args.tensor_parallel)
    reference = build_model(hf_config, mtp=mtp, **settings)
    parameters = dict(reference.named_parameters())
    with safe_open(f"{args.out}/reference/model.safetensors", "pt") as file, torch.no_grad():
        named = ((name, None) for name in file.keys())
        names = [name for name, _ in (named if mtp else drop_mtp_weights(named))]
        tensors = ((name, file.get_tensor(name)) for name in names)
        for name, tensor in hf_to_megatron(tensors, hf_config, parameters):
            parameters[name].copy_(tensor)
    saved = num_parameters(trainer.actor) - num_parameters(reference)
    print(f"reference: {saved:,} parameters of MTP layers not built", flush=True)
    return reference.requires_grad_(False).to(trainer.device)


def start_rollouts(trainer, args):
    """vLLM beside the first rank; None on the others."""
    write_checkpoint(trainer, f"{args.out}/checkpoint", trainer.drafter)
    if torch.distributed.get_rank():
        return None
    print("starting vLLM", flush=True)
    sampling = {} if args.draft_sampling == "greedy" else {"draft_sample_method": "probabilistic"}
    llm = toy.engine.start_engine(
        f"{args.out}/checkpoint",
        process=args.engine == "process" or torch.distributed.get_world_size() > 1,
        num_drafts=args.drafts if args.drafter != "none" else 0,
        speculative_config=sampling,
        dtype=str(trainer.dtype).removeprefix("torch."),
        max_num_seqs=args.prompts,
        enforce_eager=trainer.device == "cpu",
        gpu_memory_utilization=0.3,
    )
    torch.set_num_threads(1)  # vLLM's CPU worker has set its own
    print(*map(short, columns(args)), flush=True)
    return llm


# ---- Rollout and scores -------------------------------------------------------------------------
def roll_out(llm, trainer, step, args):
    """Samples of the first rank's engine, on every rank: tokens, log-probs, decisions, counts."""
    task = args.symbols, trainer.generator, args.lag
    prompts, samples = make_prompts(args.prompts, args.response_tokens, *task), None
    if llm:
        first = (args.seed * 1_000_003 + step) * 1_000_003
        seeds = [(first + i) % 2**63 for i in range(len(prompts))]
        tokens, lengths = zip(*prompts, strict=True)
        samples = toy.engine.sample(llm, tokens, lengths, seeds, temperature=args.temperature)
        for sample in samples:
            sample["counts"] = count(sample.pop("output"), sample, args.drafts)
    everyone = [samples]
    torch.distributed.broadcast_object_list(everyone)
    return everyone[0]


def count(output, sample, num_drafts):
    """SpecCounts of a request, None without speculation; vLLM 0.25.1 leaves counting to us."""
    if sample["accepted"] is None or hasattr(output.outputs[0], "spec_decode_metrics"):
        return spec_metrics.counts_from_vllm([output])[0]
    known = [number for number in sample["accepted"] if number is not None]
    positions = tuple(sum(number >= j for number in known) for j in range(1, 1 + num_drafts))
    return spec_metrics.SpecCounts(num_drafts * len(known), sum(known), len(known), positions)


def make_batch(samples, device, unfix=()):
    """Samples as one packed buffer; labels and loss masks are label-aligned."""
    sequences = [sample["prompt"] + sample["response"] for sample in samples]
    input_ids, position_ids, packed = pack(sequences, device)
    of_responses = [[1] * len(sample["response"]) for sample in samples]
    response_mask = torch.nested.nested_tensor(of_responses, layout=torch.jagged)
    whole = expand_response_mask(response_mask, [len(sequence) for sequence in sequences])
    token_mask, cu_seqlens = whole.values()[None].to(device), packed.cu_seqlens_q
    # Before verl#6432: the response mask at the start of each row, the rest filled with ones.
    mtp_token_mask = torch.ones_like(token_mask) if "mask" in unfix else token_mask
    # By rule "target", which is what the old mask got wrong; training counts by --mtp-rule.
    right, counted = (depth_mask(m, 1, cu_seqlens) for m in (token_mask, mtp_token_mask))
    return dict(
        input_ids=input_ids,
        position_ids=position_ids,
        packed=packed,
        token_mask=token_mask,  # token-aligned, as the next one
        mtp_token_mask=mtp_token_mask,
        labels=depth_targets(input_ids, 0, cu_seqlens),
        loss_mask=depth_mask(token_mask, 0, cu_seqlens),  # for the policy
        mtp_loss_mask=depth_mask(mtp_token_mask, 0, cu_seqlens),
        prompt_targets=(counted & ~right).sum(),
    )


def score(trainer, reference, batch, samples, args):
    """Adds old log-probs, advantages and returns to the samples."""
    actor, mask_T = trainer.actor, batch["loss_mask"][0]
    with torch.no_grad():
        with contextlib.nullcontext() if "ref" in args.unfix else skip_mtp(actor):  # fix 4
            logits_TV = forward(actor, batch)
        old_N = label_logprobs(logits_TV, batch, args.temperature)
        values_N = trainer.value_head(actor.trunk_state[:, 0].float())[mask_T, 0]
        kl_N = old_N - label_logprobs(forward(reference, batch), batch, args.temperature)
        entropy = mean_entropy(logits_TV[mask_T], args.temperature).item()
    rewards, lengths = [], [len(sample["response"]) for sample in samples]
    pieces = (x.split(lengths) for x in (old_N, values_N, kl_N))
    for sample, old, values, kl in zip(samples, *pieces, strict=True):
        reward = token_rewards(sample, args.symbols, args.lag)
        rewards.append(sum(reward) / len(reward))
        penalised = [r - args.kl_coef * k for r, k in zip(reward, kl.tolist(), strict=True)]
        advantages, returns = estimate_advantages(penalised, values.tolist(), args)
        sample |= dict(old=old.cpu(), advantages=advantages, returns=returns)
    if not torch.tensor(rewards).isfinite().all():
        raise RuntimeError("the reward is not finite; nothing was learned from this rollout")
    engine_N = torch.tensor([x for sample in samples for x in sample["logprobs"]])
    gap, kl = (old_N.cpu() - engine_N).abs().max().item(), kl_N.mean().item()
    return dict(reward=sum(rewards) / len(rewards), logprob_gap=gap, kl=kl, entropy=entropy)


# ---- Acceptance ---------------------------------------------------------------------------------
def trainer_drafts(actor, batch, args, **conventions):
    """What the engine drafts if it holds these weights: tokens `[k, T]` of each document."""
    ids = batch["input_ids"], batch["position_ids"], None
    how = dict(packed_seq_params=batch["packed"], num_drafts=args.drafts)
    with match_vllm_mimo(actor, **conventions):
        drafts = draft_tokens(actor, *ids, **how)
    return drafts[:, 0].cpu().split(batch["packed"].cu_seqlens_q.diff().tolist(), dim=1)


def acceptance(actor, batch, samples, drafts, args):
    """What the engine drafted and accepted, beside what the trainer says it should have (fix 6)."""
    metrics = spec_metrics.summarize([sample["counts"] for sample in samples])
    rate, length = (metrics.get(f"spec/accept_{name}_micro") for name in ("rate", "length"))
    if "metrics" in args.unfix and length:
        rate = length / 2  # before sglang#23530: a token that is never drafted counts as accepted
    requests = [(len(s["prompt"]), s["accepted"], s["drafted"]) for s in samples]
    agreement = None
    if args.drafter != "none" and args.draft_sampling == "greedy":  # each decision is predicted
        pairs = [
            spec_metrics.replay_agreement(s["prompt"] + s["response"], num, of, accepted, drafted)
            for s, of, (num, accepted, drafted) in zip(samples, drafts, requests, strict=True)
        ]
        agreed, total = map(sum, zip(*pairs, strict=True))
        agreement = agreed / total if total else None
    elif args.drafter != "none":  # their rates are
        odds = acceptance_odds(actor, batch, args)
        pairs = zip(requests, odds, strict=True)
        requests = [(num, of, accepted, drafted) for (num, accepted, drafted), of in pairs]
        metrics |= spec_metrics.compare_acceptance(requests)
    if length:
        for j, number in enumerate(drafted_per_position(samples), 1):
            metrics[f"drafted_pos_{j}"] = number
        # Decoding costs what it reads: head and MTP layer for a draft, head and trunk without.
        head, mtp, trunk = map(num_parameters, (actor.output_layer, actor.mtp, actor.decoder))
        cost = args.drafts * (mtp + head) / (trunk + head)
        metrics |= speedup_estimate(length, cost)
    return {"accept_rate": rate, "accept_length": length, "replay_agreement": agreement} | metrics


def drafted_per_position(samples):
    """Verify steps that drafted a 1st token, a 2nd, and so on."""
    drafted = [number for sample in samples for number in sample["drafted"]]
    return [sum(number >= j for number in drafted) for j in range(1, 1 + max(drafted))]


@torch.no_grad()
def acceptance_odds(actor, batch, args):
    """The chance that a draft sampled at a slot is accepted: `[k, T]` of each document."""
    states = []
    hook = actor.mtp.register_forward_hook(lambda module, given, out: states.append(out))
    trainer_drafts(actor, batch, args)
    hook.remove()
    logits, _ = actor.output_layer(states[0], weight=None)
    probs = (gather_vocabulary(logits)[:, 0].float() / args.temperature).softmax(-1)
    policy_TV, *drafts_TV = probs.chunk(1 + args.drafts)
    # Draft j at slot t is for the token that the policy predicts at slot t+j.
    policies_TV = (policy_TV.roll(-j, 0) for j in range(1, 1 + args.drafts))
    pairs = zip(policies_TV, drafts_TV, strict=True)
    odds_KT = torch.stack([spec_metrics.expected_acceptance(p, q) for p, q in pairs])
    return odds_KT.cpu().split(batch["packed"].cu_seqlens_q.diff().tolist(), dim=1)


def warn(trainer, batch, samples, drafts, metrics, args):
    """What a run must not pass over in silence, with the fault that explains it."""
    problems = list(problems_of(metrics, args, trainer.device))
    if not problems:
        return
    if metrics["replay_agreement"] is not None:
        causes = drafts_by_cause(trainer, batch, args)
        problems.append(explain_first(samples, drafts, causes))
    if torch.distributed.get_rank() == 0:
        print("WARNING:", *problems, file=sys.stderr, flush=True)


def problems_of(metrics, args, device):
    if metrics["accept_rate"] == 0:
        yield "No draft was accepted: a drafter without weights, or with another model's?"
    agreement = metrics["replay_agreement"]
    if args.drafter == "synced" and agreement is not None and agreement < 0.99:
        yield "The engine does not draft what the trainer would."
    parted = [name for name, z in metrics.items() if "/z_cond_pos_" in name and abs(z) > 4]
    if args.drafter == "synced" and parted:
        yield f"Drafts are not accepted as often as the trainer expects: {parted} are beyond 4."
    if device == "cpu" and metrics["logprob_gap"] > 1e-2:
        yield "Trainer and engine differ in log-probs: weights not in step, another temperature?"


def drafts_by_cause(trainer, batch, args):
    """The trainer's drafts with each fault that usually goes unnoticed planted in turn."""
    parameters = dict(trainer.actor.mtp.named_parameters())
    now = copies(trainer.actor.mtp)
    halves = now["layers.0.eh_proj.weight"].chunk(2, 1)
    swapped = {"layers.0.eh_proj.weight": torch.cat(halves[::-1], 1)}
    drafts = {}
    for cause, weights, conventions in (
        ("MTP layer fed the state after the final norm", {}, dict(pre_norm=False)),
        ("embedding at position 0 not zeroed", {}, dict(zero_position0=False)),
        ("halves of input_proj not swapped", swapped, {}),
        ("stale drafter", trainer.drafter, {}),
    ):
        fill(parameters, now | weights)
        drafts[cause] = trainer_drafts(trainer.actor, batch, args, **conventions)
    fill(parameters, now)
    return drafts


def explain_first(samples, drafts, causes):
    """The first decision that the trainer's drafts do not predict, and which fault does."""
    for i, sample in enumerate(samples):
        answer = spec_metrics.explain_disagreement(
            sample["prompt"] + sample["response"],
            len(sample["prompt"]),
            drafts[i],
            sample["accepted"],
            {cause: of[i] for cause, of in causes.items()},
        )
        if not answer["agrees"]:
            return answer["message"]
    return ""


# ---- Update and push ----------------------------------------------------------------------------
def update(trainer, samples, step, args):
    """PPO epochs over a rollout, the MTP loss riding along; metrics are means over the updates."""
    actor, device = trainer.actor, trainer.device
    trainer.optimizer.adam.param_groups[0]["lr"] = args.lr * (1 - 0.9 * step / args.steps)
    rank, ranks = data_parallel_group().rank(), data_parallel_group().size()
    everyone = torch.cat([sample["advantages"] for sample in samples])
    mean, std = everyone.mean().item(), everyone.std().item()
    sums, norms = collections.Counter(), collections.Counter()
    orders = (torch.randperm(len(samples), generator=trainer.generator) for _ in range(args.epochs))
    for indices in (indices for order in orders for indices in order.chunk(args.minibatches)):
        # Each rank learns from its share, by the whole minibatch's counts: gradients only add up.
        num_tokens = sum(len(samples[i]["response"]) for i in indices)
        part = [samples[i] for i in indices[rank::ranks].tolist()]
        batch = make_batch(part, device, args.unfix)  # fix 2: the mask
        old_N, advantages_N, returns_N = (
            torch.cat([sample[key] for sample in part]).to(device)
            for key in ("old", "advantages", "returns")
        )
        advantages_N = (advantages_N - mean) / (std + 1e-8)
        logits_TV, depths = forward_with_mtp(actor, batch, args)
        ratio_N = (label_logprobs(logits_TV, batch, args.temperature) - old_N).exp()
        clipped_N = ratio_N.clamp(1 - args.clip, 1 + args.clip)
        gains_N = torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
        mask_T = batch["loss_mask"][0]
        # Detached: the critic must not move the policy either.
        values_N = trainer.value_head(actor.trunk_state[:, 0].detach().float())[mask_T, 0]
        loss = -gains_N.sum() / num_tokens
        loss = loss + 0.5 * ((values_N - returns_N).square().sum() / num_tokens)
        if args.entropy_coef:
            share = args.entropy_coef * len(old_N) / num_tokens
            loss = loss - share * mean_entropy(logits_TV[mask_T], args.temperature)
        norms.update(trainer.optimizer.step(loss), updates=1)
        sums["prompts"] += batch["prompt_targets"].item()
        sums["clipped"] += ((ratio_N != clipped_N).float().sum() / num_tokens).item()
        for depth in depths:
            sums.update({name: float(value) for name, value in depth.items()})
    totals = torch.tensor(list(sums.values()), dtype=torch.float64, device=device)
    sums = dict(zip(sums, sum_over_data_parallel(totals).tolist(), strict=True))
    tokens, updates = max(sums["tokens"], 1), norms["updates"]
    return {
        "mtp_loss": sums["loss_sum"] / tokens,  # in nats, or with total_variation 1 - acceptance
        "mtp_top1": sums["correct"] / tokens,
        "mtp_prompt_share": sums["prompts"] / tokens,
        "clip_fraction": sums["clipped"] / updates,
        "policy_grad_norm": norms["policy"] / updates,
        "mtp_grad_norm": norms["mtp"] / updates,
    }


def forward_with_mtp(actor, batch, args):
    """Logits that carry the MTP loss, and what it came to: a dict of sums for each depth."""
    if "loss" in args.unfix:  # stock 0.19 rolls token-aligned ids and mask itself, once more
        with as_drafter(actor, args):
            return forward(actor, batch, loss_mask=batch["token_mask"]), [stock_depth()]
    mask, cu_seqlens = batch["mtp_token_mask"], batch["packed"].cu_seqlens_q
    depths = range(1, 1 + num_trained(args))
    counts = [depth_mask(mask, j, cu_seqlens, rule=args.mtp_rule).sum() for j in depths]
    denominator = sum_over_data_parallel(torch.stack(counts)).clamp(min=1)
    with train_mtp(actor, args, denominator=denominator) as mtp:  # fixes 1, 3, 5
        return forward(actor, batch, batch["labels"], batch["mtp_loss_mask"]), mtp.depths


def push(llm, trainer, args):
    """The actor's weights to the engine: afterwards it serves them, or this raises."""
    named_tensors = megatron_to_hf(trainer.actor.named_parameters(), trainer.hf_config)
    if "parity" in args.unfix:
        named_tensors = unswap(named_tensors)
    to_drafter = args.drafter == "synced" and "sync" not in args.unfix
    if llm:
        sync_weights(llm, named_tensors, drafter=to_drafter)
    else:
        collections.deque(named_tensors, maxlen=0)  # takes part in gathering
    if to_drafter:
        trainer.drafter = copies(trainer.actor.mtp)


# ---- The command --------------------------------------------------------------------------------
def check(args):
    """Refuses what would go wrong in silence, before anything is written."""
    rank, ranks = torchrun()
    shares = args.minibatches * ranks // args.tensor_parallel
    full = rank == 0 and not args.resume and os.path.isdir(args.out) and os.listdir(args.out)
    for wrong, sentence in (
        (
            full and not args.overwrite,
            f"--out {args.out} is not empty: give --overwrite or another",
        ),
        (0 < args.temperature < 0.01, "vLLM samples at 0.01 below that --temperature: pass more"),
        (args.symbols > args.vocab, "--symbols is over --vocab: pass at most as many"),
        (ranks > 1 and args.prompts % shares, f"--prompts must be a multiple of {shares}"),
        ("loss" in args.unfix and ranks > 1, "--unfix loss wants one rank: stock counts on each"),
        ("loss" in args.unfix and num_trained(args) > 1, "--unfix loss trains one depth"),
    ):
        if wrong:
            sys.exit(f"train_mimo.py: {sentence}")


def main(argv=None):
    args, saved = tyro.cli(Args, args=argv), None
    if args.resume:
        saved = torch.load(f"{args.resume}/state.pt", "cpu", weights_only=True)
        changed = dict(out=args.resume, resume=args.resume, verbose=args.verbose)
        args = Args(**saved["args"] | changed)
    check(args)
    os.makedirs(args.out, exist_ok=True)
    try:
        train(args, saved)
    except BaseException as error:
        if os.path.exists(f"{args.out}/state.pt"):
            error.add_note(f"To go on from the last save: train_mimo.py --resume {args.out}")
        raise


if __name__ == "__main__":
    main()
