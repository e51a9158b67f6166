"""Fix 4: a reference without MTP, an actor that skips it; megatron-core 0.16.1 to 0.19.2."""

import contextlib
import copy
import itertools

import conftest
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import toy.model
from drafter_sync import match_vllm_mimo
from mtp_loss import draft_tokens, patch_mtp_loss
from ref_disable import (
    drop_mtp_weights,
    reference_transformer_config,
    skip_mtp,
    without_mtp_config,
)
from toy.hybrid import build_hybrid_model

COUNT_NAMES = ("num_nextn_predict_layers", "mtp_num_hidden_layers")

# --------------------------------------------------------------------------------------------------
# Configs
# --------------------------------------------------------------------------------------------------

FIELD = {  # the layouts seen in the field, and what each says when it is off
    "MiMo": ({"num_nextn_predict_layers": 1}, {"num_nextn_predict_layers": 0}),
    "Qwen3.5": ({"mtp_num_hidden_layers": 1}, {"mtp_num_hidden_layers": 0}),
    "Qwen3.5 nested": (
        {"text_config": {"mtp_num_hidden_layers": 1}},
        {"text_config": {"mtp_num_hidden_layers": 0}},
    ),
    "DeepSeek-V3": (
        {"num_nextn_predict_layers": 1, "n": [3]},
        {"num_nextn_predict_layers": 0, "n": [3]},
    ),
    "both": (dict.fromkeys(COUNT_NAMES, 2), dict.fromkeys(COUNT_NAMES, 0)),
    "both, everywhere": (
        dict.fromkeys(COUNT_NAMES, 2) | {"text_config": dict.fromkeys(COUNT_NAMES, 2)},
        dict.fromkeys(COUNT_NAMES, 0) | {"text_config": dict.fromkeys(COUNT_NAMES, 0)},
    ),
    "None": (
        {"num_nextn_predict_layers": None, "text_config": None},
        {"num_nextn_predict_layers": 0, "text_config": None},
    ),
    "0": ({"mtp_num_hidden_layers": 0}, {"mtp_num_hidden_layers": 0}),
    "no such field": (
        {"hidden_size": 8, "text_config": {"a": 1}},
        {"hidden_size": 8, "text_config": {"a": 1}},
    ),
}


@pytest.mark.parametrize("given, wanted", FIELD.values(), ids=FIELD)
def test_every_count_of_a_dict_is_0_and_nothing_is_added_or_shared(given, wanted):
    before = copy.deepcopy(given)
    found = without_mtp_config(given)
    assert found == wanted and given == before
    inner = [key for key, value in given.items() if isinstance(value, (dict, list))]
    assert found is not given and all(found[key] is not given[key] for key in inner)


def pretrained_configs():
    import transformers

    nested_dict = transformers.PretrainedConfig(num_nextn_predict_layers=1)
    nested_dict.text_config = {"mtp_num_hidden_layers": 1}
    return [
        transformers.PretrainedConfig(num_nextn_predict_layers=1),
        transformers.Qwen2Config(num_nextn_predict_layers=1),  # MiMo's own class derives from it
        transformers.Qwen3_5TextConfig(mtp_num_hidden_layers=1),
        transformers.Qwen3_5Config(text_config={"mtp_num_hidden_layers": 1}),
        transformers.DeepseekV3Config(num_nextn_predict_layers=1),
        transformers.Glm4MoeConfig(num_nextn_predict_layers=1),
        nested_dict,
    ]


@pytest.mark.parametrize("index", range(7))
def test_pretrained_configs_are_switched_off_too_and_stay_usable_for_the_actor(index):
    config = pretrained_configs()[index]
    before = copy.deepcopy(config.to_dict())
    found = without_mtp_config(config)
    assert type(found) is type(config) and config.to_dict() == before
    switched_off = []

    def switch_off(tree):
        if not isinstance(tree, dict):
            return tree
        switched_off.extend(tree[name] for name in COUNT_NAMES if name in tree)
        return {key: 0 if key in COUNT_NAMES else switch_off(tree[key]) for key in tree}

    assert found.to_dict() == switch_off(before) and set(switched_off) == {1}


@pytest.mark.parametrize("actor_first", [True, False])
def test_in_either_order_of_construction_the_actor_has_mtp_and_the_reference_has_none(
    megatron, actor_first
):
    shared = toy.model.mimo_config(hidden_size=64, num_heads=2, ffn_size=96)
    build = {"actor": lambda: toy.model.build_model(shared)}
    build["reference"] = lambda: toy.model.build_model(without_mtp_config(shared))
    models = {name: build[name]() for name in sorted(build, reverse=not actor_first)}
    assert any("mtp" in name for name, _ in models["actor"].named_parameters())
    assert not any("mtp" in name for name, _ in models["reference"].named_parameters())

    def before(config):  # verl before #6626
        config["num_nextn_predict_layers"] = 0
        return toy.model.build_model(config)

    before(shared)
    assert not any("mtp" in name for name, _ in build["actor"]().named_parameters())


def test_the_transformer_config_is_copied_with_mtp_off(tiny):
    config = tiny(mtp_layers=2).config
    config.moe_layer_freq, config.moe_router_topk_limited_devices = [1, 0], None
    config.grad_scale_func = tiny  # a callable, and what it is bound to, must not be copied
    before = copy.copy(vars(config))
    reference = reference_transformer_config(config)
    assert type(reference) is type(config) and reference.mtp_num_layers is None
    assert vars(config) == before and config.mtp_num_layers == 2
    assert {k: v for k, v in vars(reference).items() if k != "mtp_num_layers"} == {
        k: v for k, v in before.items() if k != "mtp_num_layers"
    }
    assert reference.grad_scale_func is config.grad_scale_func
    reference.moe_layer_freq.append(1)
    assert config.moe_layer_freq == [1, 0]


# --------------------------------------------------------------------------------------------------
# Weights
# --------------------------------------------------------------------------------------------------

TRUNK = [
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.60.mlp.gate.e_score_correction_bias",
    "model.language_model.layers.3.input_layernorm.weight",
    "model.visual.blocks.70.attn.qkv.weight",
    "vision_model.encoder.layers.99.layer_norm1.weight",
    "model.norm.weight",
    "lm_head.weight",
    "smtp.weight",
    "model.mtpx.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "module.module.output_layer.weight",
    "",
]
MTP = [
    "model.mtp_layers.0.input_proj.weight",  # MiMo
    "mtp.fc.weight",  # Qwen3-Next, Qwen3.5
    "mtp.layers.0.self_attn.q_proj.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "model.mtp.layers.0.enorm.weight",
    "model.mtp_block.0.mlp.up_proj.weight",  # Ernie 4.5
    "model.mtp_emb_norm.0.weight",
    "mtp.layers.1.eh_proj.weight",  # Megatron
    "module.module.mtp.layers.0.transformer_layer.mlp.linear_fc1.weight",
    "mtp.layers.0.final_layernorm._extra_state",
]
BY_NUMBER = [  # DeepSeek-V3 with 61 layers, GLM
    "model.layers.61.eh_proj.weight",
    "model.layers.61.embed_tokens.weight",
    "model.layers.61.mlp.experts.0.up_proj.weight",
    "model.layers.61.shared_head.head.weight",
    "model.language_model.layers.62.enorm.weight",
]


def test_trunk_tensors_stay_in_order_and_untouched_and_mtp_tensors_go():
    pairs = [(name, object()) for pair in zip(TRUNK, MTP, strict=False) for name in pair]
    pairs += [(name, object()) for name in TRUNK[len(MTP) :]]
    kept = list(drop_mtp_weights(pairs))
    assert [name for name, _ in kept] == TRUNK
    assert all(value is dict(pairs)[name] for name, value in kept)
    assert list(drop_mtp_weights(dict(pairs))) == kept
    assert list(drop_mtp_weights(iter(kept))) == kept


def test_layers_beyond_the_trunk_are_told_by_their_number():
    pairs = [(name, None) for name in TRUNK + BY_NUMBER + MTP]
    assert [name for name, _ in drop_mtp_weights(pairs, num_hidden_layers=61)] == TRUNK
    with pytest.raises(
        ValueError,
        match="layers.61.eh_proj.weight .* num_hidden_layers is None; wanted the trunk's",
    ):
        list(drop_mtp_weights(pairs))
    with pytest.raises(
        ValueError, match="layers.61.eh_proj.weight .* num_hidden_layers is 62; wanted the trunk's"
    ):
        list(drop_mtp_weights(pairs, num_hidden_layers=62))


@given(
    st.lists(st.sampled_from(TRUNK + MTP)),
    st.sampled_from(["", "module.", "actor.model.", "module.module."]),
)
def test_any_mixture_behind_any_prefix(names, prefix):
    kept = [name for name, _ in drop_mtp_weights((prefix + name, 0) for name in names)]
    assert kept == [prefix + name for name in names if name in TRUNK]


def test_it_is_lazy():
    taken = []

    def stream():
        for name in ("a", "mtp.b", "c", "d"):
            taken.append(name)
            yield name, None

    pairs = drop_mtp_weights(stream())
    assert taken == [] and next(pairs) == ("a", None) and taken == ["a"]
    assert next(pairs) == ("c", None) and taken == ["a", "mtp.b", "c"]


# --------------------------------------------------------------------------------------------------
# Models
# --------------------------------------------------------------------------------------------------


def batch():
    input_ids, position_ids, packed = toy.model.pack(
        [list(range(16)), list(range(20, 44)), list(range(50, 62))]
    )
    labels, loss_mask = input_ids.roll(-1, -1), torch.ones(input_ids.shape)
    return (
        (input_ids, position_ids, None),
        dict(packed_seq_params=packed),
        dict(labels=labels, loss_mask=loss_mask),
    )


def megatron_release():
    import megatron.core

    return megatron.core.__version__.rsplit(".", 1)[0]


@contextlib.contextmanager
def counted_forwards(model):
    """A list that grows with every forward of an MTP layer."""
    calls = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, _: calls.append(layer))
        for layer in model.mtp.layers
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@pytest.fixture(autouse=True)
def no_leftover_tracker(megatron):
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker = {}  # sized by the first model that ran, of whatever depth


@pytest.mark.parametrize("depth, tied", [(1, False), (2, True)])
def test_a_reference_filled_from_a_checkpoint_with_mtp_gives_the_actors_log_probs(
    tiny, tmp_path, depth, tied
):
    actor = tiny(mtp_layers=depth, tied=tied)
    weights = {
        name: tensor
        for name, tensor in actor.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }
    save_file(weights, tmp_path / "model.safetensors")

    hf_config = without_mtp_config(
        toy.model.mimo_config(
            hidden_size=64, num_heads=2, num_groups=2, ffn_size=96, mtp_layers=depth, tied=tied
        )
    )
    reference = toy.model.build_model(hf_config)
    assert not any("mtp" in name for name in reference.state_dict())
    wanted = {
        name for name, tensor in reference.state_dict().items() if isinstance(tensor, torch.Tensor)
    }
    read = []
    with safe_open(tmp_path / "model.safetensors", "pt") as file, torch.no_grad():
        for name, _ in drop_mtp_weights((name, None) for name in file.keys()):
            read.append(name)
            reference.get_parameter(name).copy_(file.get_tensor(name))
    assert sorted(read) == sorted(
        wanted
    )  # each once: no MTP tensor read, nothing left over, nothing missing
    assert len(read) < len(weights)

    args, packed, labels = batch()
    with torch.no_grad():
        with skip_mtp(actor):
            trunk = actor(*args, **packed)
        logits = reference(*args, **packed)  # labels=None
        assert torch.equal(logits.log_softmax(-1), trunk.log_softmax(-1))
        assert torch.equal(
            reference(*args, **packed, **labels), actor(*args, **packed, **labels)
        )  # log-probs of labels


def test_the_reference_config_builds_what_a_config_without_mtp_builds(tiny):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = toy.model.PackedAttention
    actor = tiny(mtp_layers=1)
    settings = dict(
        vocab_size=64, max_sequence_length=128, position_embedding_type="rope", rotary_base=10000.0
    )
    reference = GPTModel(
        reference_transformer_config(actor.config),
        spec,
        share_embeddings_and_output_weights=False,
        **settings,
    )
    kept = dict(drop_mtp_weights(actor.state_dict()))
    reference.load_state_dict(kept, strict=True)
    args, packed, _ = batch()
    with torch.no_grad(), skip_mtp(actor):
        assert torch.equal(reference(*args, **packed), actor(*args, **packed))


@pytest.mark.parametrize("count", [1, 0])
def test_stock_0_16_crashes_on_a_log_prob_pass_unless_mtp_num_layers_is_none(tiny, count):
    model = tiny(mtp_layers=count)
    model.config.mtp_num_layers = count
    args, packed, _ = batch()
    crash = pytest.raises(AttributeError, match="'NoneType' object has no attribute 'clone'")
    with crash if megatron_release() == "0.16" else contextlib.nullcontext():
        model(*args, **packed)
    with skip_mtp(model):
        model(*args, **packed)


@pytest.mark.parametrize("depth, tied", [(1, True), (2, False)])
def test_inside_skip_mtp_no_mtp_layer_runs_and_the_logits_are_bitwise_the_same(tiny, depth, tied):
    actor = tiny(mtp_layers=depth, tied=tied)
    args, packed, labels = batch()
    plain = tiny(mtp_layers=depth, tied=tied, mtp_num_layers=None)
    with counted_forwards(actor) as calls, torch.no_grad():
        loss = actor(*args, **packed, **labels)
        assert len(calls) == depth
        with skip_mtp(actor):
            assert torch.equal(actor(*args, **packed), plain(*args, **packed))
            assert torch.equal(actor(*args, **packed, **labels), loss)
            assert (
                actor.decoder.config.mtp_num_layers == depth
            )  # MoE routers size their loss tracker by it
        assert len(calls) == depth
        actor(*args, **packed, **labels)
        assert len(calls) == 2 * depth


@pytest.mark.parametrize("detach_trunk", [True, False])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_it_holds_in_any_order_with_the_patched_loss_and_vllms_convention(
    tiny, order, detach_trunk
):
    actor = tiny()
    args, packed, labels = batch()
    before, config = state(actor), actor.config
    contexts = [
        lambda: skip_mtp(actor),
        lambda: patch_mtp_loss(actor, detach_trunk=detach_trunk),
        lambda: match_vllm_mimo(actor),
    ]
    with skip_mtp(actor):
        logits = actor(*args, **packed)
    with counted_forwards(actor) as calls:
        with contextlib.ExitStack() as stack:
            entered = [(i, stack.enter_context(contexts[i]())) for i in order]
            mtp = dict(entered)[1]
            assert torch.equal(actor(*args, **packed, **labels), logits)
            assert torch.equal(actor(*args, **packed), logits)
            assert mtp.depths == []
            with pytest.raises(RuntimeError, match="skip_mtp"):
                draft_tokens(actor, *args, **packed)
        assert not calls
        with contexts[1]() as mtp, contexts[2]():  # and all of it is back
            assert torch.equal(actor(*args, **packed, **labels), logits)
        assert len(calls) == len(mtp.depths) == 1
    assert state(actor) == before and actor.config is config
    assert "forward" not in vars(actor.mtp)


def test_within_the_patched_loss_a_pass_is_skipped_and_the_next_step_trains_mtp_again(tiny):
    actor = tiny()
    args, packed, labels = batch()
    with patch_mtp_loss(actor) as mtp, counted_forwards(actor) as calls:
        actor(*args, **packed, **labels)
        assert len(calls) == len(mtp.depths) == 1
        tokens = mtp.depths[0]["tokens"].clone()
        mtp.depths.clear()
        with skip_mtp(actor):
            actor(*args, **packed, **labels)
        assert len(calls) == 1 and mtp.depths == []
        actor(*args, **packed, **labels)
        assert len(calls) == 2 and mtp.depths[0]["tokens"] == tokens


def state(model):
    return {name: value for name, value in vars(model).items() if name != "_modules"}, copy.copy(
        vars(model.config)
    )


def test_the_model_is_whole_again_afterwards_also_after_an_error_and_nested(tiny):
    actor = tiny()
    args, packed, labels = batch()

    def gradients():
        actor.zero_grad()
        actor(*args, **packed, **labels).sum().backward()
        return [parameter.grad.clone() for parameter in actor.parameters()]

    expected, before, config = gradients(), state(actor), actor.config
    with skip_mtp(actor), skip_mtp(actor):
        pass
    with pytest.raises(KeyError), skip_mtp(actor):
        with skip_mtp(actor):
            actor(*args, **packed)
        with counted_forwards(actor) as calls:  # the outer one is still on
            actor(*args, **packed)
        assert not calls
        raise KeyError
    assert (
        state(actor) == before and actor.config is config and actor.mtp.layers[0].config is config
    )
    assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))


class Wrapper(torch.nn.Module):  # as DDP and Float16Module
    def __init__(self, module):
        super().__init__()
        self.module = module


class VisionLanguageModel(torch.nn.Module):
    def __init__(self, language_model):
        super().__init__()
        self.vision_tower, self.language_model = torch.nn.Linear(2, 2), language_model


@pytest.mark.parametrize(
    "held",
    [
        lambda model: Wrapper(Wrapper(model)),
        lambda model: VisionLanguageModel(model),
        lambda model: Wrapper(VisionLanguageModel(Wrapper(model))),
        lambda model: [model],
        lambda model: (Wrapper(VisionLanguageModel(model)),),
        lambda model: torch.nn.ModuleList([model]),
    ],
)
def test_it_finds_the_model_where_codebases_hold_it(tiny, held):
    actor = tiny()
    args, packed, _ = batch()
    wanted, before, config = actor(*args, **packed, labels=args[0]), state(actor), actor.config
    with skip_mtp(held(actor)), counted_forwards(actor) as calls:
        assert torch.equal(actor(*args, **packed, labels=args[0]), wanted) and not calls
    assert state(actor) == before and actor.config is config


def test_of_a_virtual_pipelines_chunks_the_one_with_the_head_skips_mtp(tiny):
    actor, first = tiny(), tiny(mtp_num_layers=None)
    first.post_process = False
    before = state(first)
    with skip_mtp([first, actor]):
        assert actor.config.mtp_num_layers is None and state(first) == before
    first.config.pipeline_model_parallel_size = 2
    with skip_mtp([first]), skip_mtp(first):  # a stage that has no head
        assert state(first)[0] == before[0]


def test_a_model_without_mtp_is_left_alone(tiny):
    plain = tiny(mtp_num_layers=None)
    before = state(plain)
    with skip_mtp(plain):
        assert state(plain) == before


@pytest.mark.parametrize(
    "model", [None, [], [None], torch.nn.Linear(2, 2), torch.nn.Linear, "actor"]
)
def test_what_is_no_model_of_megatrons_is_refused_by_the_name_of_its_class(model):
    name = type(model[0] if model and isinstance(model, list) else model).__name__
    with pytest.raises((TypeError, ValueError), match=name), skip_mtp(model):
        pass


def test_two_chunks_with_a_head_are_refused_and_left_alone(tiny):
    chunks = [tiny(), tiny()]
    before = [state(chunk) for chunk in chunks]
    with pytest.raises(ValueError, match="GPTModel, GPTModel"), skip_mtp(chunks):
        pass
    assert [state(chunk) for chunk in chunks] == before


@pytest.mark.parametrize("depth, tied", [(1, False), (2, True)])
def test_a_hybrid_model_skips_its_mtp_layers_too(megatron, depth, tied):
    if megatron_release() in ("0.16", "0.17"):
        pytest.skip("no HybridModel before 0.18")
    hf_config = toy.model.mimo_config(
        hidden_size=64, num_heads=2, ffn_size=96, mtp_layers=depth, tied=tied
    )
    actor = build_hybrid_model(hf_config)
    conftest.random_weights(actor, 0)
    reference = build_hybrid_model(without_mtp_config(hf_config))
    reference.load_state_dict(dict(drop_mtp_weights(actor.state_dict())), strict=True)
    args, packed, labels = batch()
    before, config = state(actor), actor.config
    with counted_forwards(actor) as calls, torch.no_grad():
        loss = actor(*args, **packed, **labels)
        assert len(calls) == depth
        with skip_mtp([Wrapper(actor)]):
            assert torch.equal(actor(*args, **packed), reference(*args, **packed))
            assert torch.equal(actor(*args, **packed, **labels), loss)
        assert len(calls) == depth
        actor(*args, **packed, **labels)
        assert len(calls) == 2 * depth
    logits = reference(*args, **packed)
    with counted_forwards(actor) as calls:
        with skip_mtp(actor), patch_mtp_loss(actor) as mtp:
            assert torch.equal(actor(*args, **packed, **labels), logits)
        with patch_mtp_loss(actor) as mtp:
            with skip_mtp(actor):
                assert torch.equal(actor(*args, **packed, **labels), logits) and mtp.depths == []
            assert not calls
            actor(*args, **packed, **labels)
            assert len(calls) == len(mtp.depths) == depth
    assert state(actor) == before and actor.config is config


def test_a_tied_head_on_a_last_pipeline_stage_keeps_its_weight(tiny):
    """From 0.17 on its copy of the embedding; its output_layer's own weight is never filled."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )

    config, spec = tiny().config, get_gpt_layer_local_spec(normalization="RMSNorm")
    mtp_spec = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    stage = GPTModel(
        config,
        spec,
        64,
        128,
        pre_process=False,
        share_embeddings_and_output_weights=True,
        mtp_block_spec=mtp_spec,
    )
    outside = stage.shared_embedding_or_output_weight()
    with skip_mtp(stage):
        assert stage.shared_embedding_or_output_weight() is outside
