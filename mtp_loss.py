"""Fix 1 of 7: the MTP loss trains the MTP layers and nothing else, and keeps no logits.

Bug     An MTP layer borrows the policy's trunk, embedding and head. In Megatron its loss flows back
        into all three, so the policy is pulled towards being easy to draft, whatever reward says.
Rule    Depth k's loss at slot t is that of token t+1+k, over the slots whose rolled mask counts. It
        reaches mtp.* only (detach_trunk=True), or trunk and embedding look-up too; never the head.

            which parameters move   embedding  trunk  norm  head  mtp    # moves  . None or 0
            stock Megatron              #        #     #     #     #     policy loss times 0, MTP
            detach_trunk=False          #        #     #     .     #     loss on; GPTModel and
            detach_trunk=True           .        .     .     .     #     HybridModel, tied or not

        Both classes call model.mtp(...) and hand to the head what it returns. That is replaced:

            embedding -> decoder -> trunk -+-------------- the loss rides on it -> head -> logits
                                           +-| cut |-> model.mtp -> depths -> loss

        A slot's loss depends on its own hidden state alone. So masked-in slots are projected chunk
        by chunk, and the gradient is taken with the loss; the backward pass only scales it:

            hidden [s, b, h] --pick--> rows --head--> logits [chunk, V] --> loss, top-1, gradient
                      grad rows [n, h] <--head, transposed----------------------------+
                      kept for backward            (then the chunk's logits are freed)
Source  slime#709, verl#6432, miles#3211 (the head moves); slime#746, xtuner#2048 (detached and
        recomputed, nothing trains); Megatron-LM#3396 (a rank without tokens), #7452 (unequal
        micro-batches). For process_mtp_loss (core/transformer/multi_token_prediction.py) of
        megatron-core 0.17.1, 0.18.2, 0.19.2, and GPTModel._postprocess of 0.16.1.
Shapes  s slots of this rank, b rows, h hidden size (D in names), n or N masked-in slots, T all
        s x b slots, V this rank's share of the vocabulary. Label-aligned: slot t speaks of t+1.
Use     with patch_mtp_loss(model) as mtp:
            logits = model(input_ids, position_ids, mask, labels=labels, loss_mask=loss_mask)
            policy_loss(logits).backward()  # trains the MTP layers too
            nats_per_token = mtp.depths[0]["loss_sum"] / mtp.depths[0]["tokens"]
Run     python -m pytest tests/test_mtp_loss.py: the specification.
"""

import copy
import functools
import inspect
import types
from contextlib import contextmanager, nullcontext

import torch
from torch.autograd.function import once_differentiable


def mtp_cross_entropy(
    hidden, output_layer, targets, mask, *, output_weight=None, chunk_tokens=1024
):
    """Cross entropy and top-1 of the masked-in slots, through a head that gets no gradient.

    hidden         [s, b, h] floats; of a sequence-parallel model [s / tp, b, h], gathered in here.
    output_layer   Megatron's ColumnParallelLinear, or alike: output_layer([n, 1, h], weight=...) ->
                   (logits [n, 1, V], bias or None). Ranks of its tp_group pass the same slots.
    targets        [b, s] int64, the token that each slot predicts; any number where masked out.
    mask           [b, s] of 0 and 1, any dtype: which slots count.
    output_weight  the head's weight, for a head that holds none (tied embeddings).
    chunk_tokens   how many slots are projected at a time: it bounds memory, changes nothing else.

    Returns loss [b, s] in nats, float32 (float64 from float64), and correct [b, s], bool: is the
    arg-max token (the lowest on a tie) the target? 0 and False where masked out. Gradient reaches
    hidden only. ValueError: other shapes or mask, a target outside the vocabulary, no chunk_tokens.
    """
    loss, token = _score(hidden, output_layer, output_weight, targets, mask, chunk_tokens)
    return loss, (token == targets) & mask.bool()


@contextmanager
def patch_mtp_loss(
    model,
    *,
    detach_trunk=True,
    rule="target",
    scale=None,
    denominator=None,
    chunk_tokens=1024,
    num_drafts=None,
    objective="cross_entropy",
):
    """Inside, a Megatron model returns its main head's logits; backward through them trains MTP.

    Call model(input_ids, position_ids, attention_mask, labels=..., loss_mask=...,
    packed_seq_params=...) with label-aligned labels and loss_mask [b, s]; logits [b, s, vocab / tp]
    come back, bitwise those without MTP. With labels=None, with grad off or inside skip_mtp, the
    MTP block does not run.

    model         GPTModel, HybridModel or a list of chunks (those without a head stay as they are),
                  in any number of .module and .language_model.
    detach_trunk  True: the loss reaches mtp.* only. False: trunk and embedding look-up too.
    rule          "target": depth k counts at slot t iff token t+1+k is masked in; "drafted": iff
                  all of t+1 to t+1+k.
    scale         lambda, by default config.mtp_loss_scaling_factor, shared equally by the depths.
    denominator   divides a depth's summed loss: one number, or one a depth. By default, as in
                  Megatron, the depth's count on this rank, at least 1; with
                  calculate_per_token_loss that count / the sum of loss_mask (1 on 0.16). With the
                  global batch's count, summed gradients do not depend on the split, if the
                  autoscaler's scale is 1: where a schedule or DDP averages, divide the count by
                  num_microbatches x dp (x cp).
    chunk_tokens  as in mtp_cross_entropy.
    num_drafts    None: a depth a layer. k: depths 1 to k, of k layers, or of the one layer as an
                  engine drafts with it (mtp_recursion.py).
    objective     "cross_entropy" in nats of the token that came, or "total_variation", one minus
                  the acceptance of a probabilistic draft: 1 - sum_v min(p_v, q_v), q the draft's
                  distribution and p the main head's for that token (temperature 1, no gradient).

    Yields an object with scale and denominator, read at each forward; and depths: a dict a depth of
    loss_sum, tokens and correct, 0-dim tensors of this rank, added up until the caller clears the
    list. Megatron's MTPLossLoggingHelper is filled too. An all-zero mask gives zero gradients, not
    None. On exit, also after an error, the model is as it was. RuntimeError or ValueError: patched
    twice, no MTP layers, unknown internals, labels without loss_mask, unpadded cu_seqlens_q,
    num_drafts that the layers do not give, settings that contradict each other.
    """
    record = types.SimpleNamespace(scale=scale, denominator=denominator, depths=[])
    model = _chunk_with_head(model)
    if model is None:
        yield record
        return
    _check_model(model)
    _check_settings(model, detach_trunk, rule, objective)
    stock, signature = model.forward, inspect.signature(model.forward)

    def forward(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        labels, loss_mask = (given.arguments.get(name) for name in ("labels", "loss_mask"))
        given.arguments |= {"labels": None, "loss_mask": None}  # or a loss would come back
        if labels is not None and loss_mask is None:
            raise ValueError("labels came without loss_mask; wanted both: prompts would train too")
        add_losses = None
        if labels is not None and model.config.mtp_num_layers and torch.is_grad_enabled():
            batch = labels, loss_mask, model.mtp.cp_group
            options = rule, objective, chunk_tokens
            add_losses = functools.partial(_add_losses, model, record, batch, options)
        with _mtp_replaced(model, add_losses, num_drafts, detach_trunk):
            return stock(*given.args, **given.kwargs)

    with _replaced(model, "forward", forward):
        yield record


@torch.no_grad()
def draft_tokens(
    model, input_ids, position_ids, attention_mask, *, packed_seq_params=None, num_drafts=None
):
    """The token that each depth drafts at each slot: slot t of depth j holds the draft for t+1+j.

    Arguments as for the model's own forward; model and num_drafts as in patch_mtp_loss, except that
    None gives depth 1 alone, [b, s] int64; a number k gives [k, b, s]. Tokens between are those of
    input_ids. No grad, evaluation mode, inside patch_mtp_loss too; all is left as it was. Every
    tensor-parallel rank gets the tokens. Errors as in patch_mtp_loss; RuntimeError inside skip_mtp.
    """
    model = _chunk_with_head(model)
    _check_model(model)
    if model.config.mtp_num_layers is None:  # the trunk's state would be taken for the drafts'
        raise RuntimeError("config.mtp_num_layers is None; wanted MTP on: leave skip_mtp first")
    targets, mask = torch.zeros_like(input_ids), torch.ones_like(input_ids)  # any target will do
    drafts = []

    def draft(trunk, states, packed):
        head, weight = model.output_layer, _tied_weight(model)
        for state in states[: num_drafts or 1]:
            drafts.append(_score(state, head, weight, targets, mask, chunk_tokens=1024)[1])
        return trunk[:1]  # one slot is enough: nobody asks for main logits

    stock = types.MethodType(type(model).forward, model)
    is_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with _replaced(model, "forward", stock), _mtp_replaced(model, draft, num_drafts):
            model(input_ids, position_ids, attention_mask, packed_seq_params=packed_seq_params)
    finally:
        for module in is_training:
            module.training = True
    return drafts[0] if num_drafts is None else torch.stack(drafts)


@contextmanager
def _mtp_replaced(model, use, num_drafts, detach_trunk=True):
    """Inside, Megatron's forward calls run_mtp instead of model.mtp, and takes no MTP loss itself.

    use(trunk, the depths' states, packed_seq_params) gives the state [s, b, h] for the head. None:
    the MTP block does not run, the trunk's state goes on.
    """
    block, num_layers, was_called = model.mtp, model.config.mtp_num_layers, []
    num_depths = num_layers if num_drafts is None else num_drafts

    def run_mtp(*, hidden_states, embedding, packed_seq_params, **rest):
        if use is None:
            return hidden_states
        was_called.append(True)
        _check_packed(packed_seq_params)
        rest |= dict(hidden_states=hidden_states, embedding=embedding)
        if detach_trunk:
            # A leaf that wants gradient: full recompute trains nothing if none of its inputs does
            # (slime#746, xtuner#2048).
            rest["hidden_states"] = hidden_states.detach().requires_grad_()
            rest["embedding"] = lambda *args, **kwargs: embedding(*args, **kwargs).detach()
        states = block(packed_seq_params=packed_seq_params, **rest).chunk(1 + num_depths)[1:]
        return use(hidden_states, states, packed_seq_params)

    recursion = nullcontext()
    if use and num_depths != num_layers:
        import mtp_recursion

        recursion = mtp_recursion.draft_recursion(model, num_depths)
    # The model alone gets this copy: the block and MoE routers go on reading the one they share.
    config = copy.copy(model.config)
    config.mtp_num_layers = None
    with recursion, _replaced(model, "mtp", run_mtp), _replaced(model, "config", config):
        yield
    if use and not was_called:
        came = f"{type(model).__name__}.forward did not call model.mtp"
        raise RuntimeError(f"{came}; wanted mtp_process on: leave inference mode")


def _add_losses(model, record, batch, options, trunk, states, packed):
    """Every depth's loss, recorded, and riding on the trunk's state that is returned.

    On the state before the head, as in Megatron: the logits may then be changed in place.
    """
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    (labels, loss_mask, cp_group), (rule, objective, chunk_tokens) = batch, options
    head, weight = model.output_layer, _tied_weight(model)
    scale = model.config.mtp_loss_scaling_factor if record.scale is None else record.scale
    policy = _whole_sequence(trunk.detach(), head) if objective == "total_variation" else None

    def roll(tensor):  # Megatron's own knows documents and zig-zag shards
        where = dict(cp_group=cp_group, packed_seq_params=packed)
        return roll_tensor(tensor, shifts=-1, dims=-1, **where)[0]

    _check_mask(loss_mask)
    # Rolled as one tensor, so that neither can be rolled more often than the other.
    both = torch.stack([labels, loss_mask.to(labels.dtype)])
    drafted = both[1]
    for depth, state in enumerate(states):
        both = roll(both)
        targets, mask = both
        drafted = drafted * mask
        mask = (drafted if rule == "drafted" else mask).bool()
        if policy is not None:  # the main head predicts this depth's token from slot t+1+depth
            policy = roll(policy.permute(1, 2, 0)).permute(2, 0, 1)
        loss, token = _score(state, head, weight, targets, mask, chunk_tokens, policy)
        tokens, correct = mask.sum(), ((token == targets) & mask).sum()
        divisor = _divisor(model.config, record.denominator, depth, len(states), tokens, loss_mask)
        trunk = _ride(trunk, scale / len(states) * loss.sum() / divisor)
        totals = dict(loss_sum=loss.detach().sum(), tokens=tokens, correct=correct)
        if depth == len(record.depths):
            record.depths.append(dict.fromkeys(totals, 0))
        sums = record.depths[depth]
        record.depths[depth] = {name: sums[name] + total for name, total in totals.items()}
        if model.training:
            _log(depth, len(states), **totals)
    return trunk


def _divisor(config, denominator, depth, num_depths, tokens, loss_mask):
    """What a depth's summed loss is divided by; by default what Megatron's own is divided by."""
    from megatron.core.transformer import multi_token_prediction

    if denominator is not None:
        denominator = torch.as_tensor(denominator).expand(num_depths)[depth]
    elif not config.calculate_per_token_loss:
        denominator = tokens
    elif hasattr(multi_token_prediction, "process_mtp_loss"):
        denominator = tokens.clamp(min=1) / loss_mask.sum().clamp(min=1)
    else:  # 0.16
        denominator = 1
    return denominator + (denominator == 0)  # no token: 0 / 1, where Megatron 0.16 has 0 / 0


def _ride(hidden, loss):
    """The same numbers as hidden; a backward pass through them also goes through loss."""
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    try:
        return MTPLossAutoScaler.apply(hidden, loss)
    except Exception as error:
        came = f"MTPLossAutoScaler.apply, here {MTPLossAutoScaler.apply}, failed"
        wanted = "wanted Megatron's: leave out what replaces it (SkyRL: disable_native_mtp_loss)"
        raise RuntimeError(f"{came}; {wanted}") from error


def _log(depth, num_depths, loss_sum, tokens, correct):
    """Into Megatron's tracker as Megatron does: each micro-batch's mean, added up."""
    from megatron.core import parallel_state
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as helper

    # One buffer for the whole process: that of a model with fewer depths is too short (slime#2131).
    if any(torch.is_tensor(x) and x.numel() < num_depths for x in helper.tracker.values()):
        helper.tracker.clear()
    mean = loss_sum / tokens.clamp(min=1)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if hasattr(helper, "save_metrics_to_tracker"):  # from 0.19 on
        save, numbers = helper.save_metrics_to_tracker, (mean, correct.float(), tokens.float())
    else:
        save, numbers = helper.save_loss_to_tracker, (mean,)
    save(*numbers, depth, num_depths, avg_group=group)


# What follows knows no model: the head, a chunk of slots at a time.


def _score(hidden, output_layer, weight, targets, mask, chunk_tokens, policy=None):
    """loss and arg-max token [b, s], 0 and -1 where masked out; policy: states for its logits."""
    hidden = _whole_sequence(hidden, output_layer)
    _check_slots(hidden, targets, mask, chunk_tokens)
    # Inside a Function this can't be told any more.
    wants_grad = hidden.requires_grad and torch.is_grad_enabled()
    return _ChunkedLoss.apply(
        hidden, policy, output_layer, weight, targets, mask, chunk_tokens, wants_grad
    )


class _ChunkedLoss(torch.autograd.Function):
    """Takes the gradient with the loss: what is kept for backward is [n, h] instead of [n, V]."""

    @staticmethod
    def forward(ctx, hidden, policy, output_layer, weight, targets, mask, chunk_tokens, wants_grad):
        group = getattr(output_layer, "tp_group", None)
        if getattr(output_layer, "gather_output", False) or (group and group.size() == 1):
            group = None  # the logits are whole
        hidden_TD = hidden.reshape(-1, hidden.shape[2])
        slots_N = mask.bool().t().reshape(-1).nonzero()[:, 0]  # in [s, b] order, as hidden lies
        targets_N = targets.t().reshape(-1)[slots_N]
        loss_dtype = torch.promote_types(hidden.dtype, torch.float32)
        loss_T = hidden_TD.new_zeros(len(hidden_TD), dtype=loss_dtype)
        token_T = targets.new_full(loss_T.shape, -1)
        grad_ND = hidden_TD.new_empty(len(slots_N) if wants_grad else 0, hidden.shape[2])
        for start in range(0, len(slots_N), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            here = slots_N[chunk]
            rows = hidden_TD[here].detach().requires_grad_(wants_grad)
            with torch.set_grad_enabled(wants_grad):
                logits = _project(rows, output_layer, weight)
            draft_NV = logits.detach()
            if start == 0:
                _check_targets(targets_N, logits.shape[1] * (group.size() if group else 1))
            if policy is None:
                scored = _cross_entropy(draft_NV, targets_N[chunk], group, wants_grad)
            else:
                from mtp_recursion import total_variation

                policy_NV = _project(policy.reshape(hidden_TD.shape)[here], output_layer, weight)
                both = [(x_NV, *_statistics(x_NV, group)) for x_NV in (policy_NV, draft_NV)]
                scored = total_variation(*both, group, wants_grad)
                del policy_NV, both
            loss_T[here], token_T[here], dlogits_NV = scored
            if wants_grad:  # by the head's own backward, which also sums over its ranks
                grad_ND[chunk] = torch.autograd.grad(logits, rows, dlogits_NV)[0]
            # Or they would live on while the next chunk is projected.
            del logits, draft_NV, scored, dlogits_NV
        ctx.save_for_backward(slots_N, grad_ND)
        ctx.shape = hidden.shape
        loss, token = (x.view(hidden.shape[:2]).t().contiguous() for x in (loss_T, token_T))
        ctx.mark_non_differentiable(token)
        return loss, token

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _):
        slots_N, grad_ND = ctx.saved_tensors
        scaled_ND = (grad_ND * grad_loss.t().reshape(-1)[slots_N, None]).to(grad_ND.dtype)
        grad = grad_ND.new_zeros(ctx.shape)
        grad.view(-1, ctx.shape[2]).index_copy_(0, slots_N, scaled_ND)
        return grad, *[None] * 7


def _project(rows_ND, output_layer, weight):
    """The head's logits [n, V], this rank's share; neither weight nor bias gets a gradient."""
    weight = getattr(output_layer, "weight", None) if weight is None else weight
    # Detached, it takes Megatron's head down its frozen-weight path: no fused add to main_grad.
    weight = None if weight is None else weight.detach()
    # The rows are gathered already, so that the head's own backward sums over ranks.
    with _replaced(output_layer, "sequence_parallel", False):
        logits, bias = output_layer(rows_ND[:, None], weight=weight)
    return (logits if bias is None else logits + bias.detach()).squeeze(1)


def _cross_entropy(logits_NV, targets_N, group, wants_grad):
    """One chunk's loss_N, arg-max token_N and d loss / d logits (None if not wanted)."""
    first_token = group.rank() * logits_NV.shape[1] if group else 0
    place_N1 = (targets_N - first_token).clamp(0, logits_NV.shape[1] - 1)[:, None]
    is_here_N1 = targets_N[:, None] == place_N1 + first_token
    target_N = logits_NV.gather(1, place_N1).where(is_here_N1, 0)[:, 0]
    top_N, token_N, total_N, target_N = _statistics(logits_NV, group, target_N)
    loss_N = total_N.log() - (target_N - top_N)
    if not wants_grad:
        return loss_N, token_N, None
    dlogits_NV = _steps(logits_NV.is_cuda)[_softmax](logits_NV, top_N, total_N)
    # p - 1 is computed here and written: subtracted in bf16, a p close to 1 would leave nothing.
    minus_one_N1 = torch.expm1(-loss_N)[:, None].to(dlogits_NV.dtype)
    at_target_N1 = minus_one_N1.where(is_here_N1, dlogits_NV.gather(1, place_N1))
    return loss_N, token_N, dlogits_NV.scatter_(1, place_N1, at_target_N1)


def _statistics(logits_NV, group, *summed):
    """_row_statistics of the whole vocabulary, and the sum over ranks of each of summed [n]."""
    top_N, token_N, total_N = _steps(logits_NV.is_cuda)[_row_statistics](logits_NV)
    summed = [x_N.to(top_N.dtype) for x_N in summed]
    if not group:
        return top_N, token_N, total_N, *summed
    # Tokens below 2**24 are exact in float32.
    token_N = (token_N + group.rank() * logits_NV.shape[1]).to(top_N.dtype)
    mine = torch.stack([top_N, token_N, total_N, *summed])
    shares = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(shares, mine, group=group)
    tops, tokens, totals, *summed = torch.stack(shares, dim=1)  # each [tp, n]
    top_N, winner_N = tops.max(dim=0)  # on a tie the lowest rank, which holds the lowest tokens
    token_N = tokens.gather(0, winner_N[None])[0].long()
    total_N = (totals * (tops - top_N).exp()).sum(dim=0)
    return top_N, token_N, total_N, *(x.sum(dim=0) for x in summed)


# Each reads the logits once when compiled, and makes no float32 copy of them.
def _row_statistics(logits_NV):
    """Each row's largest logit, its place (the first on a tie), and sum of exp(logit - largest)."""
    top_N, token_N = logits_NV.max(dim=1)
    top_N = top_N.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return top_N, token_N, (logits_NV - top_N[:, None]).exp_().sum(dim=1)


def _softmax(logits_NV, top_N, total_N):
    return (logits_NV - top_N[:, None]).exp_().div_(total_N[:, None]).to(logits_NV.dtype)


@functools.cache  # torch.compile takes 30 ms even when all is compiled
def _steps(is_cuda):
    """The two above, compiled on CUDA; without dynamic=True, which is half as fast."""
    return {f: torch.compile(f) if is_cuda else f for f in (_row_statistics, _softmax)}


def _whole_sequence(hidden, output_layer):
    """A sequence-parallel head would gather by itself, but after the slots are picked: too late."""
    if not getattr(output_layer, "sequence_parallel", False):
        return hidden
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region as gather

    # The gradient is whole on every rank: to be cut, not to be summed again.
    return gather(hidden, tensor_parallel_output_grad=False, group=output_layer.tp_group)


@contextmanager
def _replaced(owner, name, value):
    """Sets owner.name, and afterwards puts back what was there, or nothing where none was."""
    before = {name: vars(owner)[name]} if name in vars(owner) else {}
    vars(owner)[name] = value
    try:
        yield
    finally:
        del vars(owner)[name]
        vars(owner).update(before)


def _tied_weight(model):
    is_tied = model.share_embeddings_and_output_weights
    return model.shared_embedding_or_output_weight() if is_tied else None


# The same lines as in ref_disable.py and drafter_sync.py.
def _chunk_with_head(model):
    """The chunk that makes the logits, out of its wrappers; None where this stage has no head.

    A whole model without a head, or with two, is refused: none or the wrong one would be patched.
    """
    is_list, is_stage, chunks, heads = hasattr(model, "__iter__"), False, [], []
    for chunk in model if is_list else [model]:
        # A vision-language model whose stage holds the encoder alone has language_model None.
        while hasattr(chunk, "module") or getattr(chunk, "language_model", None) is not None:
            chunk = chunk.module if hasattr(chunk, "module") else chunk.language_model
        chunks.append(type(chunk).__name__)
        if not hasattr(chunk, "config") or not hasattr(chunk, "post_process"):
            raise TypeError(f"{chunks[-1]} came; wanted a Megatron GPTModel or HybridModel")
        is_stage |= chunk.config.pipeline_model_parallel_size > 1
        if chunk.post_process and not hasattr(chunk, "language_model"):
            heads.append(chunk)
    if len(heads) > 1 or (is_list and not heads and not is_stage):
        names = ", ".join(chunks)
        came = f"the {type(model).__name__} holds {len(heads)} chunks with a head, of ({names})"
        raise ValueError(f"{came}; wanted 1: pass all chunks of one model, and of no other")
    return heads[0] if heads else None


def _check_model(model):
    """Has it MTP layers, and its release the parts that are replaced or called here?"""
    import megatron.core
    from megatron.core.transformer import multi_token_prediction

    name = type(model).__name__
    if not hasattr(model, "mtp"):
        raise RuntimeError(f"{name} has no MTP layers here; wanted them beside the head")
    there = {*inspect.signature(type(model.mtp).forward).parameters, *dir(multi_token_prediction)}
    wanted = {"hidden_states", "embedding", "packed_seq_params"}
    wanted |= {"roll_tensor", "MTPLossAutoScaler", "MTPLossLoggingHelper"}
    if missing := ", ".join(sorted(wanted - there)):
        came = f"megatron-core {megatron.core.__version__} has no {missing} for {name}"
        raise RuntimeError(f"{came}; wanted 0.16 to 0.19")
    for name in ("use_mup", "defer_embedding_wgrad_compute"):  # scaled logits; inputs kept
        if getattr(model.config, name, False):
            raise ValueError(f"config.{name} is on; wanted it off: the chunked head ignores it")


def _check_settings(model, detach_trunk, rule, objective):
    for name in ("forward", "_postprocess"):
        own = vars(model).get(name)
        # The class's own function bound on the instance, which verl leaves there, is stock.
        if own is not None and getattr(own, "__func__", None) is not getattr(type(model), name):
            raise RuntimeError(f"{name} is patched already: leave the other context first")
    if rule not in ("target", "drafted"):
        raise ValueError(f"rule is {rule!r}; wanted 'target' or 'drafted'")
    if objective not in ("cross_entropy", "total_variation"):
        raise ValueError(f"objective is {objective!r}; wanted 'cross_entropy' or 'total_variation'")
    if getattr(model.config, "mtp_detach_heads", False) and not detach_trunk:
        raise ValueError("detach_trunk is False; config.mtp_detach_heads would detach anyway")


def _check_packed(packed):
    padded = None if packed is None else packed.cu_seqlens_q_padded
    if padded is not None and not torch.equal(padded, packed.cu_seqlens_q):  # roll_tensor's
        came = "cu_seqlens_q differs from cu_seqlens_q_padded"
        raise ValueError(f"{came}; put the padded offsets into both and mask the padding out")


def _check_slots(hidden, targets, mask, chunk_tokens):
    wanted = [hidden.shape[1], hidden.shape[0]]
    for name, tensor in (("targets", targets), ("mask", mask)):
        if list(tensor.shape) != wanted:
            came = f"{name} has shape {list(tensor.shape)}, hidden [s, b, h] {list(hidden.shape)}"
            raise ValueError(f"{came}; wanted [b, s] = {wanted}")
    if chunk_tokens < 1:  # no chunk at all would be projected
        raise ValueError(f"chunk_tokens is {chunk_tokens}; wanted 1 or more")
    _check_mask(mask)


def _check_mask(mask):
    if mask.dtype != torch.bool and (wrong := (mask != 0) & (mask != 1)).any():
        raise ValueError(f"the mask holds {mask[wrong][0].item()}; wanted 0 or 1: weigh the loss")


def _check_targets(targets_N, vocab_size):
    # Tensor-parallel ranks would not notice: none would own the target, the loss would be wrong.
    if (wrong := (targets_N < 0) | (targets_N >= vocab_size)).any():
        came = f"a masked-in slot has target {targets_N[wrong][0].item()}"
        raise ValueError(f"{came}; wanted 0 to {vocab_size - 1}: mask out slots without a target")
