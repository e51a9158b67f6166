"""Each symptom on each megatron-core release, stock and fixed, measured.

    1 loss       which parameters get a gradient from the MTP loss (policy loss times 0)
    2 mask       labels that a padded pack gets wrong: Megatron's roll_tensor, and depth_targets
    3 recompute  full recompute of a packed step; the largest gradient difference from one without
    4 reference  MTP layers run in a log-prob pass, which has no labels
    5 drafter    depth 1's logits against vLLM's MiMo layer, written out in plain torch below
    6 metrics    the rate of the example at the head of spec_metrics.py; no Megatron in it

Each release is measured in a process of its own, with its folder first on PYTHONPATH. vLLM is not
started: whether it drafts what this computes, tests/test_drafter_sync.py asks the running engine.

Run     make test-releases                           once: it installs the releases into .releases/
        .venv/bin/python figures/compatibility.py    a minute; keeps figures/data/compatibility.md
        --overlays DIR takes DIR/VERSION or DIR/mcore-VERSION instead
"""

import argparse
import contextlib
import json
import logging
import os
import pathlib
import subprocess
import sys
import warnings

ROOT = pathlib.Path(__file__).resolve().parents[1]
RELEASES = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
SYMPTOMS = {
    "loss": "1 loss: what the MTP loss moves",
    "mask": "2 mask: wrong labels in a padded pack",
    "recompute": "3 recompute of a packed step",
    "reference": "4 reference: MTP layers run in a log-prob pass",
    "drafter": "5 drafter: logits against vLLM's layer, largest difference",
    "metrics": "6 metrics: acceptance of the example (no Megatron involved)",
}
DOCUMENTS = [[(7 * i + 3) % 64 for i in range(n)] for n in (16, 24, 12)]


# --------------------------------------------------------------------------------------------------
# In the release's own process
# --------------------------------------------------------------------------------------------------


def measure():
    """{symptom: [stock, fixed]} of the megatron-core that this process imports."""
    import toy.model

    toy.model.init_megatron("cpu")
    functions = (loss, mask, recompute, reference, drafter, metrics)
    return {function.__name__: [function(False), function(True)] for function in functions}


def build(**settings):
    """A tiny MiMo, every weight random: norms of ones hide which state the MTP layer is fed."""
    import torch

    import toy.model

    torch.manual_seed(0)
    hf_config = toy.model.mimo_config(hidden_size=64, num_heads=2, num_groups=1, ffn_size=96)
    model = toy.model.build_model(hf_config, **settings)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    return model, hf_config


def batch():
    import torch

    import toy.model

    input_ids, position_ids, packed = toy.model.pack(DOCUMENTS)
    targets = dict(
        labels=input_ids.roll(-1, 1), loss_mask=torch.ones_like(input_ids, dtype=torch.float32)
    )
    return (input_ids, position_ids, None), dict(packed_seq_params=packed), targets


def outcome(function):
    """function(), or the name of the error that it raises."""
    try:
        return function()
    except (TypeError, AttributeError) as error:
        return type(error).__name__


def loss(fixed):
    from figures.gradients import measure_gradients

    moved = measure_gradients(True if fixed else None)
    names = [
        n
        for n, mark in zip(("embedding", "trunk", "norm", "head", "MTP"), moved, strict=True)
        if mark == "#"
    ]
    return "everything" if len(names) == 5 else " ".join(names)


def mask(fixed):
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    from mtp_mask import depth_targets

    ids, real, padded = torch.tensor([1, 2, 3, 0, 11, 12, 0, 0]), [0, 3, 5], [0, 4, 8]
    packed = PackedSeqParams("thd", torch.tensor(real), None, torch.tensor(padded))
    labels, _ = roll_tensor(ids, packed_seq_params=packed)
    if fixed:
        labels = depth_targets(ids, 0, real, cu_seqlens_padded=padded)
    return f"{(labels != torch.tensor([2, 3, 0, 0, 12, 0, 0, 0])).sum().item()} of 8"


def recompute(fixed):
    import torch

    from mtp_recompute import patch_mtp_recompute

    def gradients(**settings):
        model, _ = build(**settings)
        inputs, packed, targets = batch()
        model(*inputs, **packed, **targets).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    def difference():
        full = gradients(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        )
        pairs = zip(gradients(), full, strict=True)
        return f"runs, {max((a - b).abs().max().item() for a, b in pairs):.0e}".replace(
            "0e+00", "0"
        )

    assert torch.is_grad_enabled()
    with patch_mtp_recompute() if fixed else contextlib.nullcontext():
        return outcome(difference)


def reference(fixed):
    import torch

    from ref_disable import skip_mtp

    model, _ = build()
    inputs, packed, _ = batch()
    calls = []
    model.mtp.layers[0].register_forward_hook(lambda *unused: calls.append(1))

    def run():
        model(*inputs, **packed)
        return str(len(calls))

    with torch.no_grad(), skip_mtp(model) if fixed else contextlib.nullcontext():
        return outcome(run)


def drafter(fixed):
    """Stock: Megatron's own state and embedding, and the halves of eh_proj as they are."""
    import torch

    from drafter_sync import match_vllm_mimo, megatron_to_hf

    model, hf_config = build()
    inputs, packed, targets = batch()
    seen = {}
    model.decoder.final_layernorm.register_forward_pre_hook(
        lambda _, args: seen.update(trunk=args[0])
    )
    model.mtp.register_forward_hook(lambda _, args, out: seen.update(mtp=out))
    with torch.no_grad(), match_vllm_mimo(model) if fixed else contextlib.nullcontext():
        model(
            *inputs, **packed, **targets
        )  # with labels: without, 0.16.1 has no MTP pass that survives
        weights = dict(megatron_to_hf(model.named_parameters(), hf_config))
        if not fixed:
            weights["model.mtp_layers.0.input_proj.weight"] = model.mtp.layers[0].eh_proj.weight
        megatron_TV = seen["mtp"].chunk(2)[1][:, 0] @ weights["lm_head.weight"].t()
        start, worst = 0, 0.0
        for document in DOCUMENTS:
            ids_T, slots = torch.tensor(document), slice(start, start + len(document) - 1)
            vllm_TV = vllm_mimo_mtp(
                weights, hf_config, ids_T, seen["trunk"][start : start + len(ids_T), 0]
            )
            worst = max(worst, (vllm_TV[:-1] - megatron_TV[slots]).abs().max().item())
            start += len(document)
    return f"{worst:.1f}" if worst > 0.1 else f"{worst:.0e}"


def vllm_mimo_mtp(weights, hf_config, ids_T, trunk_TD):
    """Logits of a document's slots, as vllm 0.32.0's/mimo_mtp.py and qwen2.py compute them.

    trunk_TD: before the final norm. The last slot has no next token: its logits mean nothing.
    """
    import torch
    import torch.nn.functional as F

    layer = {
        n.removeprefix("model.mtp_layers.0."): w
        for n, w in weights.items()
        if ".mtp_layers.0." in n
    }
    num_slots, hidden = trunk_TD.shape

    def norm(x, name):
        return F.rms_norm(x, (hidden,), layer[f"{name}.weight"], hf_config["rms_norm_eps"])

    def heads(x, name):
        out = F.linear(x, layer[f"self_attn.{name}.weight"], layer[f"self_attn.{name}.bias"])
        return out.view(num_slots, -1, hf_config["head_dim"]).transpose(0, 1)

    def rotate(x):
        half = hf_config["head_dim"] // 2
        frequencies = hf_config["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.arange(num_slots)[:, None] * frequencies
        first, second = x.chunk(2, -1)
        sin, cos = angles.sin(), angles.cos()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    embedded_TD = weights["model.embed_tokens.weight"][ids_T.roll(-1)]
    embedded_TD[0] = 0  # position 0
    both = torch.cat([norm(trunk_TD, "hidden_layernorm"), norm(embedded_TD, "token_layernorm")], -1)
    x = both @ layer["input_proj.weight"].t()
    normed = norm(x, "input_layernorm")
    query, key, value = (
        rotate(heads(normed, "q_proj")),
        rotate(heads(normed, "k_proj")),
        heads(normed, "v_proj"),
    )
    attended = F.scaled_dot_product_attention(
        query[None], key[None], value[None], is_causal=True, enable_gqa=True
    )[0]
    x = x + attended.transpose(0, 1).flatten(1) @ layer["self_attn.o_proj.weight"].t()
    normed = norm(x, "post_attention_layernorm")
    gate, up = (normed @ layer[f"mlp.{name}.weight"].t() for name in ("gate_proj", "up_proj"))
    x = x + (F.silu(gate) * up) @ layer["mlp.down_proj.weight"].t()
    return norm(x, "final_layernorm") @ weights["lm_head.weight"].t()


def metrics(fixed):
    from spec_metrics import SpecCounts, compute_spec_decode_metrics, summarize

    columns = [12, 0, 3], [9, 0, 0], [4, 0, 1]
    if not fixed:
        return f"{compute_spec_decode_metrics(*columns)['rollout/spec_accept_rate']:.3f}"
    counts = [SpecCounts(*row) for row in zip(*columns, strict=True)]
    return f"{summarize(counts)['spec/accept_rate_micro']:.3f}"


# --------------------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------------------


def measure_release(version, overlays):
    """Runs this file again with the release first on the path."""
    folders = [
        overlays / name for name in (version, f"mcore-{version}") if (overlays / name).is_dir()
    ]
    path = os.pathsep.join(map(str, [*folders[:1], ROOT]))
    environment = os.environ | {"PYTHONPATH": path, "NO_VCS_VERSION": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--measure"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stderr[-3000:]}\nmegatron-core {version} could not be measured")
    result = json.loads(done.stdout.splitlines()[-1])
    if result["version"] != version:
        sys.exit(f"megatron-core {version} is not in {overlays}: run `make test-releases` first")
    return result["cells"]


def table(columns):
    lines = [
        "| stock &rarr; fixed | " + " | ".join(columns) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for key, title in SYMPTOMS.items():
        cells = [" &rarr; ".join(column[key]) for column in columns.values()]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--overlays",
        type=pathlib.Path,
        default=ROOT / ".releases",
        help="folder of release folders",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="print what this process's megatron-core does, as JSON",
    )
    args = parser.parse_args()
    if args.measure:
        warnings.simplefilter("ignore")
        logging.getLogger("megatron").setLevel(logging.ERROR)
        import megatron.core

        print(json.dumps({"version": megatron.core.__version__, "cells": measure()}))
        return
    columns = {}
    for version in RELEASES:
        print(f"megatron-core {version}", file=sys.stderr, flush=True)
        columns[version] = measure_release(version, args.overlays.resolve())
    text = table(columns)
    (ROOT / "figures" / "data" / "compatibility.md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
