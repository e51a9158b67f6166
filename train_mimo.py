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
        python train_mimo.py --drafter frozen   the same with a drafter that is never updated
Output  OUT/metrics.jsonl (one line a step), OUT/curves.png, OUT/checkpoint/ (Hugging Face layout, loads in stock vLLM)
"""

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

from drafter_sync import DrafterSyncExtension, hf_to_megatron, match_vllm_mimo, megatron_to_hf, sync_weights
from mtp_loss import draft_tokens, patch_mtp_loss
from mtp_mask import depth_mask, depth_targets, expand_response_mask
from mtp_recompute import patch_mtp_recompute
from ref_disable import drop_mtp_weights, skip_mtp, without_mtp_config
from spec_metrics import counts_from_vllm, replay_acceptance, summarize

# vLLM reads these when it is imported, here and in its worker processes.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # on CPU, compiling stalls the first step by 16 to 20 s


def option(default, sentence, choices=None):
    return dataclasses.field(default=default, metadata={"help": sentence, "choices": choices})


@dataclasses.dataclass
class Args:
    """Every argument, with its default and a sentence. `--no-recompute` style flags turn a bool off."""

    steps: int = option(30, "PPO steps: a rollout, its updates and a push each")
    seed: int = option(0, "seed of weights, prompts and sampling; the same seed gives the same numbers")
    out: str = option("runs/mimo", "folder for metrics.jsonl, curves.png and checkpoint/")
    overwrite: bool = option(False, "use --out although it holds something, deleting what it holds")
    device: str = option(
        "auto", "where to train and sample; auto takes CUDA where there is one", ["auto", "cpu", "cuda"]
    )
    drafter: str = option(
        "synced",
        "push weights to the drafter, never (frozen), or sample without it (none)",
        ["none", "frozen", "synced"],
    )
    engine: str = option(
        "inprocess", "vLLM in this process (quick start) or in one of its own", ["inprocess", "process"]
    )
    temperature: float = option(1.0, "sampling temperature; log-probs are of the tempered distribution on both sides")
    mtp_scale: float = option(0.2, "lambda, the weight of the MTP loss")
    mtp_rule: str = option("drafted", "which slots train the MTP layer, see mtp_mask.py", ["target", "drafted"])
    recompute: bool = option(True, "full activation recompute, trunk and MTP layer")
    verbose: bool = option(False, "show the log output of vLLM and Megatron")
    warmup_steps: int = option(100, "supervised steps before PPO")
    prompts: int = option(64, "prompts a rollout, one response each")
    response_tokens: int = option(28, "longest response; lengths vary from half of it to all")
    epochs: int = option(2, "passes over a rollout")
    minibatches: int = option(4, "updates a pass")
    lr: float = option(1e-3, "learning rate of policy and value head, falling linearly to a tenth over the PPO steps")
    mtp_lr: float = option(3e-3, "learning rate of the MTP layer")
    clip: float = option(0.2, "PPO clip range of the probability ratio")
    kl_coef: float = option(0.01, "weight of the KL penalty towards the reference in the reward")
    gamma: float = option(0.3, "discount; small, since a token only decides its own reward and the next state")
    gae_lambda: float = option(0.9, "GAE lambda")
    max_grad_norm: float = option(1.0, "gradient clip, of policy and MTP apart")
    layers: int = option(2, "transformer layers of the trunk")
    hidden: int = option(128, "hidden size")
    heads: int = option(4, "attention heads; head size 32 or more for vLLM on CPU")
    groups: int = option(2, "query groups (key/value heads)")
    ffn: int = option(256, "feed-forward size")
    vocab: int = option(64, "vocabulary")


# ------------------------------------------------------------------------------------------------------------------
# Megatron: one model on CPU or CUDA, trained on packed sequences
# ------------------------------------------------------------------------------------------------------------------


def mimo_config(
    *, num_layers=2, hidden_size=128, num_heads=4, num_groups=2, ffn_size=256, vocab_size=64, max_positions=128,
    mtp_layers=1, tied=False,
):  # fmt: skip
    """A Hugging Face `config.json` in MiMo's layout; it drives Megatron and vLLM alike."""
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_groups,
        "head_dim": hidden_size // num_heads,
        "intermediate_size": ffn_size,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_positions,
        "num_nextn_predict_layers": mtp_layers,
        "tie_word_embeddings": tied,
        "attention_bias": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }


def megatron_on_cpu():
    """Lets megatron-core run without a GPU: it asks CUDA for the current device and keeps its dropout RNG there."""
    import megatron.core.tensor_parallel.random as megatron_random

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    megatron_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def init_megatron(device="cpu", *, rank=0, world_size=1, tensor_parallel=1, context_parallel=1, store=None):
    """Starts torch.distributed (gloo on CPU, NCCL on CUDA) and Megatron's process groups; `store` only for many ranks."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    if device == "cpu":
        megatron_on_cpu()
    torch.distributed.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        store=store or torch.distributed.HashStore(),
        rank=rank,
        world_size=world_size,
    )
    parallel_state.initialize_model_parallel(tensor_parallel, context_parallel_size=context_parallel)
    model_parallel_cuda_manual_seed(1)


class PackedAttention(torch.nn.Module):
    """Causal attention core for packed `[t, n, d]` and dense `[s, b, n, d]` input.

    Megatron's local DotProductAttention refuses packed sequences and Transformer Engine's wants a GPU, so each document
    goes through torch's attention alone: no document sees another, by construction.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, **unused):
        super().__init__()
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def attend(self, query_BNSD, key_BGSD, value_BGSD):
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        dropout = self.dropout if self.training else 0.0
        with get_cuda_rng_tracker().fork() if dropout else contextlib.nullcontext():
            return F.scaled_dot_product_attention(
                query_BNSD, key_BGSD, value_BGSD, is_causal=True, dropout_p=dropout, enable_gqa=True
            )

    def forward(self, query, key, value, attention_mask, packed_seq_params=None, **unused):
        if packed_seq_params is None:
            out_BNSD = self.attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return out_BNSD.permute(2, 0, 1, 3).flatten(2)
        cu_seqlens = packed_seq_params.cu_seqlens_q_padded
        cu_seqlens = (packed_seq_params.cu_seqlens_q if cu_seqlens is None else cu_seqlens).tolist()
        documents = []
        for start, end in zip(cu_seqlens, cu_seqlens[1:], strict=False):
            if end > start:
                out_BNSD = self.attend(*(x[start:end].transpose(0, 1)[None] for x in (query, key, value)))
                documents.append(out_BNSD[0].transpose(0, 1).flatten(1))
        return torch.cat(documents)


def build_model(hf_config, *, mtp=True, tensor_parallel=1, dtype=torch.float32, **overrides):
    """A Megatron `GPTModel` of MiMo's architecture (local spec); `overrides` go to `TransformerConfig`."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings = dict(
        num_layers=hf_config["num_hidden_layers"],
        hidden_size=hf_config["hidden_size"],
        ffn_hidden_size=hf_config["intermediate_size"],
        num_attention_heads=hf_config["num_attention_heads"],
        num_query_groups=hf_config["num_key_value_heads"],
        kv_channels=hf_config["head_dim"],
        layernorm_epsilon=hf_config["rms_norm_eps"],
        mtp_num_layers=(hf_config["num_nextn_predict_layers"] or None) if mtp else None,
        mtp_loss_scaling_factor=0.2,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        tensor_model_parallel_size=tensor_parallel,
        use_cpu_initialization=True,
        # Fusions want Apex or Transformer Engine.
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    config = TransformerConfig(**(settings | overrides))
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return GPTModel(
        config,
        spec,
        vocab_size=hf_config["vocab_size"],
        max_sequence_length=hf_config["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=hf_config["rope_theta"],
        share_embeddings_and_output_weights=hf_config["tie_word_embeddings"],
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        if config.mtp_num_layers
        else None,
    )


def pack(documents, device="cpu"):
    """Token lists to one packed buffer: `input_ids`, `position_ids` `[1, T]` and Megatron's `PackedSeqParams`."""
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = torch.tensor([0] + [len(document) for document in documents])
    cu_seqlens = lengths.cumsum(0).to(device=device, dtype=torch.int32)
    longest = int(lengths.max())
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    input_ids = torch.cat([torch.as_tensor(document, dtype=torch.long) for document in documents])
    position_ids = torch.cat([torch.arange(len(document)) for document in documents])
    return input_ids[None].to(device), position_ids[None].to(device), packed


# ------------------------------------------------------------------------------------------------------------------
# vLLM: the sampler, drafting with the MTP layer
# ------------------------------------------------------------------------------------------------------------------

# The real MiMo checkpoint ships such a file: transformers does not know model_type "mimo".
MIMO_CONFIGURATION = """from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""


def write_checkpoint(model, hf_config, folder):
    """A Hugging Face MiMo checkpoint that stock vLLM loads (with trust_remote_code, as the real one)."""
    tensors = {name: tensor.contiguous() for name, tensor in megatron_to_hf(model.named_parameters(), hf_config)}
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    auto_map = {"AutoConfig": "configuration_mimo.MiMoConfig"}
    os.makedirs(folder, exist_ok=True)
    save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
    with open(f"{folder}/configuration_mimo.py", "w") as file:
        file.write(MIMO_CONFIGURATION)
    with open(f"{folder}/config.json", "w") as file:
        json.dump(hf_config | {"torch_dtype": dtype, "auto_map": auto_map}, file, indent=2)


class SmokeWorker(DrafterSyncExtension):
    """What runs inside vLLM's worker: the weight push, and a mend for a fault of vLLM's CPU backend."""

    def mend_cpu_sampler(self):
        """Returns whether this vLLM had the fault.

        vllm-cpu 0.32.0's `expand_batch_to_tokens` writes floats to a copy that is thrown away (cpu_triton_utils.py,
        _expand_kernel_impl), so the rejection sampler divides by an uninitialised temperature: with speculation on,
        samples at temperature > 0 do not follow the policy.
        """
        import vllm.v1.sample.rejection_sampler as rejection_sampler

        def expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
            counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
            return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts)

        probe = torch.tensor([0.5, 0.25], device=self.device), torch.tensor([1, 3], device=self.device), 3
        broken = not torch.equal(rejection_sampler.expand_batch_to_tokens(*probe), expand(*probe))
        if broken:
            rejection_sampler.expand_batch_to_tokens = expand
        return broken


def start_engine(folder, *, process=False, speculate=True, dtype="float32", max_num_seqs=256, **overrides):
    """Stock `vllm.LLM` on a checkpoint folder; in this process, or (process=True) in one of its own."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(process))
    from vllm import LLM

    settings = dict(
        skip_tokenizer_init=True,
        trust_remote_code=True,
        dtype=dtype,
        enforce_eager=True,
        max_num_seqs=max_num_seqs,
        use_tqdm_on_load=False,
        logprobs_mode="processed_logprobs",
        worker_extension_cls="train_mimo.SmokeWorker",
    )
    if speculate:
        settings["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 1}
        settings["per_request_spec_decode_metrics"] = "detailed"
    llm = LLM(folder, **(settings | overrides))
    llm.collective_rpc("mend_cpu_sampler")
    return llm


# ------------------------------------------------------------------------------------------------------------------
# The task
# ------------------------------------------------------------------------------------------------------------------

MAX_PROMPT = 6
WARMUP_SHARE_OF_PLUS_TWO = 0.3  # under a half, so that the reward has to move the policy's arg-max


def make_sequences(num, length, vocab, generator):
    """`[num, length]` tokens counting by +1 or +2 modulo the vocabulary."""
    steps = 1 + (torch.rand(num, length, generator=generator) < WARMUP_SHARE_OF_PLUS_TWO).long()
    steps[:, 0] = torch.randint(vocab, (num,), generator=generator)
    return steps.cumsum(1) % vocab


def token_rewards(sample, vocab):
    """1.0 for each response token that is the token before it plus 2, else 0.0."""
    previous = [sample["prompt"][-1], *sample["response"][:-1]]
    return [float((token - before) % vocab == 2) for before, token in zip(previous, sample["response"], strict=True)]


def make_prompts(num, response_tokens, vocab, generator):
    """(prompt, response length) pairs of varying lengths.

    From 2 tokens on: vLLM 0.32 pads the prefill of a one-token prompt to a verify step and counts a draft never made.
    """
    sequences = make_sequences(num, MAX_PROMPT, vocab, generator).tolist()
    prompt_lengths = torch.randint(2, MAX_PROMPT + 1, (num,), generator=generator).tolist()
    lengths = torch.randint(response_tokens // 2, response_tokens + 1, (num,), generator=generator).tolist()
    return [(sequence[:n], length) for sequence, n, length in zip(sequences, prompt_lengths, lengths, strict=True)]


def make_batch(samples, device):
    """Samples (prompt and response token lists) as one packed buffer with label-aligned labels and loss mask."""
    input_ids, position_ids, packed = pack([s["prompt"] + s["response"] for s in samples], device)
    lengths = [len(s["response"]) for s in samples]
    attention_BR = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    whole = expand_response_mask(
        attention_BR.long(), [len(s["prompt"]) + len(s["response"]) for s in samples], attention_BR
    )
    token_mask = whole.values()[None].to(device)
    cu_seqlens = packed.cu_seqlens_q
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "packed": packed,
        "labels": depth_targets(input_ids, 0, cu_seqlens),
        "loss_mask": depth_mask(token_mask, 0, cu_seqlens),
    }


# ------------------------------------------------------------------------------------------------------------------
# PPO
# ------------------------------------------------------------------------------------------------------------------


def load_reference(folder, hf_config, **settings):
    """A model without MTP layers from a checkpoint that has them; no MTP tensor is read (fix 4)."""
    reference = build_model(without_mtp_config(hf_config), mtp=False, **settings)
    parameters = dict(reference.named_parameters())
    with safe_open(f"{folder}/model.safetensors", "pt") as file, torch.no_grad():
        names = [name for name, _ in drop_mtp_weights((name, None) for name in file.keys())]
        tensors = ((name, file.get_tensor(name)) for name in names)
        for name, tensor in hf_to_megatron(tensors, without_mtp_config(hf_config), parameters):
            parameters[name].copy_(tensor)
    return reference.requires_grad_(False)


def forward(model, batch, **kwargs):
    """Logits `[T, V]` of a packed batch."""
    return model(batch["input_ids"], batch["position_ids"], None, packed_seq_params=batch["packed"], **kwargs)[0]


def label_logprobs(logits_TV, labels, temperature):
    """Log-probs `[T]` of the labels and entropy-ready log-softmax under the tempered policy, which is what is sampled."""
    logprobs_TV = (logits_TV.float() / temperature).log_softmax(-1)
    return logprobs_TV.gather(1, labels[0, :, None])[:, 0]


def warm_up(actor, step, args, generator, device):
    """Supervised training of policy and MTP layer, so that both start competent; dense, since all rows are as long."""
    length = MAX_PROMPT + args.response_tokens
    position_ids = torch.arange(length, device=device).expand(args.prompts, -1)
    for _ in range(args.warmup_steps):
        input_ids = make_sequences(args.prompts, length, args.vocab, generator).to(device)
        token_mask = position_ids >= 2  # the shortest prompt
        labels, loss_mask = depth_targets(input_ids, 0), depth_mask(token_mask, 0)
        with match_vllm_mimo(actor), patch_mtp_loss(actor, rule=args.mtp_rule):
            logits_BSV = actor(input_ids, position_ids, None, labels=labels, loss_mask=loss_mask)
            step(F.cross_entropy(logits_BSV[loss_mask].float(), labels[loss_mask]))


def sample(llm, prompts, args, step):
    """One response a prompt; each request has a seed of its own, so that the result does not depend on scheduling."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=args.temperature,
            max_tokens=length,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            seed=(args.seed * 1_000_003 + step) * 1_000_003 + i,
        )
        for i, (_, length) in enumerate(prompts)
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in prompts], params, use_tqdm=False)
    samples = []
    for output in outputs:
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        logprobs = [position[token].logprob for position, token in zip(completion.logprobs, tokens, strict=True)]
        samples.append({"prompt": output.prompt_token_ids, "response": tokens, "logprobs": logprobs})
    return samples, outputs


def acceptance(samples, outputs, drafts):
    """Acceptance of a rollout, and the share of accept / reject decisions that the trainer's drafts predict."""
    counts = counts_from_vllm(outputs)
    summary = summarize(counts)
    agreed = total = start = 0
    for sample, output in zip(samples, outputs, strict=True):
        tokens = sample["prompt"] + sample["response"]
        record = output.outputs[0].spec_decode_metrics
        if record is not None:
            predicted = replay_acceptance(tokens, len(sample["prompt"]), drafts[start : start + len(tokens)])
            agreed += sum(a == b for a, b in zip(predicted, record.per_step_accepted, strict=False))
            total += max(len(predicted), len(record.per_step_accepted))
        start += len(tokens)
    return {
        "accept_rate": summary.get("spec/accept_rate_micro"),
        "accept_length": summary.get("spec/accept_length_micro"),
        "replay_agreement": agreed / total if total else None,
        "drafts": total,
    } | summary


def estimate_advantages(rewards, values, gamma, gae_lambda):
    """GAE of one response: advantage and return of each token. values[t] is the value before token t."""
    advantages, running, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        running = reward + gamma * next_value - value + gamma * gae_lambda * running
        next_value = value
        advantages.append(running)
    advantages.reverse()
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


def score_rollout(actor, reference, value_head, samples, args, device):
    """Adds old log-probs, advantages and returns to the samples; returns (drafts of the trainer, metrics)."""
    batch = make_batch(samples, device)
    counts = batch["loss_mask"][0]
    with torch.no_grad():
        with skip_mtp(actor):  # fix 4: a log-prob pass runs no MTP layer
            old_T = label_logprobs(forward(actor, batch), batch["labels"], args.temperature)[counts]
            values_T = value_head(actor.trunk_state[:, 0].float())[:, 0][counts]
        reference_T = label_logprobs(forward(reference, batch), batch["labels"], args.temperature)[counts]
    with match_vllm_mimo(actor):
        drafts = draft_tokens(actor, batch["input_ids"], batch["position_ids"], None, packed_seq_params=batch["packed"])
    engine_T = torch.tensor([logprob for sample in samples for logprob in sample["logprobs"]], device=device)
    kl_T = old_T - reference_T
    lengths = [len(sample["response"]) for sample in samples]
    per_sample = zip(samples, *(x.split(lengths) for x in (old_T, values_T, kl_T)), strict=True)
    rewards = []
    for sample, old, value, kl in per_sample:
        reward = token_rewards(sample, args.vocab)
        rewards.append(sum(reward) / len(reward))
        reward = [r - args.kl_coef * k for r, k in zip(reward, kl.tolist(), strict=True)]
        advantages, returns = estimate_advantages(reward, value.tolist(), args.gamma, args.gae_lambda)
        sample |= {"old": old, "advantages": torch.tensor(advantages), "returns": torch.tensor(returns)}
    metrics = {
        "reward": sum(rewards) / len(rewards),
        "logprob_gap": (old_T - engine_T).abs().max().item(),
        "kl": kl_T.mean().item(),
    }
    return drafts[0].tolist(), metrics


def update(actor, value_head, step, samples, args, generator, device):
    """PPO epochs over a rollout, the MTP loss riding along; returns metrics averaged over the updates."""
    totals = dict.fromkeys(("clip_fraction", "policy_grad_norm", "mtp_grad_norm"), 0.0)
    mtp_loss = mtp_tokens = mtp_correct = 0.0
    flat = torch.cat([sample["advantages"] for sample in samples])
    mean, std = flat.mean(), flat.std() + 1e-8
    num_updates = args.epochs * args.minibatches
    for _ in range(args.epochs):
        order = torch.randperm(len(samples), generator=generator)
        for indices in order.chunk(args.minibatches):
            part = [samples[i] for i in indices.tolist()]
            batch = make_batch(part, device)
            old_T, advantages_T, returns_T = (
                torch.cat([sample[key] for sample in part]).to(device) for key in ("old", "advantages", "returns")
            )
            counts = batch["loss_mask"][0]
            # Fixes 1 and 2: the MTP loss trains the MTP layer only, on drafts of response tokens only.
            # Fix 5: the MTP layer computes what vLLM's drafter will compute. Fix 3: it is recomputed, packed or not.
            with match_vllm_mimo(actor), patch_mtp_loss(actor, rule=args.mtp_rule) as mtp, patch_mtp_recompute():
                logits_TV = forward(actor, batch, labels=batch["labels"], loss_mask=batch["loss_mask"])
                ratio_T = (label_logprobs(logits_TV, batch["labels"], args.temperature)[counts] - old_T).exp()
                scaled_T = (advantages_T - mean.to(device)) / std.to(device)
                clipped_T = ratio_T.clamp(1 - args.clip, 1 + args.clip)
                policy_loss = -torch.minimum(ratio_T * scaled_T, clipped_T * scaled_T).mean()
                value_T = value_head(actor.trunk_state[:, 0].detach().float())[:, 0][counts]
                norms = step(policy_loss + 0.5 * (value_T - returns_T).square().mean())
            totals["clip_fraction"] += (ratio_T != clipped_T).float().mean().item() / num_updates
            totals["policy_grad_norm"] += norms[0] / num_updates
            totals["mtp_grad_norm"] += norms[1] / num_updates
            mtp_loss += float(mtp.depths[0]["loss_sum"])
            mtp_tokens += float(mtp.depths[0]["tokens"])
            mtp_correct += float(mtp.depths[0]["correct"])
    return totals | {"mtp_loss": mtp_loss / mtp_tokens, "mtp_top1": mtp_correct / mtp_tokens}


# ------------------------------------------------------------------------------------------------------------------
# The run
# ------------------------------------------------------------------------------------------------------------------


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for field in dataclasses.fields(Args):
        kind = {"action": argparse.BooleanOptionalAction} if field.type is bool else {"type": field.type}
        if field.metadata["choices"]:
            kind["choices"] = field.metadata["choices"]
        parser.add_argument(
            "--" + field.name.replace("_", "-"), default=field.default, help=field.metadata["help"], **kind
        )
    return Args(**vars(parser.parse_args(argv)))


def check(args):
    """Refuses what cannot run, in one sentence, before anything is written."""
    for name in ("steps", "prompts", "epochs", "minibatches", "layers", "hidden", "heads", "groups", "ffn"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}, give 1 or more")
    if args.warmup_steps < 0 or args.response_tokens < 4 or args.vocab < 8 or args.minibatches > args.prompts:
        raise ValueError(
            "give --warmup-steps of 0 or more, --response-tokens of 4, --vocab of 8 and a prompt a minibatch"
        )
    if not args.temperature > 0 or not args.mtp_scale >= 0 or not args.max_grad_norm > 0:
        raise ValueError("give a --temperature and --max-grad-norm above 0 and an --mtp-scale of 0 or more")
    if args.hidden % args.heads or args.heads % args.groups or args.hidden // args.heads % 32:
        raise ValueError("--hidden must be --heads times 32, 64, 96 or 128, and --heads a multiple of --groups")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch sees no CUDA device: give cpu, or auto")
    if os.path.exists(args.out) and not os.path.isdir(args.out):
        raise ValueError(f"--out {args.out} is a file, give a folder")
    if os.path.isdir(args.out) and os.listdir(args.out) and not args.overwrite:
        raise ValueError(f"--out {args.out} is not empty, give another folder or --overwrite")
    parent = os.path.abspath(args.out)
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    if not os.access(parent, os.W_OK):
        raise ValueError(f"--out {args.out} cannot be written: no permission for {parent}")


@contextlib.contextmanager
def quiet(verbose):
    """Holds back what Megatron, vLLM and their C++ parts write to stderr; after an error all of it is shown."""
    if verbose:
        yield
        return
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(stderr, held.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)


def warn(metrics, args, device):
    """Loud, not silent: what usually goes unnoticed."""
    if metrics.get("drafts") and not metrics["accept_rate"]:
        print(
            "WARNING: no draft was accepted: drafter without weights, halves not swapped, or another model's?",
            file=sys.stderr,
        )
    if args.drafter == "synced" and metrics["replay_agreement"] is not None and metrics["replay_agreement"] < 0.99:
        print(
            "WARNING: the trainer's drafts differ from the engine's: stale or differently computed drafter",
            file=sys.stderr,
        )
    if device == "cpu" and metrics["logprob_gap"] > 1e-2:
        print(
            "WARNING: trainer and engine disagree on log-probs: weights not in step, or another temperature",
            file=sys.stderr,
        )


COLUMNS = {  # printed each step; metrics.jsonl has all
    "step": "{:4d}", "reward": "{:6.3f}", "accept_rate": "{:11.3f}", "replay_agreement": "{:16.4f}", "mtp_loss": "{:8.3f}",
    "kl": "{:6.3f}", "logprob_gap": "{:11.1e}", "rollout_s": "{:9.2f}", "train_s": "{:7.2f}", "sync_s": "{:6.2f}",
}  # fmt: skip


def report(lines, args, started):
    """One aligned line a step on the screen, all of it in metrics.jsonl."""
    line = lines[-1]
    with open(f"{args.out}/metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    cells = [form.format(line[name]) if line[name] is not None else "-" for name, form in COLUMNS.items()]
    cells = [cell.rjust(len(name)) for name, cell in zip(COLUMNS, cells, strict=True)]
    per_step = sum(line["rollout_s"] + line["train_s"] + line["sync_s"] for line in lines) / len(lines)
    print(" ".join(cells), f"  {per_step * (args.steps - len(lines)):.0f} s left", flush=True)


def draw(path, lines):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot([line["step"] for line in lines], [line["reward"] for line in lines], label="reward")
    if lines[0]["accept_rate"] is not None:
        axes.plot([line["step"] for line in lines], [line["accept_rate"] for line in lines], label="acceptance")
    axes.set(xlabel="PPO step", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def train(args):
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    hf_config = mimo_config(
        num_layers=args.layers, hidden_size=args.hidden, num_heads=args.heads, num_groups=args.groups, ffn_size=args.ffn,
        vocab_size=args.vocab, max_positions=max(128, MAX_PROMPT + args.response_tokens + 8),
    )  # fmt: skip
    if args.overwrite:
        shutil.rmtree(args.out, ignore_errors=True)
    os.makedirs(args.out, exist_ok=True)
    started = time.perf_counter()

    # The actor, its value head, and one optimizer with policy and MTP layer apart.
    torch.set_num_threads(1)  # at this size a second thread costs more than it brings
    with quiet(args.verbose):
        init_megatron(device)
        recompute = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
        torch.manual_seed(args.seed)
        actor = build_model(
            hf_config, dtype=dtype, mtp_loss_scaling_factor=args.mtp_scale, **(recompute if args.recompute else {})
        ).to(device)
    actor.decoder.final_layernorm.register_forward_hook(lambda module, _, out: setattr(actor, "trunk_state", out))
    value_head = torch.nn.Linear(args.hidden, 1).to(device)
    mtp_parameters = list(actor.mtp.parameters())
    of_mtp = {id(parameter) for parameter in mtp_parameters}
    policy_parameters = [p for p in [*actor.parameters(), *value_head.parameters()] if id(p) not in of_mtp]
    optimizer = torch.optim.Adam(
        [{"params": policy_parameters, "lr": args.lr}, {"params": mtp_parameters, "lr": args.mtp_lr}]
    )

    def step(loss):
        loss.backward()
        # Clipped apart: together, a large MTP gradient would shrink the policy's update.
        groups = (policy_parameters, mtp_parameters)
        norms = [torch.nn.utils.clip_grad_norm_(group, args.max_grad_norm).item() for group in groups]
        optimizer.step()
        optimizer.zero_grad()
        return norms

    generator = torch.Generator().manual_seed(args.seed)
    print(f"warm-up, {args.warmup_steps} steps", flush=True)
    warm_up(actor, step, args, generator, device)
    folder = f"{args.out}/checkpoint"
    write_checkpoint(actor, hf_config, folder)
    reference = load_reference(folder, hf_config, dtype=dtype).to(device)
    print(f"{time.perf_counter() - started:.0f} s; starting vLLM", flush=True)
    with quiet(args.verbose):
        llm = start_engine(folder, process=args.engine == "process", speculate=args.drafter != "none",
            dtype=str(dtype).removeprefix("torch."), max_num_seqs=args.prompts)  # fmt: skip
    torch.set_num_threads(1)  # vLLM's CPU worker has set its own
    print(f"{time.perf_counter() - started:.0f} s; PPO\n" + " ".join(COLUMNS), flush=True)

    lines = []
    for step_number in range(args.steps):
        optimizer.param_groups[0]["lr"] = args.lr * (1 - 0.9 * step_number / args.steps)
        clock = time.perf_counter()
        prompts = make_prompts(args.prompts, args.response_tokens, args.vocab, generator)
        samples, outputs = sample(llm, prompts, args, step_number)
        rollout_s = time.perf_counter() - clock

        clock = time.perf_counter()
        drafts, metrics = score_rollout(actor, reference, value_head, samples, args, device)
        metrics |= acceptance(samples, outputs, drafts)  # fix 6
        metrics |= update(actor, value_head, step, samples, args, generator, device)  # fixes 1, 2, 3
        train_s = time.perf_counter() - clock

        clock = time.perf_counter()
        named_tensors = megatron_to_hf(actor.named_parameters(), hf_config)
        sync_weights(llm, named_tensors, drafter=args.drafter == "synced")  # fix 5
        sync_s = time.perf_counter() - clock

        tokens = sum(len(sample["response"]) for sample in samples)
        seconds = {
            "rollout_s": rollout_s,
            "train_s": train_s,
            "sync_s": sync_s,
            "rollout_tokens_per_s": tokens / rollout_s,
        }
        lines.append({"step": step_number} | metrics | seconds)
        report(lines, args, started)
        warn(metrics, args, device)

    write_checkpoint(actor, hf_config, folder)
    draw(f"{args.out}/curves.png", lines)


def main(argv=None):
    args = parse_args(argv)
    try:
        check(args)
    except ValueError as error:
        print(f"train_mimo.py: {error}", file=sys.stderr)
        return 2
    train(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
