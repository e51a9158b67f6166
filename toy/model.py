"""The small MiMo in Megatron: config, process groups, attention core, packing; CPU or CUDA.

Nothing here is a fix. It is what a codebase that trains with Megatron has already, made as small as
it gets, so that the fixes can be seen to work on any machine. Imports none of the fixes.
"""

import contextlib
import itertools
import os

import torch
import torch.nn.functional as F


def mimo_config(
    *,
    num_layers=2,
    hidden_size=128,
    num_heads=4,
    num_groups=2,
    ffn_size=256,
    vocab_size=64,
    max_positions=128,
    mtp_layers=1,
    tied=False,
):
    """A Hugging Face `config.json` in MiMo's layout, a dict; it drives Megatron and vLLM."""
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "hidden_act": "silu",
        "attention_bias": True,
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": ffn_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_groups,
        "head_dim": hidden_size // num_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tied,
        "num_nextn_predict_layers": mtp_layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }


def torchrun():
    """(rank, number of ranks) that torchrun set for this process; (0, 1) without it."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def init_megatron(device="cpu", tensor_parallel=1, context_parallel=1):
    """Megatron's groups over torch.distributed (gloo or NCCL), unless that is started already."""
    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.core import parallel_state

    rank, world_size = torchrun()
    if device == "cpu":  # Megatron asks CUDA for the current device and keeps its dropout RNG there
        torch.cuda.current_device = lambda: torch.device("cpu")
        torch.cuda.manual_seed = torch.manual_seed
        torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
        megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    else:
        torch.cuda.set_device(rank)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            store=None if world_size > 1 else torch.distributed.HashStore(),  # None: torchrun's
            rank=rank,
            world_size=world_size,
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_parallel, context_parallel_size=context_parallel
        )
    megatron_random.model_parallel_cuda_manual_seed(1)


class PackedAttention(torch.nn.Module):
    """Causal attention core for packed `[t, n, d]` and dense `[s, b, n, d]` input.

    Megatron's local core refuses packed sequences, Transformer Engine's wants a GPU.
    """

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, **unused
    ):
        super().__init__()
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(self, query, key, value, attention_mask, packed_seq_params=None, **unused):
        if packed_seq_params is None:
            return self.attend(query, key, value)
        plain, padded = packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_q_padded
        offsets = plain if padded is None else padded
        if query.is_cuda and not self.dropout:
            from torch.nn.attention.varlen import varlen_attn

            longest = packed_seq_params.max_seqlen_q
            repeats = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
            bounds = offsets, offsets, longest, longest
            return varlen_attn(query, key, value, *bounds, window_size=(-1, 0)).flatten(1)
        documents = [
            slice(*pair) for pair in itertools.pairwise(offsets.tolist()) if pair[0] < pair[1]
        ]
        return torch.cat(
            [self.attend(*(x[of, None] for x in (query, key, value))) for of in documents]
        )[:, 0]

    def attend(self, *qkv_SBND):
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        qkv_BNSD = [x.permute(1, 2, 0, 3) for x in qkv_SBND]
        dropout = self.dropout if self.training else 0.0
        with get_cuda_rng_tracker().fork() if dropout else contextlib.nullcontext():
            out_BNSD = F.scaled_dot_product_attention(
                *qkv_BNSD, is_causal=True, dropout_p=dropout, enable_gqa=True
            )
        return out_BNSD.permute(2, 0, 1, 3).flatten(2)


def build_model(hf_config, *, mtp=True, tensor_parallel=1, dtype=torch.float32, **overrides):
    """A `GPTModel` of MiMo's architecture (local spec); overrides go to `TransformerConfig`."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
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
        bf16=dtype == torch.bfloat16,
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
    mtp_spec = None
    if config.mtp_num_layers:
        mtp_spec = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return GPTModel(
        config,
        spec,
        vocab_size=hf_config["vocab_size"],
        max_sequence_length=hf_config["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=hf_config["rope_theta"],
        share_embeddings_and_output_weights=hf_config["tie_word_embeddings"],
        mtp_block_spec=mtp_spec,
    )


def num_parameters(module):
    """Of the whole module: a shard counts for every tensor-parallel rank."""
    shards = module.config.tensor_model_parallel_size
    return sum(
        p.numel() * (shards if getattr(p, "tensor_model_parallel", False) else 1)
        for p in module.parameters()
    )


def forward(model, batch, labels=None, loss_mask=None):
    """Logits `[T, V]` of a batch, whole on every tensor-parallel rank."""
    logits = model(
        batch["input_ids"],
        batch["position_ids"],
        None,
        labels=labels,
        loss_mask=loss_mask,
        packed_seq_params=batch["packed"],
    )
    return gather_vocabulary(logits).flatten(0, 1)


def gather_vocabulary(logits):
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    return gather_from_tensor_model_parallel_region(logits)


def copies(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@torch.no_grad()
def fill(tensors, values):
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


def pack(documents, device="cpu"):
    """Token lists as one packed buffer: `input_ids`, `position_ids` `[1, T]`, `PackedSeqParams`."""
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
