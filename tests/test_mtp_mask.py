"""Fix 2: cases of the field, equality with a slow loop and with Megatron's roll."""

import runpy
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

import mtp_mask
from mtp_mask import context_parallel_slice, depth_mask, depth_targets, expand_response_mask

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
repeatable = partial(settings, derandomize=True, deadline=None, database=None)
depths = st.integers(0, 4)
rules = st.sampled_from(["target", "drafted"])
# A document is its token-aligned mask; its tokens are numbered so that no two of a batch are
# alike, and none is 0.
documents = st.lists(st.lists(st.booleans(), max_size=7), max_size=4)


def jagged(*rows, dtype=torch.int64):
    return torch.nested.nested_tensor(
        [torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged
    )


def rows_of(nested):
    return [row.tolist() for row in nested.unbind()]


def as_ints(mask):
    assert mask.dtype == torch.bool
    return mask.int().tolist()


def offsets_of(lengths):
    return [0, *accumulate(lengths)]


def token_ids_of(masks):
    return [[100 * (i + 1) + j for j in range(len(mask))] for i, mask in enumerate(masks)]


def slow_counts(mask, depth, rule):
    """For one document: the target exists, and it (drafted: all up to it) is the policy's."""
    counts = []
    for t in range(len(mask)):
        target = t + 1 + depth
        needed = range(t + 1, target + 1) if rule == "drafted" else [target]
        counts.append(target < len(mask) and all(mask[j] for j in needed))
    return counts


def slow_targets(ids, depth, fill):
    return [ids[t + 1 + depth] if t + 1 + depth < len(ids) else fill for t in range(len(ids))]


def slow_pairs(masks, depth, rule):
    """Which (source, target) tokens the rule supervises, whatever the layout."""
    pairs = set()
    for mask, ids in zip(masks, token_ids_of(masks), strict=True):
        counts, targets = slow_counts(mask, depth, rule), slow_targets(ids, depth, 0)
        pairs |= {(s, g) for s, g, c in zip(ids, targets, counts, strict=True) if c}
    return pairs


def laid_out(rows, room, empty):
    """Documents one after the other, document i in room[i] slots; what is left holds `empty`."""
    return [
        x for row, size in zip(rows, room, strict=True) for x in row + [empty] * (size - len(row))
    ]


# Case 1: one dense row


CASE_1 = [0, 0, 0, 1, 1, 1, 1, 0]


def roll_left(row, times):
    return row[times:] + [0] * min(times, len(row))


def before_laid_left_and_padded_with_ones(token_mask):  # verl before #6432
    prompt, length = 3, 7
    response_mask = token_mask[prompt:length]
    whole = response_mask + [1] * (length - len(response_mask))
    return roll_left(whole + [0] * (len(token_mask) - length), 2)


def before_rolled_once_too_often(token_mask):  # miles#3219
    return roll_left(token_mask, 3)


def before_mask_rolled_once_labels_twice(token_mask):
    return roll_left(token_mask, 1)


def test_depth_one_counts_where_token_t_plus_2_is_the_policys_or_is_drafted_from_a_token_of_its():
    mask = torch.tensor(CASE_1)
    assert as_ints(depth_mask(mask, 1)) == [0, 1, 1, 1, 1, 0, 0, 0]
    assert as_ints(depth_mask(mask, 1, rule="drafted")) == [0, 0, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("before", "seen_wrong"),
    [
        (before_laid_left_and_padded_with_ones, [1, 1, 1, 1, 1, 0, 0, 0]),
        (before_rolled_once_too_often, [1, 1, 1, 1, 0, 0, 0, 0]),
        (before_mask_rolled_once_labels_twice, [0, 0, 1, 1, 1, 1, 0, 0]),
    ],
)
def test_the_masks_seen_in_the_field_break_the_rule(before, seen_wrong):
    assert before(CASE_1) == seen_wrong
    for rule in ("target", "drafted"):
        assert as_ints(depth_mask(torch.tensor(CASE_1), 1, rule=rule)) != seen_wrong
        assert slow_counts(CASE_1, 1, rule) != seen_wrong


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float32]
)
def test_a_mask_of_any_dtype_gives_the_same_bools(dtype):
    assert as_ints(depth_mask(torch.tensor(CASE_1).to(dtype), 1)) == [0, 1, 1, 1, 1, 0, 0, 0]


def test_depth_0_is_the_main_head_under_both_rules():
    for rule in ("target", "drafted"):
        assert as_ints(depth_mask(torch.tensor(CASE_1), 0, rule=rule)) == [0, 0, 1, 1, 1, 1, 0, 0]


# Cases 2 and 3: tool turns, labels


def test_nothing_is_drafted_across_a_tool_turn():
    mask = torch.tensor([1, 0, 1, 1, 0])
    assert as_ints(depth_mask(mask, 1)) == [1, 1, 0, 0, 0]
    assert as_ints(depth_mask(mask, 1, rule="drafted")) == [0, 1, 0, 0, 0]
    assert as_ints(depth_mask(mask, 2, rule="drafted")) == [0, 0, 0, 0, 0]


def test_depth_one_predicts_the_token_after_the_next():
    ids = [10, 20, 30, 40, 50]
    before = roll_left(ids, 3)  # miles#2215
    assert before == [40, 50, 0, 0, 0]
    assert depth_targets(torch.tensor(ids), 1, fill=-100).tolist() == [30, 40, 50, -100, -100]
    assert depth_targets(torch.tensor(ids), 0).tolist() == [20, 30, 40, 50, 0]


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int32, torch.int64, torch.float32, torch.bool]
)
def test_targets_keep_the_dtype_of_the_ids_and_inputs_stay_as_they_were(dtype):
    ids = torch.tensor([1, 0, 1]).to(dtype)
    targets = depth_targets(ids, 0, fill=1)
    assert targets.dtype == dtype and targets.tolist() == [0, 1, 1]
    assert ids.tolist() == [1, 0, 1]


def test_each_row_of_any_leading_shape_is_a_document():
    mask = torch.tensor([[[1, 1, 0], [0, 1, 1]], [[0, 0, 1], [1, 1, 1]]])
    assert as_ints(depth_mask(mask, 0)) == [[[1, 0, 0], [1, 1, 0]], [[0, 1, 0], [1, 1, 0]]]
    assert as_ints(depth_mask(mask, 1, rule="drafted")) == [
        [[0, 0, 0], [1, 0, 0]],
        [[0, 0, 0], [1, 0, 0]],
    ]
    assert depth_targets(mask, 1, fill=9).tolist() == [
        [[0, 9, 9], [1, 9, 9]],
        [[1, 9, 9], [1, 9, 9]],
    ]


# Case 4: packed with padding


def packed_params(cu_seqlens, cu_seqlens_padded):
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=torch.tensor(cu_seqlens, dtype=torch.int32),
        cu_seqlens_q_padded=torch.tensor(cu_seqlens_padded, dtype=torch.int32),
    )


def before_rolled_by_unpadded_offsets(ids, cu_seqlens, cu_seqlens_padded):  # Megatron-LM#6205
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    return roll_tensor(ids, packed_seq_params=packed_params(cu_seqlens, cu_seqlens_padded))[0]


def test_a_padded_pack_is_rolled_by_its_padded_offsets_and_padding_gets_fill():
    ids = torch.tensor([1, 2, 3, 0, 11, 12, 0, 0])
    where = dict(cu_seqlens=[0, 3, 5], cu_seqlens_padded=[0, 4, 8])
    assert depth_targets(ids, 0, **where).tolist() == [2, 3, 0, 0, 12, 0, 0, 0]
    assert depth_targets(ids, 0, **where, fill=-1).tolist() == [2, 3, -1, -1, 12, -1, -1, -1]
    assert as_ints(depth_mask(torch.ones(8), 0, **where)) == [1, 1, 0, 0, 1, 0, 0, 0]
    assert as_ints(depth_mask(torch.ones(8), 1, **where)) == [1, 0, 0, 0, 0, 0, 0, 0]


def test_megatrons_roll_by_unpadded_offsets_breaks_the_rule():
    pytest.importorskip("megatron.core")
    ids = torch.tensor([1, 2, 3, 0, 11, 12, 0, 0])
    rolled = before_rolled_by_unpadded_offsets(ids, [0, 3, 5], [0, 4, 8])
    assert rolled.tolist() == [2, 3, 0, 11, 0, 12, 0, 0]


def test_what_padding_holds_never_counts_nor_becomes_a_target():
    real, padded = [0, 3, 5], [0, 4, 8]
    assert (
        as_ints(
            depth_mask(torch.tensor([0, 0, 0, 1, 0, 0, 1, 1]), 0, real, cu_seqlens_padded=padded)
        )
        == [0] * 8
    )
    targets = depth_targets(
        torch.tensor([1, 2, 3, 99, 11, 12, 99, 99]), 0, real, cu_seqlens_padded=padded
    )
    assert targets.tolist() == [2, 3, 0, 0, 12, 0, 0, 0]


@pytest.mark.parametrize("as_row", [lambda x: x, lambda x: x[None]])
@pytest.mark.parametrize(
    "as_offsets", [list, tuple, torch.tensor, partial(torch.tensor, dtype=torch.int32)]
)
def test_a_pack_is_t_or_1_t_and_its_offsets_a_list_or_a_tensor(as_row, as_offsets):
    mask, offsets = as_row(torch.ones(5)), as_offsets([0, 3, 5])
    assert torch.equal(
        depth_mask(mask, 0, offsets), as_row(torch.tensor([True, True, False, True, False]))
    )
    assert torch.equal(
        depth_targets(mask.long(), 0, offsets), as_row(torch.tensor([1, 1, 0, 1, 0]))
    )


def test_numpys_ints_are_ints():
    one, eight, cu_seqlens = np.uint8(1), np.int64(8), [np.int64(0), np.int32(8)]
    assert as_ints(depth_mask(torch.ones(8), one, cu_seqlens)) == [1, 1, 1, 1, 1, 1, 0, 0]
    targets = depth_targets(torch.arange(8), one, cu_seqlens, fill=eight)
    assert targets.tolist() == [2, 3, 4, 5, 6, 7, 8, 8]
    share = context_parallel_slice(torch.arange(8), cu_seqlens, np.uint8(2), one)
    assert share.tolist() == [2, 3, 4, 5]


# Case 5: response masks to whole sequences


def before_whole_mask(response_mask, length):  # verl before #6432
    return response_mask + [1] * (length - len(response_mask))


def test_a_row_is_zeros_for_the_prompt_then_the_responses_own_mask():
    mask, attention = torch.tensor([[1, 1, 0], [1, 0, 1]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    expected = [[0, 0, 0, 1, 1], [0, 1, 0, 1]]
    assert rows_of(expand_response_mask(mask, [5, 4], attention)) == expected
    assert rows_of(expand_response_mask(jagged([1, 1], [1, 0, 1]), [5, 4])) == expected


def test_padding_right_of_the_response_is_dropped_where_the_old_code_padded_with_ones():
    row = [1, 1, 0, 0]
    assert before_whole_mask(row, 5) == [1, 1, 0, 0, 1]
    assert rows_of(expand_response_mask(torch.tensor([row]), [5], torch.tensor([row]))) == [
        [0, 0, 0, 1, 1]
    ]


def test_a_buffer_wider_than_the_sequence_is_fine_as_long_as_the_response_fits():
    row = torch.tensor([[1, 1, 0, 0, 0, 0]])
    assert rows_of(expand_response_mask(row, [3], row)) == [[0, 1, 1]]


def test_the_length_of_a_response_comes_from_the_attention_not_from_the_mask():
    attention = torch.tensor([[1, 1, 1, 0]])
    assert rows_of(expand_response_mask(torch.tensor([[1, 0, 0, 0]]), [4], attention)) == [
        [0, 1, 0, 0]
    ]
    assert rows_of(expand_response_mask(torch.tensor([[0, 0, 0, 0]]), [4], attention)) == [
        [0, 0, 0, 0]
    ]
    assert rows_of(expand_response_mask(torch.tensor([[1, 0, 0, 1]]), [4], attention)) == [
        [0, 1, 0, 0]
    ]


def test_nested_rows_may_be_empty_may_be_the_whole_sequence_and_may_leave_gaps():
    assert rows_of(expand_response_mask(jagged([1, 0], [], [1]), [2, 3, 1])) == [
        [1, 0],
        [0, 0, 0],
        [1],
    ]
    assert rows_of(expand_response_mask(jagged([], []), [0, 0])) == [[], []]
    padded, starts, lengths = (
        torch.arange(12).view(3, 4),
        torch.tensor([0, 1, 2]),
        torch.tensor([2, 3, 1]),
    )
    gappy = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)
    assert rows_of(expand_response_mask(gappy, [2, 4, 2])) == [[0, 1], [0, 5, 6, 7], [0, 10]]


@pytest.mark.parametrize("lengths", [[], torch.tensor([], dtype=torch.int64)])
def test_a_batch_of_no_rows_gives_no_rows(lengths):
    padded = torch.zeros(0, 3, dtype=torch.bool)
    nested = torch.nested.nested_tensor_from_jagged(
        torch.zeros(0, dtype=torch.bool), torch.tensor([0])
    )
    for whole in (
        expand_response_mask(padded, lengths, padded),
        expand_response_mask(nested, lengths),
    ):
        assert whole.layout == torch.jagged and len(whole) == 0 and whole.dtype == torch.bool
        assert as_ints(depth_mask(whole.values(), 1, whole.offsets())) == []


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32]
)
def test_the_whole_mask_is_jagged_and_keeps_dtype_and_values(dtype):
    mask, attention = torch.tensor([[1, 0, 1]]).to(dtype), torch.tensor([[True, True, True]])
    for whole in (
        expand_response_mask(mask, [4], attention),
        expand_response_mask(jagged([1, 0, 1], dtype=dtype), [4]),
    ):
        assert (
            whole.layout == torch.jagged
            and whole.dtype == dtype
            and rows_of(whole) == [[0, 1, 0, 1]]
        )
    whole = expand_response_mask(torch.tensor([[0.5]]), [2], torch.ones(1, 1))
    assert rows_of(whole) == [[0, 0.5]]


def test_a_whole_mask_goes_straight_into_depth_mask_as_a_pack():
    whole = expand_response_mask(jagged([1, 1], [1, 0, 1]), [5, 4])
    assert as_ints(depth_mask(whole.values(), 0, whole.offsets())) == [0, 0, 1, 1, 0, 1, 0, 1, 0]


@repeatable(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 1), max_size=5)), max_size=5),
    st.integers(0, 3),
)
def test_expanding_equals_the_sentence_row_by_row(rows, spare):
    responses = [response for _, response in rows]
    lengths = [prompt + len(response) for prompt, response in rows]
    slow = [[0] * prompt + response for prompt, response in rows]
    width = max(map(len, responses), default=0) + spare
    padded = torch.zeros(len(rows), width, dtype=torch.int64)
    attention = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, response in enumerate(responses):
        padded[i, : len(response)], attention[i, : len(response)] = torch.tensor(response), True
    for given_lengths in (lengths, torch.tensor(lengths, dtype=torch.int32)):
        assert rows_of(expand_response_mask(padded, given_lengths, attention)) == slow
        if rows:
            assert rows_of(expand_response_mask(jagged(*responses), given_lengths)) == slow


class HostReads(TorchFunctionMode):
    """Counts the calls through which Python reads a tensor: on a GPU, device-to-host copies."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in (
            "tolist",
            "item",
            "cpu",
            "numpy",
            "__bool__",
            "__int__",
            "__index__",
            "__float__",
        ):
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def expand_both_ways(num_rows, device="cpu"):
    """A padded and a nested call, as thunks, all their inputs on the device."""
    padded = torch.ones(num_rows, 3, device=device)
    lengths = torch.full((num_rows,), 5, device=device)
    nested = torch.nested.as_nested_tensor(list(padded.unbind()), layout=torch.jagged)
    return [
        partial(expand_response_mask, padded, lengths, padded),
        partial(expand_response_mask, nested, lengths),
    ]


@pytest.mark.parametrize("num_rows", [1, 2, 64])
def test_expanding_reads_the_device_once_however_many_rows(num_rows):
    for call in expand_both_ways(num_rows):
        with HostReads() as reads:
            call()
        assert reads.seen == ["tolist"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="counts real device-to-host copies")
def test_expanding_on_a_gpu_copies_to_the_host_once():
    for call in expand_both_ways(64, "cuda"):
        call()
        with torch.profiler.profile() as profile:
            whole = call()
        assert sum(event.count for event in profile.key_averages() if "DtoH" in event.key) == 1
        assert whole.device.type == "cuda" and rows_of(whole) == [[0, 0, 1, 1, 1]] * 64
        counts = depth_mask(whole.values(), 1, whole.offsets())
        assert counts.device.type == "cuda" and counts.int().tolist() == [1, 1, 1, 0, 0] * 64


# Case 6: short documents, documents without a prompt


def test_the_last_slots_of_a_document_have_no_target_and_its_first_token_is_nobodys_label():
    ids, offsets = torch.tensor([1, 2, 3, 11, 12, 13]), [0, 3, 6]
    for depth, counts in enumerate([[1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]):
        for rule in ("target", "drafted"):
            assert as_ints(depth_mask(torch.ones(6), depth, offsets, rule=rule)) == counts * 2
        targets = depth_targets(ids, depth, offsets, fill=-1).tolist()
        assert 11 not in targets and 1 not in targets
        assert [target == -1 for target in targets] == [not c for c in counts * 2]


@pytest.mark.parametrize("rule", ["target", "drafted"])
@pytest.mark.parametrize("depth", [1, 2, 5, 10**30])
def test_documents_of_0_1_or_2_tokens_have_no_slot_and_do_not_crash(depth, rule):
    for lengths in ([0], [1], [2], [0, 1, 0, 2, 1, 0]):
        mask, offsets = torch.ones(sum(lengths)), offsets_of(lengths)
        assert not depth_mask(mask, depth, offsets, rule=rule).any()
        assert not depth_mask(mask, depth, rule=rule)[-2:].any()
        assert depth_targets(mask, depth, offsets).tolist() == [0] * sum(lengths)


def test_a_pack_of_no_documents_and_rows_of_no_slots_give_what_they_got():
    assert depth_mask(torch.ones(0), 1, [0]).shape == (0,)
    assert depth_mask(torch.ones(0), 1, [0], cu_seqlens_padded=[0], rule="drafted").shape == (0,)
    assert depth_mask(torch.ones(0, 4), 1).shape == (0, 4)
    assert depth_mask(torch.ones(3, 0), 1, rule="drafted").shape == (3, 0)
    assert depth_targets(torch.ones(3, 0), 1).shape == (3, 0)
    assert context_parallel_slice(torch.ones(2, 0), [0], 2, 1).shape == (2, 0)


# Case 7: what would be a wrong mask in silence is an error that names the row and what came


ONES = torch.ones(2, 3)
EIGHT = torch.ones(8)
ERRORS = {
    "attention with a hole": (
        lambda: expand_response_mask(ONES, [5, 5], torch.tensor([[1, 1, 1], [1, 0, 1]])),
        "row 1: response_attention_mask",
    ),
    "attention at the right": (
        lambda: expand_response_mask(ONES, [5, 5], torch.tensor([[0, 1, 1], [1, 0, 0]])),
        "row 0: response_attention_mask",
    ),
    "attention that is not 0 or 1": (
        lambda: expand_response_mask(ONES, [5, 5], torch.tensor([[1.0, 1, 0], [1, 0.5, 0]])),
        "row 1: response_attention_mask",
    ),
    "a response longer than its sequence": (
        lambda: expand_response_mask(ONES, [3, 2], ONES),
        "row 1: .* 3 tokens, .* 2;",
    ),
    "a nested response longer than its sequence": (
        lambda: expand_response_mask(jagged([1], [1, 1]), [1, 1]),
        "row 1: .* 2 tokens, .* 1;",
    ),
    "a negative length": (lambda: expand_response_mask(ONES, [3, -1], ONES), "row 1: .* -1;"),
    "a negative length in a tensor": (
        lambda: expand_response_mask(ONES, torch.tensor([3, -1]), ONES),
        "row 1: .* -1;",
    ),
    "fewer lengths than rows": (
        lambda: expand_response_mask(ONES, [5], ONES),
        "row 1: .* 2 rows, sequence_lengths 1;",
    ),
    "more lengths than rows": (
        lambda: expand_response_mask(ONES, [5, 5, 5], ONES),
        "row 2: .* 2 rows, sequence_lengths 3;",
    ),
    "padded without attention": (
        lambda: expand_response_mask(ONES, [5, 5]),
        "row 0 and all others: .*response_attention_mask",
    ),
    "attention of another width": (
        lambda: expand_response_mask(ONES, [5, 5], torch.ones(2, 4)),
        r"row 2: .*\[2, 3\], .*\[2, 4\]",
    ),
    "attention of another height": (
        lambda: expand_response_mask(ONES, [5, 5], torch.ones(1, 3)),
        r"row 1: .*\[2, 3\], .*\[1, 3\]",
    ),
    "attention beside nested rows": (
        lambda: expand_response_mask(jagged([1]), [2], ONES),
        "row 0 and all others: response_attention_mask",
    ),
    "a negative depth": (lambda: depth_mask(EIGHT, -1), "depth is -1"),
    "an unknown rule": (lambda: depth_mask(EIGHT, 1, rule="draft"), "'draft'.*'target'.*'drafted'"),
    "a mask that is not 0 or 1": (
        lambda: depth_mask(torch.tensor([[1, 0], [0, -100]]), 1),
        "row 1: token_mask holds -100 at slot 1",
    ),
    "a mask that is not a number": (
        lambda: depth_mask(torch.tensor([0, float("nan")]), 1),
        "row 0: token_mask holds nan at slot 1",
    ),
    "offsets that fall": (
        lambda: depth_mask(EIGHT, 1, [0, 5, 3, 8]),
        "row 1: cu_seqlens falls from 5 to 3",
    ),
    "offsets not from 0": (
        lambda: depth_targets(EIGHT, 1, torch.tensor([3, 8])),
        r"row 0: cu_seqlens starts with \[3\]",
    ),
    "no offsets": (lambda: depth_mask(EIGHT, 1, []), "row 0: cu_seqlens"),
    "negative offsets": (lambda: depth_mask(EIGHT, 1, [0, -2, 8]), "row 0: .*from 0 to -2"),
    "offsets short of T": (
        lambda: depth_mask(EIGHT, 1, [0, 3, 5]),
        "row 1: cu_seqlens ends at 5, .* 8",
    ),
    "offsets past T": (
        lambda: depth_mask(EIGHT, 1, [0, 9]),
        "row 0: cu_seqlens ends at 9, .* 8",
    ),
    "padded offsets short of T": (
        lambda: depth_mask(EIGHT, 1, [0, 3, 5], cu_seqlens_padded=[0, 4, 7]),
        "row 1: cu_seqlens_padded ends at 7, .* 8",
    ),
    "offsets of other documents": (
        lambda: depth_mask(EIGHT, 1, [0, 3, 5], cu_seqlens_padded=[0, 8]),
        "argument 2 is shorter than argument 1",
    ),
    "a document larger than its room": (
        lambda: depth_mask(EIGHT, 1, [0, 3, 8], cu_seqlens_padded=[0, 4, 8]),
        "row 1: 5 tokens .* 4 slots",
    ),
    "a pack of two rows": (
        lambda: depth_mask(ONES, 1, [0, 3]),
        r"row 1: cu_seqlens .*\[2, 3\]",
    ),
    "a fill beyond the dtype": (
        lambda: depth_targets(torch.zeros(2, dtype=torch.uint8), 1, fill=-100),
        "fill is -100; .*torch.uint8",
    ),
    "a fill between two ids": (lambda: depth_targets(EIGHT.long(), 1, fill=0.5), "fill is 0.5"),
    "a document that does not divide": (
        lambda: context_parallel_slice(torch.ones(10), [0, 4, 10], 2, 0),
        "row 1: .* 6 slots, 2 . cp_size is 4",
    ),
    "a rank outside": (
        lambda: context_parallel_slice(EIGHT, [0, 8], 2, 2),
        "cp_rank is 2, cp_size 2",
    ),
    "no ranks": (lambda: context_parallel_slice(EIGHT, [0, 8], 0, 0), "cp_size 0"),
    "slices past T": (
        lambda: context_parallel_slice(EIGHT, [0, 4], 1, 0),
        "row 0: cu_seqlens ends at 4, .* 8",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_does_not_fit_is_a_value_error_that_names_it(name):
    call, facts = ERRORS[name]
    with pytest.raises(ValueError, match=facts):
        call()


# Case 8 and the slow loop: every layout


@repeatable(max_examples=100)
@given(documents, st.integers(0, 2), depths, rules)
def test_dense_rows_equal_the_slow_loop(masks, spare, depth, rule):
    width = max(map(len, masks), default=0) + spare
    rows = [mask + [False] * (width - len(mask)) for mask in masks]
    ids = token_ids_of(rows)
    mask_BT = torch.tensor(rows, dtype=torch.bool).reshape(len(rows), width)
    ids_BT = torch.tensor(ids, dtype=torch.int64).reshape(len(rows), width)
    assert depth_mask(mask_BT, depth, rule=rule).tolist() == [
        slow_counts(row, depth, rule) for row in rows
    ]
    assert depth_targets(ids_BT, depth, fill=-1).tolist() == [
        slow_targets(row, depth, -1) for row in ids
    ]


@repeatable(max_examples=200)
@given(documents, st.lists(st.integers(0, 3), min_size=4, max_size=4), st.booleans(), depths, rules)
def test_packed_and_padded_packed_rows_equal_the_slow_loop(masks, spare, junk, depth, rule):
    ids, lengths = token_ids_of(masks), [len(mask) for mask in masks]
    for room in (lengths, [n + extra for n, extra in zip(lengths, spare, strict=False)]):
        where = dict(cu_seqlens=offsets_of(lengths), cu_seqlens_padded=offsets_of(room))
        if room == lengths:
            del where["cu_seqlens_padded"]
        mask_T = torch.tensor(laid_out(masks, room, junk), dtype=torch.bool)
        ids_T = torch.tensor(laid_out(ids, room, 99), dtype=torch.int64)
        counts = laid_out([slow_counts(mask, depth, rule) for mask in masks], room, False)
        targets = laid_out([slow_targets(row, depth, -1) for row in ids], room, -1)
        assert depth_mask(mask_T, depth, **where, rule=rule).tolist() == counts
        assert depth_mask(mask_T[None], depth, **where, rule=rule).tolist() == [counts]
        assert depth_targets(ids_T, depth, **where, fill=-1).tolist() == targets
        assert depth_targets(ids_T[None], depth, **where, fill=-1).tolist() == [targets]


def pairs(ids, targets, counts):
    return list(zip(ids[counts].tolist(), targets[counts].tolist(), strict=True))


@repeatable(max_examples=100)
@given(
    documents,
    st.lists(st.integers(0, 1), min_size=4, max_size=4),
    st.sampled_from([1, 2, 4]),
    depths,
    rules,
)
def test_all_layouts_supervise_the_same_pairs_of_tokens(masks, spare, cp_size, depth, rule):
    ids, lengths = token_ids_of(masks), [len(mask) for mask in masks]
    expected = sorted(slow_pairs(masks, depth, rule))
    width = max(lengths, default=0)
    multiple = 2 * cp_size
    room = [
        (-(-n // multiple) + extra) * multiple for n, extra in zip(lengths, spare, strict=False)
    ]

    mask_BT = torch.tensor(
        [m + [False] * (width - len(m)) for m in masks], dtype=torch.bool
    ).reshape(len(masks), width)
    ids_BT = torch.tensor([x + [0] * (width - len(x)) for x in ids], dtype=torch.int64).reshape(
        len(masks), width
    )
    assert (
        sorted(pairs(ids_BT, depth_targets(ids_BT, depth), depth_mask(mask_BT, depth, rule=rule)))
        == expected
    )

    real, padded = offsets_of(lengths), offsets_of(room)
    ids_T, mask_T = (
        torch.tensor(sum(ids, []), dtype=torch.int64),
        torch.tensor(sum(masks, []), dtype=torch.bool),
    )
    assert (
        sorted(
            pairs(
                ids_T, depth_targets(ids_T, depth, real), depth_mask(mask_T, depth, real, rule=rule)
            )
        )
        == expected
    )

    ids_T = torch.tensor(laid_out(ids, room, 0), dtype=torch.int64)
    mask_T = torch.tensor(laid_out(masks, room, True), dtype=torch.bool)
    targets_T = depth_targets(ids_T, depth, real, cu_seqlens_padded=padded)
    counts_T = depth_mask(mask_T, depth, real, cu_seqlens_padded=padded, rule=rule)
    assert sorted(pairs(ids_T, targets_T, counts_T)) == expected

    share = partial(context_parallel_slice, cu_seqlens=padded, cp_size=cp_size)
    shares = [
        [share(x, cp_rank=rank) for x in (ids_T, targets_T, counts_T)] for rank in range(cp_size)
    ]
    assert sorted(pair for one in shares for pair in pairs(*one)) == expected


def test_a_rank_keeps_chunk_r_and_its_mirror_of_every_document():
    slots, offsets = torch.arange(24), [0, 8, 8, 24]
    first, second = (context_parallel_slice(slots, offsets, 2, rank).tolist() for rank in (0, 1))
    assert first == [0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23]
    assert second == [2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19]
    assert context_parallel_slice(slots.view(2, 12), [0, 12], 3, 2).tolist() == [
        [4, 5, 6, 7],
        [16, 17, 18, 19],
    ]
    assert context_parallel_slice(slots, torch.tensor(offsets), 1, 0).tolist() == slots.tolist()


@repeatable(max_examples=50)
@given(st.lists(st.integers(0, 3), max_size=4), st.integers(1, 4))
def test_the_shares_of_all_ranks_are_the_buffer_each_slot_once(num_chunk_slots, cp_size):
    offsets = offsets_of(2 * cp_size * n for n in num_chunk_slots)
    slots = torch.arange(offsets[-1])
    shares = [
        context_parallel_slice(slots, offsets, cp_size, rank).tolist() for rank in range(cp_size)
    ]
    for rank, share in enumerate(shares):
        slow = []
        for start, end in pairwise(offsets):
            size = (end - start) // (2 * cp_size)
            mirror = 2 * cp_size - 1 - rank
            slow += [*range(start + rank * size, start + (rank + 1) * size)]
            slow += [*range(start + mirror * size, start + (mirror + 1) * size)]
        assert share == slow
    assert sorted(sum(shares, [])) == slots.tolist()


@repeatable(max_examples=50)
@given(documents, depths)
def test_what_is_drafted_is_also_a_target(masks, depth):
    mask_T, offsets = torch.tensor(sum(masks, []), dtype=torch.bool), offsets_of(map(len, masks))
    target, drafted = (
        depth_mask(mask_T, depth, offsets, rule=rule) for rule in ("target", "drafted")
    )
    assert not (drafted & ~target).any()


# Megatron


@repeatable(max_examples=40)
@given(documents, st.lists(st.integers(0, 3), min_size=4, max_size=4), depths)
def test_rule_target_is_megatrons_roll_of_label_aligned_labels_and_mask_depth_times(
    masks, spare, depth
):
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    lengths = [len(mask) for mask in masks]
    room = [n + extra for n, extra in zip(lengths, spare, strict=False)]
    real, padded = offsets_of(lengths), offsets_of(room)
    ids_T = torch.tensor(laid_out(token_ids_of(masks), room, 0), dtype=torch.int64)
    mask_T = torch.tensor(laid_out(masks, room, False), dtype=torch.bool)
    labels, loss_mask = ids_T, mask_T.float()
    for _ in range(
        depth + 1
    ):  # the first roll makes them label-aligned; Megatron sees padded offsets only
        labels, _ = roll_tensor(labels, packed_seq_params=packed_params(padded, padded))
        loss_mask, _ = roll_tensor(loss_mask, packed_seq_params=packed_params(padded, padded))
    assert torch.equal(depth_targets(ids_T, depth, real, cu_seqlens_padded=padded), labels)
    assert torch.equal(depth_mask(mask_T, depth, real, cu_seqlens_padded=padded).float(), loss_mask)


@repeatable(max_examples=40)
@given(st.integers(1, 3), st.integers(1, 7), depths, st.randoms(use_true_random=False))
def test_dense_rows_equal_megatrons_roll_too(num_rows, width, depth, random):
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    mask_BT = torch.tensor(
        [[float(random.random() < 0.6) for _ in range(width)] for _ in range(num_rows)]
    )
    rolled = mask_BT
    for _ in range(depth + 1):
        rolled, _ = roll_tensor(rolled)
    assert torch.equal(depth_mask(mask_BT, depth).float(), rolled)
    assert torch.equal(depth_targets(mask_BT, depth), rolled)


# The file that teaches


def test_the_picture_at_the_head_of_the_file_is_what_running_it_prints(capsys):
    runpy.run_path(mtp_mask.__file__, run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    head = [line.strip() for line in mtp_mask.__doc__.splitlines()]
    start = head.index(printed[0])
    assert len(printed) == 9 and head[start : start + 9] == printed
