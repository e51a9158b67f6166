"""Fix 1's matrix, measured: which parameters move when the policy loss is times 0.

python figures/gradients.py prints it for the Megatron that is installed, in 5 s on CPU; with
PYTHONPATH=.releases/0.17.1 in front, for another. `measure_gradients` gives one row.
"""

import contextlib
import itertools
import logging
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import toy.hybrid  # noqa: E402
import toy.model  # noqa: E402
from mtp_loss import patch_mtp_loss  # noqa: E402


def measure_gradients(detach_trunk, tied=False, depths=1, recompute=False, hybrid=False):
    """Embedding, trunk, final norm, head, MTP: five of "#" (moves) and "." (gradient None or 0).

    detach_trunk as in patch_mtp_loss, or None for stock Megatron. "xxxxx" where Megatron crashes.
    """
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    # Class-wide: stock Megatron crashes on a model with more depths than the last (slime#2131).
    MTPLossLoggingHelper.tracker.clear()
    full = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    config = toy.model.mimo_config(
        hidden_size=32, num_heads=2, ffn_size=32, mtp_layers=depths, tied=tied
    )
    build = toy.hybrid.build_hybrid_model if hybrid else toy.model.build_model
    model = build(config, **full if recompute else {})
    # Of a vocabulary of 64: tokens 48 to 63 are never looked up.
    tokens = torch.randint(48, (1, 32), generator=torch.Generator().manual_seed(0))
    batch = dict(labels=tokens.roll(-1, dims=1), loss_mask=torch.ones(1, 32))
    patch = contextlib.nullcontext()
    if detach_trunk is not None:
        patch = patch_mtp_loss(model, detach_trunk=detach_trunk)
    with patch:
        try:
            model(tokens, torch.arange(32)[None], None, **batch).sum().mul(0).backward()
        except TypeError:  # megatron-core 0.18 can't recompute MTP: fix 3, mtp_recompute.py
            return "xxxxx"
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    moved = {name for name, grad in grads.items() if grad.any()}
    embedding = grads.get("embedding.word_embeddings.weight", torch.zeros(64, 1))
    columns = [
        embedding[:48].any(),
        any(name.startswith("decoder.layers") for name in moved),
        any(name.startswith("decoder.final") for name in moved),
        embedding[48:].any() if tied else "output_layer.weight" in moved,
        all(name in moved for name, _ in model.named_parameters() if name.startswith("mtp.")),
    ]
    return "".join("#" if moves else "." for moves in columns)


def main():
    import megatron.core

    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    toy.model.init_megatron("cpu")
    # After the + stands the commit of whatever folder this runs in.
    version = megatron.core.__version__.split("+")[0]
    print(f"megatron-core {version}, policy loss times 0: # moves, . does not, x Megatron crashes")
    models = [("GPTModel", False)]
    with contextlib.suppress(ImportError):
        import megatron.core.models.hybrid.hybrid_model  # noqa: F401

        models.append(("HybridModel", True))
    columns = "emb trunk norm head mtp"
    for name, hybrid in models:
        print(f"\n{name:<27}{'stock Megatron':<27}{'detach_trunk=False':<27}detach_trunk=True")
        print(f"{'head    depths  recompute':<27}" + f"{columns:<27}" * 2 + columns)
        for tied, depths, recompute in itertools.product((False, True), (1, 2), (False, True)):
            label = f"{'tied' if tied else 'untied':<8}{depths:<8}{'full' if recompute else 'none'}"
            cells = [
                measure_gradients(way, tied, depths, recompute, hybrid)
                for way in (None, False, True)
            ]
            row = ("{:^3} {:^5} {:^4} {:^4} {:^3}".format(*cell) for cell in cells)
            print((f"{label:<27}" + "".join(f"{text:<27}" for text in row)).rstrip())


if __name__ == "__main__":
    main()
