"""Fix 2 of 6: which positions may train draft depth k, and on which token.

Bug     RL code knows which response tokens are the policy's; MTP needs to know which slots may train. On the way, masks
        were laid at the sequence's start and padded with ones, rolled more or less often than the labels, or rolled by
        the wrong offsets. Nothing crashes: the drafter learns prompts, tool output or padding, and acceptance falls.
Rule    Draft depth k at slot t sees token t+1 and predicts token t+1+k of the same document (depth 0: the main head).
        rule="target"   counts iff the policy produced token t+1+k: what Megatron's and verl's rolling gives.
        rule="drafted"  counts iff it produced all of t+1 to t+1+k: the slots where speculative decoding really drafts.
                        A response's first token comes from prefill; nothing is drafted from prompt or tool tokens.

            t          0  1  2  3  4  5  6  7
            token      P  P  P  R  R  R  R  .     P prompt, R response, . padding; which slots train depth 1?
            before     #  #  #  #  #  .  .  .     left-aligned, padded with ones: learns prompt token 2
            target     .  #  #  #  #  .  .  .     learns tokens 3 to 6
            drafted    .  .  #  #  #  .  .  .     learns tokens 4 to 6

            token      1  2  3  . 11 12  .  .     two documents in one padded buffer; what does depth 0 learn?
            before     2  3  . 11  . 12  .  .     rolled by unpadded offsets: padding learns, slot 4 does not
            after      2  3  .  . 12  .  .  .     rolled by padded offsets

Source  verl#6432 (left-aligned), miles#2215 and miles#3219 (rolled too often), slime#751 (tool turns), Megatron-LM#6205
        (unpadded offsets). Rule "target" is Megatron-LM 0.19.2, megatron/core/transformer/multi_token_prediction.py,
        roll_tensor, applied k times to label-aligned labels and loss_mask.
Shapes  B rows or documents, R response slots, T slots. Token-aligned: slot j speaks of token j. Label-aligned: of a
        later one. "row i" in an error is batch row or document i.
Use     whole = expand_response_mask(response_mask, sequence_lengths, response_attention_mask)
        counts_T = depth_mask(whole.values(), 1, whole.offsets())      # a jagged tensor's values and offsets are a pack
        targets_T = depth_targets(token_ids_T, 1, whole.offsets())
Run     python mtp_mask.py prints the picture, computed; tests/test_mtp_mask.py is the specification.
"""

from itertools import pairwise
from numbers import Integral

import torch
from torch.nn.functional import pad


def expand_response_mask(response_mask, sequence_lengths, response_attention_mask=None):
    """Lay response-only masks into whole sequences: row i is zeros for its prompt, then its response's mask, unchanged.

    response_mask            token-aligned; bool, int or float. Jagged nested [B, j1], whose row lengths are the
                             response lengths, or padded [B, R]. Zeros inside a response (tool output) are kept.
    sequence_lengths         prompt + response of each row: a list of B ints or an integer tensor [B].
    response_attention_mask  [B, R], for padded input only: ones, then zeros. It alone says how long a response is; what
                             response_mask holds beyond that is padding and is dropped.

    Returns a jagged nested tensor [B, j2], dtype and device of response_mask. ValueError or TypeError for rows that do
    not fit. At most one device-to-host copy a call, whatever B.
    """
    find_rows = _jagged_rows if getattr(response_mask, "is_nested", False) else _padded_rows
    flat, *facts = find_rows(response_mask, response_attention_mask)
    lengths = _check_ints("sequence_lengths", sequence_lengths)
    num_rows, num_lengths = len(facts[0]), len(lengths)
    if num_rows != num_lengths:
        came = f"response_mask has {num_rows} rows, sequence_lengths {num_lengths}"
        raise ValueError(
            f"row {min(num_rows, num_lengths)}: {came}; wanted as many: pass one length a row"
        )
    if isinstance(lengths, torch.Tensor):
        facts.append(lengths.to(facts[0].device))
    starts, counts, aligned, *copied = torch.stack(
        facts
    ).tolist()  # the one copy: all that the loop needs

    whole = []
    for row, length in enumerate(copied[0] if copied else lengths):
        start, count = starts[row], counts[row]
        if not aligned[row]:
            came = f"response_attention_mask has {count} slots that are not 0, yet not {count} ones at the left"
            raise ValueError(
                f"row {row}: {came}; wanted ones, then zeros: left-align the response and its masks"
            )
        if not count <= length < 2**31:  # cu_seqlens are int32 in Megatron and in attention kernels
            came = f"the response has {count} tokens and its whole sequence {length}"
            raise ValueError(
                f"row {row}: {came}; wanted {count} to 2**31 - 1: pass prompt + response"
            )
        whole.append(pad(flat[start : start + count], (length - count, 0)))
    if not whole:  # torch makes no jagged tensor of an empty list
        return torch.nested.nested_tensor_from_jagged(
            flat[:0], torch.zeros(1, dtype=torch.int64, device=flat.device)
        )
    return torch.nested.as_nested_tensor(whole, layout=torch.jagged)


def depth_mask(token_mask, depth, cu_seqlens=None, *, cu_seqlens_padded=None, rule="target"):
    """Say at which slots draft depth `depth` may train.

    token_mask         token-aligned, 1 where the policy produced the token; bool, or int or float holding only 0 and 1.
                       [..., T] with each row one document, or packed [T] or [1, T] with cu_seqlens.
    depth              0 is the main head, k the k-th MTP layer.
    cu_seqlens         B+1 ints (list or tensor): where each document starts, then T. Documents may be empty.
    cu_seqlens_padded  where each document starts in a padded pack, then T. Document i has its
                       cu_seqlens[i+1] - cu_seqlens[i] tokens there; slots beyond them never count.
    rule               "target": token t+1+depth must be the policy's. "drafted": all of t+1 to t+1+depth.

    Returns bool, label-aligned, token_mask's shape; False where the document has no token t+1+depth. ValueError or
    TypeError for what does not fit. Read back from a GPU: offsets that lie there, and masks that are not bool.
    """
    hops, has_target_T = _find_targets(
        "token_mask", token_mask, depth, cu_seqlens, cu_seqlens_padded
    )
    if not isinstance(rule, str) or rule not in ("target", "drafted"):
        raise ValueError(f"rule is {rule!r}; wanted 'target' or 'drafted': pass one of the two")
    if token_mask.dtype != torch.bool and (wrong := (token_mask != 0) & (token_mask != 1)).any():
        row, slot = wrong.reshape(-1, token_mask.shape[-1]).nonzero()[0].tolist()
        value = token_mask[wrong][0].item()
        raise ValueError(
            f"row {row}: token_mask holds {value} at slot {slot}; wanted 0 or 1: weigh the loss instead"
        )
    # A roll wraps tokens round the end and over document borders, but only into slots without a target.
    mask = token_mask.bool()
    if rule == "target":
        return mask.roll(-hops, dims=-1) & has_target_T
    num_so_far = mask.cumsum(-1)
    num_seen = (
        num_so_far.roll(-hops, dims=-1) - num_so_far
    )  # of the tokens t+1 to t+hops, how many are the policy's
    return (num_seen == hops) & has_target_T


def depth_targets(token_ids, depth, cu_seqlens=None, *, cu_seqlens_padded=None, fill=0):
    """Give each slot the token that draft depth `depth` predicts there: token t+1+depth of its document.

    token_ids  ints (bools and floats roll as well), laid out as token_mask in depth_mask; depth, cu_seqlens and
               cu_seqlens_padded as there.
    fill       an int that token_ids' dtype can hold: for slots without a target, padded slots too.

    Returns token_ids' shape and dtype, label-aligned; depth 0 gives Megatron's `labels`. Errors as in depth_mask.
    """
    hops, has_target_T = _find_targets("token_ids", token_ids, depth, cu_seqlens, cu_seqlens_padded)
    fill = _as_int("fill", fill, at_least=-(2**63))
    if (
        fill >= 2**63 or torch.tensor(fill).to(token_ids.dtype).item() != fill
    ):  # torch wraps -100 to 156 in uint8
        raise ValueError(
            f"fill is {fill}; wanted a value of {token_ids.dtype}: pass another, or convert token_ids"
        )
    return token_ids.roll(-hops, dims=-1).masked_fill(~has_target_T, fill)


def context_parallel_slice(tensor, cu_seqlens, cp_size, cp_rank):
    """Cut one context-parallel rank's zig-zag share out of a packed buffer.

    Each document is cut into 2*cp_size equal chunks; rank r keeps chunks r and 2*cp_size-1-r, so that causal attention
    costs all ranks the same. Roll first and slice afterwards: the token that a shard's last slot needs is elsewhere.

    tensor      [..., T]: ids, masks or targets; bool, int or float.
    cu_seqlens  B+1 ints (list or tensor): the buffer's own offsets, the padded ones where there are two.

    Returns [..., T / cp_size]: document after document, the lower chunk first (Megatron's order for packed sequences).
    ValueError or TypeError for a rank outside cp_size or a document that 2*cp_size does not divide.
    """
    _check_tensor("tensor", tensor)
    cp_size, cp_rank = (
        _as_int("cp_size", cp_size, at_least=1),
        _as_int("cp_rank", cp_rank, at_least=0),
    )
    if cp_rank >= cp_size:
        wanted = f"a rank from 0 to {cp_size - 1}: take both from one group"
        raise ValueError(f"cp_rank is {cp_rank}, cp_size {cp_size}; wanted {wanted}")
    pieces = [tensor[..., :0]]  # a pack without documents needs something to concatenate
    for row, (start, end) in enumerate(
        pairwise(_offsets("cu_seqlens", cu_seqlens, tensor.shape[-1]))
    ):
        chunk, rest = divmod(end - start, 2 * cp_size)
        if rest:
            wanted = (
                f"a multiple of 2 * cp_size = {2 * cp_size}: pad it and pass the padded offsets"
            )
            raise ValueError(f"row {row}: the document has {end - start} slots; wanted {wanted}")
        for part in (cp_rank, 2 * cp_size - 1 - cp_rank):
            pieces.append(tensor[..., start + part * chunk : start + (part + 1) * chunk])
    return torch.cat(pieces, dim=-1)


def _jagged_rows(response_mask, response_attention_mask):
    """Flat values of a jagged mask, and of each row: where it starts there, its length, True."""
    if response_mask.layout != torch.jagged or response_mask.dim() != 2:
        raise ValueError(
            "response_mask is nested, not jagged [B, j]; wanted that: nest 1-D rows, layout=torch.jagged"
        )
    if response_attention_mask is not None:
        came = "response_attention_mask came with nested rows, which have lengths of their own"
        raise ValueError(f"row 0 and all others: {came}; wanted one of the two: leave it out")
    _check_tensor("response_mask.values()", response_mask.values())
    offsets, gappy_B = response_mask.offsets(), response_mask.lengths()
    count_B = (
        offsets.diff() if gappy_B is None else gappy_B
    )  # torch.nested.narrow leaves gaps between its rows
    return response_mask.values(), offsets[:-1], count_B, torch.ones_like(count_B)


def _padded_rows(response_mask, response_attention_mask):
    """The same of a padded [B, R] mask; the last is False where a row's attention is not ones, then zeros."""
    _check_tensor("response_mask", response_mask)
    if response_mask.dim() != 2:
        raise ValueError(
            f"response_mask has shape {list(response_mask.shape)}; wanted [B, R]: add or drop a dimension"
        )
    if response_attention_mask is None:
        came = "response_mask is padded and response_attention_mask missing: where a response ends is unknown"
        raise ValueError(
            f"row 0 and all others: {came}; wanted [B, R] attention: pass it, or a jagged response_mask"
        )
    _check_tensor("response_attention_mask", response_attention_mask)
    shape, attention_shape = list(response_mask.shape), list(response_attention_mask.shape)
    if shape != attention_shape:
        came = f"response_mask has shape {shape}, response_attention_mask {attention_shape}"
        raise ValueError(
            f"row {min(shape[0], attention_shape[0])}: {came}; wanted the same: slice both alike"
        )
    count_B = (response_attention_mask != 0).sum(-1)
    ones_then_zeros_BR = torch.arange(shape[1], device=count_B.device) < count_B[:, None]
    aligned_B = (response_attention_mask == ones_then_zeros_BR).all(-1)
    return (
        response_mask.reshape(-1),
        shape[1] * torch.arange(shape[0], device=count_B.device),
        count_B,
        aligned_B,
    )


def _find_targets(name, tensor, depth, cu_seqlens, cu_seqlens_padded):
    """How many slots ahead depth `depth` predicts, and has_target_T: is there a real token of the same document?"""
    _check_tensor(name, tensor)
    num_slots = tensor.shape[-1]
    hops = min(
        1 + _as_int("depth", depth, at_least=0), num_slots
    )  # from T hops on no slot has a target
    end_T = num_slots
    if cu_seqlens is not None or cu_seqlens_padded is not None:
        if tensor.shape[:-1] not in ((), (1,)):
            wanted = "[T] or [1, T]: leave cu_seqlens out where each row is one document"
            raise ValueError(
                f"row 1: {name} has shape {list(tensor.shape)} and came with cu_seqlens; wanted {wanted}"
            )
        end_T = _document_ends(cu_seqlens, cu_seqlens_padded, num_slots).to(tensor.device)
    return hops, torch.arange(num_slots, device=tensor.device) + hops < end_T


def _document_ends(cu_seqlens, cu_seqlens_padded, num_slots):
    """end_T, on the host: of each slot, where its document's real tokens end; padded slots lie at or beyond that."""
    real = _offsets("cu_seqlens", cu_seqlens, num_slots if cu_seqlens_padded is None else None)
    room = (
        real
        if cu_seqlens_padded is None
        else _offsets("cu_seqlens_padded", cu_seqlens_padded, num_slots)
    )
    if len(room) != len(real):
        came = f"cu_seqlens has {len(real) - 1} documents, cu_seqlens_padded {len(room) - 1}"
        raise ValueError(
            f"row {min(len(room), len(real)) - 1}: {came}; wanted the same: take both from one batch"
        )
    end_T = torch.empty(num_slots, dtype=torch.int64)
    for row, ((first, last), (start, stop)) in enumerate(
        zip(pairwise(real), pairwise(room), strict=True)
    ):
        if last - first > stop - start:
            came = f"{last - first} tokens by cu_seqlens, {stop - start} slots by cu_seqlens_padded"
            raise ValueError(
                f"row {row}: {came}; wanted a slot for each token: see that the two are not swapped"
            )
        end_T[start:stop] = start + last - first
    return end_T


def _offsets(name, cu_seqlens, num_slots):
    """cu_seqlens as Python ints, once they are known to run from 0, never falling, to num_slots (None: anywhere)."""
    offsets = _check_ints(name, cu_seqlens)
    offsets = offsets.tolist() if isinstance(offsets, torch.Tensor) else offsets
    if not offsets or offsets[0] != 0:
        raise ValueError(
            f"row 0: {name} starts with {offsets[:1]}; wanted B+1 offsets: put the 0 in front"
        )
    for row, (start, end) in enumerate(pairwise(offsets)):
        if end < start:
            raise ValueError(
                f"row {row}: {name} falls from {start} to {end}; wanted offsets: sum the lengths up"
            )
    if num_slots is not None and offsets[-1] != num_slots:
        came = f"row {max(len(offsets) - 2, 0)}: {name} ends at {offsets[-1]}"
        raise ValueError(
            f"{came}; wanted T = {num_slots}: give the padding to a document, or cut it off"
        )
    return offsets


def _check_tensor(name, tensor):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"{name} is a {type(tensor).__name__}; wanted a tensor: convert it with torch.tensor"
        )
    if tensor.is_nested or tensor.is_meta or tensor.layout != torch.strided:
        raise TypeError(
            f"{name} is nested, sparse or meta; wanted a plain tensor: pass a jagged one's values()"
        )
    ints = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    if tensor.dtype not in (*ints, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(
            f"{name} is {tensor.dtype}; wanted bool, uint8, int8 to int64, float16 to float64: convert it"
        )
    if tensor.dim() == 0:
        raise ValueError(f"{name} is a single number; wanted at least one dimension: reshape it")


def _as_int(name, value, at_least):
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; wanted an int: convert it")
    if value < at_least:
        raise ValueError(f"{name} is {value}; wanted {at_least} or more: check where it comes from")
    return int(value)


def _check_ints(name, ints):
    """A 1-D tensor of ints, as it came, or a list. torch would cut 2.5 to 2 and read True as 1 without a word."""
    if isinstance(ints, torch.Tensor):
        _check_tensor(name, ints)
        if ints.dtype == torch.bool or ints.is_floating_point():
            raise TypeError(
                f"{name} is {ints.dtype}; wanted ints: convert it with .to(torch.int64)"
            )
        if ints.dim() != 1:
            raise ValueError(
                f"{name} has shape {list(ints.shape)}; wanted one dimension: flatten it"
            )
        return ints
    if not isinstance(ints, (list, tuple)):
        raise TypeError(
            f"{name} is a {type(ints).__name__}; wanted a list or a 1-D tensor of ints: convert it"
        )
    return [_as_int(f"row {row}: {name}", value, at_least=0) for row, value in enumerate(ints)]


def main():
    """Print the picture at the head of this file from a computation."""

    def before_laid_at_the_start(response_mask, length):  # verl before #6432
        return pad(response_mask, (0, length - len(response_mask)), value=True)

    def before_rolled_by_unpadded(ids, cu_seqlens):  # Megatron-LM#6205
        rolled = ids.clone()
        for start, end in pairwise(cu_seqlens):
            rolled[start:end] = pad(ids[start + 1 : end], (0, 1))
        return rolled

    def show(name, cells, remark=""):
        marks = "".join(f"{'#' if cell is True else cell or '.':>3}" for cell in cells)
        print(f"{name:<9}{marks}     {remark}".rstrip())

    response = torch.ones(4, dtype=torch.bool)
    before = pad(before_laid_at_the_start(response, 7), (0, 1))
    mask = pad(expand_response_mask(response[None], [7], response[None]).values(), (0, 1))
    show("t", "01234567")
    show("token", "PPPRRRR.", "P prompt, R response, . padding; which slots train depth 1?")
    show(
        "before",
        depth_mask(before, 1).tolist(),
        "left-aligned, padded with ones: learns prompt token 2",
    )
    show("target", depth_mask(mask, 1).tolist(), "learns tokens 3 to 6")
    show("drafted", depth_mask(mask, 1, rule="drafted").tolist(), "learns tokens 4 to 6")

    ids, real, padded = torch.tensor([1, 2, 3, 0, 11, 12, 0, 0]), [0, 3, 5], [0, 4, 8]
    before, after = (
        before_rolled_by_unpadded(ids, real),
        depth_targets(ids, 0, real, cu_seqlens_padded=padded),
    )
    print()
    show("token", ids.tolist(), "two documents in one padded buffer; what does depth 0 learn?")
    show("before", before.tolist(), "rolled by unpadded offsets: padding learns, slot 4 does not")
    show("after", after.tolist(), "rolled by padded offsets")


if __name__ == "__main__":
    main()
