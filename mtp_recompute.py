"""Fix 3 of 6: full activation recompute of MTP layers, with packed sequences.

Bug     Recompute keeps a layer's inputs instead of its activations and runs the layer again in
        the backward pass. Megatron's checkpoint stores its arguments with autograd's
        save_for_backward, which takes tensors and None. megatron-core 0.16 and 0.17 hand an MTP
        layer's keyword values to it as they come, PackedSeqParams (where each packed document
        begins) among them, and every packed step raises. 0.18 raises too: its recompute does not
        know `padding_mask`. And where both inputs of the layer are detached, as in training that
        must not move the trunk, 0.16 and 0.17 train no MTP parameter at all, without a word.
Rule    Tensors go through the checkpoint, wherever in the arguments they are. All else stays in
        the closure. One tensor requires grad, or the checkpoint has nothing to give gradient to.

            a layer gets           before (0.16, 0.17)            after
            PackedSeqParams        TypeError: save_for_backward   gradients as without recompute
            keywords reordered     other gradients, no error      gradients as without recompute
            a tensor in a tuple    TypeError: save_for_backward   gradients as without recompute
            both inputs detached   no gradients, no error         gradients as without recompute

Source  Megatron-LM#4593, Megatron-LM#4933 (packed recompute), slime#746, xtuner#2048 (both inputs
        detached); megatron/core/transformer/multi_token_prediction.py,
        MultiTokenPredictionLayer._checkpointed_forward, in megatron-core 0.16.1, 0.17.1 and
        0.18.2. 0.19.2 is right and is left alone.
Use     with patch_mtp_recompute():      # around one step or all of training: it acts on the class
            loss = model(..., packed_seq_params=packed)
        loss.backward()                  # inside or after: the recompute is part of the graph
Run     python figures/demos.py recompute prints the table, computed; benchmarks/bench_recompute.py
        weighs the saved bytes; tests/test_mtp_recompute.py is the specification.
"""

import contextlib
import copy
import functools
import inspect
import warnings

import torch


def checkpoint_tensors(checkpoint, function, *args, **kwargs):
    """Call `function(*args, **kwargs)` through a `checkpoint` that takes nothing but tensors.

    checkpoint  called as checkpoint(run, *tensors), to return run(*tensors) now and to run it
                again in the backward pass, with detached tensors:
                functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True) is one.
                The tensors are those in args, then those in kwargs, also inside lists, tuples and
                dicts, of any shape and dtype.
    function    gets back exactly the structure and keywords given here. A container that holds a
                tensor is rebuilt as its own type (named tuples and subclasses too); all else
                comes back as the identical object, dataclasses such as PackedSeqParams too.
                A tensor inside such an object does not go through the checkpoint: it stays in
                memory.

    Returns what checkpoint returns. Gradient reaches every tensor that requires it.
    """
    tensors, hole = [], object()

    def take_out(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return hole

    # With holes for the tensors: a closure that held them would keep them in memory for as long
    # as the output lives.
    structure = _map_leaves((args, kwargs), take_out)

    def run(*given):
        remaining = iter(given)

        def put_back(leaf):
            return next(remaining) if leaf is hole else leaf

        args, kwargs = _map_leaves(structure, put_back)
        return function(*args, **kwargs)

    return checkpoint(run, *tensors)


def _map_leaves(tree, change):
    """The same lists, tuples and dicts with change(leaf) for each leaf.

    Where nothing changed, the identical object.
    """
    if not isinstance(tree, (dict, list, tuple)):
        return change(tree)
    keys = list(tree) if isinstance(tree, dict) else range(len(tree))
    new = {key: _map_leaves(tree[key], change) for key in keys}
    changed = [key for key in keys if new[key] is not tree[key]]
    if not changed:
        return tree
    if hasattr(tree, "_make"):  # a named tuple
        return tree._make(new.values())
    if isinstance(tree, tuple):
        return type(tree)(new.values())
    rebuilt = copy.copy(tree)  # keeps a subclass and what it carries: a defaultdict's factory
    for key in changed:
        rebuilt[key] = new[key]
    return rebuilt


@contextlib.contextmanager
def patch_mtp_recompute():
    """Make full recompute of MTP layers work with packed sequences, on megatron-core 0.16 to 0.19.

    Yields True where the installed Megatron needs the patch, False where it does not and nothing
    is touched. It acts on the class of the layer, which GPTModel and HybridModel share. Inside,
    loss and gradients are bitwise those without recompute at depth 1, and within 1e-6 from depth
    2 on (the checkpoint reorders a sum of gradients, in 0.19 too).

    Megatron's own method still decides what happens where config.recompute_granularity is "full":
    recompute_method "uniform" wants recompute_num_layers 1, "block" warns and runs without
    recompute, and config.fp8 goes to Transformer Engine's checkpoint.

    The class is as it was found afterwards, also after an error; an inner use yields the same and
    does nothing. What somebody else put in the method's place stays in the chain; on 0.16 and
    0.17 it is called with tensors only. RuntimeError where its signature is no known release's,
    or hidden by a wrapper (functools.wraps shows it).
    """
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    found = vars(MultiTokenPredictionLayer)["_checkpointed_forward"]
    if _is_ours(found):
        yield True
        return
    adapt = _find_adapter(found, MultiTokenPredictionLayer._proj_and_transformer_layer)
    if adapt is None:
        yield False
        return
    patched = MultiTokenPredictionLayer._checkpointed_forward = adapt(found)
    try:
        yield True
    finally:
        last = MultiTokenPredictionLayer._checkpointed_forward
        MultiTokenPredictionLayer._checkpointed_forward = found
        if last is not patched:
            came = f"{_name(last)} was put on inside patch_mtp_recompute"
            warnings.warn(f"{came} and leaves with it", stacklevel=3)


def _find_adapter(found, layer_forward):
    """What the `_checkpointed_forward` that was found needs, by its signature; None: nothing."""
    try:
        takes = list(inspect.signature(found).parameters)
    except (TypeError, ValueError):  # no function, or one that cannot be read
        takes = []
    wanted = set(inspect.signature(layer_forward).parameters)
    if takes == ["self", "forward_func", "args", "kwargs"]:  # 0.16, 0.17
        return _pass_tensors_only
    if "hidden_states" in takes and wanted - set(takes) == {"padding_mask"}:  # 0.18
        return _pass_padding_mask
    if "hidden_states" in takes and wanted <= set(takes):  # 0.19
        return None
    raise RuntimeError(
        f"MultiTokenPredictionLayer._checkpointed_forward is {_name(found)}, which takes {takes}; "
        "wanted the signature of megatron-core 0.16 to 0.19, (self, forward_func, *args, "
        "**kwargs) or (self, hidden_states, decoder_input, ...): install one of these, or put "
        "functools.wraps on the function that wraps the method"
    )


def _pass_tensors_only(found):
    """0.16 and 0.17: the checkpoint gets the tensors alone."""

    @functools.wraps(found)
    def checkpointed_forward(self, forward_func, *args, **kwargs):
        def checkpoint(run, *tensors):
            return found(self, run, *_one_requires_grad(tensors))

        return checkpoint_tensors(checkpoint, forward_func, *args, **kwargs)

    return checkpointed_forward


def _pass_padding_mask(found):
    """0.18: non-tensors are in the closure already, but `padding_mask` is not taken."""

    @functools.wraps(found)
    def checkpointed_forward(self, hidden_states, decoder_input, *, padding_mask=None, **kwargs):
        hidden_states, decoder_input = _one_requires_grad((hidden_states, decoder_input))
        layer = self
        if padding_mask is not None:
            # A copy shares every parameter, and what is set on it lives as long as this call's
            # graph: two micro-batches may be under way at once.
            layer = copy.copy(self)
            forward = functools.partial(self._proj_and_transformer_layer, padding_mask=padding_mask)
            layer._proj_and_transformer_layer = forward
        return found(layer, hidden_states, decoder_input, **kwargs)

    return checkpointed_forward


def _one_requires_grad(tensors):
    """Make the first float tensor, the hidden state, require grad where none does.

    The checkpoint's output requires grad iff one of its inputs does; the parameters, which are in
    the closure, do not count.
    """
    if not torch.is_grad_enabled() or any(tensor.requires_grad for tensor in tensors):
        return tensors
    tensors = list(tensors)
    first = next(i for i, tensor in enumerate(tensors) if tensor.is_floating_point())
    tensors[first] = tensors[first].detach().requires_grad_()
    return tensors


def _is_ours(method):
    """Is our method there, or under wrappers that say what they wrap?"""
    while method is not None:
        if getattr(method, "__globals__", None) is globals():
            return True
        method = getattr(method, "__wrapped__", None)
    return False


def _name(method):
    """File and line of a method; functools.wraps copies its name, but not its code object."""
    code = getattr(method, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} {code.co_qualname}" if code else repr(method)
