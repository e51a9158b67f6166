"""A tiny Megatron `HybridModel` with MTP on CPU, from attention and MLP layers.

Nothing here is a fix. For megatron-core 0.18 and 0.19, which ship a hybrid spec of Transformer
Engine's parts alone; those want a GPU, and this one is made of what the local GPT spec has. Mamba
layers want a GPU in any case, and no fix touches them.
"""

import contextlib
import copy

import toy.model


def build_hybrid_model(hf_config, **overrides):
    """The sizes of `hf_config`; for each of its layers an attention layer and an MLP layer.

    overrides go to TransformerConfig. Names: decoder.final_norm where GPTModel has
    decoder.final_layernorm, mtp.layers.N.mtp_model_layer.layers.M where it has mtp_model_layer.
    """
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    num_layers, depths = hf_config["num_hidden_layers"], hf_config["num_nextn_predict_layers"]
    settings = dict(num_layers=2 * num_layers, is_hybrid_model=True)
    # A GPTModel is built for its config alone: the settings of the toy stand in build_model.
    config = copy.copy(toy.model.build_model(hf_config, **settings | overrides).config)
    with _replaced(hybrid_block, "TENorm", WrappedTorchNorm):  # the final norm is hard-wired
        return HybridModel(
            config,
            _stack_spec(),
            vocab_size=hf_config["vocab_size"],
            max_sequence_length=hf_config["max_position_embeddings"],
            hybrid_layer_pattern="/".join(["*-" * num_layers, *["*-"] * depths]),
            position_embedding_type="rope",
            rotary_base=hf_config["rope_theta"],
            share_embeddings_and_output_weights=hf_config["tie_word_embeddings"],
        )


def _stack_spec():
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import multi_token_prediction as megatron_mtp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    gpt_layer = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    gpt_layer.self_attention.submodules.core_attention = toy.model.PackedAttention
    attention = TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=gpt_layer.self_attention,
        self_attn_bda=get_bias_dropout_add,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm, mlp=gpt_layer.mlp, mlp_bda=get_bias_dropout_add
    )
    mtp_layer = megatron_mtp.MultiTokenPredictionLayerSubmodules(
        enorm=WrappedTorchNorm,
        hnorm=WrappedTorchNorm,
        layer_norm=WrappedTorchNorm,
        eh_proj=ColumnParallelLinear,
        mtp_model_layer=None,  # built from the pattern
    )
    layer_spec = ModuleSpec(megatron_mtp.MultiTokenPredictionLayer, submodules=mtp_layer)
    block = megatron_mtp.MultiTokenPredictionBlockSubmodules(layer_specs=[layer_spec])
    return ModuleSpec(
        HybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(MLPLayer, submodules=mlp),
            mtp_block_spec=ModuleSpec(megatron_mtp.MultiTokenPredictionBlock, submodules=block),
        ),
    )


@contextlib.contextmanager
def _replaced(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
