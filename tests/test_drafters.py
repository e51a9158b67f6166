"""Fix 5 on every MTP drafter that vLLM starts on CPU: a pushed engine is a fresh engine, bytewise.

Each engine starts from a checkpoint of random weights, is pushed other weights, and then the first
ones again: every parameter and buffer of target and drafter must be what it was after the start,
and so must tokens and accept counts. Then one tensor is missing, left over, of a wrong shape or not
finite: refused by name, and a whole push heals. Run: make test-drafters (8 to 30 s an engine).
"""

import hashlib
import importlib.util
import json
import pathlib
import re

import toy.engine  # isort: skip  # before torch
import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter_sync import DrafterSyncError, sync_weights

SIZES = dict(
    vocab_size=100,  # no multiple of 64: vLLM pads the rows
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=False,
)
EXPERTS = dict(moe_intermediate_size=32, num_experts_per_tok=2)
LINEAR = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    layer_types=["linear_attention", "full_attention"],
)
GLM = dict(head_dim=32, n_routed_experts=4, use_qk_norm=True, attention_bias=True)
DEEPSEEK = dict(
    n_routed_experts=4,
    topk_method="noaux_tc",
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    q_lora_rank=32,
    kv_lora_rank=512,
    qk_nope_head_dim=128,  # the sizes that the kernels know
    qk_rope_head_dim=64,
    v_head_dim=128,
)
ERNIE = dict(moe_num_experts=4, moe_k=2, moe_layer_end_index=1, moe_intermediate_size=32)
EXAONE = dict(num_experts=4, first_k_dense_replace=1, layer_types=["full_attention"] * 2)

# Transformers' config and its settings; where the MTP layer's tensors are, in which the last trunk
# layer is repeated; and those that join it to the trunk, norms and one matrix [D, 2D].
JOINT = "enorm hnorm eh_proj shared_head.norm shared_head.head embed_tokens"
FC = "mtp.pre_fc_norm_embedding mtp.pre_fc_norm_hidden mtp.fc mtp.norm"
MIMO_JOINTS = "token_layernorm hidden_layernorm input_proj final_layernorm"
ERNIE_JOINTS = "model.mtp_emb_norm.0 model.mtp_hidden_norm.0 model.mtp_linear_proj.0"
NEXT = dict(head_dim=32, num_experts=4, shared_expert_intermediate_size=32)
ARCHITECTURES = {
    "mimo": ("Qwen2Config", {}, "model.mtp_layers.0.", MIMO_JOINTS),
    "glm4_moe": ("Glm4MoeConfig", GLM | EXPERTS, "model.layers.2.", JOINT),
    "deepseek_v3": ("DeepseekV3Config", DEEPSEEK | EXPERTS, "model.layers.2.", JOINT),
    "qwen3_next": ("Qwen3NextConfig", LINEAR | EXPERTS | NEXT, "mtp.layers.0.", FC),
    "qwen3_5": ("Qwen3_5TextConfig", LINEAR | dict(head_dim=32), "mtp.layers.0.", FC),
    "ernie": ("Ernie4_5_MoeConfig", ERNIE, "model.mtp_block.0.", ERNIE_JOINTS),
    "exaone_moe": ("ExaoneMoeConfig", EXPERTS | EXAONE, "mtp.layers.0.", FC),
}  # fmt: skip


def write_checkpoint(folder, architecture, **changes):
    """Random weights in the architecture's own names; returns its tensors."""
    import transformers

    config_class, settings, layer, joint = ARCHITECTURES[architecture]
    config = getattr(transformers, config_class)(**(SIZES | settings | changes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    path = pathlib.Path(folder)
    tensors = load_file(path / "model.safetensors")
    trunk = f"model.layers.{config.num_hidden_layers - 1}."
    block = {
        name.replace(trunk, layer): tensor
        for name, tensor in tensors.items()
        if name.startswith(trunk)
    }
    if architecture in ("ernie", "exaone_moe"):  # a dense layer: the trunk has it first
        block = {
            n.replace("model.layers.0.", layer): t
            for n, t in tensors.items()
            if n.startswith("model.layers.0.")
        }
    for part in joint.split():
        name = (part if part.startswith(("mtp.", "model.")) else layer + part) + ".weight"
        if "embed_tokens" in name:
            block[name] = tensors["model.embed_tokens.weight"]
        elif "head.head" in name:
            block[name] = tensors["lm_head.weight"]
        else:
            width = config.hidden_size
            block[name] = torch.empty([width] if "norm" in name else [width, 2 * width])
    settings = json.loads((path / "config.json").read_text())
    settings |= {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}
    if architecture == "mimo":
        toy.engine.write_config(
            folder,
            settings | {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"},
            torch.float32,
        )
    else:
        (path / "config.json").write_text(json.dumps(settings))
    tensors = random_weights(tensors | block, 0)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return tensors


def random_weights(tensors, seed):
    """Other weights in the same names; copies stay copies."""
    generator, new = torch.Generator().manual_seed(seed), {}
    for name, tensor in sorted(tensors.items()):
        scale = 1.0 if "embed" in name and "lm_head.weight" in tensors else 0.1
        new[name] = torch.randn(tensor.shape, generator=generator) * scale + ("norm" in name)
    for name in new:
        if re.search(r"layers\.\d+\.embed_tokens", name):
            new[name] = new["model.embed_tokens.weight"].clone()
        if "shared_head.head" in name:
            new[name] = new["lm_head.weight"].clone()
    return new


def held_by(worker):
    """{name: digest} of all that target and drafter compute with, packing on CPU undone."""
    held = {}
    for which, model in zip(("target", "drafter"), worker.drafter_sync_models(), strict=True):
        for path, layer in model.named_modules():
            tensors = layer._parameters | layer._buffers | vars(layer)
            tensors |= vars(getattr(layer, "impl", None) or object)  # MLA keeps kv_b_proj there
            for leaf, tensor in tensors.items():
                if not isinstance(tensor, torch.Tensor) or leaf == "kv_cache":
                    continue
                is_mla = path.endswith("kv_b_proj") and not tensor.numel()
                if leaf == "weight" and hasattr(layer, "cpu_linear") and not is_mla:
                    size = getattr(layer, "input_size_per_partition", None)
                    size = tensor.shape[1] if tensor.dim() == 2 else size or layer.input_size
                    rows = torch.eye(size, dtype=worker.vllm_config.model_config.dtype)
                    tensor = layer.cpu_linear(rows, tensor, None)
                content = tensor.detach().contiguous().view(-1).view(torch.uint8)
                digest = hashlib.sha256(content.numpy().tobytes()).hexdigest()
                held[f"{which} {path}.{leaf}"] = f"{list(tensor.shape)} {digest}"
    return held


@pytest.fixture(scope="module")
def engine_of(request, tmp_path_factory):
    """(llm, tensors, read back after the start, tokens and accept counts after the start)"""
    folder = str(tmp_path_factory.mktemp("drafter"))
    tensors = write_checkpoint(folder, request.param[0], **request.param[1])
    settings = {}
    if request.param[0] in ("deepseek_v3", "qwen3_next"):
        settings["dtype"] = "bfloat16"  # vLLM's CPU kernels for linear attention know no float32
    if request.param[0] == "deepseek_v3":  # the MLA for AMX is refused, see below
        settings["attention_backend"] = "CPU_MLA"
        settings["speculative_config"] = {"attention_backend": "CPU_MLA"}
    llm = toy.engine.start_engine(
        folder,
        max_num_seqs=8,
        enable_prefix_caching=False,  # with it, vLLM's linear attention wants Triton
        **settings,
    )
    yield llm, tensors, llm.collective_rpc(held_by)[0], answers(llm)
    llm.llm_engine.engine_core.shutdown()  # with vLLM's groups: one for experts has others


def answers(llm):
    prompts = [[1, 2, 3, 4], [60, 7, 8], [5, 6, 9, 10, 11]]
    outputs = toy.engine.sample(llm, prompts, [24] * 3, [0] * 3, temperature=0.0)
    return [
        (
            o["response"],
            [round(logprob, 3) for logprob in o["logprobs"]],
            o["output"].outputs[0].spec_decode_metrics.per_step_accepted,
        )
        for o in outputs
    ]


def each(test):
    runs = {name: (name, {}) for name in ARCHITECTURES} | {
        "mimo_tied": ("mimo", {"tie_word_embeddings": True}),
        "mimo_biased": ("mimo", {"attention_bias": True}),
    }
    marks = {name: [pytest.mark.drafters] for name in runs if name not in ("mimo", "glm4_moe")}
    has_vision = importlib.util.find_spec("torchvision") is not None
    no_vision = pytest.mark.skipif(not has_vision, reason="vLLM's module imports torchvision")
    marks["qwen3_5"].append(no_vision)
    params = [pytest.param(run, id=name, marks=marks.get(name, [])) for name, run in runs.items()]
    return pytest.mark.engine(pytest.mark.parametrize("engine_of", params, indirect=True)(test))


def read_back(llm):
    return llm.collective_rpc(held_by)[0]


# What no push changes: tables of positions, and the scales of the cache of keys and values.
FIXED = re.compile(r"cos_sin_cache|_scale(_cpu|_float)?$")


@each
def test_a_pushed_engine_is_a_fresh_engine_bytewise_and_answers_as_one(engine_of):
    llm, tensors, fresh, answered = engine_of
    report = sync_weights(llm, random_weights(tensors, 1), bucket_bytes=20_000)
    assert report.target_loaded > 10 and report.drafter_loaded > 8
    held = read_back(llm)
    assert [
        n for n in fresh if held[n] == fresh[n] and not FIXED.search(n) and "[0]" not in held[n]
    ] == []
    assert answers(llm) != answered
    sync_weights(llm, tensors, bucket_bytes=20_000)
    assert differences(read_back(llm), fresh) == {}
    assert answers(llm) == answered


def differences(held, fresh):
    return {n: (held.get(n), fresh.get(n)) for n in held | fresh if held.get(n) != fresh.get(n)}


@each
def test_a_faulty_tensor_is_refused_by_name_and_a_whole_push_heals(engine_of):
    llm, tensors, fresh, _ = engine_of
    block = [name for name in tensors if re.search(r"mtp|layers\.2\.", name)]
    victims = [name for name in block if name.endswith("o_proj.weight")]
    victims += [n for n in tensors if re.search(r"model\.layers\.1\..*experts\.1\.up_proj", n)]
    for victim in victims:
        tensor = tensors[victim]
        others = {name: t for name, t in tensors.items() if name != victim}
        faults = {
            "missing": others,
            "left over": tensors | {victim.replace("_proj.", "_prox."): tensor},
            "too small": others | {victim: tensor[:, :-1]},
            "too large": others | {victim: torch.cat([tensor, tensor])},
            "NaN": others | {victim: tensor * float("nan")},
        }
        # A fused parameter is named as vLLM does, with the tensors that did come.
        named = "o_pro[jx]|up_pro[jx]|w13_weight"
        for pushed in faults.values():
            with pytest.raises(DrafterSyncError, match=f"({named}).* mixed weights"):
                sync_weights(llm, pushed, bucket_bytes=20_000)
        sync_weights(llm, tensors)
        assert differences(read_back(llm), fresh) == {}


@each
def test_copies_of_embedding_and_head_may_be_absent_or_equal_and_are_refused_otherwise(engine_of):
    llm, tensors, fresh, _ = engine_of
    copies = [n for n in tensors if re.search(r"layers\.2\..*(embed_tokens|head\.head)", n)]
    if "lm_head.weight" not in tensors:  # tied
        copies, tensors = ["lm_head.weight"], dict(tensors)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    for copy in copies:
        with pytest.raises(DrafterSyncError, match=re.escape(copy)):
            sync_weights(llm, tensors | {copy: tensors[copy] + 1})
        sync_weights(llm, {name: t for name, t in tensors.items() if name != copy})
        sync_weights(llm, tensors, verify=False)
        assert differences(read_back(llm), fresh) == {}
