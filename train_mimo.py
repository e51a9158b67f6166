"""MTP inside RL, end to end: Megatron trains a small MiMo with PPO, vLLM samples with its MTP drafter, on one node.

        warm-up  supervised, policy and MTP layer
           |
           v
    +-> rollout      vLLM drafts with the MTP layer, verifies with the policy      spec_metrics.py (fix 6)
    |   old log-prob actor without its MTP block, reference without MTP layers     ref_disable.py (fix 4)
    |   replay       every accept / reject decision, predicted by the trainer      spec_metrics.py, drafter_sync.py
    |   update       PPO + MTP loss that never moves the policy                    mtp_loss.py, mtp_mask.py (fixes 1, 2)
    |                with full recompute of MTP layers on packed sequences         mtp_recompute.py (fix 3)
    +-- push         weights to vLLM's target and drafter, read back               drafter_sync.py (fix 5)

Task    Tokens are numbers modulo the vocabulary. Warm-up teaches "+1" (70 %) and "+2" (30 %); the reward of a response
        is its share of "+2" steps. PPO thus drives the policy away from what the drafter learned at first, so that a
        drafter that is not kept in step proposes "+1" in vain.
Run     python train_mimo.py                    about 2 minutes on 2 cores; --help explains every argument
        python train_mimo.py --unfix loss       the same with a fix taken out (loss, mask, recompute, ref, sync, ...)
        torchrun --nproc-per-node 4 train_mimo.py --tensor-parallel 2   ranks: 2 a model, each pair half a minibatch
Output  OUT/metrics.jsonl (one line a step), OUT/curves.png, OUT/checkpoint/ (Hugging Face layout, loads in stock vLLM)
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
import warnings

if (
    __name__ in ("__main__", "__mp_main__") and "--verbose" not in sys.argv
):  # errors are still shown
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ["TQDM_DISABLE"] = "1"
if "--verbose" in sys.argv:
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"

import toy.engine  # isort: skip  # before torch: it sets what torch and vLLM read when they are imported
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

import spec_metrics
from drafter_sync import hf_to_megatron, match_vllm_mimo, megatron_to_hf, sync_weights
from mtp_loss import draft_tokens, patch_mtp_loss
from mtp_mask import depth_mask, depth_targets, expand_response_mask
from mtp_recompute import patch_mtp_recompute
from ref_disable import drop_mtp_weights, skip_mtp, without_mtp_config
from toy.engine import start_engine
from toy.model import build_model, init_megatron, mimo_config, pack


def option(default, sentence, allowed=1):
    """A field of Args; allowed: the smallest number that can run, or a list of choices."""
    return dataclasses.field(default=default, metadata=dict(help=sentence, allowed=allowed))


# fmt: off
@dataclasses.dataclass
class Args:
    """Every argument, its default and a sentence; a bool also takes --no-NAME."""

    steps: int = option(30, "PPO steps: a rollout, its updates and a push each")
    seed: int = option(0, "seed of weights, prompts and sampling; the same seed gives the same numbers", 0)
    out: str = option("runs/mimo", "folder for metrics.jsonl, curves.png and checkpoint/")
    save_every: int = option(10, "steps between saves of the whole state to OUT/state.safetensors; 0 never saves", 0)
    resume: str = option("", "folder of a run to go on with, from its last save and with its own arguments")
    overwrite: bool = option(False, "use --out although it holds something, deleting what it holds")
    device: str = option("auto", "where to train and sample; auto: CUDA if there is one", ["auto", "cpu", "cuda"])
    drafter: str = option("synced", "push to the drafter, never do, or sample without", ["none", "frozen", "synced"])
    engine: str = option("inprocess", "vLLM in this process or, always with ranks, its own", ["inprocess", "process"])
    tensor_parallel: int = option(1, "how many of the ranks hold a model together; such groups share minibatches")
    unfix: list = option((), "take a fix out, to see what it is for; repeatable; parity: what match_vllm_mimo does",
                         ["loss", "mask", "recompute", "ref", "sync", "metrics", "parity"])
    baseline: str = option("", "folder of a finished run with --drafter none, to report the measured speed-up against")
    temperature: float = option(1.0, "sampling temperature; all log-probs are of the tempered distribution", 0.01)
    mtp_scale: float = option(0.2, "lambda, the weight of the MTP loss", 0)
    mtp_rule: str = option("drafted", "which slots train the MTP layer, see mtp_mask.py", ["target", "drafted"])
    recompute: bool = option(True, "full activation recompute, of trunk and MTP layer")
    verbose: bool = option(False, "show what vLLM and Megatron log")
    warmup_steps: int = option(100, "supervised steps before PPO", 0)
    prompts: int = option(64, "prompts a rollout, one response each")
    response_tokens: int = option(28, "longest response; lengths vary from half of it on", 4)
    epochs: int = option(2, "passes over a rollout")
    minibatches: int = option(4, "updates a pass")
    lr: float = option(1e-3, "learning rate of policy and value head, falling linearly to a tenth of it", 1e-12)
    mtp_lr: float = option(3e-3, "learning rate of the MTP layer", 1e-12)
    clip: float = option(0.2, "PPO clip range of the probability ratio", 1e-12)
    kl_coef: float = option(0.01, "weight of the KL penalty towards the reference, in the reward", 0)
    gamma: float = option(0.3, "discount; small, since a token decides its own reward only", 0)
    gae_lambda: float = option(0.9, "GAE lambda", 0)
    max_grad_norm: float = option(1.0, "gradient clip, of policy and MTP layer apart", 1e-12)
    layers: int = option(2, "transformer layers of the trunk")
    hidden: int = option(128, "hidden size")
    heads: int = option(4, "attention heads; vLLM on CPU wants a head size of 32 or more")
    groups: int = option(2, "query groups, that is key/value heads")
    ffn: int = option(256, "feed-forward size")
    vocab: int = option(64, "vocabulary")
    symbols: int = option(64, "how many tokens of the vocabulary the task counts with", 8)
# fmt: on


# ---- Megatron: one model on CPU or CUDA, trained on packed sequences -------------------------------------------------
def load_reference(folder, hf_config, unfix=(), **settings):
    """The reference from a checkpoint that has MTP tensors: none is built, none is read (fix 4)."""
    mtp = "ref" in unfix
    hf_config = hf_config if mtp else without_mtp_config(hf_config)
    reference = build_model(hf_config, mtp=mtp, **settings)
    parameters = dict(reference.named_parameters())
    with safe_open(f"{folder}/model.safetensors", "pt") as file, torch.no_grad():
        names = [(name, None) for name in file.keys()]
        tensors = (
            (name, file.get_tensor(name)) for name, _ in (names if mtp else drop_mtp_weights(names))
        )
        for name, tensor in hf_to_megatron(tensors, hf_config, parameters):
            parameters[name].copy_(tensor)
    return reference.requires_grad_(False)


# ---- vLLM: the sampler, drafting with the MTP layer ------------------------------------------------------------------
def write_checkpoint(model, hf_config, folder, drafter=None):
    """A Hugging Face MiMo checkpoint that stock vLLM loads; drafter: MTP tensors to write instead of the model's."""
    parameters = dict(model.named_parameters()) | {
        f"mtp.{name}": tensor for name, tensor in (drafter or {}).items()
    }
    tensors = list(megatron_to_hf(parameters.items(), hf_config))
    if (
        torch.distributed.get_rank() == 0
    ):  # every rank takes part in gathering, the first one writes
        toy.engine.write_checkpoint(folder, hf_config, tensors)


def save_whole(path, tensors, metadata):
    """Written aside and renamed whole, so that a kill leaves the last one; no pickle that could run code."""
    save_file(tensors, f"{path}.new", metadata=metadata)
    os.replace(f"{path}.new", path)


# ---- The task --------------------------------------------------------------------------------------------------------
MAX_PROMPT = 6
WARMUP_SHARE_OF_PLUS_TWO = 0.3  # under a half, so that the reward has to move the policy's arg-max


def make_sequences(num, length, vocab, generator):
    """`[num, length]` tokens counting by +1 or +2 modulo the vocabulary."""
    steps = 1 + (torch.rand(num, length, generator=generator) < WARMUP_SHARE_OF_PLUS_TWO).long()
    steps[:, 0] = torch.randint(vocab, (num,), generator=generator)
    return steps.cumsum(1) % vocab


def make_prompts(num, response_tokens, vocab, generator):
    """(prompt, response length) pairs; 2 tokens or more: after one, vLLM 0.32 counts a draft that it never made."""
    sequences = make_sequences(num, MAX_PROMPT, vocab, generator).tolist()
    prompt_lengths = torch.randint(2, MAX_PROMPT + 1, (num,), generator=generator).tolist()
    lengths = torch.randint(
        response_tokens // 2, response_tokens + 1, (num,), generator=generator
    ).tolist()
    return [
        (sequence[:n], length)
        for sequence, n, length in zip(sequences, prompt_lengths, lengths, strict=True)
    ]


def token_rewards(sample, vocab):
    """1.0 for each response token that is the token before it plus 2, else 0.0."""
    previous = [sample["prompt"][-1], *sample["response"][:-1]]
    return [
        float((token - before) % vocab == 2)
        for before, token in zip(previous, sample["response"], strict=True)
    ]


def make_batch(samples, device, unfix=()):
    """Samples (prompt and response token lists) as one packed buffer with label-aligned labels and loss masks."""
    input_ids, position_ids, packed = pack([s["prompt"] + s["response"] for s in samples], device)
    response_mask = torch.nested.nested_tensor(
        [[1] * len(s["response"]) for s in samples], layout=torch.jagged
    )
    whole = expand_response_mask(
        response_mask, [len(s["prompt"]) + len(s["response"]) for s in samples]
    )
    token_mask, cu_seqlens = whole.values()[None].to(device), packed.cu_seqlens_q
    # Before verl#6432: the response mask at the start of each row, and the rest of the row filled with ones.
    mtp_token_mask = torch.ones_like(token_mask) if "mask" in unfix else token_mask
    batch = dict(input_ids=input_ids, position_ids=position_ids, packed=packed)
    batch |= dict(
        token_mask=token_mask, mtp_token_mask=mtp_token_mask
    )  # token-aligned; the rest is label-aligned
    batch["labels"] = depth_targets(input_ids, 0, cu_seqlens)
    batch["loss_mask"] = depth_mask(token_mask, 0, cu_seqlens)  # for the policy
    batch["mtp_loss_mask"] = depth_mask(
        mtp_token_mask, 0, cu_seqlens
    )  # the same but for --unfix mask
    # By rule "target", which is what the old mask got wrong; training counts by --mtp-rule.
    right, counted = (depth_mask(mask, 1, cu_seqlens) for mask in (token_mask, mtp_token_mask))
    return batch | {"prompt_targets": (counted & ~right).sum()}


# ---- PPO -------------------------------------------------------------------------------------------------------------
def forward(model, batch, **kwargs):
    """Logits `[T, V]` of a packed batch, on every tensor-parallel rank."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    logits = model(
        batch["input_ids"], batch["position_ids"], None, packed_seq_params=batch["packed"], **kwargs
    )
    return gather_from_tensor_model_parallel_region(logits).flatten(0, 1)


def label_logprobs(logits_TV, batch, temperature):
    """Log-probs of the response tokens, one after the other, under the tempered policy, from which vLLM samples."""
    logprobs_TV = (logits_TV.float() / temperature).log_softmax(-1)
    return logprobs_TV.gather(1, batch["labels"][0, :, None])[:, 0][batch["loss_mask"][0]]


def warm_up(actor, step, args, generator, device):
    """Supervised training of policy and MTP layer, so that both start competent; dense, since all rows are as long."""
    from megatron.core import parallel_state

    rank, ranks = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    length, num = MAX_PROMPT + args.response_tokens, args.prompts // ranks
    position_ids = torch.arange(length, device=device).expand(num, -1)
    for _ in range(args.warmup_steps):
        input_ids = make_sequences(args.prompts, length, args.symbols, generator)[rank * num :][
            :num
        ].to(device)
        labels, loss_mask = (
            depth_targets(input_ids, 0),
            depth_mask(position_ids >= 2, 0),
        )  # 2: the shortest prompt
        batch = dict(input_ids=input_ids, position_ids=position_ids, packed=None)
        # All shares count as many slots, so that the mean over all is the sum of each one's over the number of ranks.
        with (
            mtp_as_drafter(actor, args),
            patch_mtp_loss(actor, rule=args.mtp_rule, scale=args.mtp_scale / ranks),
        ):
            logits_TV = forward(actor, batch, labels=labels, loss_mask=loss_mask)[
                loss_mask.flatten()
            ]
            step(F.cross_entropy(logits_TV.float(), labels[loss_mask]) / ranks)


def sample(llm, prompts, args, step_number):
    """One response a prompt, with log-probs, decisions, counts."""
    seeds = [
        ((args.seed * 1_000_003 + step_number) * 1_000_003 + i) % 2**63 for i in range(len(prompts))
    ]  # 64 bits
    token_lists, lengths = zip(*prompts, strict=True)
    samples = toy.engine.sample(llm, token_lists, lengths, seeds, temperature=args.temperature)
    for of in samples:
        output, gains = of.pop("output"), of.pop("gains")
        of["counts"], of["decisions"] = spec_metrics.counts_from_vllm([output])[0], None
        if of["counts"] is not None:
            of["decisions"] = output.outputs[0].spec_decode_metrics.per_step_accepted
        elif gains is not None and llm.llm_engine.vllm_config.speculative_config is not None:
            of["decisions"] = spec_metrics.decisions_from_gains(gains)
            known = [decision for decision in of["decisions"] if decision is not None]
            of["counts"] = spec_metrics.SpecCounts(len(known), sum(known), len(known))
    return samples


@contextlib.contextmanager
def mtp_as_drafter(actor, args):
    """Passes that train the MTP layer compute what vLLM's drafter does (fix 5), and may recompute it (fix 3)."""
    matched = contextlib.nullcontext() if "parity" in args.unfix else match_vllm_mimo(actor)
    with matched, contextlib.nullcontext() if "recompute" in args.unfix else patch_mtp_recompute():
        yield


def trainer_drafts(actor, batch, **conventions):
    """The drafts that the engine makes if it holds these weights: one token a slot, a list a document."""
    with match_vllm_mimo(actor, **conventions):
        tokens = draft_tokens(
            actor,
            batch["input_ids"],
            batch["position_ids"],
            None,
            packed_seq_params=batch["packed"],
        )
    return [
        drafts.tolist() for drafts in tokens[0].split(batch["packed"].cu_seqlens_q.diff().tolist())
    ]


def drafts_by_cause(actor, batch, pushed):
    """The trainer's drafts with each fault that usually goes unnoticed planted in turn, for `explain_disagreement`."""
    drafts = {
        "MTP layer fed the state after the final norm": trainer_drafts(actor, batch, pre_norm=False)
    }
    drafts["embedding at position 0 not zeroed"] = trainer_drafts(
        actor, batch, zero_position0=False
    )
    parameters = dict(actor.mtp.named_parameters())
    now = {name: p.detach().clone() for name, p in parameters.items()}
    unswapped = {
        "layers.0.eh_proj.weight": torch.cat(now["layers.0.eh_proj.weight"].chunk(2, 1)[::-1], 1)
    }
    for cause, fault in (
        ("halves of input_proj not swapped", unswapped),
        ("stale drafter", pushed),
    ):
        fill(parameters, now | fault)
        drafts[cause] = trainer_drafts(actor, batch)
    fill(parameters, now)
    return drafts


@torch.no_grad()
def fill(tensors, values):
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


def acceptance(samples, drafts, args):
    """Acceptance of a rollout and the share of its decisions that the trainer's drafts predict (fix 6)."""
    agreed = total = 0
    for sample, drafted in zip(samples, drafts, strict=True):
        if (decisions := sample["decisions"]) is not None:
            tokens = sample["prompt"] + sample["response"]
            predicted = spec_metrics.replay_acceptance(tokens, len(sample["prompt"]), drafted)
            agreed += sum(
                b is None or a == b for a, b in zip(predicted, decisions, strict=False)
            )  # None: cut off
            total += max(len(predicted), len(decisions))
    summary = spec_metrics.summarize([sample["counts"] for sample in samples])
    rate, length = summary.get("spec/accept_rate_micro"), summary.get("spec/accept_length_micro")
    if "metrics" in args.unfix and length:
        rate = (
            length / 2
        )  # before sglang#23530: the token that is never drafted counts as drafted and accepted
    agreement = agreed / total if total else None
    return {"accept_rate": rate, "accept_length": length, "replay_agreement": agreement} | summary


def explain_first(samples, drafts, causes):
    """Which decision of the engine the trainer's drafts do not predict first, and which planted fault predicts it."""
    for i, sample in enumerate(samples if samples[0]["decisions"] is not None else ()):
        decided = (
            len(sample["prompt"]),
            drafts[i],
            sample["decisions"],
            {name: causes[name][i] for name in causes},
        )
        answer = spec_metrics.explain_disagreement(sample["prompt"] + sample["response"], *decided)
        if not answer["agrees"]:
            return answer["message"]
    return ""


def unswap(named_tensors):
    """--unfix parity: eh_proj's columns as Megatron has them; vLLM loads them without a word."""
    for name, tensor in named_tensors:
        yield (
            name,
            torch.cat(tensor.chunk(2, 1)[::-1], 1)
            if name.endswith("input_proj.weight")
            else tensor,
        )


def estimate_advantages(rewards, values, args):
    """GAE of one response: advantage and return of each token. values[t] is the value before token t."""
    advantages, running, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        delta, next_value = reward + args.gamma * next_value - value, value
        running = delta + args.gamma * args.gae_lambda * running
        advantages.insert(0, running)
    return advantages, [
        advantage + value for advantage, value in zip(advantages, values, strict=True)
    ]


def score_rollout(actor, reference, value_head, batch, samples, args):
    """Adds old log-probs, advantages and returns to the samples."""
    with torch.no_grad():
        with (
            contextlib.nullcontext() if "ref" in args.unfix else skip_mtp(actor)
        ):  # fix 4: no MTP layer runs
            old_N = label_logprobs(forward(actor, batch), batch, args.temperature)
            values_N = value_head(actor.trunk_state[:, 0].float())[batch["loss_mask"][0], 0]
        kl_N = old_N - label_logprobs(forward(reference, batch), batch, args.temperature)
    engine_N = torch.tensor(
        [logprob for sample in samples for logprob in sample["logprobs"]], device=old_N.device
    )
    rewards, lengths = [], [len(sample["response"]) for sample in samples]
    for sample, old, values, kl in zip(
        samples, *(x.split(lengths) for x in (old_N, values_N, kl_N)), strict=True
    ):
        reward = token_rewards(sample, args.symbols)
        rewards.append(sum(reward) / len(reward))
        penalised = [r - args.kl_coef * k for r, k in zip(reward, kl.tolist(), strict=True)]
        advantages, returns = estimate_advantages(penalised, values.tolist(), args)
        sample |= {
            "old": old.cpu(),
            "advantages": torch.tensor(advantages),
            "returns": torch.tensor(returns),
        }
    if not torch.tensor(rewards).isfinite().all():
        raise RuntimeError(
            "the reward is not finite; nothing was learned from this rollout: look at the reward"
        )
    gap = (old_N - engine_N).abs().max().item()
    return {"reward": sum(rewards) / len(rewards), "logprob_gap": gap, "kl": kl_N.mean().item()}


def update(actor, value_head, step, samples, args, generator, device):
    """PPO epochs over a rollout, the MTP loss riding along; returns metrics averaged over the updates."""
    from megatron.core import parallel_state

    rank, ranks = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    everyone = torch.cat([sample["advantages"] for sample in samples])
    sums, norms = collections.Counter(), []
    orders = (torch.randperm(len(samples), generator=generator) for _ in range(args.epochs))
    for indices in (indices for order in orders for indices in order.chunk(args.minibatches)):
        # Each rank learns from its share, by the whole minibatch's counts: then gradients need only be added up.
        num_tokens = sum(len(samples[i]["response"]) for i in indices)
        part = [samples[i] for i in indices[rank::ranks].tolist()]
        batch = make_batch(part, device, args.unfix)  # fix 2: the mask
        num_drafted = depth_mask(
            batch["mtp_token_mask"], 1, batch["packed"].cu_seqlens_q, rule=args.mtp_rule
        ).sum()
        torch.distributed.all_reduce(num_drafted, group=parallel_state.get_data_parallel_group())
        keys = ("old", "advantages", "returns")
        old_N, advantages_N, returns_N = (
            torch.cat([sample[key] for sample in part]).to(device) for key in keys
        )
        advantages_N = (advantages_N - everyone.mean().item()) / (everyone.std().item() + 1e-8)
        with mtp_as_drafter(actor, args):
            if (
                "loss" in args.unfix
            ):  # stock megatron-core 0.19: labels from input_ids, loss into head and trunk
                # Token-aligned: it rolls ids and mask itself, once more than a caller with labels wants.
                logits_TV = forward(actor, batch, loss_mask=batch["token_mask"])
                depth = stock_depth()
            else:
                with patch_mtp_loss(
                    actor, rule=args.mtp_rule, denominator=num_drafted.clamp(min=1)
                ) as mtp:  # fix 1
                    logits_TV = forward(
                        actor, batch, labels=batch["labels"], loss_mask=batch["mtp_loss_mask"]
                    )
                depth = mtp.depths[0]
            ratio_N = (label_logprobs(logits_TV, batch, args.temperature) - old_N).exp()
            clipped_N = ratio_N.clamp(1 - args.clip, 1 + args.clip)
            policy_loss = (
                -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N).sum() / num_tokens
            )
            # Detached: the critic must not move the policy either.
            values_N = value_head(actor.trunk_state[:, 0].detach().float())[
                batch["loss_mask"][0], 0
            ]
            value_loss = (values_N - returns_N).square().sum() / num_tokens
            norms.append(step(policy_loss + 0.5 * value_loss))
        sums.update({name: float(value) for name, value in depth.items()})
        clipped = (ratio_N != clipped_N).float().sum() / num_tokens
        sums.update(prompts=batch["prompt_targets"].item(), clipped=clipped.item())
    totals = torch.tensor(list(sums.values()), dtype=torch.float64, device=device)
    torch.distributed.all_reduce(totals, group=parallel_state.get_data_parallel_group())
    sums = dict(zip(sums, totals.tolist(), strict=True))
    tokens = max(sums["tokens"], 1)
    metrics = {"mtp_loss": sums["loss_sum"] / tokens, "mtp_top1": sums["correct"] / tokens}
    metrics |= {
        "mtp_prompt_share": sums["prompts"] / tokens,
        "clip_fraction": sums["clipped"] / len(norms),
    }
    of_policy, of_mtp = zip(*norms, strict=True)
    return metrics | {
        "policy_grad_norm": statistics.fmean(of_policy),
        "mtp_grad_norm": statistics.fmean(of_mtp),
    }


def stock_depth():
    """What stock Megatron keeps of its MTP loss, in a global of its own; read and emptied."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as stock

    loss, tokens, correct = (
        stock.tracker.pop(f"{name}_values").sum().item() for name in ("loss", "total", "correct")
    )
    return {"loss_sum": loss * tokens, "tokens": tokens, "correct": correct}


# ---- The run ---------------------------------------------------------------------------------------------------------
class Refused(ValueError):
    """What was asked for cannot be done; nothing has been written."""


def parse_args(argv=None):
    about, formatter = __doc__.splitlines()[0], argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        description=about, formatter_class=formatter, allow_abbrev=False
    )
    kinds = {
        bool: dict(action=argparse.BooleanOptionalAction),
        list: dict(action="append", default=[]),
    }
    for field in dataclasses.fields(Args):
        how = dict(default=field.default, help=field.metadata["help"]) | kinds.get(
            field.type, dict(type=field.type)
        )
        if isinstance(field.metadata["allowed"], list):
            how["choices"] = field.metadata["allowed"]
        parser.add_argument("--" + field.name.replace("_", "-"), **how)
    return Args(**vars(parser.parse_args(argv)))


def check(args):
    """Refuses what cannot run, in one sentence, before anything is written but an empty folder --out."""
    for field in dataclasses.fields(args):
        value, least = getattr(args, field.name), field.metadata["allowed"]
        if field.type in (int, float) and not least <= value < 2**63:
            raise Refused(
                f"--{field.name.replace('_', '-')} is {value}, give {least} or more, and under 2**63"
            )
    # vLLM sets LOCAL_WORLD_SIZE as well, for what this process starts; torchrun sets both.
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    several_nodes = (
        "WORLD_SIZE" in os.environ and int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) != ranks
    )
    cut = any(
        n % args.tensor_parallel for n in (ranks, args.heads, args.groups, args.ffn, args.vocab)
    )
    shares = args.minibatches * ranks // args.tensor_parallel
    on_cuda = args.device == "cuda" or args.device == "auto" and torch.cuda.is_available()
    few = f"torch sees {torch.cuda.device_count()} CUDA devices for {ranks} ranks"
    no_baseline = args.baseline and not os.path.isfile(f"{args.baseline}/metrics.jsonl")
    full = os.path.isdir(args.out) and os.listdir(args.out) and not (args.overwrite or args.resume)
    for applies, sentence in [
        (args.minibatches > args.prompts, f"--minibatches is {args.minibatches}, give --prompts at the most"),
        (args.symbols > args.vocab, f"--symbols is {args.symbols}, give --vocab ({args.vocab}) at the most"),
        (args.heads % args.groups, f"--heads is {args.heads}, give a multiple of --groups ({args.groups})"),
        (args.hidden / args.heads not in (32, 64, 96, 128), f"--hidden is {args.hidden}, give 32, 64, 96, 128 a head"),
        (on_cuda and torch.cuda.device_count() < ranks, f"--device is {args.device}, but {few}: give cpu"),
        (no_baseline, f"--baseline {args.baseline} has no metrics.jsonl, give the --out of a finished run"),
        (cut, f"--tensor-parallel {args.tensor_parallel} must divide --heads, --groups, --ffn, --vocab, {ranks} ranks"),
        (ranks > 1 and args.prompts % shares, f"--prompts is {args.prompts}, give a multiple of {shares}"),
        (ranks > 1 and "loss" in args.unfix, "--unfix loss wants one rank: stock Megatron counts on each rank alone"),
        (several_nodes, "torchrun started ranks on several nodes, give it --nnodes 1"),
        (full and not rank, f"--out {args.out} is not empty, give another folder or --overwrite"),
    ]:  # fmt: skip
        if applies:
            raise Refused(sentence)
    try:
        os.makedirs(args.out, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out).close()
    except OSError as error:
        raise Refused(
            f"--out {args.out} cannot be written ({error}), give another folder"
        ) from error


def problems_of(metrics, args, device):
    """What a run must not pass over in silence."""
    if metrics["accept_rate"] == 0:
        yield "No draft was accepted: a drafter without weights, or with another model's?"
    if (
        args.drafter == "synced"
        and (agreement := metrics["replay_agreement"]) is not None
        and agreement < 0.99
    ):
        yield "The engine does not draft what the trainer would."
    if device == "cpu" and metrics["logprob_gap"] > 1e-2:
        yield "Trainer and engine differ in log-probs: weights not in step, or another temperature?"


COLUMNS = {  # printed each step; metrics.jsonl has everything
    "step": "{:4d}", "reward": "{:6.3f}", "accept_rate": "{:.3f}", "replay_agreement": "{:.4f}", "mtp_loss": "{:.3f}",
    "kl": "{:6.3f}", "logprob_gap": "{:.1e}", "rollout_s": "{:.2f}", "train_s": "{:.2f}", "sync_s": "{:.2f}",
}  # fmt: skip


def save_state(args, step_number, tensors, generator):
    """Every tensor-parallel rank's tensors in one file, so that a kill cannot leave ranks at different steps."""
    from megatron.core import parallel_state

    # A copy each: on CPU a master is the parameter itself, and safetensors refuses shared memory.
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    shards = [None] * args.tensor_parallel
    torch.distributed.all_gather_object(
        shards, tensors, group=parallel_state.get_tensor_model_parallel_group()
    )
    if torch.distributed.get_rank() == 0:
        whole = {
            f"{rank}.{name}": tensor
            for rank, shard in enumerate(shards)
            for name, tensor in shard.items()
        }
        lines = bytearray(open(f"{args.out}/metrics.jsonl", "rb").read() if step_number else b"")
        whole |= {
            "generator": generator.get_state(),
            "metrics": torch.tensor(lines, dtype=torch.uint8),
        }
        save_whole(
            f"{args.out}/state.safetensors",
            whole,
            {"step": str(step_number), "args": json.dumps(vars(args))},
        )


def load_state(folder):
    """(args of the run, next step, tensors, generator's state, metrics.jsonl's bytes) of the last save, or Refused."""
    path = f"{folder}/state.safetensors"
    try:
        with safe_open(path, "pt") as file:
            metadata, saved = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
        state = (
            Args(**json.loads(metadata["args"])),
            int(metadata["step"]),
            saved,
            saved.pop("generator"),
        )
        path = f"{folder}/reference/model.safetensors"
        safe_open(path, "pt")  # whole?
        return *state, saved.pop("metrics").numpy().tobytes()
    except Exception as error:
        said = f"{path} is not that of a run with a save ({type(error).__name__}: {error}), give the --out of one"
        raise Refused(f"--resume {folder}: {said}") from error


def restore(tensors, saved, lines, args):
    """What load_state read, into what is in use; the steps after the save will be made again."""
    of_rank = f"{torch.distributed.get_rank() % args.tensor_parallel}."
    saved = {
        name.removeprefix(of_rank): tensor
        for name, tensor in saved.items()
        if name.startswith(of_rank)
    }
    if {name: t.shape for name, t in saved.items()} != {
        name: t.shape for name, t in tensors.items()
    }:
        raise Refused(
            f"--resume {args.out}: state.safetensors holds another model's tensors, give another run"
        )
    fill(tensors, saved)
    pathlib.Path(f"{args.out}/metrics.jsonl").write_bytes(lines)  # on every rank the same


def num_parameters(*modules):
    """Of whole modules: a shard counts for every tensor-parallel rank."""
    shards, parameters = (
        modules[0].config.tensor_model_parallel_size,
        [p for m in modules for p in m.parameters()],
    )
    return sum(
        p.numel() * (shards if getattr(p, "tensor_model_parallel", False) else 1)
        for p in parameters
    )


def report(step_number, metrics, samples, clock, actor, baseline, args):
    """One aligned line a step on the screen; all of it, with seconds and whether drafting paid, in metrics.jsonl."""
    line = {"step": step_number} | metrics
    line |= {
        name: clock[i + 1] - clock[i] for i, name in enumerate(("rollout_s", "train_s", "sync_s"))
    }
    line["rollout_tokens_per_s"] = rate = (
        sum(len(sample["response"]) for sample in samples) / line["rollout_s"]
    )
    if metrics["accept_length"]:
        # Cost by parameters read, which is what decoding is bound by: MTP layer and head over trunk and head.
        drafted, verified = (
            num_parameters(part, actor.output_layer) for part in (actor.mtp, actor.decoder)
        )
        line |= spec_metrics.speedup_estimate(metrics["accept_length"], drafted / verified)
    if baseline:
        line["spec/speedup_measured"] = rate / baseline
    with open(f"{args.out}/metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    cells = {
        name: "-" if line[name] is None else form.format(line[name])
        for name, form in COLUMNS.items()
    }
    left = (clock[-1] - clock[0]) * (args.steps - step_number - 1)
    print(
        *(cell.rjust(len(name)) for name, cell in cells.items()), f" {left:.0f} s left", flush=True
    )


def draw(folder):
    from matplotlib.figure import Figure  # not pyplot, which would look for a screen

    lines, figure = (
        [json.loads(line) for line in open(f"{folder}/metrics.jsonl")],
        Figure(figsize=(6, 3.5)),
    )
    axes = figure.add_subplot(xlabel="PPO step", ylim=(0, 1))
    for name, label in (("reward", "reward"), ("accept_rate", "acceptance")):
        if lines[0][name] is not None:
            axes.plot([line["step"] for line in lines], [line[name] for line in lines], label=label)
    axes.legend()
    figure.savefig(f"{folder}/curves.png", dpi=120, bbox_inches="tight")


def build_trainer(args, hf_config, device, dtype):
    """Actor, value head, drafter; Adam on float32 masters (policy and MTP layer apart), its step; all their tensors."""
    from megatron.core import parallel_state

    recompute = dict(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    )
    settings = (recompute if args.recompute else {}) | dict(tensor_parallel=args.tensor_parallel)
    torch.manual_seed(args.seed)
    actor = build_model(
        hf_config, dtype=dtype, mtp_loss_scaling_factor=args.mtp_scale, **settings
    ).to(device)
    actor.decoder.final_layernorm.register_forward_hook(
        lambda module, _, out: setattr(actor, "trunk_state", out)
    )
    value_head = torch.nn.Linear(args.hidden, 1).to(device)
    drafter = {
        name: p.detach().clone() for name, p in actor.mtp.named_parameters()
    }  # what the engine drafts with
    of_mtp = list(actor.mtp.parameters())
    of_policy = [p for name, p in actor.named_parameters() if not name.startswith("mtp.")] + [
        *value_head.parameters()
    ]
    # Most of Adam's steps are smaller than bf16 can tell; a float32 weight is its own master.
    masters = {p: p if p.dtype == torch.float32 else p.detach().float() for p in of_policy + of_mtp}
    groups = [
        {"params": [masters[p] for p in of_policy]},
        {"params": [masters[p] for p in of_mtp], "lr": args.mtp_lr},
    ]
    optimizer = torch.optim.Adam(groups, lr=args.lr)
    # All that the next step depends on, as it is in use: to save from and to restore into.
    modules = torch.nn.ModuleDict(dict(actor=actor, value_head=value_head))
    tensors = dict(modules.named_parameters()) | {
        f"drafter.{name}": tensor for name, tensor in drafter.items()
    }
    for i, master in enumerate(masters.values()):
        # Adam makes these at its first step; a resumed run fills them before.
        adam = dict(
            step=torch.tensor(0.0),
            exp_avg=torch.zeros_like(master),
            exp_avg_sq=torch.zeros_like(master),
        )
        tensors |= {f"master.{i}": master} | {
            f"adam.{i}.{name}": tensor for name, tensor in adam.items()
        }
        optimizer.state[master] = adam

    def clip(parameters):
        """Returns the norm over all tensor-parallel ranks: of every shard, and once of what each rank holds whole."""
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        counted = [
            masters[p].grad
            for p in parameters
            if first or getattr(p, "tensor_model_parallel", False)
        ]
        # In float64 square and root undo each other exactly.
        square = (
            torch.nn.utils.get_total_norm([grad for grad in counted if grad is not None])
            .double()
            .square()
        )
        torch.distributed.all_reduce(square, group=parallel_state.get_tensor_model_parallel_group())
        norm = square.sqrt().float()
        torch.nn.utils.clip_grads_with_norm_(
            [masters[p] for p in parameters], args.max_grad_norm, norm
        )
        return norm.item()

    def step(loss):
        loss.backward()
        for parameter, master in masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
            if master.grad is not None and parallel_state.get_data_parallel_world_size() > 1:
                torch.distributed.all_reduce(
                    master.grad, group=parallel_state.get_data_parallel_group()
                )
        norms = (
            clip(of_policy),
            clip(of_mtp),
        )  # apart: together, a large MTP gradient would shrink the policy's update
        optimizer.step()
        with torch.no_grad():
            for parameter, master in masters.items():
                parameter.copy_(master)
                parameter.grad = None
        return norms

    return actor, value_head, drafter, optimizer, step, tensors


def train(args, first_step=0, saved=None, random_state=None, lines=b""):
    device = (
        args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    )
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    hf_config = mimo_config(
        num_layers=args.layers, hidden_size=args.hidden, num_heads=args.heads, num_groups=args.groups,
        ffn_size=args.ffn, vocab_size=args.vocab, max_positions=max(128, MAX_PROMPT + args.response_tokens + 8),
    )  # fmt: skip
    started, baseline = (
        time.perf_counter(),
        args.baseline and open(f"{args.baseline}/metrics.jsonl"),
    )
    baseline = baseline and statistics.median(
        json.loads(line)["rollout_tokens_per_s"] for line in baseline
    )
    torch.set_num_threads(1)  # at this size a second thread costs more than it brings
    ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    init_megatron(device, args.tensor_parallel, 1, *ranks)
    if rank := torch.distributed.get_rank():
        sys.stdout = open(os.devnull, "w")  # the first one speaks for all
    actor, value_head, drafter, optimizer, step, tensors = build_trainer(
        args, hf_config, device, dtype
    )
    generator = torch.Generator().manual_seed(args.seed)
    if saved is not None:
        generator.set_state(random_state)
        restore(tensors, saved, lines, args)
    else:
        if args.overwrite and rank == 0:
            shutil.rmtree(args.out)
        print(f"warm-up, {args.warmup_steps} steps", flush=True)
        warm_up(actor, step, args, generator, device)
        fill(drafter, dict(actor.mtp.named_parameters()))
        write_checkpoint(actor, hf_config, f"{args.out}/reference")
    torch.distributed.barrier()
    settings = dict(dtype=dtype, tensor_parallel=args.tensor_parallel)
    reference = load_reference(f"{args.out}/reference", hf_config, args.unfix, **settings).to(
        device
    )
    num_saved = num_parameters(actor) - num_parameters(reference)
    saving = (
        f"{num_saved:,} parameters, {num_saved * dtype.itemsize:,} bytes of MTP layers not built"
    )
    print(
        f"reference: {saving}, {0 if 'ref' in args.unfix else 2} MTP forward passes a step not run",
        flush=True,
    )
    print(f"{time.perf_counter() - started:.0f} s; starting vLLM", flush=True)
    write_checkpoint(actor, hf_config, f"{args.out}/checkpoint", drafter=drafter)
    llm = rank == 0 and start_engine(
        f"{args.out}/checkpoint", process=args.engine == "process" or torch.distributed.get_world_size() > 1,
        num_drafts=int(args.drafter != "none"), dtype=str(dtype).removeprefix("torch."), max_num_seqs=args.prompts,
        enforce_eager=device == "cpu", gpu_memory_utilization=0.3,
    )  # fmt: skip
    torch.set_num_threads(1)  # vLLM's CPU worker has set its own
    print(f"{time.perf_counter() - started:.0f} s; PPO\n{' '.join(COLUMNS)}", flush=True)

    for step_number in range(first_step, args.steps):
        if args.save_every and step_number % args.save_every == 0:
            save_state(args, step_number, tensors, generator)
        optimizer.param_groups[0]["lr"] = args.lr * (1 - 0.9 * step_number / args.steps)
        clock = [time.perf_counter()]
        prompts = make_prompts(args.prompts, args.response_tokens, args.symbols, generator)
        rollout = [sample(llm, prompts, args, step_number) if llm else None]
        torch.distributed.broadcast_object_list(
            rollout
        )  # from rank 0, beside which the engine runs
        samples = rollout[0]
        clock.append(time.perf_counter())

        batch = make_batch(samples, device)
        metrics = score_rollout(actor, reference, value_head, batch, samples, args)  # fix 4
        drafts = trainer_drafts(actor, batch)
        metrics |= acceptance(samples, drafts, args)  # fix 6
        if problems := list(problems_of(metrics, args, device)):
            told = explain_first(samples, drafts, drafts_by_cause(actor, batch, drafter))
            if rank == 0:
                print("WARNING:", *problems, told, file=sys.stderr, flush=True)
        metrics |= update(
            actor, value_head, step, samples, args, generator, device
        )  # fixes 1, 2, 3
        clock.append(time.perf_counter())

        named_tensors = megatron_to_hf(actor.named_parameters(), hf_config)
        named_tensors = unswap(named_tensors) if "parity" in args.unfix else named_tensors
        to_drafter = args.drafter == "synced" and "sync" not in args.unfix
        if llm:
            sync_weights(llm, named_tensors, drafter=to_drafter)  # fix 5
        else:
            collections.deque(named_tensors, maxlen=0)  # takes part in gathering
        if to_drafter:
            fill(drafter, dict(actor.mtp.named_parameters()))
        clock.append(time.perf_counter())
        if rank == 0:
            report(step_number, metrics, samples, clock, actor, baseline, args)

    write_checkpoint(actor, hf_config, f"{args.out}/checkpoint")
    if args.save_every:
        save_state(args, args.steps, tensors, generator)
    if rank == 0:
        draw(args.out)


def main(argv=None):
    args, state, rank = parse_args(argv), (), int(os.environ.get("RANK", 0))
    try:
        if args.resume:
            saved, *state = load_state(args.resume)
            args = dataclasses.replace(
                saved, out=args.resume, resume=args.resume, verbose=args.verbose
            )
        check(args)
        train(args, *state)
        return 0
    except Refused as error:
        code, said = 2, str(error)
    except KeyboardInterrupt:
        code, said = 130, "interrupted"
    except Exception as error:
        if args.verbose:
            raise
        code, said = 1, f"{type(error).__name__}: {error}"
    if code != 2 and os.path.exists(f"{args.out}/state.safetensors"):
        said += f"; go on from the last save with --resume {args.out}"
    if (
        rank and code == 1
    ):  # mostly all ranks fail alike: torchrun ends this one, and the first one's message is enough
        time.sleep(10)
    if (
        rank == 0 or code == 1
    ) and "Connection closed by peer" not in said:  # that is another rank's failure
        print(f"train_mimo.py: {said}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
