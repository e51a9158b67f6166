"""The tables at the heads of the fixes that need a model, computed with the installed Megatron.

    python figures/demos.py recompute     mtp_recompute.py: a layer's arguments in a checkpoint
    python figures/demos.py reference     ref_disable.py: which models have and run MTP layers

The fixes import nothing of the project; what shows them at work on the small MiMo stands here.
"""

import contextlib
import logging
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch

import toy.model
from mtp_recompute import _one_requires_grad, checkpoint_tensors
from ref_disable import skip_mtp, without_mtp_config


def recompute():
    """Four calls of a layer through Megatron's checkpoint, as 0.16.1 and as fix 3 make them."""
    from megatron.core import tensor_parallel

    packed_seq_params = toy.model.pack([[1, 2, 3], [4, 5]])[2]

    def checkpoint(run, *inputs):  # Megatron's own, the same in all four releases
        return tensor_parallel.checkpoint(run, False, *inputs)

    def before(layer, **inputs):  # 0.16.1's MultiTokenPredictionLayer._checkpointed_forward
        return checkpoint(layer, *inputs.values())

    def after(layer, **inputs):
        def with_grad(run, *tensors):
            return checkpoint(run, *_one_requires_grad(tensors))

        return checkpoint_tensors(with_grad, layer, **inputs)

    def plain(layer, **inputs):
        return layer(**inputs)

    def gradients(call, make_inputs):
        values = (1.0, 2.0, 3.0, 5.0)
        trunk, weight, hidden, embedding = (torch.tensor(x, requires_grad=True) for x in values)

        def layer(hidden, embedding, packed_seq_params=None):
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
            return weight * hidden + embedding**2

        (trunk + call(layer, **make_inputs(hidden, embedding))).backward()
        return [tensor.grad for tensor in (weight, hidden, embedding)]

    def outcome(call, make_inputs):
        try:
            found = gradients(call, make_inputs)
        except TypeError as error:
            return f"TypeError: {str(error).split()[0]}"
        if found == gradients(plain, make_inputs):
            return "same gradients as without recompute"
        return "no gradients, no error" if found == [None] * 3 else "other gradients, no error"

    def packed(hidden, embedding):
        return dict(hidden=hidden, embedding=embedding, packed_seq_params=packed_seq_params)

    def reordered(hidden, embedding):
        return dict(embedding=embedding, hidden=hidden)

    def in_a_tuple(hidden, embedding):
        return dict(hidden=(hidden,), embedding=embedding)

    def detached(hidden, embedding):
        return dict(hidden=hidden.detach(), embedding=embedding.detach())

    rows = {
        "PackedSeqParams": packed,
        "keywords in another order": reordered,
        "a tensor in a tuple": in_a_tuple,
        "both inputs detached": detached,
    }
    print(f"{'a layer is called with':<29}{'before (0.16, 0.17)':<31}after")
    for name, make_inputs in rows.items():
        print(f"{name:<29}{outcome(before, make_inputs):<31}{outcome(after, make_inputs)}")


def reference():
    """Four models of one HF config: their MTP layers, and how many run in a log-prob pass."""
    input_ids, position_ids, packed = toy.model.pack([list(range(16)), list(range(24))])

    def show(label, model, hf_config, context):
        layers, forwards = model.mtp.layers if model.mtp_process else [], []
        for layer in layers:
            layer.register_forward_hook(lambda *unused: forwards.append(1))
        with torch.no_grad(), context:  # labels, or 0.16 crashes wherever MTP is on
            model(input_ids, position_ids, None, labels=input_ids, packed_seq_params=packed)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        next_actor = "yes" if hf_config["num_nextn_predict_layers"] else "no"
        print(f"{label:<36}{len(layers):>10}{num_parameters:>12,}{len(forwards):>21}  {next_actor}")

    columns = "MTP layers  parameters  MTP forwards a pass  MTP in an actor built next"
    print(f"{'a toy MiMo, one HF config':<36}{columns}")
    off = contextlib.nullcontext()
    shared = toy.model.mimo_config(hidden_size=64, num_heads=2, ffn_size=128)
    actor = toy.model.build_model(shared)
    show("reference, as the config says", actor, shared, off)
    set_to_0 = shared | {"num_nextn_predict_layers": 0}
    show("reference, shared config set to 0", toy.model.build_model(set_to_0), set_to_0, off)
    copies = toy.model.build_model(without_mtp_config(shared))
    show("reference, from copies", copies, shared, off)
    show("actor, inside skip_mtp", actor, shared, skip_mtp(actor))


DEMOS = {"recompute": recompute, "reference": reference}


def main(arguments):
    if len(arguments) != 1 or arguments[0] not in DEMOS:
        sys.exit(f"usage: python figures/demos.py {{{','.join(DEMOS)}}}")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    toy.model.init_megatron("cpu")
    DEMOS[arguments[0]]()


if __name__ == "__main__":
    main(sys.argv[1:])
