"""MTP inside RL, end to end: Megatron trains a small MiMo with PPO, vLLM samples with its MTP drafter, on one node."""

import contextlib

import torch
import torch.nn.functional as F

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
