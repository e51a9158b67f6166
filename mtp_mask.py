"""Fix 2 of 6: which positions may train draft depth k, and on which token.

Bug     RL code knows which response tokens the policy produced; MTP needs to know which slots may
        train. On the way, masks were laid at the sequence's start and padded with ones, rolled
        more or less often than the labels, or rolled by the wrong offsets. Nothing crashes: the
        drafter learns prompts, tool output or padding, and its drafts are accepted less often.
Rule    Depth k at slot t sees token t+1 and predicts token t+1+k of the same document. Depth 0 is
        the main head, depth k the k-th MTP layer. There are two rules for which slots count:
        "target"   the policy produced token t+1+k: what Megatron's and verl's rolling gives.
        "drafted"  the policy produced all of t+1 to t+1+k: the slots from which an engine really
                   drafts. A response's first token comes from prefill, and nothing is drafted
                   from prompt or tool tokens.

  t          0  1  2  3  4  5  6  7
  token      P  P  P  R  R  R  R  .     P prompt, R response, . padding; which slots train depth 1?
  before     #  #  #  #  #  .  .  .     left-aligned, padded with ones: learns prompt token 2
  target     .  #  #  #  #  .  .  .     learns tokens 3 to 6
  drafted    .  .  #  #  #  .  .  .     learns tokens 4 to 6

  token      1  2  3  . 11 12  .  .     two documents in one padded buffer; what does depth 0 learn?
  before     2  3  . 11  . 12  .  .     rolled by unpadded offsets: padding learns, slot 4 does not
  after      2  3  .  . 12  .  .  .     rolled by padded offsets

Source  verl#6432 (left-aligned), miles#2215 and miles#3219 (rolled too often), slime#751 (tool
        turns), Megatron-LM#6205 (unpadded offsets). Rule "target" is roll_tensor of Megatron-LM
        0.19.2, megatron/core/transformer/multi_token_prediction.py, applied k times to
        label-aligned labels and loss_mask.
Shapes  B rows or documents, R response slots, T slots. A token-aligned tensor speaks at slot j of
        token j; a label-aligned one speaks at slot t of the token that slot t predicts.
Use     whole = expand_response_mask(response_mask, sequence_lengths, response_attention_mask)
        token_mask_T, cu_seqlens = whole.values(), whole.offsets()    # rows one after the other
        counts_T = depth_mask(token_mask_T, 1, cu_seqlens, rule="drafted")
        targets_T = depth_targets(token_ids_T, 1, cu_seqlens)
Run     python mtp_mask.py prints the picture, computed; tests/test_mtp_mask.py is the
        specification.
"""

import operator
from itertools import pairwise

import torch


def expand_response_mask(response_mask, sequence_lengths, response_attention_mask=None):
    """Lay response-only masks into whole sequences: zeros for the prompt, then the response's mask.

    response_mask            token-aligned, bool, int or float: a jagged nested tensor [B, j] whose
                             rows are the responses, or padded [B, R]. Zeros inside a response
                             (tool output) are kept.
    sequence_lengths         prompt + response of each row: a list of B ints or a tensor [B].
    response_attention_mask  [B, R], for padded input only: ones, then zeros. It alone says how
                             long a response is; response_mask beyond that is padding and dropped.

    Returns a jagged nested tensor [B, j], dtype and device of response_mask, no gradient. However
    many rows there are, a GPU is read once. ValueError: rows that do not fit, named.
    """
    if response_mask.is_nested:
        flat, start_B, count_B, aligned_B = _jagged_rows(response_mask, response_attention_mask)
    else:
        flat, start_B, count_B, aligned_B = _padded_rows(response_mask, response_attention_mask)
    num_rows, num_lengths = len(start_B), len(sequence_lengths)
    if num_rows != num_lengths:
        came = f"response_mask has {num_rows} rows, sequence_lengths {num_lengths}"
        raise ValueError(f"row {min(num_rows, num_lengths)}: {came}; wanted one length a row")
    facts = [start_B, count_B, aligned_B]
    if isinstance(sequence_lengths, torch.Tensor):
        facts.append(sequence_lengths.to(start_B.device))
    # The one copy to the host: all that the loop below asks for.
    starts, counts, aligned, *lengths = torch.stack(facts).tolist()
    lengths = lengths[0] if lengths else sequence_lengths

    whole = []
    for row, (start, count, length) in enumerate(zip(starts, counts, lengths, strict=True)):
        if not aligned[row]:
            came = "response_attention_mask is not ones, then zeros"
            raise ValueError(f"row {row}: {came}; wanted that: left-align the response")
        if count > length:
            came = f"the response has {count} tokens, its whole sequence {length}"
            raise ValueError(f"row {row}: {came}; wanted prompt + response in sequence_lengths")
        prompt = flat.new_zeros(length - count)
        whole.append(torch.cat([prompt, flat[start : start + count]]))
    if not whole:  # torch makes no jagged tensor of an empty list
        offsets = torch.zeros(1, dtype=torch.int64, device=flat.device)
        return torch.nested.nested_tensor_from_jagged(flat[:0], offsets)
    return torch.nested.as_nested_tensor(whole, layout=torch.jagged)


def _jagged_rows(response_mask, response_attention_mask):
    """All rows' values in one tensor, each row's start and length in it, and True for each row."""
    if response_attention_mask is not None:
        came = "response_attention_mask came with nested rows, which have lengths of their own"
        raise ValueError(f"row 0 and all others: {came}; wanted one of the two: leave it out")
    offsets = response_mask.offsets()
    count_B = response_mask.lengths()
    if count_B is None:  # no gaps between the rows; torch.nested.narrow leaves some
        count_B = offsets.diff()
    return response_mask.values(), offsets[:-1], count_B, torch.ones_like(count_B)


def _padded_rows(response_mask, response_attention_mask):
    """The same of [B, R]; the last is False where a row's attention is not ones, then zeros."""
    if response_attention_mask is None:
        came = "response_mask is padded, and without attention no row says where it ends"
        raise ValueError(f"row 0 and all others: {came}; wanted response_attention_mask: pass it")
    shape, attention_shape = list(response_mask.shape), list(response_attention_mask.shape)
    if shape != attention_shape:
        row = min(shape[0], attention_shape[0])
        came = f"response_mask has shape {shape}, response_attention_mask {attention_shape}"
        raise ValueError(f"row {row}: {came}; wanted the same: cut both alike")
    num_rows, width = shape
    device = response_mask.device
    count_B = (response_attention_mask != 0).sum(-1)
    ones_then_zeros_BR = torch.arange(width, device=device) < count_B[:, None]
    aligned_B = (response_attention_mask == ones_then_zeros_BR).all(-1)
    start_B = width * torch.arange(num_rows, device=device)
    return response_mask.flatten(), start_B, count_B, aligned_B


def depth_mask(token_mask, depth, cu_seqlens=None, *, cu_seqlens_padded=None, rule="target"):
    """Say at which slots draft depth `depth` may train.

    token_mask         token-aligned: 1 where the policy produced the token, else 0; any dtype.
                       [..., T] with each row one document, or packed [T] or [1, T].
    depth              0 is the main head, k the k-th MTP layer.
    cu_seqlens         for a pack: B+1 ints (list or tensor), where each document starts, then
                       where the last one ends. Documents may be empty.
    cu_seqlens_padded  for a pack whose documents have padding behind them: B+1 ints, where each
                       document starts in the buffer, then T. Document i still has
                       cu_seqlens[i+1] - cu_seqlens[i] tokens; slots behind them never count.
    rule               "target": token t+1+depth must be the policy's. "drafted": all of t+1 to
                       t+1+depth must be.

    Returns bool of token_mask's shape, label-aligned; False where the document has no token
    t+1+depth. A GPU is read for offsets that lie there, and for a mask that is not bool.
    ValueError: offsets that do not fit, a mask that is not 0 or 1, depth < 0, an unknown rule.
    """
    if rule not in ("target", "drafted"):
        raise ValueError(f"rule is {rule!r}; wanted 'target' or 'drafted': pass one of the two")
    wrong = (token_mask != 0) & (token_mask != 1)  # NaN is neither
    if token_mask.dtype != torch.bool and wrong.any():
        row, slot = wrong.reshape(-1, token_mask.shape[-1]).nonzero()[0].tolist()
        came = f"token_mask holds {token_mask[wrong][0].item()} at slot {slot}"
        raise ValueError(f"row {row}: {came}; wanted 0 or 1: weigh the loss instead")
    ahead, has_target_T = _find_targets(token_mask, depth, cu_seqlens, cu_seqlens_padded)
    # A roll wraps around the buffer's end and over document borders, but it brings such tokens
    # only to slots that have no target.
    mask = token_mask.bool()
    if rule == "target":
        return mask.roll(-ahead, dims=-1) & has_target_T
    num_so_far = mask.cumsum(-1)
    num_produced = num_so_far.roll(-ahead, dims=-1) - num_so_far  # of tokens t+1 to t+ahead
    return (num_produced == ahead) & has_target_T


def depth_targets(token_ids, depth, cu_seqlens=None, *, cu_seqlens_padded=None, fill=0):
    """Give each slot the token that draft depth `depth` predicts there.

    token_ids  laid out as token_mask in depth_mask; depth, cu_seqlens, cu_seqlens_padded as there.
    fill       what slots without a target get, padded slots too: a value of token_ids' dtype.

    Returns token_ids' shape and dtype, label-aligned: slot t holds token t+1+depth of its
    document, so that depth 0 gives Megatron's `labels`. ValueError as in depth_mask.
    """
    if torch.tensor(fill).to(token_ids.dtype).item() != fill:  # torch wraps -100 to 156 in uint8
        raise ValueError(f"fill is {fill}; wanted a value of {token_ids.dtype}: pass another")
    ahead, has_target_T = _find_targets(token_ids, depth, cu_seqlens, cu_seqlens_padded)
    return token_ids.roll(-ahead, dims=-1).masked_fill(~has_target_T, fill)


def _find_targets(tensor, depth, cu_seqlens, cu_seqlens_padded):
    """How many slots ahead the target is; and bool [T]: is it a real token of the same document?"""
    if depth < 0:
        raise ValueError(f"depth is {depth}; wanted 0, the main head, or more: count from there")
    num_slots = tensor.shape[-1]
    # num_slots ahead, no slot has a target any more.
    ahead = min(1 + operator.index(depth), num_slots)
    end_T = num_slots
    if cu_seqlens is not None or cu_seqlens_padded is not None:
        if tensor.shape[:-1] not in ((), (1,)):
            came = f"cu_seqlens came with a tensor of shape {list(tensor.shape)}"
            raise ValueError(f"row 1: {came}; wanted [T] or [1, T]: rows need no cu_seqlens")
        end_T = _document_ends(cu_seqlens, cu_seqlens_padded, num_slots).to(tensor.device)
    return ahead, torch.arange(num_slots, device=tensor.device) + ahead < end_T


def _document_ends(cu_seqlens, cu_seqlens_padded, num_slots):
    """For each slot, where its document's real tokens end; padded slots lie at or behind that.

    Of document i, real[i+1] - real[i] is the number of tokens, room[i] where it starts.
    """
    if cu_seqlens_padded is None:
        real = room = _read_offsets("cu_seqlens", cu_seqlens, num_slots)
    else:
        real = _read_offsets("cu_seqlens", cu_seqlens)
        room = _read_offsets("cu_seqlens_padded", cu_seqlens_padded, num_slots)
    end_T = torch.empty(num_slots, dtype=torch.int64)
    spans = zip(pairwise(real), pairwise(room), strict=True)
    for row, ((first, last), (start, stop)) in enumerate(spans):
        if last - first > stop - start:
            came = f"{last - first} tokens by cu_seqlens, {stop - start} slots by the padded one"
            raise ValueError(f"row {row}: {came}; wanted a slot for each: are the two swapped?")
        end_T[start:stop] = start + last - first
    return end_T


def context_parallel_slice(tensor, cu_seqlens, cp_size, cp_rank):
    """Cut one context-parallel rank's zig-zag share out of a packed buffer.

    Each document is cut into 2 * cp_size equal chunks, and rank r keeps chunks r and
    2 * cp_size - 1 - r, so that causal attention costs all ranks the same. Make masks and targets
    first and slice afterwards: the token that a shard's last slot predicts lies in another shard.

        a document of 8 slots, cp_size 2     0 1 2 3 4 5 6 7
        rank 0                               0 1 . . . . 6 7
        rank 1                               . . 2 3 4 5 . .

    tensor      [..., T] of any dtype: ids, masks or targets.
    cu_seqlens  B+1 ints (list or tensor): the buffer's own offsets, padded where it has padding.
    cp_rank     from 0 to cp_size - 1.

    Returns [..., T / cp_size]: document after document, the lower chunk first, which is
    Megatron's order for packed sequences; gradient flows through. ValueError: a rank outside
    cp_size, offsets that do not fit, a document that 2 * cp_size does not divide.
    """
    if not 0 <= cp_rank < cp_size:
        came = f"cp_rank is {cp_rank}, cp_size {cp_size}"
        raise ValueError(f"{came}; wanted 0 to cp_size - 1: take both from one group")
    offsets = _read_offsets("cu_seqlens", cu_seqlens, tensor.shape[-1])
    pieces = [tensor[..., :0]]  # so that a pack without documents has something to concatenate
    for row, (start, end) in enumerate(pairwise(offsets)):
        chunk, rest = divmod(end - start, 2 * cp_size)
        if rest:
            came = f"the document has {end - start} slots, 2 * cp_size is {2 * cp_size}"
            raise ValueError(f"row {row}: {came}; wanted a multiple: pad it, pass padded offsets")
        for part in (cp_rank, 2 * cp_size - 1 - cp_rank):
            first = start + part * chunk
            pieces.append(tensor[..., first : first + chunk])
    return torch.cat(pieces, dim=-1)


def _read_offsets(name, cu_seqlens, num_slots=None):
    """A list, once it is known to run from 0, never falling, to num_slots (None: anywhere)."""
    offsets = cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else list(cu_seqlens)
    if offsets[:1] != [0]:
        came = f"{name} starts with {offsets[:1]}"
        raise ValueError(f"row 0: {came}; wanted B+1 offsets: put the 0 in front")
    for row, (start, end) in enumerate(pairwise(offsets)):
        if end < start:
            came = f"{name} falls from {start} to {end}"
            raise ValueError(f"row {row}: {came}; wanted offsets: sum the lengths up")
    if num_slots is not None and offsets[-1] != num_slots:
        last, came = max(len(offsets) - 2, 0), f"{name} ends at {offsets[-1]}"
        raise ValueError(f"row {last}: {came}, the buffer at {num_slots}; wanted the same end")
    return offsets


def main():
    """Print the picture at the head of this file from a computation."""

    def show(name, cells, remark=""):
        marks = "".join(f"{'#' if cell is True else cell or '.':>3}" for cell in cells)
        print(f"{name:<9}{marks}     {remark}".rstrip())

    response = torch.ones(4, dtype=torch.bool)
    before = torch.cat([response, torch.ones(3, dtype=torch.bool)])  # verl before #6432
    mask = expand_response_mask(response[None], [7], response[None]).values()
    rows = [
        ("before", before, "target", "left-aligned, padded with ones: learns prompt token 2"),
        ("target", mask, "target", "learns tokens 3 to 6"),
        ("drafted", mask, "drafted", "learns tokens 4 to 6"),
    ]
    show("t", "01234567")
    show("token", "PPPRRRR.", "P prompt, R response, . padding; which slots train depth 1?")
    for name, token_mask, rule, remark in rows:
        padded = torch.cat([token_mask, torch.tensor([False])])
        show(name, depth_mask(padded, 1, rule=rule).tolist(), remark)

    ids, real, padded = torch.tensor([1, 2, 3, 0, 11, 12, 0, 0]), [0, 3, 5], [0, 4, 8]
    before = ids.clone()
    for start, end in pairwise(real):  # Megatron-LM#6205
        before[start:end] = torch.cat([ids[start + 1 : end], ids.new_zeros(1)])
    after = depth_targets(ids, 0, real, cu_seqlens_padded=padded)
    print()
    show("token", ids.tolist(), "two documents in one padded buffer; what does depth 0 learn?")
    show("before", before.tolist(), "rolled by unpadded offsets: padding learns, slot 4 does not")
    show("after", after.tolist(), "rolled by padded offsets")


if __name__ == "__main__":
    main()
