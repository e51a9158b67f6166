"""Fix 1 of 6: the MTP loss trains the MTP layers and nothing else, and keeps no logits.

Bug     An MTP layer borrows the policy's trunk, embedding and head. In Megatron its loss flows back into all three, so
        the policy is pulled towards being easy to draft, whatever reward says. Patches that detached the head stopped
        doing so without a word when megatron-core 0.17 moved the call they had replaced.
Rule    Depth k's loss at slot t is the cross entropy of token t+1+k, over the slots whose rolled mask counts. It
        reaches mtp.* only (detach_trunk=True), or trunk and embedding look-up as well, and never the head.

            which parameters move       embedding  trunk  norm  head  mtp      # moves  . gradient None or 0
            stock Megatron                  #        #     #     #     #       policy loss times 0, MTP loss on;
            detach_trunk=False              #        #     #     .     #       embeddings tied or not, 1 depth or 2,
            detach_trunk=True               .        .     .     .     #       recompute on or off

        Masked-in slots are projected chunk by chunk. A slot's loss depends on its own hidden state alone, so its
        gradient is taken at once, in the forward pass, and the backward pass only scales it:

            hidden [s, b, h] --pick--> rows --head--> logits [chunk, V] --> loss, top-1, softmax - one-hot
                        grad rows [n, h] <--head, transposed--------------------------------+
                        kept for backward             (then the chunk's logits are freed)
Source  slime#709, verl#6432, miles#3211 (the head moves); slime#746, xtuner#2048 (detached and recomputed, nothing
        trains); Megatron-LM#3396 (a rank without tokens), #7452 (micro-batches of unequal count). Stands in for
        _postprocess of megatron/core/models/gpt/gpt_model.py, megatron-core 0.16.1, 0.17.1, 0.18.2 and 0.19.2.
Shapes  s slots of this rank, b rows, h hidden size (D in names), n or N masked-in slots, T all s x b slots, K depths, V
        this rank's share of the vocabulary. labels and loss_mask are label-aligned: slot t speaks of token t+1.
Use     with patch_mtp_loss(model) as mtp:
            logits = model(input_ids, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
            policy_loss(logits).backward()  # trains the MTP layers too
            nats_per_token = mtp.depths[0]["loss_sum"] / mtp.depths[0]["tokens"]
Run     python mtp_loss.py measures the whole matrix above; tests/test_mtp_loss.py is the specification.
"""

import functools
import inspect
import itertools
import logging
import warnings
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch
from torch.autograd.function import once_differentiable


def mtp_cross_entropy(
    hidden, output_layer, targets, mask, *, output_weight=None, chunk_tokens=1024
):
    """Cross entropy and top-1 of the masked-in slots, through a head that gets no gradient.

    hidden         [s, b, h] floats; from a sequence-parallel model this rank's [s / tp, b, h], gathered in here.
    output_layer   called as output_layer([n, 1, h], weight=...) -> (logits [n, 1, V], bias or None); a bias is added.
                   Megatron's ColumnParallelLinear, or anything alike. If its tp_group has several ranks and
                   gather_output is off, V is a share, and all these ranks must call with the same slots.
    targets        [b, s] int64, the token that each slot predicts. What masked-out slots hold does not matter.
    mask           [b, s] of 0 and 1, any dtype: which slots count.
    output_weight  the head's weight, for a head that holds none (tied embeddings).
    chunk_tokens   how many slots are projected at a time: it bounds memory and changes nothing else.

    Returns loss [b, s] in nats, float32 (float64 from float64), 0 where masked out; and correct [b, s], bool: whether
    the arg-max token (the lowest on a tie) is the target, False where masked out. Gradient reaches `hidden` only. A GPU
    is waited for, since the number of slots must be known. ValueError or TypeError for what does not fit.
    """
    _check_tensor("hidden", hidden, "[s, b, h]", floating=True)
    if not callable(output_layer):
        raise TypeError(
            f"output_layer is {type(output_layer).__name__}; wanted a callable: pass the head's module"
        )
    weight = getattr(output_layer, "weight", None) if output_weight is None else output_weight
    if weight is not None:
        _check_tensor("output_weight", weight, "[V, h]", floating=True)
        if weight.shape[1] != hidden.shape[2] or weight.dtype != hidden.dtype:
            came = f"output_weight is {weight.dtype} {list(weight.shape)}, hidden {hidden.dtype} {list(hidden.shape)}"
            raise ValueError(
                f"{came}; wanted one dtype and one h: pass the weight of this model's head"
            )
    # Detached, it takes Megatron's head down its frozen-weight path: no weight gradient, no fused add to main_grad.
    weight = None if weight is None else weight.detach()
    with _whole_sequence(hidden, output_layer) as whole:
        _check_arguments(whole, targets, mask, chunk_tokens)
        slots_N = (
            mask.bool().t().reshape(-1).nonzero()[:, 0]
        )  # in [s, b] order, as hidden lies in memory
        targets_N = targets.t().reshape(-1)[slots_N]
        wants_grad = (
            whole.requires_grad and torch.is_grad_enabled()
        )  # inside a Function this can't be told any more
        return _ChunkedCrossEntropy.apply(
            whole, output_layer, weight, slots_N, targets_N, chunk_tokens, wants_grad
        )


@contextmanager
def patch_mtp_loss(
    model, *, detach_trunk=True, rule="target", scale=None, denominator=None, chunk_tokens=1024
):
    """Inside, a Megatron GPTModel returns its main head's logits, and any backward through them trains MTP too.

    Call model(input_ids, position_ids, attention_mask, labels=..., loss_mask=..., packed_seq_params=...) with
    label-aligned labels and loss_mask [b, s]; logits [b, s, vocab / tp] come back, bitwise those without MTP. With
    labels=None, or with grad off, the MTP block does not run.

    model         GPTModel, or DDP / Float16Module around it. A pipeline chunk without post_process is left alone.
    detach_trunk  True: the MTP loss reaches mtp.* only. False: trunk and embedding look-up too, never the head.
    rule          "target": depth k counts at slot t iff token t+1+k is masked in; "drafted": iff all of t+1 to t+1+k.
    scale         lambda, by default config.mtp_loss_scaling_factor; each depth weighs scale / K.
    denominator   divides a depth's summed loss: one number, or one a depth. By default that depth's count on this rank,
                  at least 1. With the count of the global batch, gradients summed over micro-batches and ranks are
                  those of the undivided batch. That takes gradients that are summed and an autoscaler scale of 1: where
                  a schedule or DDP averages, divide the count by num_microbatches x dp (x cp). With
                  config.calculate_per_token_loss Megatron itself divides every gradient by the token count: pass 1.
    chunk_tokens  as in mtp_cross_entropy.

    Yields an object with `depths`: after each forward one dict a depth with loss_sum (nats), tokens and correct, 0-dim
    tensors of this rank; [] where the MTP block did not run. An all-zero mask gives zero gradients, not None. On exit,
    also after an error, the model is as it was. RuntimeError or ValueError: patched twice, no MTP layers here, unknown
    internals, labels without loss_mask, unpadded cu_seqlens_q, settings that contradict each other.
    """
    model, record = _chunk_with_head(model), SimpleNamespace(depths=[])
    if model is None:
        yield record
        return
    _check_model(model)
    if "_postprocess" in vars(model):
        came = "this model has a _postprocess of its own: it is patched already, here or by another library"
        raise RuntimeError(f"{came}; wanted Megatron's: leave the other context first")
    if not isinstance(detach_trunk, bool):
        raise TypeError(
            f"detach_trunk is {detach_trunk!r}; wanted True or False: pass one of the two"
        )
    _check_chunk_tokens(chunk_tokens)
    for name, given, most in (
        ("scale", scale, 0),
        ("denominator", denominator, 1),
    ):  # most: dimensions
        for number in given if most and isinstance(given, (list, tuple)) else [given]:
            is_number = (
                isinstance(number, (int, float)) and not isinstance(number, bool) and number >= 0
            )
            is_number = is_number and (
                isinstance(number, float) or number < 2.0**127
            )  # an int can be past any float
            if isinstance(number, torch.Tensor) and not number.is_nested:
                is_number = number.dim() <= most and not number.is_complex() and not number.is_meta
            if not is_number and number is not None:
                raise ValueError(
                    f"{name} is {given!r:.60}; wanted a number, 0 or more, or None: pass that"
                )
    if not isinstance(rule, str) or rule not in ("target", "drafted"):
        raise ValueError(f"rule is {rule!r}; wanted 'target' or 'drafted': pass one of the two")
    if getattr(model.config, "mtp_detach_heads", False) and not detach_trunk:
        came = "detach_trunk is False and config.mtp_detach_heads True: Megatron would detach all the same"
        raise ValueError(
            f"{came}; wanted the two to agree: build the model without mtp_detach_heads"
        )
    stock = model._postprocess
    options = (detach_trunk, rule, scale, denominator, chunk_tokens)

    def postprocess(**arguments):  # GPTModel.forward passes keywords only
        record.depths = []
        if arguments["labels"] is not None and arguments["loss_mask"] is None:
            came = (
                "labels came without loss_mask: Megatron would then count every slot, prompts too"
            )
            raise ValueError(f"{came}; wanted both, [b, s]: pass the label-aligned response mask")
        if arguments["labels"] is not None:
            for name in ("labels", "loss_mask"):
                _check_tensor(name, arguments[name], "[b, s]")
            if arguments["labels"].dtype != torch.int64 or not arguments["labels"].numel():
                came = f"labels is {arguments['labels'].dtype} {list(arguments['labels'].shape)}"
                raise TypeError(
                    f"{came}; wanted torch.int64 [b, s], not empty: call .long(), or skip the batch"
                )
        # mtp_in_postprocess is off inside skip_mtp (ref_disable.py).
        if (
            arguments["labels"] is not None
            and arguments["mtp_in_postprocess"]
            and torch.is_grad_enabled()
        ):
            # Onto the state before the head, as Megatron does: the logits may then be changed in place.
            arguments["hidden_states"] = _add_mtp_losses(model, arguments, record, *options)
        # With MTP in its config 0.16 would crash without labels, and 0.19 would make up its own from input_ids.
        with _replaced(model.config, "mtp_num_layers", None):
            return stock(
                **arguments | {"labels": None, "loss_mask": None, "mtp_in_postprocess": False}
            )

    with _replaced(model, "_postprocess", postprocess):
        yield record


@torch.no_grad()
def draft_tokens(model, input_ids, position_ids, attention_mask, *, packed_seq_params=None):
    """Give the token that depth 1 drafts at each slot: `[b, s]` int64, slot t holds the arg-max token for t+2.

    Arguments as for the model's own forward. Runs without grad and in evaluation mode, inside patch_mtp_loss too, and
    leaves all as it was. Tensor-parallel ranks get the same tokens. RuntimeError or ValueError as in patch_mtp_loss.
    """
    model = _chunk_with_head(model)
    _check_model(model)
    if not model.config.mtp_num_layers:
        came = f"config.mtp_num_layers is {model.config.mtp_num_layers}: MTP is off, perhaps by skip_mtp"
        raise RuntimeError(f"{came}; wanted it on: leave that context first")
    for name, ids in (("input_ids", input_ids), ("position_ids", position_ids)):
        _check_tensor(name, ids, "[b, s]")
        if ids.dtype != torch.int64 or ids.shape != input_ids.shape:
            came = f"{name} is {ids.dtype} {list(ids.shape)}, input_ids has shape {list(input_ids.shape)}"
            raise ValueError(
                f"{came}; wanted torch.int64, the same shape twice: pass the model's own batch"
            )
    if not input_ids.numel() or not 0 <= input_ids.min() <= input_ids.max() < model.vocab_size:
        came = f"input_ids holds {f'{input_ids.min()} to {input_ids.max()}' if input_ids.numel() else 'no token'}"
        raise ValueError(
            f"{came}; wanted 0 to {model.vocab_size - 1}, the vocabulary: pass this model's own tokens"
        )

    def postprocess(**arguments):
        hidden, *_ = _run_mtp(model, arguments, detach_trunk=True)
        with _whole_sequence(hidden, model.output_layer) as whole:
            flat_TD = whole.reshape(-1, whole.shape[2])
            slots_T = torch.arange(len(flat_TD), device=whole.device)
            nothing_T = torch.zeros_like(slots_T)  # there are no targets; any token will do
            token_T = _score_slots(
                flat_TD, model.output_layer, _tied_weight(model), slots_T, nothing_T, 1024, False
            )[1]
            return token_T.view(whole.shape[:2]).t().contiguous()

    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with _replaced(model, "_postprocess", postprocess):
            return model(
                input_ids, position_ids, attention_mask, packed_seq_params=packed_seq_params
            )
    finally:
        for module in training:
            module.training = True


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Takes the gradient together with the loss: what is kept for backward is [n, h] instead of [n, V]."""

    @staticmethod
    def forward(ctx, hidden, output_layer, weight, slots_N, targets_N, chunk_tokens, wants_grad):
        flat_TD = hidden.reshape(-1, hidden.shape[2])
        loss_N, token_N, grad_ND = _score_slots(
            flat_TD, output_layer, weight, slots_N, targets_N, chunk_tokens, wants_grad
        )
        loss_T = loss_N.new_zeros(len(flat_TD)).index_copy_(0, slots_N, loss_N)
        correct_T = torch.zeros_like(loss_T, dtype=torch.bool).index_copy_(
            0, slots_N, token_N == targets_N
        )
        loss, correct = (x.view(hidden.shape[:2]).t().contiguous() for x in (loss_T, correct_T))
        ctx.save_for_backward(slots_N, grad_ND)
        ctx.shape = hidden.shape
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _):
        slots_N, grad_ND = ctx.saved_tensors
        scaled_ND = (grad_ND * grad_loss.t().reshape(-1)[slots_N, None]).to(grad_ND.dtype)
        grad = grad_ND.new_zeros(ctx.shape)
        grad.view(-1, ctx.shape[2]).index_copy_(0, slots_N, scaled_ND)
        return grad, None, None, None, None, None, None


def _score_slots(flat_TD, output_layer, weight, slots_N, targets_N, chunk_tokens, wants_grad):
    """loss_N, arg-max token_N and, if wanted, d loss / d hidden as grad_ND; the logits of one chunk live at a time."""
    group = _vocabulary_group(output_layer)
    loss_N = flat_TD.new_empty(len(slots_N), dtype=_wide(flat_TD.dtype))
    token_N = torch.empty_like(targets_N)
    grad_ND = flat_TD.new_empty(len(slots_N) if wants_grad else 0, flat_TD.shape[1])
    for start in range(0, len(slots_N), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        rows = flat_TD[slots_N[chunk]].detach().requires_grad_(wants_grad)
        with torch.set_grad_enabled(wants_grad):
            logits, bias = output_layer(rows[:, None], weight=weight)
            logits = logits if bias is None else logits + bias.detach()
        if start == 0:
            _check_targets(targets_N, logits.shape[2] * (group.size() if group else 1))
        loss_N[chunk], token_N[chunk], dlogits = _score(
            logits.detach()[:, 0], targets_N[chunk], group, wants_grad
        )
        if wants_grad:  # by the layer's own backward, which also sums over tensor-parallel ranks
            grad_ND[chunk] = torch.autograd.grad(logits, rows, dlogits[:, None])[0]
        del logits, dlogits  # or they would live on while the next chunk is projected
    return loss_N, token_N, grad_ND


def _score(logits_NV, targets_N, group, wants_grad):
    """One chunk's loss_N, arg-max token_N and d loss / d logits (None if not wanted), in the logits' dtype."""
    statistics, softmax = _fused() if logits_NV.is_cuda else (_row_statistics, _softmax)
    first_token = group.rank() * logits_NV.shape[1] if group else 0
    slot_N = (targets_N - first_token).clamp(0, logits_NV.shape[1] - 1)
    is_here_N = targets_N == slot_N + first_token
    top_N, token_N, total_N = statistics(logits_NV)
    token_N = token_N + first_token
    target_N = logits_NV.gather(1, slot_N[:, None])[:, 0].to(top_N.dtype).where(is_here_N, 0)
    if group:
        top_N, token_N, total_N, target_N = _over_ranks(top_N, token_N, total_N, target_N, group)
    loss_N = total_N.log() - (target_N - top_N)
    if not wants_grad:
        return loss_N, token_N, None
    dlogits_NV = softmax(logits_NV, top_N, total_N)
    # p - 1 is computed here and written: subtracted in bf16, a p close to 1 would leave nothing.
    minus_one_N = torch.expm1(-loss_N).to(dlogits_NV.dtype)
    at_target_N = torch.where(is_here_N, minus_one_N, dlogits_NV.gather(1, slot_N[:, None])[:, 0])
    return loss_N, token_N, dlogits_NV.scatter_(1, slot_N[:, None], at_target_N[:, None])


def _row_statistics(logits_NV):
    """Each row's largest logit, its place (the first on a tie), and the sum of exp(logit - largest)."""
    top_N, token_N = logits_NV.max(dim=1)
    top_N = top_N.to(_wide(logits_NV.dtype))
    return top_N, token_N, (logits_NV - top_N[:, None]).exp_().sum(dim=1)


def _softmax(logits_NV, top_N, total_N):
    return (logits_NV - top_N[:, None]).exp_().div_(total_N[:, None]).to(logits_NV.dtype)


@functools.cache  # torch.compile takes 30 ms even when all is compiled
def _fused():
    """The same two without a float32 copy of the logits. A fixed vocabulary is twice as fast as dynamic=True."""
    return torch.compile(_row_statistics), torch.compile(_softmax)


def _over_ranks(top_N, token_N, total_N, target_N, group):
    """The same four of the whole vocabulary, from every rank's share."""
    mine = torch.stack(
        [top_N, token_N.to(top_N.dtype), total_N, target_N]
    )  # tokens below 2**24 are exact in float32
    shares = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(shares, mine, group=group)
    tops, tokens, totals, targets = torch.stack(shares, dim=1)  # each [tp, n]
    top_N, winner_N = tops.max(dim=0)  # on a tie the lowest rank, which holds the lowest tokens
    total_N = (totals * (tops - top_N).exp()).sum(dim=0)
    return top_N, tokens.gather(0, winner_N[None])[0].long(), total_N, targets.sum(dim=0)


def _add_mtp_losses(model, arguments, record, detach_trunk, rule, scale, denominator, chunk_tokens):
    """Run MTP, fill record.depths, and return the trunk's hidden state with every depth's loss riding on it."""
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    hidden, num_depths = arguments["hidden_states"], model.config.mtp_num_layers
    scale = model.config.mtp_loss_scaling_factor if scale is None else scale
    one_a_depth = isinstance(denominator, (list, tuple)) or getattr(denominator, "ndim", 0) == 1
    divisors = list(denominator) if one_a_depth else [denominator] * num_depths
    if len(divisors) != num_depths:
        came = f"denominator has {len(divisors)} entries, the model {num_depths} depths"
        raise ValueError(f"{came}; wanted one number, or one a depth: pass that")
    states = _run_mtp(model, arguments, detach_trunk)
    for state, (targets, mask), divisor in zip(
        states, _rolled(model, arguments, rule), divisors, strict=False
    ):
        loss, correct = mtp_cross_entropy(
            state,
            model.output_layer,
            targets,
            mask,
            output_weight=_tied_weight(model),
            chunk_tokens=chunk_tokens,
        )
        tokens = mask.sum()
        divisor = tokens if divisor is None else divisor
        divisor = divisor + (
            divisor == 0
        )  # no token anywhere: 0 / 1, where Megatron 0.16 has 0 / 0
        hidden = MTPLossAutoScaler.apply(hidden, scale / num_depths * loss.sum() / divisor)
        record.depths.append(
            {"loss_sum": loss.detach().sum(), "tokens": tokens, "correct": correct.sum()}
        )
    return hidden


def _run_mtp(model, arguments, detach_trunk):
    """Each depth's hidden state [s, b, h], from the MTP block called as this release's own _postprocess calls it."""
    hidden, embedding = arguments["hidden_states"], model.embedding
    _check_packed(arguments["packed_seq_params"])
    if detach_trunk:
        # A leaf that wants gradient: full recompute trains nothing if none of its inputs does (slime#746, xtuner#2048).
        hidden = hidden.detach().requires_grad_()

        def embedding(*args, **kwargs):
            return model.embedding(*args, **kwargs).detach()

    known = inspect.signature(
        type(model.mtp).forward
    ).parameters  # padding_mask, say, is there from 0.18 on
    passed = {name: value for name, value in arguments.items() if name in known}
    states = model.mtp(**passed | {"hidden_states": hidden, "embedding": embedding})
    return states.chunk(1 + model.config.mtp_num_layers)[1:]


def _rolled(model, arguments, rule):
    """Yields targets and mask [b, s] of depths 1, 2 and so on; Megatron's roll knows documents and zig-zag shards."""
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    labels, mask, packed = (
        arguments["labels"],
        arguments["loss_mask"],
        arguments["packed_seq_params"],
    )
    _check_mask(mask)
    if labels.shape != mask.shape:
        came = f"labels has shape {list(labels.shape)}, loss_mask {list(mask.shape)}"
        raise ValueError(f"{came}; wanted the same [b, s]: cut both alike")
    # Rolled as one tensor, so that neither can be rolled more often than the other.
    both = torch.stack([labels, mask.to(labels.dtype)])
    drafted = both[1]
    while True:
        both, _ = roll_tensor(
            both, shifts=-1, dims=-1, cp_group=model.mtp.cp_group, packed_seq_params=packed
        )
        drafted = drafted * both[1]
        yield both[0], (drafted if rule == "drafted" else both[1]).bool()


@contextmanager
def _whole_sequence(hidden, output_layer):
    """Yields all of s. A sequence-parallel head would gather by itself, but after the slots are picked: too late."""
    if not getattr(output_layer, "sequence_parallel", False):
        yield hidden
        return
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region as gather

    # With the flag off the head's own backward sums over ranks: the gradient is whole, to be cut and not summed again.
    with _replaced(output_layer, "sequence_parallel", False):
        yield gather(hidden, tensor_parallel_output_grad=False, group=output_layer.tp_group)


@contextmanager
def _replaced(owner, name, value):
    """Sets owner.name, and afterwards puts back what was there, or nothing where only the class had it."""
    before = {name: vars(owner)[name]} if name in vars(owner) else {}
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        vars(owner).update(before)


def _tied_weight(model):
    return (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else None
    )


def _vocabulary_group(output_layer):
    """The ranks that each hold a share of the logits; None where they are whole."""
    group = getattr(output_layer, "tp_group", None)
    return (
        None
        if group is None or group.size() == 1 or getattr(output_layer, "gather_output", False)
        else group
    )


def _wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunk_with_head(model):
    """The one chunk that makes the logits, unwrapped; None where this pipeline stage has no head.

    model is a chunk, or an iterable of chunks as a pipeline holds them, each inside any number of
    .module (DDP, Float16Module) and .language_model (a vision-language model). A stage without a
    head is normal; a whole model without one, or with two, is not: nothing would be patched then,
    or the wrong chunk, without a word.
    """
    is_list = hasattr(model, "__iter__")
    chunks, heads = [], []
    for chunk in model if is_list else [model]:
        # A vision-language model whose stage holds the encoder alone has language_model None.
        while hasattr(chunk, "module") or getattr(chunk, "language_model", None) is not None:
            chunk = chunk.module if hasattr(chunk, "module") else chunk.language_model
        if not hasattr(chunk, "config") or not hasattr(chunk, "post_process"):
            came = f"{type(chunk).__name__} has no config and post_process"
            raise TypeError(f"{came}; wanted a Megatron GPTModel or HybridModel: pass that")
        chunks.append(chunk)
        if chunk.post_process and not hasattr(chunk, "language_model"):
            heads.append(chunk)
    is_stage = any(chunk.config.pipeline_model_parallel_size > 1 for chunk in chunks)
    if len(heads) > 1 or (is_list and not heads and not is_stage):
        names = ", ".join(type(chunk).__name__ for chunk in heads or chunks) or "no chunk"
        came = f"the {type(model).__name__} holds {len(heads)} chunks with a head ({names})"
        raise ValueError(f"{came}; wanted 1: pass all chunks of one model, and of no other")
    return heads[0] if heads else None


def _check_model(model):
    """Is this a GPTModel with MTP layers, whose release has the internals that are replaced or called here?"""
    import megatron.core
    from megatron.core.transformer import multi_token_prediction

    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model is {type(model).__name__}; wanted a Megatron GPTModel with MTP layers: pass that"
        )
    if not hasattr(model, "mtp") or not hasattr(model, "output_layer"):
        came = f"{type(model).__name__} has no {'head' if hasattr(model, 'mtp') else 'MTP layers'} on this rank"
        raise RuntimeError(
            f"{came}; wanted both on the last pipeline stage: build it with mtp_num_layers there"
        )
    functions = (getattr(type(model), "_postprocess", _check_model), type(model.mtp).forward)
    there = {name for function in functions for name in inspect.signature(function).parameters}
    there |= set(dir(multi_token_prediction))
    wanted = {
        "roll_tensor",
        "MTPLossAutoScaler",
        "mtp_in_postprocess",
        "loss_mask",
        "hidden_states",
        "embedding",
    }
    if missing := sorted(wanted - there):
        came = f"megatron-core {megatron.core.__version__} has no {', '.join(missing)} at GPTModel._postprocess"
        raise RuntimeError(f"{came}; wanted what 0.16 to 0.19 have: install one of those")
    for name in (
        "use_mup",
        "defer_embedding_wgrad_compute",
    ):  # scaled logits; a head that keeps its inputs
        if getattr(model.config, name, False):
            raise ValueError(
                f"config.{name} is on; wanted it off, the chunked head does not do it: build without it"
            )


def _check_packed(packed):
    padded = None if packed is None else packed.cu_seqlens_q_padded
    if (
        padded is not None
        and padded is not packed.cu_seqlens_q
        and not torch.equal(padded, packed.cu_seqlens_q)
    ):
        came = "cu_seqlens_q differs from cu_seqlens_q_padded, and Megatron rolls the MTP layer's tokens by the first"
        raise ValueError(
            f"{came}; wanted one layout: put the padded offsets into both and mask the padding out"
        )


def _check_arguments(hidden, targets, mask, chunk_tokens):
    wanted = [hidden.shape[1], hidden.shape[0]]
    for name, tensor in (("targets", targets), ("mask", mask)):
        _check_tensor(name, tensor, "[b, s]")
        if list(tensor.shape) != wanted:
            came = f"{name} has shape {list(tensor.shape)}, hidden [s, b, h] {list(hidden.shape)}"
            raise ValueError(f"{came}; wanted [b, s] = {wanted}: transpose or slice one of the two")
    if targets.dtype != torch.int64:
        raise TypeError(f"targets is {targets.dtype}; wanted torch.int64: call .long()")
    _check_chunk_tokens(chunk_tokens)
    _check_mask(mask)


def _check_chunk_tokens(chunk_tokens):
    if type(chunk_tokens) is not int or chunk_tokens < 1:
        raise ValueError(
            f"chunk_tokens is {chunk_tokens!r}; wanted an int, 1 or more: leave it at 1024"
        )


def _check_tensor(name, tensor, shape, floating=False):
    """A dense tensor with as many dimensions as `shape` names, of a kind that torch can compute with."""
    is_dense = (
        isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not tensor.is_nested
    )
    if not is_dense or tensor.is_meta or tensor.is_complex():
        came = (
            f"{tensor.dtype} {tensor.layout}"
            if isinstance(tensor, torch.Tensor)
            else type(tensor).__name__
        )
        raise TypeError(f"{name} is {came}; wanted a dense tensor {shape} with data: convert it")
    if tensor.dim() != shape.count(",") + 1 or (floating and not tensor.is_floating_point()):
        kind = "floats " if floating else ""
        raise TypeError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}; wanted {kind}{shape}: convert it"
        )


def _check_mask(mask):
    if mask.dtype != torch.bool and (wrong := (mask != 0) & (mask != 1)).any():
        raise ValueError(
            f"the mask holds {mask[wrong][0].item()}; wanted 0 or 1: weigh the loss instead"
        )


def _check_targets(targets_N, vocab_size):
    # Tensor-parallel ranks would not notice: none would own the target, and the loss would be wrong.
    if (wrong := (targets_N < 0) | (targets_N >= vocab_size)).any():
        came = f"a masked-in slot has target {targets_N[wrong][0].item()}"
        raise ValueError(
            f"{came}; wanted 0 to {vocab_size - 1}: mask out the slots that have no target"
        )


def measure_gradients(detach_trunk, tied=False, depths=1, recompute=False):
    """Which of a toy model's parameters move when the policy loss is times 0: five of "#" and ".", as in the picture.

    detach_trunk as in patch_mtp_loss, or None for stock Megatron. "xxxxx" where Megatron itself crashes.
    """
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    import toy.model

    MTPLossLoggingHelper.tracker.clear()  # class-wide: a model with more depths than the last crashes (slime#2131)
    full = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    config = toy.model.mimo_config(
        hidden_size=32, num_heads=2, ffn_size=32, mtp_layers=depths, tied=tied
    )
    model = toy.model.build_model(config, **full if recompute else {})
    tokens = torch.randint(
        48, (1, 32), generator=torch.Generator().manual_seed(0)
    )  # of a vocabulary of 64
    inputs = dict(labels=tokens.roll(-1, dims=1), loss_mask=torch.ones(1, 32))
    with (
        nullcontext() if detach_trunk is None else patch_mtp_loss(model, detach_trunk=detach_trunk)
    ):
        try:
            model(tokens, torch.arange(32)[None], None, **inputs).sum().mul(0).backward()
        except TypeError:  # megatron-core 0.18 can't recompute MTP: fix 3, mtp_recompute.py
            return "xxxxx"
    moved = {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.any()
    }
    embedding = moved.get("embedding.word_embeddings.weight", torch.zeros(64, 1))
    columns = [
        embedding[:48].any(),
        any(name.startswith("decoder.layers") for name in moved),
        "decoder.final_layernorm.weight" in moved,
        embedding[48:].any()
        if tied
        else "output_layer.weight" in moved,  # tokens 48 to 63 are never looked up
        all(name in moved for name, _ in model.named_parameters() if name.startswith("mtp.")),
    ]
    return "".join("#" if moves else "." for moves in columns)


def main():
    """Print the gradient matrix of the Megatron that is installed."""
    import megatron.core

    import toy.model

    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    toy.model.init_megatron("cpu")
    version = megatron.core.__version__.split("+")[
        0
    ]  # after the + stands the commit of whatever folder this runs in
    print(
        f"megatron-core {version}, policy loss times 0: # moves, . does not, x Megatron crashes\n"
    )
    print(f"{'':<27}{'stock Megatron':<27}{'detach_trunk=False':<27}detach_trunk=True")
    print(
        f"{'head    depths  recompute':<27}" + "  ".join(["emb trunk norm head mtp  "] * 3).rstrip()
    )
    for tied, depths, recompute in itertools.product((False, True), (1, 2), (False, True)):
        cells = (measure_gradients(way, tied, depths, recompute) for way in (None, False, True))
        row = "".join(f"{'{:^3} {:^5} {:^4} {:^4} {:^3}'.format(*cell):<27}" for cell in cells)
        print(
            f"{'tied' if tied else 'untied':<8}{depths:<8}{'full' if recompute else 'none':<11}{row}".rstrip()
        )


if __name__ == "__main__":
    main()
