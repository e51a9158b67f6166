"""Fix 3 of 6: full activation recompute of MTP layers, with packed sequences.

Bug     Recompute keeps a layer's inputs instead of its activations and runs the layer again in the backward pass.
        Megatron's checkpoint stores its arguments with autograd's save_for_backward, which takes tensors and None.
        megatron-core 0.16 and 0.17 hand an MTP layer's keyword values to it as they come, PackedSeqParams among them,
        and every packed step raises. 0.18 raises too: its recompute does not know `padding_mask`. And where both
        inputs of the layer are detached, 0.16 and 0.17 train no MTP parameter at all, without a word.
Rule    Tensors go through the checkpoint, wherever in the arguments they are. Everything else stays in the closure.
        One tensor requires grad, or the checkpoint has nothing to give a gradient to.

            a layer is called with       before (0.16, 0.17)            after
            PackedSeqParams              TypeError: save_for_backward   same gradients as without recompute
            keywords in another order    other gradients, no error      same gradients as without recompute
            a tensor in a tuple          TypeError: save_for_backward   same gradients as without recompute
            both inputs detached         no gradients, no error         same gradients as without recompute

Source  Megatron-LM#4593, Megatron-LM#4933 (packed recompute), slime#746, xtuner#2048 (both inputs detached);
        megatron/core/transformer/multi_token_prediction.py, MultiTokenPredictionLayer._checkpointed_forward, in
        megatron-core 0.16.1, 0.17.1 and 0.18.2. 0.19.2 is right and is left alone.
Use     with patch_mtp_recompute():             # around one step or all of training: it acts on the class
            loss = model(..., packed_seq_params=packed)
        loss.backward()                         # inside or after: the recompute is part of the graph
Run     python mtp_recompute.py prints the table, computed; benchmarks/bench_recompute.py weighs the saved bytes;
        tests/test_mtp_recompute.py is the specification.
"""

import contextlib
import copy
import functools
import inspect
import warnings

import torch


def checkpoint_tensors(checkpoint, function, *args, **kwargs):
    """Call `function(*args, **kwargs)` through a `checkpoint` that takes nothing but tensors.

    checkpoint  called as checkpoint(run, *tensors), to return run(*tensors) now and to run it again in the backward
                pass, with detached tensors: functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True) is
                one. The tensors are those in args, then those in kwargs, also inside lists, tuples and dicts.
    function    gets back exactly the structure and keywords given here. A container that holds a tensor is rebuilt as
                its own type (named tuples and subclasses too); all else, dataclasses too, comes back as the identical
                object. A tensor inside such an object bypasses the checkpoint: it stays in memory.

    Returns what checkpoint returns. Gradient reaches every tensor that requires it. TypeError for what is not callable.
    """
    for name, value in (("checkpoint", checkpoint), ("function", function)):
        if not callable(value):
            wanted = "a callable: pass checkpoint first, then function, then the function's own arguments"
            raise TypeError(f"{name} is a {type(value).__name__}; wanted {wanted}")
    tensors, hole = [], object()

    def take_out(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return hole

    # With holes, not tensors: a closure that held them would keep them in memory for as long as the output lives.
    structure = _map_leaves((args, kwargs), take_out)
    num_tensors = len(tensors)

    def run(*given):
        if len(given) != num_tensors:
            came = f"checkpoint called run with {len(given)} tensors"
            raise ValueError(
                f"{came}; wanted the {num_tensors} that it was given: call run(*tensors)"
            )
        remaining = iter(given)
        args, kwargs = _map_leaves(
            structure, lambda leaf: next(remaining) if leaf is hole else leaf
        )
        return function(*args, **kwargs)

    return checkpoint(run, *tensors)


def _map_leaves(tree, change):
    """The same lists, tuples and dicts with change(leaf) for each leaf; where nothing changed, the identical object."""
    if not isinstance(tree, (dict, list, tuple)):
        return change(tree)
    keys = list(tree) if isinstance(tree, dict) else range(len(tree))
    new = {key: _map_leaves(tree[key], change) for key in keys}
    changed = [key for key in keys if new[key] is not tree[key]]
    if not changed:
        return tree
    if isinstance(tree, tuple):
        return tree._make(new.values()) if hasattr(tree, "_make") else type(tree)(new.values())
    rebuilt = copy.copy(
        tree
    )  # keeps a subclass and what it carries, such as a defaultdict's factory
    for key in changed:
        rebuilt[key] = new[key]
    return rebuilt


@contextlib.contextmanager
def patch_mtp_recompute():
    """Make full recompute of MTP layers work with packed sequences, on megatron-core 0.16 to 0.19.

    Yields True where the installed Megatron needs the patch, False where it does not and nothing is touched. Inside,
    loss and gradients are bitwise those without recompute at depth 1, and within 1e-6 from depth 2 on (the checkpoint
    reorders a sum of gradients, in 0.19 too). Megatron's own method still decides what happens: recompute_method
    "uniform" wants recompute_num_layers 1 (else ValueError), "block" warns and runs without recompute, config.fp8 goes
    to Transformer Engine's checkpoint, or is an ImportError where that is not installed.

    The class is as it was found afterwards, also after an error; an inner use yields the same and does nothing. What
    somebody else put in the method's place stays in the chain; on 0.16 and 0.17 it is called with tensors only. It is
    refused by name, RuntimeError, if its signature is no known release's, or hidden (functools.wraps shows it).
    """
    from megatron.core.transformer import multi_token_prediction

    layer_class = getattr(multi_token_prediction, "MultiTokenPredictionLayer", None)
    found = vars(layer_class).get("_checkpointed_forward") if layer_class else None
    if _is_ours(found):
        yield True
        return
    adapt = _find_adapter(found, getattr(layer_class, "_proj_and_transformer_layer", None))
    if adapt is None:
        yield False
        return
    patched = layer_class._checkpointed_forward = adapt(found)
    try:
        yield True
    finally:
        last, layer_class._checkpointed_forward = layer_class._checkpointed_forward, found
        if last is not patched:
            warnings.warn(
                f"{_name(last)} was put on inside patch_mtp_recompute and leaves with it",
                stacklevel=3,
            )


def _find_adapter(found, layer_forward):
    """What the `_checkpointed_forward` that was found needs, told by its signature; None: nothing."""
    try:
        takes = list(inspect.signature(found).parameters)
        wanted = set(inspect.signature(layer_forward).parameters)
    except (TypeError, ValueError):
        takes, wanted = [], set()
    if takes == ["self", "forward_func", "args", "kwargs"]:  # 0.16, 0.17
        return _pass_tensors_only
    if "hidden_states" in takes and wanted - set(takes) == {"padding_mask"}:  # 0.18
        return _pass_padding_mask
    if "hidden_states" in takes and wanted <= set(takes):  # 0.19
        return None
    raise RuntimeError(
        f"MultiTokenPredictionLayer._checkpointed_forward is {_name(found)}, which takes {takes}; wanted the signature "
        "of megatron-core 0.16 to 0.19, (self, forward_func, *args, **kwargs) or (self, hidden_states, decoder_input, "
        "...): install one of these, or apply functools.wraps to the function that wraps the method"
    )


def _pass_tensors_only(found):
    """0.16 and 0.17: the checkpoint gets the tensors alone."""

    @functools.wraps(found)
    def checkpointed_forward(self, forward_func, *args, **kwargs):
        _check_recompute(self.config)

        def checkpoint(run, *tensors):
            return found(self, run, *_one_requires_grad(tensors))

        return checkpoint_tensors(checkpoint, forward_func, *args, **kwargs)

    return checkpointed_forward


def _pass_padding_mask(found):
    """0.18: non-tensors are in the closure already, but `padding_mask` is not taken."""

    @functools.wraps(found)
    def checkpointed_forward(
        self, hidden_states, decoder_input, *args, padding_mask=None, **kwargs
    ):
        _check_recompute(self.config)
        hidden_states, decoder_input = _one_requires_grad((hidden_states, decoder_input))
        layer = self
        if padding_mask is not None:
            layer = copy.copy(
                self
            )  # shares every parameter; what is set on it goes with this call's graph
            forward = functools.partial(self._proj_and_transformer_layer, padding_mask=padding_mask)
            layer._proj_and_transformer_layer = forward
        return found(layer, hidden_states, decoder_input, *args, **kwargs)

    return checkpointed_forward


def _one_requires_grad(tensors):
    """The checkpoint's output requires grad iff one of its inputs does; the parameters in the closure do not count."""
    if torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in tensors):
        tensors = list(tensors)
        for index, tensor in enumerate(tensors):
            if tensor.is_floating_point():  # the hidden state comes first
                tensors[index] = tensor.detach().requires_grad_()
                break
    return tensors


def _check_recompute(config):
    method, num_layers = config.recompute_method, config.recompute_num_layers
    if method not in ("uniform", "block"):
        raise ValueError(
            f"recompute_method is {method!r}; wanted 'uniform' or 'block': set one in the config"
        )
    if method == "uniform" and num_layers != 1:
        wanted = "1 with 'uniform': set it to 1, or use 'block', which leaves MTP layers without recompute"
        raise ValueError(f"recompute_num_layers is {num_layers!r}; wanted {wanted}")


def _is_ours(method):
    """Is our method there, or under wrappers that say what they wrap?"""
    while method is not None:
        if getattr(method, "__globals__", None) is globals():
            return True
        method = getattr(method, "__wrapped__", None)
    return False


def _name(method):
    code = getattr(
        method, "__code__", None
    )  # functools.wraps copies the name; the code object tells who it really is
    return f"{code.co_filename}:{code.co_firstlineno} {code.co_qualname}" if code else repr(method)


def main():
    """Print the table at the head of this file from a computation."""
    from megatron.core import tensor_parallel

    import toy.model

    toy.model.init_megatron("cpu")
    packed_seq_params = toy.model.pack([[1, 2, 3], [4, 5]])[2]

    def checkpoint(run, *inputs):  # Megatron's own, the same in all four releases
        return tensor_parallel.checkpoint(run, False, *inputs)

    def before(
        layer, **inputs
    ):  # what 0.16.1 does in MultiTokenPredictionLayer._checkpointed_forward
        return checkpoint(layer, *inputs.values())

    def after(layer, **inputs):
        return checkpoint_tensors(
            lambda run, *tensors: checkpoint(run, *_one_requires_grad(tensors)), layer, **inputs
        )

    def gradients(call, make_inputs):
        trunk, weight, hidden, embedding = (
            torch.tensor(x, requires_grad=True) for x in (1.0, 2.0, 3.0, 5.0)
        )

        def layer(hidden, embedding, packed_seq_params=None):
            return weight * (hidden[0] if isinstance(hidden, tuple) else hidden) + embedding**2

        (trunk + call(layer, **make_inputs(hidden, embedding))).backward()
        return [tensor.grad for tensor in (weight, hidden, embedding)]

    def outcome(call, make_inputs):
        try:
            found = gradients(call, make_inputs)
        except TypeError as error:
            return f"TypeError: {str(error).split()[0]}"
        if found == gradients(lambda layer, **inputs: layer(**inputs), make_inputs):
            return "same gradients as without recompute"
        return "no gradients, no error" if found == [None] * 3 else "other gradients, no error"

    rows = {
        "PackedSeqParams": lambda h, e: {
            "hidden": h,
            "embedding": e,
            "packed_seq_params": packed_seq_params,
        },
        "keywords in another order": lambda h, e: {"embedding": e, "hidden": h},
        "a tensor in a tuple": lambda h, e: {"hidden": (h,), "embedding": e},
        "both inputs detached": lambda h, e: {"hidden": h.detach(), "embedding": e.detach()},
    }
    print(f"{'a layer is called with':<29}{'before (0.16, 0.17)':<31}after")
    for name, make_inputs in rows.items():
        print(f"{name:<29}{outcome(before, make_inputs):<31}{outcome(after, make_inputs)}")


if __name__ == "__main__":
    main()
