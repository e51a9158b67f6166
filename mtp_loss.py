"""Fix 1 of 7: the MTP loss trains the MTP layers and nothing else, and keeps no logits.

Bug     An MTP layer borrows the policy's trunk, embedding and head. In Megatron its loss flows back
        into all three, so the policy is pulled towards being easy to draft, whatever reward says.
        Patches that detached the head stopped doing so without a word when megatron-core 0.17
        moved the call that they had replaced.
Rule    Depth k's loss at slot t is that of token t+1+k, over the slots whose rolled mask counts. It
        reaches mtp.* only (detach_trunk=True), or trunk and embedding look-up as well, and never
        the head.

            which parameters move   embedding  trunk  norm  head  mtp    # moves  . None or 0
            stock Megatron              #        #     #     #     #     policy loss times 0, MTP
            detach_trunk=False          #        #     #     .     #     loss on; GPTModel and
            detach_trunk=True           .        .     .     .     #     HybridModel, tied or not

        Both classes call model.mtp(...) and hand to the head what it returns. The call is replaced:

            embedding -> decoder -> trunk -+-------------- the loss rides on it -> head -> logits
                                           +-| cut |-> model.mtp -> depths -> loss

        Masked-in slots are projected chunk by chunk. A slot's loss depends on its own hidden state
        alone, so its gradient is taken at once, in the forward pass; the backward only scales it:

            hidden [s, b, h] --pick--> rows --head--> logits [chunk, V] --> loss, top-1, gradient
                      grad rows [n, h] <--head, transposed----------------------------+
                      kept for backward            (then the chunk's logits are freed)
Source  slime#709, verl#6432, miles#3211 (the head moves); slime#746, xtuner#2048 (detached and
        recomputed, nothing trains); Megatron-LM#3396 (a rank without tokens), #7452 (micro-batches
        of unequal count). Stands in for process_mtp_loss of megatron-core 0.17.1, 0.18.2, 0.19.2
        (core/transformer/multi_token_prediction.py), and GPTModel._postprocess of 0.16.1.
Shapes  s slots of this rank, b rows, h hidden size (D in names), n or N masked-in slots, T all
        s x b slots, K depths, V this rank's share of the vocabulary. labels and loss_mask are
        label-aligned: slot t speaks of token t+1.
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
    output_layer   called as output_layer([n, 1, h], weight=...) -> (logits [n, 1, V], bias or
                   None); a bias is added. Megatron's ColumnParallelLinear, or anything alike. If
                   its tp_group has several ranks and gather_output is off, V is a share, and all
                   these ranks must call with the same slots.
    targets        [b, s] int64, the token that each slot predicts; any number where masked out.
    mask           [b, s] of 0 and 1, any dtype: which slots count.
    output_weight  the head's weight, for a head that holds none (tied embeddings).
    chunk_tokens   how many slots are projected at a time: it bounds memory, changes nothing else.

    Returns loss [b, s] in nats, float32 (float64 from float64), 0 where masked out; and correct
    [b, s], bool: whether the arg-max token (the lowest on a tie) is the target, False where masked
    out. Gradient reaches `hidden` only. A GPU is waited for, since the number of slots must be
    known. ValueError: other shapes, another mask, a target outside the vocabulary, no chunk_tokens.
    """
    return _score(hidden, None, output_layer, output_weight, targets, mask, chunk_tokens)


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

    model         GPTModel or HybridModel, or the list of chunks that a pipeline has, in any number
                  of .module and .language_model. Chunks without a head are left alone.
    detach_trunk  True: the MTP loss reaches mtp.* only. False: trunk and embedding look-up too,
                  never the head.
    rule          "target": depth k counts at slot t iff token t+1+k is masked in; "drafted": iff
                  all of t+1 to t+1+k.
    scale         lambda, by default config.mtp_loss_scaling_factor; each depth weighs scale / K.
    denominator   divides a depth's summed loss: one number, or one a depth. By default that depth's
                  count on this rank, at least 1; with config.calculate_per_token_loss, where all
                  gradients are divided by the sum of loss_mask later, count / that sum, as in
                  Megatron's own MTP loss (1 on 0.16). With the global batch's count, gradients
                  summed over micro-batches and ranks are those of the undivided batch, if the
                  autoscaler's scale is 1: where a schedule or DDP averages, divide the count by
                  num_microbatches x dp (x cp).
    chunk_tokens  as in mtp_cross_entropy.
    num_drafts    None: as many depths as the model has MTP layers. k: the model's one layer is
                  trained at depths 1 to k, as an engine drafts with it (mtp_recursion.py).
    objective     "cross_entropy" of the token that came, in nats; or "total_variation", one minus
                  the acceptance of a probabilistic draft: 1 - sum_v min(p_v, q_v), with q the
                  draft's distribution and p the policy's own for that token (the main head at the
                  slot that predicts it, temperature 1, no gradient).

    Yields an object with `scale` and `denominator`, read at each forward, so that a caller who
    patches once may set them for each batch; and `depths`: one dict a depth of loss_sum, tokens and
    correct, 0-dim tensors of this rank, added up over forwards until the caller clears the list.
    With "total_variation", 1 - loss_sum / tokens is the expected acceptance. Megatron's
    MTPLossLoggingHelper is filled as Megatron fills it. An all-zero mask gives zero gradients, not
    None. On exit, also after an error, the model is as it was. RuntimeError or ValueError: patched
    twice, no MTP layers here, unknown internals, labels without loss_mask, unpadded cu_seqlens_q,
    num_drafts on several layers, settings that contradict each other.
    """
    record = types.SimpleNamespace(scale=scale, denominator=denominator, depths=[])
    model = _chunk_with_head(model)
    if model is None:
        yield record
        return
    _check_model(model)
    _check_settings(model, detach_trunk, rule, objective)
    layers = model.mtp.config.mtp_num_layers
    if num_drafts is not None and (num_drafts < 1 or layers > 1):
        came = f"num_drafts is {num_drafts}, and the model has {layers} MTP layers"
        raise ValueError(f"{came}; wanted 1 or more drafts from 1 layer: leave num_drafts None")
    stock, signature = model.forward, inspect.signature(model.forward)

    def forward(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        labels, loss_mask = (given.arguments.get(name) for name in ("labels", "loss_mask"))
        # For labels Megatron would return a loss.
        given.arguments |= {"labels": None, "loss_mask": None}
        if labels is not None and loss_mask is None:
            came = "labels came without loss_mask: all slots would count, prompts too"
            raise ValueError(f"{came}; wanted both, [b, s]: pass the label-aligned response mask")
        block, num_layers = model.mtp, model.config.mtp_num_layers  # None inside skip_mtp
        if labels is None or num_layers is None or not torch.is_grad_enabled():
            with _mtp_replaced(model):
                return stock(*given.args, **given.kwargs)

        def block_and_loss(**arguments):
            states = _run_mtp(block, arguments, num_drafts or num_layers, detach_trunk)
            batch = labels, loss_mask, arguments["packed_seq_params"]
            options = rule, objective, chunk_tokens
            return _add_losses(model, arguments["hidden_states"], states, batch, options, record)

        with _recursion(model, num_drafts), _mtp_replaced(model, block_and_loss):
            return stock(*given.args, **given.kwargs)

    with _replaced(model, "forward", forward):
        yield record


@torch.no_grad()
def draft_tokens(
    model, input_ids, position_ids, attention_mask, *, packed_seq_params=None, num_drafts=None
):
    """The token that each depth drafts at each slot: slot t of depth j holds the draft for t+1+j.

    Arguments as for the model's own forward; model as in patch_mtp_loss. num_drafts None gives
    depth 1 alone, [b, s] int64; a number k gives [k, b, s], from the model's k MTP layers or from
    its one layer fed with its own output (mtp_recursion.py), the tokens between taken from
    input_ids. Runs without grad and in evaluation mode, inside patch_mtp_loss too, and leaves all
    as it was. Tensor-parallel ranks get the same tokens. RuntimeError or ValueError as in
    patch_mtp_loss, and inside skip_mtp.
    """
    model = _chunk_with_head(model)
    _check_model(model)
    num_layers = model.config.mtp_num_layers
    if num_layers is None:
        came = "config.mtp_num_layers is None: MTP is off, perhaps by skip_mtp"
        raise RuntimeError(f"{came}; wanted it on: leave that context first")
    if num_drafts is not None and (num_drafts < 1 or num_layers not in (1, num_drafts)):
        came = f"num_drafts is {num_drafts}, and the model has {num_layers} MTP layers"
        raise ValueError(f"{came}; wanted a draft a layer, or 1 layer: pass {num_layers}")
    block, drafts = model.mtp, []

    def block_and_drafts(**arguments):
        states = _run_mtp(block, arguments, num_drafts or num_layers, detach_trunk=True)
        drafts.extend(_best_tokens(model, state) for state in states[: num_drafts or 1])
        return arguments["hidden_states"][:1]  # one slot is enough: nobody asks for main logits

    stock = types.MethodType(type(model).forward, model)
    is_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with (
            _replaced(model, "forward", stock),
            _recursion(model, num_drafts),
            _mtp_replaced(model, block_and_drafts),
        ):
            model(input_ids, position_ids, attention_mask, packed_seq_params=packed_seq_params)
    finally:
        for module in is_training:
            module.training = True
    return drafts[0] if num_drafts is None else torch.stack(drafts)


@contextmanager
def _mtp_replaced(model, call=None):
    """Megatron's forward then calls `call` instead of model.mtp and takes no MTP loss of its own.

    With None the trunk's state goes to the head as it is. The module, its hooks and whatever wraps
    its forward, in whatever order the contexts were entered, stay behind `call`. The model alone
    gets a copy of the config: the MTP block and MoE routers go on reading the number of layers from
    the one they share.
    """
    stand_in = _StandIn(model.mtp, call or (lambda *, hidden_states, **unused: hidden_states))
    config = copy.copy(model.config)
    config.mtp_num_layers = None
    with _replaced(model, "mtp", stand_in), _replaced(model, "config", config):
        yield
    if call and not stand_in.was_called:
        came = f"{type(model).__name__}.forward did not call model.mtp: no MTP loss, no draft"
        raise RuntimeError(f"{came}; wanted mtp_process on and no inference mode: leave that mode")


class _StandIn:
    """Hides the model's module of the same name: called instead of it, and in all else the same."""

    def __init__(self, module, call):
        self.module, self.call, self.was_called = module, call, False

    def __call__(self, **arguments):
        self.was_called = True
        return self.call(**arguments)

    def __getattr__(self, name):
        return getattr(self.module, name)


def _recursion(model, num_drafts):
    """Inside, the MTP block returns num_drafts depths, where it has fewer layers."""
    if num_drafts is None or num_drafts == model.config.mtp_num_layers:
        return nullcontext()
    from mtp_recursion import draft_recursion

    return draft_recursion(model, num_drafts)


def _run_mtp(block, arguments, num_depths, detach_trunk):
    """Each depth's hidden state [s, b, h], from the block called as Megatron's forward calls it."""
    _check_packed(arguments["packed_seq_params"])
    if detach_trunk:
        embedding = arguments["embedding"]
        # A leaf that wants gradient: full recompute trains nothing if none of its inputs does
        # (slime#746, xtuner#2048).
        hidden = arguments["hidden_states"].detach().requires_grad_()
        embed = lambda *args, **kwargs: embedding(*args, **kwargs).detach()  # noqa: E731
        arguments = arguments | {"hidden_states": hidden, "embedding": embed}
    return block(**arguments).chunk(1 + num_depths)[1:]


def _add_losses(model, trunk, states, batch, options, record):
    """Every depth's loss, recorded, and riding on the trunk's state that is returned.

    On the state before the head, as in Megatron: the logits may then be changed in place.
    """
    (labels, loss_mask, packed), (rule, objective, chunk_tokens) = batch, options
    scale = model.config.mtp_loss_scaling_factor if record.scale is None else record.scale
    head, weight, policy = model.output_layer, _tied_weight(model), None
    if objective == "total_variation":
        policy = _whole_sequence(trunk.detach(), head)
    rolled = _roll(model, labels, loss_mask, policy, packed, rule)
    for depth, state in enumerate(states):
        targets, mask, policy = next(rolled)
        loss, correct = _score(state, policy, head, weight, targets, mask, chunk_tokens)
        tokens = mask.sum()
        divisor = _divisor(model.config, record.denominator, depth, len(states), tokens, loss_mask)
        trunk = _ride(trunk, scale / len(states) * loss.sum() / divisor)
        totals = dict(loss_sum=loss.detach().sum(), tokens=tokens, correct=correct.sum())
        if depth == len(record.depths):
            record.depths.append(dict.fromkeys(totals, 0))
        sums = record.depths[depth]
        record.depths[depth] = {name: sums[name] + total for name, total in totals.items()}
        if model.training:
            _log(depth, len(states), totals)
    return trunk


def _roll(model, labels, loss_mask, policy, packed, rule):
    """Yields targets and mask [b, s], and the policy's state [s, b, h], of depths 1, 2 and so on.

    Megatron's roll knows documents and zig-zag shards. Depth k predicts token t+1+k, as the main
    head does from slot t+k: policy (None where not wanted) is rolled as often as the labels.
    """
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    def roll(tensor):
        group = model.mtp.cp_group
        return roll_tensor(tensor, shifts=-1, dims=-1, cp_group=group, packed_seq_params=packed)[0]

    _check_mask(loss_mask)
    # Rolled as one tensor, so that neither can be rolled more often than the other.
    both = torch.stack([labels, loss_mask.to(labels.dtype)])
    drafted = both[1]
    while True:
        both = roll(both)
        drafted = drafted * both[1]
        if policy is not None:
            policy = roll(policy.permute(1, 2, 0)).permute(2, 0, 1)
        yield both[0], (drafted if rule == "drafted" else both[1]).bool(), policy


def _divisor(config, denominator, depth, num_depths, tokens, loss_mask):
    """What a depth's summed loss is divided by; by default what Megatron's own is divided by."""
    from megatron.core.transformer import multi_token_prediction

    if isinstance(denominator, (list, tuple)) or getattr(denominator, "ndim", 0) == 1:
        if len(denominator) != num_depths:
            came = f"denominator has {len(denominator)} entries, the model {num_depths} depths"
            raise ValueError(f"{came}; wanted one number, or one a depth: pass that")
        denominator = denominator[depth]
    if denominator is None:
        denominator = tokens
        if config.calculate_per_token_loss:
            is_016 = not hasattr(multi_token_prediction, "process_mtp_loss")
            denominator = 1 if is_016 else tokens.clamp(min=1) / loss_mask.sum().clamp(min=1)
    return denominator + (denominator == 0)  # no token: 0 / 1, where Megatron 0.16 has 0 / 0


def _ride(hidden, loss):
    """The same numbers as hidden; a backward pass through them also goes through loss."""
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    try:
        return MTPLossAutoScaler.apply(hidden, loss)
    except Exception as error:
        other = vars(MTPLossAutoScaler).get("apply")
        if other is None:
            raise
        other = getattr(other, "__func__", other)
        came = f"MTPLossAutoScaler.apply was replaced by {other.__module__}.{other.__qualname__}"
        wanted = "wanted Megatron's, by which the loss reaches backward: leave out what replaces it"
        text = f"{came}, which fails; {wanted} (in SkyRL disable_native_mtp_loss)"
        raise RuntimeError(text) from error


def _log(depth, num_depths, totals):
    """Into Megatron's tracker as Megatron does: each micro-batch's mean, added up."""
    from megatron.core import parallel_state
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as helper

    # One buffer for the whole process: that of a model with fewer depths is too short (slime#2131).
    if any(torch.is_tensor(x) and x.numel() < num_depths for x in helper.tracker.values()):
        helper.tracker.clear()
    mean = totals["loss_sum"] / totals["tokens"].clamp(min=1)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if hasattr(helper, "save_metrics_to_tracker"):  # from 0.19 on
        counts = totals["correct"].float(), totals["tokens"].float()
        helper.save_metrics_to_tracker(mean, *counts, depth, num_depths, avg_group=group)
    else:
        helper.save_loss_to_tracker(mean, depth, num_depths, avg_group=group)


def _best_tokens(model, hidden):
    """The head's arg-max token of every slot, [b, s]."""
    hidden = _whole_sequence(hidden, model.output_layer)
    hidden_TD = hidden.reshape(-1, hidden.shape[2])
    slots_T = torch.arange(len(hidden_TD), device=hidden.device)
    nothing_T = torch.zeros_like(slots_T)  # there are no targets; any token will do
    head, weight = model.output_layer, _tied_weight(model)
    token_T = _score_slots(hidden_TD, None, head, weight, slots_T, nothing_T, 1024, False)[1]
    return token_T.view(hidden.shape[:2]).t().contiguous()


# What follows knows no model: the head, a chunk of slots at a time.


def _score(hidden, policy, output_layer, weight, targets, mask, chunk_tokens):
    """loss and correct [b, s]: cross entropy, or total variation from policy [s, b, h]'s logits."""
    hidden = _whole_sequence(hidden, output_layer)
    _check_slots(hidden, targets, mask, chunk_tokens)
    slots_N = mask.bool().t().reshape(-1).nonzero()[:, 0]  # in [s, b] order, as hidden lies
    targets_N = targets.t().reshape(-1)[slots_N]
    # Inside a Function this can't be told any more.
    wants_grad = hidden.requires_grad and torch.is_grad_enabled()
    return _ChunkedLoss.apply(
        hidden, policy, output_layer, weight, slots_N, targets_N, chunk_tokens, wants_grad
    )


class _ChunkedLoss(torch.autograd.Function):
    """Takes the gradient with the loss: what is kept for backward is [n, h] instead of [n, V]."""

    @staticmethod
    def forward(ctx, hidden, policy, output_layer, weight, slots_N, targets_N, *settings):
        hidden_TD = hidden.reshape(-1, hidden.shape[2])
        policy_TD = None if policy is None else policy.reshape(hidden_TD.shape)
        loss_N, token_N, grad_ND = _score_slots(
            hidden_TD, policy_TD, output_layer, weight, slots_N, targets_N, *settings
        )
        loss_T = loss_N.new_zeros(len(hidden_TD)).index_copy_(0, slots_N, loss_N)
        correct_T = torch.zeros_like(loss_T, dtype=torch.bool)
        correct_T.index_copy_(0, slots_N, token_N == targets_N)
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
        return grad, *[None] * 7


def _score_slots(
    hidden_TD, policy_TD, output_layer, weight, slots_N, targets_N, chunk_tokens, wants_grad
):
    """loss_N, arg-max token_N and, if wanted, d loss / d hidden; one chunk's logits are alive."""
    group = _vocabulary_group(output_layer)
    weight = getattr(output_layer, "weight", None) if weight is None else weight
    # Detached, it takes Megatron's head down its frozen-weight path: no weight gradient, no fused
    # add to main_grad.
    weight = None if weight is None else weight.detach()

    def project(rows):
        # Gathered already, so that the head's own backward sums over ranks.
        with _replaced(output_layer, "sequence_parallel", False):
            logits, bias = output_layer(rows[:, None], weight=weight)
        return logits if bias is None else logits + bias.detach()

    loss_dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
    loss_N = hidden_TD.new_empty(len(slots_N), dtype=loss_dtype)
    token_N = torch.empty_like(targets_N)
    grad_ND = hidden_TD.new_empty(len(slots_N) if wants_grad else 0, hidden_TD.shape[1])
    for start in range(0, len(slots_N), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        rows = hidden_TD[slots_N[chunk]].detach().requires_grad_(wants_grad)
        with torch.set_grad_enabled(wants_grad):
            logits = project(rows)
        draft_NV = logits.detach()[:, 0]
        if start == 0:
            _check_targets(targets_N, logits.shape[2] * (group.size() if group else 1))
        if policy_TD is None:
            scored = _cross_entropy(draft_NV, targets_N[chunk], group, wants_grad)
        else:
            policy_NV = project(policy_TD[slots_N[chunk]])[:, 0]
            scored = _total_variation(policy_NV, draft_NV, group, wants_grad)
            del policy_NV
        loss_N[chunk], token_N[chunk], dlogits_NV = scored
        if wants_grad:  # by the layer's own backward, which also sums over tensor-parallel ranks
            grad_ND[chunk] = torch.autograd.grad(logits, rows, dlogits_NV[:, None])[0]
        # Or they would live on while the next chunk is projected.
        del logits, draft_NV, scored, dlogits_NV
    return loss_N, token_N, grad_ND


def _cross_entropy(logits_NV, targets_N, group, wants_grad):
    """One chunk's loss_N, arg-max token_N and d loss / d logits (None if not wanted)."""
    step = _steps(logits_NV.is_cuda)
    first_token = group.rank() * logits_NV.shape[1] if group else 0
    slot_N = (targets_N - first_token).clamp(0, logits_NV.shape[1] - 1)
    is_here_N = targets_N == slot_N + first_token
    top_N, token_N, total_N = step[_row_statistics](logits_NV)
    token_N = token_N + first_token
    target_N = logits_NV.gather(1, slot_N[:, None])[:, 0].to(top_N.dtype).where(is_here_N, 0)
    if group:
        top_N, token_N, total_N, target_N = _over_ranks(top_N, token_N, total_N, target_N, group)
    loss_N = total_N.log() - (target_N - top_N)
    if not wants_grad:
        return loss_N, token_N, None
    dlogits_NV = step[_softmax](logits_NV, top_N, total_N)
    # p - 1 is computed here and written: subtracted in bf16, a p close to 1 would leave nothing.
    minus_one_N = torch.expm1(-loss_N).to(dlogits_NV.dtype)
    at_target_N = torch.where(is_here_N, minus_one_N, dlogits_NV.gather(1, slot_N[:, None])[:, 0])
    return loss_N, token_N, dlogits_NV.scatter_(1, slot_N[:, None], at_target_N[:, None])


def _total_variation(policy_NV, draft_NV, group, wants_grad):
    """The same for loss_N = 1 - sum_v min(p_v, q_v), p the policy's softmax and q the draft's."""
    step = _steps(draft_NV.is_cuda)
    first_token = group.rank() * draft_NV.shape[1] if group else 0
    softmaxes = []
    for logits_NV in (policy_NV, draft_NV):
        top_N, token_N, total_N = step[_row_statistics](logits_NV)
        token_N = token_N + first_token
        if group:
            top_N, token_N, total_N, _ = _over_ranks(top_N, token_N, total_N, total_N, group)
        softmaxes.append((logits_NV, top_N, total_N))
    sums_2N = torch.stack(step[_overlap](*softmaxes))
    if group:
        torch.distributed.all_reduce(sums_2N, group=group)
    loss_N, low_N = sums_2N
    dlogits_NV = step[_overlap_gradient](*softmaxes, low_N) if wants_grad else None
    return loss_N, token_N, dlogits_NV


# Each reads the logits once when compiled, and makes no float32 copy of them.
def _row_statistics(logits_NV):
    """Each row's largest logit, its place (the first on a tie), and sum of exp(logit - largest)."""
    top_N, token_N = logits_NV.max(dim=1)
    top_N = top_N.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return top_N, token_N, (logits_NV - top_N[:, None]).exp_().sum(dim=1)


def _softmax(logits_NV, top_N, total_N):
    return _probabilities(logits_NV, top_N, total_N).to(logits_NV.dtype)


def _probabilities(logits_NV, top_N, total_N):
    return (logits_NV - top_N[:, None]).exp_().div_(total_N[:, None])


def _overlap(policy, draft):
    """Each row's sum of max(p - q, 0), which is 1 - sum of min(p, q), and of q where q < p."""
    p_NV, q_NV = _probabilities(*policy), _probabilities(*draft)
    return (p_NV - q_NV).clamp(min=0).sum(dim=1), q_NV.where(q_NV < p_NV, 0).sum(dim=1)


def _overlap_gradient(policy, draft, low_N):
    """By draft logit i: q_i (sum of q where q < p, less 1 where q_i < p_i); arXiv 2606.12370."""
    p_NV, q_NV = _probabilities(*policy), _probabilities(*draft)
    return (q_NV * (low_N[:, None] - (q_NV < p_NV).to(q_NV.dtype))).to(draft[0].dtype)


@functools.cache  # torch.compile takes 30 ms even when all is compiled
def _steps(is_cuda):
    """The functions above, compiled on CUDA; without dynamic=True, which is half as fast."""
    functions = _row_statistics, _softmax, _overlap, _overlap_gradient
    return {step: torch.compile(step) if is_cuda else step for step in functions}


def _over_ranks(top_N, token_N, total_N, target_N, group):
    """The same four of the whole vocabulary, from every rank's share."""
    # Tokens below 2**24 are exact in float32.
    mine = torch.stack([top_N, token_N.to(top_N.dtype), total_N, target_N])
    shares = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(shares, mine, group=group)
    tops, tokens, totals, targets = torch.stack(shares, dim=1)  # each [tp, n]
    top_N, winner_N = tops.max(dim=0)  # on a tie the lowest rank, which holds the lowest tokens
    total_N = (totals * (tops - top_N).exp()).sum(dim=0)
    return top_N, tokens.gather(0, winner_N[None])[0].long(), total_N, targets.sum(dim=0)


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


def _vocabulary_group(output_layer):
    """The ranks that each hold a share of the logits; None where they are whole."""
    group = getattr(output_layer, "tp_group", None)
    is_whole = group is None or group.size() == 1 or getattr(output_layer, "gather_output", False)
    return None if is_whole else group


# The same lines as in ref_disable.py and drafter_sync.py.
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
    """Has it MTP layers, and its release the parts that are replaced or called here?"""
    import megatron.core
    from megatron.core.transformer import multi_token_prediction

    name = type(model).__name__
    if not hasattr(model, "mtp"):
        came = f"{name} has no MTP layers on this rank"
        raise RuntimeError(f"{came}; wanted them beside the head: build it with mtp_num_layers")
    there = {*inspect.signature(type(model).forward).parameters, *dir(multi_token_prediction)}
    there |= {*inspect.signature(type(model.mtp).forward).parameters}
    wanted = {"labels", "loss_mask", "hidden_states", "embedding", "packed_seq_params"}
    wanted |= {"roll_tensor", "MTPLossAutoScaler", "MTPLossLoggingHelper"}
    if missing := ", ".join(sorted(wanted - there)):
        came = f"megatron-core {megatron.core.__version__} has no {missing} for {name}"
        raise RuntimeError(f"{came}; wanted what 0.16 to 0.19 have: install one of these")
    # Scaled logits; a head that keeps its inputs.
    for name in ("use_mup", "defer_embedding_wgrad_compute"):
        if getattr(model.config, name, False):
            came = f"config.{name} is on"
            raise ValueError(f"{came}; wanted it off, the chunked head does not do it: build anew")


def _check_settings(model, detach_trunk, rule, objective):
    for name in ("forward", "_postprocess"):
        own = vars(model).get(name)
        # The class's own function bound on the instance, which verl leaves there, is stock.
        if own is not None and getattr(own, "__func__", None) is not getattr(type(model), name):
            came = f"this model has a {name} of its own: patched already, here or by another"
            raise RuntimeError(f"{came} library; wanted Megatron's: leave the other context first")
    if rule not in ("target", "drafted"):
        raise ValueError(f"rule is {rule!r}; wanted 'target' or 'drafted': pass one of the two")
    if objective not in ("cross_entropy", "total_variation"):
        wanted = "'cross_entropy' or 'total_variation': pass one of the two"
        raise ValueError(f"objective is {objective!r}; wanted {wanted}")
    if getattr(model.config, "mtp_detach_heads", False) and not detach_trunk:
        came = "detach_trunk is False, config.mtp_detach_heads True: Megatron would detach anyway"
        raise ValueError(f"{came}; wanted the two to agree: build without mtp_detach_heads")


def _check_packed(packed):
    padded = None if packed is None else packed.cu_seqlens_q_padded
    if padded is not None and not torch.equal(padded, packed.cu_seqlens_q):
        came = "cu_seqlens_q differs from cu_seqlens_q_padded, and Megatron rolls tokens by it"
        wanted = "one layout: put the padded offsets into both and mask the padding out"
        raise ValueError(f"{came}; wanted {wanted}")


def _check_slots(hidden, targets, mask, chunk_tokens):
    wanted = [hidden.shape[1], hidden.shape[0]]
    for name, tensor in (("targets", targets), ("mask", mask)):
        if list(tensor.shape) != wanted:
            came = f"{name} has shape {list(tensor.shape)}, hidden [s, b, h] {list(hidden.shape)}"
            raise ValueError(f"{came}; wanted [b, s] = {wanted}: transpose or slice one of the two")
    if chunk_tokens < 1:  # no chunk at all would be projected
        raise ValueError(f"chunk_tokens is {chunk_tokens}; wanted 1 or more: leave it at 1024")
    _check_mask(mask)


def _check_mask(mask):
    if mask.dtype != torch.bool and (wrong := (mask != 0) & (mask != 1)).any():
        came = f"the mask holds {mask[wrong][0].item()}"
        raise ValueError(f"{came}; wanted 0 or 1: weigh the loss instead")


def _check_targets(targets_N, vocab_size):
    # Tensor-parallel ranks would not notice: none would own the target, the loss would be wrong.
    if (wrong := (targets_N < 0) | (targets_N >= vocab_size)).any():
        came = f"a masked-in slot has target {targets_N[wrong][0].item()}"
        wanted = f"0 to {vocab_size - 1}: mask out the slots that have no target"
        raise ValueError(f"{came}; wanted {wanted}")
