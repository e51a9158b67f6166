"""Fix 1: the MTP loss trains the MTP layers and nothing else."""

import contextlib
import functools
import inspect
import itertools
import math
import shutil
import types
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import build_tiny, run_on_ranks

import toy.hybrid
import toy.model
from drafter_sync import match_vllm_mimo
from mtp_loss import (
    _row_statistics,
    _score,
    _softmax,
    draft_tokens,
    mtp_cross_entropy,
    patch_mtp_loss,
)
from mtp_mask import context_parallel_slice, depth_mask, depth_targets
from mtp_recompute import patch_mtp_recompute
from mtp_recursion import _overlap, _overlap_gradient
from ref_disable import skip_mtp

FULL_RECOMPUTE = dict(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)
MODELS = list(itertools.product((False, True), (1, 2), (False, True)))  # tied, depths, recompute


# --------------------------------------------------------------------------------------------------
# mtp_cross_entropy
# --------------------------------------------------------------------------------------------------


def plain_head(hidden, weight=None):
    return hidden @ weight.t(), None


def full_logits(hidden, weight, targets, mask):
    """The plain computation: every slot projected, all logits at once."""
    logits = (hidden @ weight.t()).transpose(0, 1)
    loss = F.cross_entropy(
        logits.transpose(1, 2).to(max_precision(hidden.dtype)), targets, reduction="none"
    )
    return loss.where(mask.bool(), 0), (logits.argmax(-1) == targets) & mask.bool()


def max_precision(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def random_slots(s, b, h=16, vocab=50, num_counted=None, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(s, b, h, generator=generator).to(dtype)
    weight = torch.randn(vocab, h, generator=generator).to(dtype)
    targets = torch.randint(vocab, (b, s), generator=generator)
    targets[:, ::2] = (
        (hidden @ weight.t()).argmax(-1).t()[:, ::2]
    )  # so that top-1 is right in half of the slots
    mask = torch.zeros(b * s)
    mask[
        torch.randperm(b * s, generator=generator)[: b * s if num_counted is None else num_counted]
    ] = 1
    return hidden, weight, targets, mask.view(b, s)


def run(function, hidden, *args, **kwargs):
    """loss, correct and the gradient of hidden, for a loss weighed differently in each slot."""
    hidden = hidden.detach().requires_grad_()
    loss, correct = function(hidden, *args, **kwargs)
    per_slot = torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return loss.detach(), correct, torch.autograd.grad((loss * per_slot).sum(), hidden)[0]


def test_loss_and_top1_by_hand():
    eye = torch.eye(3)
    hidden = torch.tensor(
        [[[0.0, 0, 0]], [[9, 0, 0]], [[0, 9, 0]]]
    )  # with an identity head: the logits
    targets, mask = torch.tensor([[2, 0, 0]]), torch.tensor([[1, 1, 0]])
    loss, correct = mtp_cross_entropy(hidden, plain_head, targets, mask, output_weight=eye)
    assert (
        loss.shape == correct.shape == (1, 3)
        and loss.dtype == torch.float32
        and correct.dtype == torch.bool
    )
    torch.testing.assert_close(
        loss, torch.tensor([[1.0986123, 0.0002468, 0.0]]), atol=1e-7, rtol=1e-5
    )
    assert correct.tolist() == [
        [False, True, False]
    ]  # slot 0 is a tie: the lowest token, 0, is the arg-max


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_counted", [0, 1, 5, 8, 37, 66])  # of 66; chunks of 8
def test_chunks_equal_full_logits_within_twice_plain_torchs_own_error(num_counted, dtype):
    hidden, weight, targets, mask = random_slots(33, 2, num_counted=num_counted, dtype=dtype)
    exact = run(full_logits, hidden.double(), weight.double(), targets, mask)
    plain = run(full_logits, hidden, weight, targets, mask)
    ours = run(
        mtp_cross_entropy, hidden, plain_head, targets, mask, output_weight=weight, chunk_tokens=8
    )
    assert torch.equal(ours[1], plain[1]) and ours[2].dtype == dtype
    for of_ours, of_plain, of_exact in ((ours[i], plain[i], exact[i]) for i in (0, 2)):
        assert of_ours[..., :0].shape == of_exact[..., :0].shape
        assert (of_ours - of_exact).abs().max() <= 2 * (of_plain - of_exact).abs().max()


def test_a_token_almost_certain_keeps_its_small_gradient_in_bf16():
    hidden = torch.tensor(
        [[[8.0, 0.0]]], dtype=torch.bfloat16
    )  # p = 0.99966: 1 - p rounds to 0 in bf16
    args = (plain_head, torch.tensor([[0]]), torch.tensor([[1]]))
    _, _, grad = run(
        mtp_cross_entropy, hidden, *args, output_weight=torch.eye(2, dtype=torch.bfloat16)
    )
    torch.testing.assert_close(
        grad[0, 0].float() / 0.5, torch.tensor([-3.353e-4, 3.353e-4]), rtol=1e-2, atol=0
    )


def test_chunk_tokens_changes_nothing_but_memory():
    hidden, weight, targets, mask = random_slots(33, 2, num_counted=37)
    whole = run(mtp_cross_entropy, hidden, plain_head, targets, mask, output_weight=weight)
    for chunk_tokens in (1, 2, 36, 37, 38):
        chunked = run(
            mtp_cross_entropy,
            hidden,
            plain_head,
            targets,
            mask,
            output_weight=weight,
            chunk_tokens=chunk_tokens,
        )
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "s, b, num_counted", [(0, 2, 0), (4, 0, 0), (1, 1, 1), (1, 1, 0), (2, 3, 6)]
)
def test_odd_sizes(s, b, num_counted):
    hidden, weight, targets, mask = random_slots(s, b, num_counted=num_counted)
    loss, correct, grad = run(
        mtp_cross_entropy, hidden, plain_head, targets, mask, output_weight=weight
    )
    assert loss.shape == correct.shape == (b, s) and grad.shape == hidden.shape
    assert (loss > 0).sum() == num_counted == (grad.abs().sum(-1) > 0).sum()


def test_only_counted_slots_are_projected_a_chunk_at_a_time_and_never_none():
    sizes = []

    def head(rows, weight=None):
        sizes.append(rows.shape[0] * rows.shape[1])
        return plain_head(rows, weight)

    for num_counted in (0, 10):
        hidden, weight, targets, mask = random_slots(33, 2, num_counted=num_counted)
        run(mtp_cross_entropy, hidden, head, targets, mask, output_weight=weight, chunk_tokens=4)
    assert sizes == [4, 4, 2]


def test_gradcheck():
    hidden, weight, targets, mask = random_slots(
        4, 2, h=3, vocab=5, num_counted=5, dtype=torch.float64
    )
    hidden.requires_grad_()

    def function(x):
        return mtp_cross_entropy(
            x, plain_head, targets, mask, output_weight=weight, chunk_tokens=2
        )[0]  # noqa: E731

    assert function(hidden).dtype == torch.float64
    torch.autograd.gradcheck(function, [hidden])


def test_the_graph_may_be_walked_twice():
    hidden, weight, targets, mask = random_slots(4, 2)
    hidden.requires_grad_()
    loss = mtp_cross_entropy(hidden, plain_head, targets, mask, output_weight=weight)[0].sum()
    first, second = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_no_logits_are_kept_for_backward():
    s, h, vocab = 64, 16, 1000
    hidden, weight, targets, mask = random_slots(s, 1, h=h, vocab=vocab)
    hidden.requires_grad_()

    def bytes_saved(function):
        storages = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: storages.update({x.untyped_storage().data_ptr(): x}) or x, lambda x: x
        ):
            function()
        inputs = {x.untyped_storage().data_ptr() for x in (hidden, weight)}
        return sum(
            x.untyped_storage().nbytes() for pointer, x in storages.items() if pointer not in inputs
        )

    before = bytes_saved(lambda: full_logits(hidden, weight, targets, mask))
    after = bytes_saved(
        lambda: mtp_cross_entropy(
            hidden, plain_head, targets, mask, output_weight=weight, chunk_tokens=8
        )
    )
    assert before >= s * vocab * 4
    assert after == s * h * 4 + s * 8  # a gradient row and an index for each slot


class BiasedHead(torch.nn.Module):
    """Returns its bias, as Megatron's layers with skip_bias_add do, or adds it."""

    def __init__(self, weight, bias, skip_bias_add):
        super().__init__()
        self.weight, self.bias, self.skip_bias_add = (
            torch.nn.Parameter(weight),
            torch.nn.Parameter(bias),
            skip_bias_add,
        )

    def forward(self, hidden, weight=None):
        logits = F.linear(
            hidden,
            self.weight if weight is None else weight,
            None if self.skip_bias_add else self.bias,
        )
        return logits, self.bias if self.skip_bias_add else None


@pytest.mark.parametrize("skip_bias_add", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_a_heads_bias_counts_and_neither_bias_nor_weight_gets_a_gradient(skip_bias_add, tied):
    hidden, weight, targets, mask = random_slots(9, 2)
    bias = torch.linspace(-3, 3, 50)
    head = BiasedHead(weight, bias, skip_bias_add)
    shared = torch.nn.Parameter(weight.clone()) if tied else None
    ours = run(mtp_cross_entropy, hidden, head, targets, mask, output_weight=shared)
    with_one = torch.cat(
        [hidden, torch.ones(9, 2, 1)], -1
    )  # the bias as one more column of the weight
    loss, correct, grad = run(
        full_logits, with_one, torch.cat([weight, bias[:, None]], 1), targets, mask
    )
    torch.testing.assert_close(ours, (loss, correct, grad[..., :16]), rtol=1e-5, atol=1e-5)
    assert (
        head.weight.grad is None
        and head.bias.grad is None
        and (shared is None or shared.grad is None)
    )


def test_the_head_is_run_frozen_so_that_megatron_computes_no_weight_gradient():
    hidden, weight, targets, mask = random_slots(9, 2)
    weight.requires_grad_()

    def head(rows, weight=None):
        assert (
            rows.requires_grad and not weight.requires_grad
        )  # ColumnParallelLinear looks at just that
        return plain_head(rows, weight)

    run(mtp_cross_entropy, hidden, head, targets, mask, output_weight=weight)
    head.weight = weight
    run(mtp_cross_entropy, hidden, head, targets, mask)


def test_targets_of_slots_that_do_not_count_may_be_anything():
    hidden, weight, targets, mask = random_slots(9, 2, num_counted=5)
    clean = run(mtp_cross_entropy, hidden, plain_head, targets, mask, output_weight=weight)
    targets[mask == 0] = -100
    dirty = run(mtp_cross_entropy, hidden, plain_head, targets, mask, output_weight=weight)
    assert all(torch.equal(x, y) for x, y in zip(clean, dirty, strict=True))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16], ids=str)
def test_a_mask_of_any_dtype(dtype):
    hidden, weight, targets, mask = random_slots(9, 2, num_counted=5)
    wanted = run(mtp_cross_entropy, hidden, plain_head, targets, mask, output_weight=weight)
    got = run(mtp_cross_entropy, hidden, plain_head, targets, mask.to(dtype), output_weight=weight)
    assert all(torch.equal(x, y) for x, y in zip(wanted, got, strict=True))


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(targets=torch.zeros(9, 2).long()), r"targets .*\[9, 2\].*\[9, 2, 16\].*\[2, 9\]"),
        (dict(mask=torch.ones(2, 8)), r"mask .*\[2, 8\].*\[9, 2, 16\].*\[2, 9\]"),
        (dict(mask=torch.full((2, 9), 0.5)), r"mask .*0\.5"),
        (dict(targets=torch.full((2, 9), 50)), r"target 50.*49"),
        (dict(targets=torch.full((2, 9), -1)), r"target -1.*49"),
        (dict(chunk_tokens=0), r"chunk_tokens .*0"),
        (dict(chunk_tokens=-1), r"chunk_tokens .*-1"),
    ],
)
def test_what_would_give_wrong_numbers_in_silence_is_refused_by_name(change, text):
    hidden, weight, targets, mask = random_slots(9, 2)
    arguments = dict(
        hidden=hidden, output_layer=plain_head, targets=targets, mask=mask, output_weight=weight
    )
    with pytest.raises(ValueError, match=text):
        mtp_cross_entropy(**arguments | change)


def _statistics(logits):
    top, _, total = _row_statistics(logits)
    return top, total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_compiled_step_equals_the_plain_one(backend, dtype):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor compiles for the CPU with g++, and there is none")
    for rows in (12, 7):
        logits = (
            torch.randn(rows, 301, generator=torch.Generator().manual_seed(rows)).mul(5).to(dtype)
        )
        plain = _row_statistics(logits)
        compiled = torch.compile(_row_statistics, dynamic=True, backend=backend)(logits)
        torch.testing.assert_close(compiled, plain, rtol=1e-6, atol=0)
        softmax = torch.compile(_softmax, dynamic=True, backend=backend)(logits, plain[0], plain[2])
        exact = logits.double().softmax(-1)
        assert softmax.dtype == dtype
        plain_error = (_softmax(logits, plain[0], plain[2]) - exact).abs().max()
        assert (softmax - exact).abs().max() <= 2 * plain_error
        policy = logits.flip(1)
        both = (policy, *_statistics(policy)), (logits, *_statistics(logits))
        for step, args in ((_overlap, both), (_overlap_gradient, (*both, plain[2] * 0 + 0.3))):
            compiled = torch.compile(step, dynamic=True, backend=backend)(*args)
            torch.testing.assert_close(compiled, step(*args), rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------------------
# objective="total_variation"
# --------------------------------------------------------------------------------------------------


def total_variation(hidden, head, targets, mask, *, policy, output_weight, chunk_tokens=1024):
    settings = output_weight, targets, mask, chunk_tokens
    loss, token = _score(hidden, head, *settings, policy)
    return loss, (token == targets) & mask.bool()


def full_total_variation(hidden, weight, targets, mask, *, policy):
    """The plain computation: all probabilities at once, the gradient by autograd."""
    dtype = max_precision(hidden.dtype)
    logits = (hidden @ weight.t()).transpose(0, 1).to(dtype)
    p = (policy.detach() @ weight.t()).transpose(0, 1).to(dtype).softmax(-1)
    loss = 1 - torch.minimum(p, logits.softmax(-1)).sum(-1)
    return loss.where(mask.bool(), 0), (logits.argmax(-1) == targets) & mask.bool()


def draft_and_policy(*size, noise=0.1, **settings):
    hidden, weight, targets, mask = random_slots(*size, **settings)
    generator = torch.Generator().manual_seed(7)
    policy = hidden + (torch.randn(hidden.shape, generator=generator) * noise).to(hidden.dtype)
    return hidden, weight, targets, mask, policy


def test_total_variation_and_its_gradient_by_hand():
    q, p = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.25, 0.55])
    hidden, policy = q.log()[None, None], p.log()[None, None]  # with an identity head: the logits
    args = (plain_head, torch.tensor([[0]]), torch.tensor([[1]]))
    loss, correct, grad = run(
        total_variation, hidden, *args, policy=policy, output_weight=torch.eye(3)
    )
    # sum of min(p, q) = .2 + .25 + .2; only token 2 has q < p, so each q_i times .2, less q_2.
    torch.testing.assert_close(loss, torch.tensor([[0.35]]))
    torch.testing.assert_close(grad[0, 0] / 0.5, torch.tensor([0.1, 0.06, -0.16]))
    assert correct.item()


def test_a_draft_that_equals_the_policy_has_no_variation_and_no_gradient():
    hidden, weight, targets, mask, _ = draft_and_policy(9, 2)
    loss, _, grad = run(
        total_variation, hidden, plain_head, targets, mask, policy=hidden, output_weight=weight
    )
    assert not loss.any() and not grad.any()


@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 1024])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_total_variation_equals_autograd_within_twice_plain_torchs_own_error(dtype, chunk_tokens):
    hidden, weight, targets, mask, policy = draft_and_policy(33, 2, num_counted=37, dtype=dtype)
    doubles = (x.double() for x in (hidden, weight))
    exact = run(full_total_variation, *doubles, targets, mask, policy=policy.double())
    plain = run(full_total_variation, hidden, weight, targets, mask, policy=policy)
    settings = dict(policy=policy, output_weight=weight, chunk_tokens=chunk_tokens)
    ours = run(total_variation, hidden, plain_head, targets, mask, **settings)
    assert torch.equal(ours[1], plain[1]) and ours[2].dtype == dtype
    assert 0.05 < ours[0][mask.bool()].mean() < 0.9
    for of_ours, of_plain, of_exact in ((ours[i], plain[i], exact[i]) for i in (0, 2)):
        error, own = (of_ours - of_exact).abs().max(), (of_plain - of_exact).abs().max()
        assert error <= (1e-14 if dtype == torch.float64 else 2 * own)


def test_total_variation_against_finite_differences():
    hidden, weight, targets, mask, policy = draft_and_policy(
        4, 2, noise=1.0, h=3, vocab=5, num_counted=5, dtype=torch.float64
    )
    settings = dict(policy=policy, output_weight=weight, chunk_tokens=2)

    def function(x):
        return total_variation(x, plain_head, targets, mask, **settings)[0]

    torch.autograd.gradcheck(function, [hidden.requires_grad_()])


def test_total_variation_keeps_no_logits_and_reaches_neither_head_nor_policy():
    hidden, weight, targets, mask, policy = draft_and_policy(64, 1, vocab=1000)
    for x in (hidden, weight, policy):
        x.requires_grad_()
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.update({x.data_ptr(): x}) or x, lambda x: x
    ):
        settings = dict(policy=policy, output_weight=weight, chunk_tokens=8)
        loss, _ = total_variation(hidden, plain_head, targets, mask, **settings)
    kept = [x.nbytes for pointer, x in saved.items() if pointer != weight.data_ptr()]
    assert sorted(kept) == [64 * 8, 64 * 16 * 4]  # an index and a gradient row for each slot
    loss.sum().backward()
    assert hidden.grad.any() and weight.grad is None and policy.grad is None


# --------------------------------------------------------------------------------------------------
# patch_mtp_loss on one rank
# --------------------------------------------------------------------------------------------------


def build_hybrid(mtp_layers=1, tied=False, vocab_size=64, **overrides):
    """As `tiny`, but a HybridModel: every weight random, norms too."""
    config = toy.model.mimo_config(
        hidden_size=64,
        num_heads=2,
        num_groups=2,
        ffn_size=96,
        vocab_size=vocab_size,
        mtp_layers=mtp_layers,
        tied=tied,
    )
    model = toy.hybrid.build_hybrid_model(config, **overrides)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(noise + (1.0 if "norm" in name else 0.0))
    return model


@pytest.fixture(params=["GPTModel", "HybridModel"])
def any_tiny(request, tiny):
    """`tiny` of both classes."""
    if request.param == "GPTModel":
        return tiny
    pytest.importorskip("megatron.core.models.hybrid.hybrid_model", reason="from 0.18 on")
    return build_hybrid


def batch_of(documents, masks=None, *, dense=False):
    """Token lists and token-aligned masks to what the model takes.

    Dense: documents of one length, one a row.
    """
    masks = [[1] * len(document) for document in documents] if masks is None else masks
    labels = [document[1:] + [0] for document in documents]
    loss_mask = [mask[1:] + [0] for mask in masks]
    if dense:
        input_ids, labels, loss_mask = (torch.tensor(x) for x in (documents, labels, loss_mask))
        position_ids, packed = torch.arange(input_ids.shape[1]).expand_as(input_ids), None
    else:
        input_ids, position_ids, packed = toy.model.pack(documents)
        labels, loss_mask = torch.tensor([sum(labels, [])]), torch.tensor([sum(loss_mask, [])])
    return SimpleNamespace(
        ids=input_ids,
        inputs=dict(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=None,
            packed_seq_params=packed,
        ),
        targets=dict(labels=labels, loss_mask=loss_mask.float()),
        documents=documents,
        masks=masks,
    )


def random_documents(*lengths, vocab=64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]


def two_documents(vocab=64):
    masks = [[0, 0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 0, 0, 1, 1]]
    return batch_of(random_documents(12, 8, vocab=vocab), masks)


def policy_loss(logits, batch):
    """A policy-gradient-like loss: log-probabilities of the labels, weighed."""
    logprobs = logits.log_softmax(-1).gather(-1, batch.targets["labels"][..., None])[..., 0]
    advantages = torch.linspace(-1, 2, logprobs.numel()).view(logprobs.shape)
    return -(logprobs * advantages * batch.targets["loss_mask"]).mean()


def gradients(model, batch, *, policy=1.0, **settings):
    """Every parameter's gradient (None where there is none), and what patch_mtp_loss recorded."""
    model.zero_grad()
    with patch_mtp_loss(model, **settings) as mtp:
        (policy * policy_loss(model(**batch.inputs, **batch.targets), batch)).backward()
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }, mtp.depths


def slow_pairs(batch, depth, rule):
    """(slot, target) of every slot that counts at this depth, in one packed buffer."""
    start = 0
    for document, mask in zip(batch.documents, batch.masks, strict=True):
        for t in range(len(document) - 1 - depth):
            draft = mask[t + 1 : t + 2 + depth]
            if draft[-1] if rule == "target" else all(draft):
                yield start + t, document[t + 1 + depth]
        start += len(document)


def hidden_states_of(model, call):
    """What the MTP block puts out during call(): one [s, b, h] a depth."""
    outputs = []
    handle = model.mtp.register_forward_hook(lambda module, args, output: outputs.append(output))
    call()
    handle.remove()
    (output,) = outputs
    return output.chunk(1 + model.config.mtp_num_layers)[1:]


def head_weight(model):
    return (
        model.embedding.word_embeddings.weight
        if model.output_layer.weight is None
        else model.output_layer.weight
    )


@pytest.mark.parametrize("rule", ["target", "drafted"])
@pytest.mark.parametrize("tied", [False, True])
def test_each_depths_sum_is_that_of_a_slow_loop_from_its_hidden_states(any_tiny, tied, rule):
    model, batch = any_tiny(mtp_layers=3, tied=tied, vocab_size=4), two_documents(vocab=4)
    with patch_mtp_loss(model, rule=rule, chunk_tokens=3) as mtp:
        states = hidden_states_of(model, lambda: model(**batch.inputs, **batch.targets))
    assert len(mtp.depths) == 3 and sum(depth["correct"] for depth in mtp.depths) > 2
    for depth, (state, got) in enumerate(zip(states, mtp.depths, strict=True), start=1):
        pairs = list(slow_pairs(batch, depth, rule))
        logits = (state[:, 0] @ head_weight(model).t()).double()
        wanted = sum(logits[slot].logsumexp(-1) - logits[slot, target] for slot, target in pairs)
        assert got["tokens"] == len(pairs) > 0
        assert got["correct"] == sum(int(logits[slot].argmax() == target) for slot, target in pairs)
        torch.testing.assert_close(
            got["loss_sum"].double(), torch.as_tensor(wanted).double(), rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("rule", ["target", "drafted"])
@pytest.mark.parametrize("tied", [False, True])
def test_total_variation_is_from_the_main_heads_logits_at_the_slot_that_predicts_the_token(
    any_tiny, tied, rule
):
    model, batch = any_tiny(mtp_layers=3, tied=tied, vocab_size=8), two_documents(vocab=8)
    settings = dict(rule=rule, objective="total_variation", chunk_tokens=3)
    with patch_mtp_loss(model, **settings) as mtp:
        logits = []
        call = lambda: logits.append(model(**batch.inputs, **batch.targets))  # noqa: E731
        states = hidden_states_of(model, call)
    p = logits[0][0].double().softmax(-1)
    for depth, (state, got) in enumerate(zip(states, mtp.depths, strict=True), start=1):
        q = (state[:, 0] @ head_weight(model).t()).double().softmax(-1)
        pairs = list(slow_pairs(batch, depth, rule))
        accepted = sum(torch.minimum(p[slot + depth], q[slot]).sum() for slot, _ in pairs)
        assert got["tokens"] == len(pairs) > 0
        expected_acceptance = 1 - got["loss_sum"] / got["tokens"]
        torch.testing.assert_close(
            expected_acceptance.double(), (accepted / len(pairs)).detach(), rtol=1e-5, atol=0
        )
        assert got["correct"] == sum(int(q[slot].argmax() == target) for slot, target in pairs)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_bitwise_those_of_the_model_without_mtp(any_tiny, tied, dense):
    batch = batch_of(random_documents(9, 9), dense=dense)
    model, without = any_tiny(mtp_layers=2, tied=tied), any_tiny(mtp_layers=0, tied=tied)
    without.load_state_dict(
        {k: v for k, v in model.state_dict().items() if not k.startswith("mtp.")}
    )
    wanted = without(**batch.inputs)
    with patch_mtp_loss(model):
        with torch.no_grad():
            assert torch.equal(model(**batch.inputs, **batch.targets), wanted)
        assert torch.equal(model(**batch.inputs), wanted)
        assert torch.equal(model(**batch.inputs, **batch.targets), wanted)
        arguments = *batch.inputs.values(), batch.targets["labels"]
        ids, positions, attention_mask, packed, labels = arguments
        settings = dict(packed_seq_params=packed, loss_mask=batch.targets["loss_mask"])
        assert torch.equal(model(ids, positions, attention_mask, None, labels, **settings), wanted)


def test_without_labels_or_without_grad_the_mtp_block_does_not_run(any_tiny):
    model, batch = any_tiny(), two_documents()
    runs = []
    model.mtp.register_forward_pre_hook(lambda *_: runs.append(1))
    with patch_mtp_loss(model) as mtp:
        model(**batch.inputs)
        with torch.no_grad():
            model(**batch.inputs, **batch.targets)
        with skip_mtp(model):
            model(**batch.inputs)
            model(**batch.inputs, **batch.targets)
        assert runs == [] and mtp.depths == []
        model(**batch.inputs, **batch.targets)
        assert runs == [1] and len(mtp.depths) == 1
    with skip_mtp(model), patch_mtp_loss(model):
        model(**batch.inputs, **batch.targets)
    assert runs == [1]


@pytest.mark.parametrize("tied, depths, recompute", MODELS)
def test_the_gradient_matrix(any_tiny, tied, depths, recompute):
    """embedding, trunk, final norm, head, MTP: which move when the policy loss is times 0."""
    batch = batch_of(random_documents(20, 11, vocab=48))  # of 64 tokens

    def moved(context):
        clear_tracker()
        model = any_tiny(mtp_layers=depths, tied=tied, **FULL_RECOMPUTE if recompute else {})
        with patch_mtp_recompute(), context(model):  # before 0.19 packed sequences crash without
            (model(**batch.inputs, **batch.targets).sum() * 0).backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        moves = {name for name, grad in grads.items() if grad.any()}
        embedding = grads.get("embedding.word_embeddings.weight", torch.zeros(64, 1))
        mtp = {name for name, _ in model.named_parameters() if name.startswith("mtp.")}
        columns = [
            embedding[:48].any(),
            any(name.startswith("decoder.layers") for name in moves),
            any(name.startswith("decoder.final") for name in moves),
            embedding[48:].any() if tied else "output_layer.weight" in moves,  # no look-up there
            mtp <= moves,
        ]
        return "".join("#" if moves else "." for moves in columns)

    assert moved(contextlib.nullcontext) == "#####"
    assert moved(functools.partial(patch_mtp_loss, detach_trunk=False)) == "###.#"
    assert moved(patch_mtp_loss) == "....#"
    assert moved(functools.partial(patch_mtp_loss, objective="total_variation")) == "....#"


@contextlib.contextmanager
def before(model):
    """As frameworks patch it: the head's own parameters detached, where Megatron lets one do so."""
    from megatron.core.transformer import multi_token_prediction as megatron_mtp

    def postprocess(hidden_states, labels, loss_mask, **rest):
        weight = (
            model.embedding.word_embeddings.weight if model.output_layer.weight is None else None
        )
        known = inspect.signature(type(model.mtp).forward).parameters
        rest = {name: value for name, value in rest.items() if name in known}
        states = model.mtp(hidden_states=hidden_states, embedding=model.embedding, **rest)
        depths, scale = model.config.mtp_num_layers, model.config.mtp_loss_scaling_factor
        if hasattr(
            megatron_mtp, "process_mtp_loss"
        ):  # from 0.17 on it hands the work, and the head, to Megatron
            hidden = megatron_mtp.process_mtp_loss(
                states, labels, loss_mask, model.output_layer, weight, None, False,
                model.compute_language_model_loss, model.config,
            )  # fmt: skip
        else:
            hidden, *states = states.chunk(1 + depths)
            detached = {name: p.detach() for name, p in model.output_layer.named_parameters()}
            for state in states:
                labels, _ = megatron_mtp.roll_tensor(labels)
                loss_mask, count = megatron_mtp.roll_tensor(loss_mask)
                logits, _ = torch.func.functional_call(
                    model.output_layer, detached, (state,), {"weight": weight}
                )
                loss = loss_mask * model.compute_language_model_loss(labels, logits)
                hidden = megatron_mtp.MTPLossAutoScaler.apply(hidden, scale / depths * loss / count)
        return model.output_layer(hidden, weight=weight)[0].transpose(0, 1).contiguous()

    model._postprocess = postprocess
    yield
    del model._postprocess


@pytest.mark.parametrize("tied", [False, True])
def test_before_the_head_leaked_from_megatron_017_on_and_tied_or_into_the_trunk_always(tiny, tied):
    from megatron.core.transformer import multi_token_prediction as megatron_mtp

    model, batch = tiny(tied=tied), batch_of([[5, 9, 17, 5, 33, 9, 21, 5]], dense=True)
    with before(model):
        (model(**batch.inputs, **batch.targets).sum() * 0).backward()
    head = model.output_layer.weight
    unseen = [
        token for token in range(64) if token not in batch.documents[0]
    ]  # no look-up reaches these
    head_moves = (
        model.embedding.word_embeddings.weight.grad[unseen].any() if tied else head.grad.any()
    )
    assert bool(head_moves) == (tied or hasattr(megatron_mtp, "process_mtp_loss"))
    assert model.decoder.final_layernorm.weight.grad.any()


@pytest.mark.parametrize("tied, depths, recompute", MODELS)
def test_detached_every_other_gradient_is_bitwise_that_of_a_run_without_mtp(
    any_tiny, tied, depths, recompute
):
    batch, model = (
        two_documents(),
        any_tiny(mtp_layers=depths, tied=tied, **FULL_RECOMPUTE if recompute else {}),
    )
    with patch_mtp_recompute():  # before 0.19 packed sequences crash without
        got, _ = gradients(model, batch)
    model.zero_grad()
    with patch_mtp_loss(model):
        policy_loss(model(**batch.inputs), batch).backward()
    for name, p in model.named_parameters():
        if name.startswith("mtp."):
            assert p.grad is None and got[name].any(), name
        else:
            assert torch.equal(got[name], p.grad), name


@pytest.mark.parametrize("objective", ["cross_entropy", "total_variation"])
@pytest.mark.parametrize("tied", [False, True])
def test_not_detached_the_gradient_is_that_of_the_same_loss_through_a_detached_head(
    any_tiny, tied, objective
):
    model, batch = any_tiny(mtp_layers=2, tied=tied), two_documents()
    settings = dict(detach_trunk=False, objective=objective)
    got, _ = gradients(model, batch, policy=0.0, **settings)
    model.zero_grad()
    with patch_mtp_loss(model, **settings):
        logits = []
        call = lambda: logits.append(model(**batch.inputs, **batch.targets))  # noqa: E731
        states = hidden_states_of(model, call)
    p = logits[0][0].detach().softmax(-1)
    for depth, state in enumerate(states, start=1):
        slots, targets = (
            torch.tensor(x) for x in zip(*slow_pairs(batch, depth, "target"), strict=True)
        )
        draft = state[slots, 0] @ head_weight(model).detach().t()
        if objective == "cross_entropy":
            loss = F.cross_entropy(draft, targets)
        else:
            loss = 1 - torch.minimum(p[slots + depth], draft.softmax(-1)).sum(-1).mean()
        (0.2 / 2 * loss).backward(retain_graph=True)
    for name, p in model.named_parameters():
        wanted = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(got[name], wanted, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("calculate_per_token_loss", [False, True])
@pytest.mark.parametrize("depths", [1, 2])
def test_mtp_gradients_are_those_of_stock_megatron(any_tiny, depths, calculate_per_token_loss):
    model, batch = any_tiny(mtp_layers=depths), two_documents()
    model.config.calculate_per_token_loss = calculate_per_token_loss
    got, _ = gradients(model, batch, policy=0.0)
    model.zero_grad()
    clear_tracker()
    (model(**batch.inputs, **batch.targets).sum() * 0).backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if name.startswith("mtp.")}
    close({name: got[name] for name in wanted}, wanted, rtol=1e-4)


def test_the_last_depth_trains_the_first(any_tiny):
    model, batch = any_tiny(mtp_layers=2), two_documents()
    got, _ = gradients(model, batch, policy=0.0, denominator=[float("inf"), 1.0])
    assert all(grad.any() for name, grad in got.items() if name.startswith("mtp.layers.0."))


def test_lambda_is_shared_by_the_depths_and_divided_by_the_slots_that_count(tiny):
    """Lambda 0.2, one depth, 5 label-valid tokens of which 4 count at depth 1: each weighs 0.05."""
    model, batch = tiny(), batch_of(random_documents(6))
    got, (depth,) = gradients(model, batch, policy=0.0)
    assert batch.targets["loss_mask"].sum() == 5 and depth["tokens"] == 4
    each, _ = gradients(model, batch, policy=0.0, scale=0.05, denominator=1)
    close(got, each, rtol=1e-5)


def test_lambda_zero_gives_zero_gradients_and_still_reports(tiny):
    got, (depth,) = gradients(tiny(), two_documents(), policy=0.0, scale=0.0)
    assert depth["loss_sum"] > 0
    assert all(
        grad is not None and not grad.any() for name, grad in got.items() if name.startswith("mtp.")
    )


@pytest.mark.parametrize("denominator", [None, 0, [0]])
def test_a_mask_of_zeros_gives_zero_gradients_not_none_and_not_nan(tiny, denominator, monkeypatch):
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    model, batch, losses, apply = (
        tiny(),
        batch_of(random_documents(7), [[0] * 7]),
        [],
        MTPLossAutoScaler.apply,
    )
    monkeypatch.setattr(
        MTPLossAutoScaler, "apply", lambda hidden, loss: losses.append(loss) or apply(hidden, loss)
    )
    got, (depth,) = gradients(model, batch, policy=0.0, denominator=denominator)
    assert losses == [0]  # Megatron 0.16: 0 / 0
    assert depth == dict(loss_sum=0, tokens=0, correct=0)
    assert all(
        grad is not None and not grad.any() for name, grad in got.items() if name.startswith("mtp.")
    )


def test_with_denominator_the_summed_gradient_does_not_depend_on_the_split(any_tiny):
    """Micro-batches with 1 and 3 valid tokens; before, each was divided by its own count."""
    model = any_tiny()
    documents, masks = random_documents(5, 6), [[0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 1]]
    whole, (depth,) = gradients(model, batch_of(documents, masks), policy=0.0)
    assert depth["tokens"] == 4

    def summed(**settings):
        parts = [
            gradients(model, batch_of([d], [m]), policy=0.0, **settings)[0]
            for d, m in zip(documents, masks, strict=False)
        ]  # noqa: B905
        return {
            name: None if a is None else a + b
            for (name, a), b in zip(parts[0].items(), parts[1].values(), strict=False)
        }  # noqa: B905

    close(summed(denominator=4), whole, rtol=1e-6)
    close(summed(denominator=torch.tensor([4])), whole, rtol=1e-6)
    close(summed(denominator=torch.tensor(4)), whole, rtol=1e-6)
    with pytest.raises(AssertionError):
        close(summed(), whole, rtol=1e-2)


def close(got, wanted, *, rtol):
    """Each gradient within rtol of its own largest entry."""
    assert got.keys() == wanted.keys()
    for name, grad in wanted.items():
        if grad is not None:
            torch.testing.assert_close(
                got[name], grad, rtol=0, atol=rtol * grad.abs().max().item(), msg=name
            )


def test_groups_clipped_apart_leave_the_policys_update_alone(tiny):
    """MTP gradient norm 20, policy norm 0.8, clip at 1: together the policy moves 25 times less."""
    model, batch = tiny(), two_documents()
    mtp = [p for name, p in model.named_parameters() if name.startswith("mtp.")]
    policy = [p for name, p in model.named_parameters() if not name.startswith("mtp.")]
    norm = lambda group: torch.nn.utils.get_total_norm([p.grad for p in group]).item()  # noqa: E731
    gradients(model, batch)
    settings = dict(scale=0.2 * 20 / norm(mtp), policy=0.8 / norm(policy))
    apart, _ = gradients(model, batch, **settings)
    assert norm(mtp) == pytest.approx(20, rel=1e-3) and norm(policy) == pytest.approx(0.8, rel=1e-3)
    for group in (policy, mtp):
        torch.nn.utils.clip_grad_norm_(group, 1.0)
    assert all(
        torch.equal(p.grad, apart[name])
        for name, p in model.named_parameters()
        if not name.startswith("mtp.")
    )
    assert norm(mtp) == pytest.approx(1, rel=1e-3)
    gradients(model, batch, **settings)
    torch.nn.utils.clip_grad_norm_([*policy, *mtp], 1.0)  # before
    assert norm(policy) == pytest.approx(0.04, rel=1e-2)


def test_logits_may_be_changed_in_place(any_tiny):
    model, batch = any_tiny(), two_documents()
    wanted, _ = gradients(model, batch, policy=0.0)
    model.zero_grad()
    with patch_mtp_loss(model):
        (model(**batch.inputs, **batch.targets).div_(0.7).sum() * 0).backward()
    assert all(
        torch.equal(p.grad, wanted[name])
        for name, p in model.named_parameters()
        if name.startswith("mtp.")
    )


def test_a_frozen_policy_still_trains_mtp(any_tiny):
    model, batch = any_tiny(), two_documents()
    wanted, _ = gradients(model, batch)
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("mtp."))
    got, _ = gradients(model, batch)
    for name, grad in got.items():
        assert torch.equal(grad, wanted[name]) if name.startswith("mtp.") else grad is None, name


def clear_tracker():
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()


def tracked():
    """Megatron's own record of the MTP loss: numbers and groups, under each release's names."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    return dict(MTPLossLoggingHelper.tracker)


@pytest.mark.parametrize("depths", [1, 2])
def test_megatrons_own_tracker_is_filled_as_stock_megatron_fills_it(any_tiny, depths):
    model, batches = any_tiny(mtp_layers=depths), [two_documents(), two_documents()]
    batches[1].targets["loss_mask"] = 1 - batches[1].targets["loss_mask"]
    clear_tracker()
    for batch in batches:
        model(**batch.inputs, **batch.targets)
    wanted = tracked()
    clear_tracker()
    with patch_mtp_loss(model):
        for batch in batches:
            model(**batch.inputs, **batch.targets)
        got = tracked()
        model.eval()
        model(**batches[0].inputs, **batches[0].targets)  # Megatron fills it in training only
    assert got.keys() == wanted.keys() == tracked().keys() and len(wanted) in (3, 5)
    for name, value in wanted.items():
        if torch.is_tensor(value):
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=0)
            assert value[0] > 0 or name == "correct_values"
        else:
            assert got[name] is value, name
    assert all(x is tracked()[name] for name, x in got.items())


def test_megatrons_own_tracker_stays_finite_without_a_token(tiny):
    clear_tracker()
    batch = batch_of(random_documents(7), [[0] * 7])
    gradients(tiny(), batch)
    assert [x for x in tracked().values() if torch.is_tensor(x)][0].tolist() == [0]


def test_a_model_with_more_depths_after_one_with_fewer(tiny):
    """Megatron's own record is one buffer for the whole process: too short, it crashes."""
    batch = two_documents()
    clear_tracker()
    for depths in (1, 2, 1):
        _, recorded = gradients(tiny(mtp_layers=depths), batch)
        assert len(recorded) == depths
    clear_tracker()
    tiny(mtp_layers=1)(**batch.inputs, **batch.targets)
    with pytest.raises(IndexError):  # before
        tiny(mtp_layers=2)(**batch.inputs, **batch.targets)
    clear_tracker()


def test_depths_add_up_over_forwards_until_the_caller_clears_them(any_tiny):
    model, batches = any_tiny(mtp_layers=2), [two_documents(), batch_of(random_documents(9, 4))]
    alone = [gradients(model, batch)[1] for batch in batches]
    with patch_mtp_loss(model) as mtp:
        for batch in (*batches, batches[0]):
            model(**batch.inputs, **batch.targets)
        model(**batches[0].inputs)
        for depth, first, second in zip(mtp.depths, *alone, strict=True):
            for name in ("tokens", "correct"):
                assert depth[name] == 2 * first[name] + second[name]
            torch.testing.assert_close(
                depth["loss_sum"], 2 * first["loss_sum"] + second["loss_sum"]
            )
        mtp.depths.clear()
        model(**batches[1].inputs, **batches[1].targets)
        assert mtp.depths == alone[1]


def test_scale_and_denominator_are_read_at_each_forward(any_tiny):
    model, batch = any_tiny(mtp_layers=2), two_documents()
    settings = [dict(scale=0.3, denominator=5), dict(scale=None, denominator=[7.0, 2.0]), {}]
    wanted = [gradients(model, batch, policy=0.0, **setting)[0] for setting in settings]
    with patch_mtp_loss(model) as mtp:
        assert mtp.scale is None and mtp.denominator is None
        for setting, grads in zip(settings, wanted, strict=True):
            mtp.scale, mtp.denominator = setting.get("scale"), setting.get("denominator")
            model.zero_grad()
            (model(**batch.inputs, **batch.targets).sum() * 0).backward()
            for name, p in model.named_parameters():
                assert p.grad is grads[name] is None or torch.equal(p.grad, grads[name]), name
        mtp.denominator = [1, 2, 3]
        with pytest.raises(RuntimeError, match="2.*3"):  # torch's own
            model(**batch.inputs, **batch.targets)


def snapshot(model):
    return (
        {name: set(vars(module)) for name, module in model.named_modules()},
        model.config,
        dict(vars(model.config)),
        model.forward,
        model.mtp,
        model.mtp.forward,
        {name: len(module._forward_hooks) for name, module in model.named_modules()},
        [module.training for module in model.modules()],
    )


def test_the_model_and_the_inputs_are_left_as_they_were_also_after_an_error(any_tiny):
    model, batch = any_tiny(), two_documents()
    found, inputs = snapshot(model), {name: x.clone() for name, x in batch.targets.items()}
    gradients(model, batch)
    with pytest.raises(ZeroDivisionError), patch_mtp_loss(model):
        model(**batch.inputs, **batch.targets)
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="a masked-in slot has target 64"), patch_mtp_loss(model):
        model(
            **batch.inputs,
            labels=torch.full_like(batch.ids, 64),
            loss_mask=batch.targets["loss_mask"],
        )
    draft_tokens(model, **batch.inputs)
    assert snapshot(model) == found
    assert all(torch.equal(batch.targets[name], x) for name, x in inputs.items())


def test_labels_without_a_mask_are_an_error(tiny):
    model, (labels, loss_mask) = tiny(), two_documents().targets.values()
    inputs = two_documents().inputs
    with patch_mtp_loss(model):
        with pytest.raises(ValueError, match="labels .*without loss_mask"):
            model(**inputs, labels=labels)
        with pytest.raises(ValueError, match="mask .*2.0"):
            model(**inputs, labels=labels, loss_mask=2 * loss_mask)
        with pytest.raises(RuntimeError, match=r"\[1, 20\].*\[1, 19\]"):  # torch's own
            model(**inputs, labels=labels, loss_mask=loss_mask[:, 1:])


def test_patching_twice_is_an_error(any_tiny):
    model = any_tiny()
    with patch_mtp_loss(model):
        with pytest.raises(RuntimeError, match="patched already"), patch_mtp_loss(model):
            pass
    with patch_mtp_loss(model):
        pass


@pytest.mark.parametrize("name", ["forward", "_postprocess"])
def test_another_librarys_function_on_the_model_is_refused_and_the_classs_own_is_stock(tiny, name):
    """verl's unpatch_postprocess leaves the latter, bound on the instance."""
    model, batch = tiny(), two_documents()
    wanted, _ = gradients(model, batch)
    setattr(model, name, types.MethodType(getattr(type(model), name), model))
    found = vars(model)[name]
    got, _ = gradients(model, batch)
    assert all(torch.equal(grad, wanted[key]) for key, grad in got.items())
    assert vars(model)[name] is found
    setattr(model, name, lambda *args, **kwargs: None)
    with pytest.raises(RuntimeError, match=name), patch_mtp_loss(model):
        pass


def test_an_autoscaler_that_another_library_disabled_is_named(tiny, monkeypatch):
    """What SkyRL's disable_native_mtp_loss does."""
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    def refuse(*args):
        raise AssertionError("native MTP loss is off")

    model = tiny()
    monkeypatch.setattr(MTPLossAutoScaler, "apply", staticmethod(refuse))
    with pytest.raises(RuntimeError, match="MTPLossAutoScaler.apply.*refuse.*disable_native_mtp"):
        gradients(model, two_documents())
    monkeypatch.undo()
    gradients(model, two_documents())


def test_what_cannot_work_is_refused_by_name(tiny, monkeypatch):
    from megatron.core.transformer import multi_token_prediction

    def refused(error, text, model, **settings):
        with pytest.raises(error, match=text), patch_mtp_loss(model, **settings):
            model(**two_documents().inputs, **two_documents().targets)

    refused(RuntimeError, "GPTModel has no MTP layers", tiny(mtp_layers=0))
    with pytest.raises(RuntimeError, match="GPTModel has no MTP layers"):
        draft_tokens(tiny(mtp_layers=0), **two_documents().inputs)
    refused(ValueError, "rule .*'drafts'.*'drafted'", tiny(), rule="drafts")
    refused(ValueError, "objective .*'tv'.*'total_variation'", tiny(), objective="tv")
    refused(ValueError, "chunk_tokens .*0", tiny(), chunk_tokens=0)
    for depths, num_drafts in ((1, 0), (1, -1), (2, 3), (2, 1)):
        text = f"{depths} MTP layers.* num_drafts {num_drafts}"
        refused(ValueError, text, tiny(mtp_layers=depths), num_drafts=num_drafts)
        with pytest.raises(ValueError, match=text):
            draft_tokens(tiny(depths), **two_documents().inputs, num_drafts=num_drafts)
    model = tiny()
    model.config.mtp_detach_heads = True
    refused(ValueError, "detach_trunk.*mtp_detach_heads", model, detach_trunk=False)
    for name in ("use_mup", "defer_embedding_wgrad_compute"):
        model = tiny()
        setattr(model.config, name, True)
        refused(ValueError, f"config.{name} is on", model)
    model = tiny()
    with skip_mtp(model), pytest.raises(RuntimeError, match="skip_mtp"):
        draft_tokens(model, **two_documents().inputs)
    model.mtp_process = False  # as in inference mode, Megatron then leaves out the block
    refused(RuntimeError, "GPTModel.*did not call model.mtp", model)
    monkeypatch.delattr(multi_token_prediction, "MTPLossAutoScaler")
    refused(RuntimeError, r"megatron-core 0\.\d+.* has no MTPLossAutoScaler.*0.16 to 0.19", tiny())


def test_padded_offsets_must_be_in_both_fields(tiny):
    model, batch = tiny(), two_documents()
    packed = batch.inputs["packed_seq_params"]
    with patch_mtp_loss(model):
        packed.cu_seqlens_q_padded = packed.cu_seqlens_q.clone()
        model(**batch.inputs, **batch.targets)
        packed.cu_seqlens_q = torch.tensor([0, 11, 18], dtype=torch.int32)
        with pytest.raises(
            ValueError,
            match="cu_seqlens_q differs from cu_seqlens_q_padded.*padded offsets into both",
        ):
            model(**batch.inputs, **batch.targets)
        with pytest.raises(ValueError, match="cu_seqlens_q differs"):
            draft_tokens(model, **batch.inputs)


class Wrapper(torch.nn.Module):
    """DDP keeps the model as `module`, a vision-language model as `language_model`."""

    def __init__(self, model, name):
        super().__init__()
        self.config, self.post_process, self.name = getattr(model, "config", None), True, name
        setattr(self, name, model)

    def forward(self, *args, **kwargs):
        return getattr(self, self.name)(*args, **kwargs)


def without_head(model, pipeline_size=2):
    model.post_process = False
    model.config.pipeline_model_parallel_size = pipeline_size
    return model


def test_wrappers_like_ddp_are_looked_through(any_tiny):
    model, batch = any_tiny(), two_documents()
    wrapped = Wrapper(Wrapper(Wrapper(model, "module"), "language_model"), "module")
    with patch_mtp_loss(wrapped) as mtp:
        wrapped(**batch.inputs, **batch.targets)
        assert len(mtp.depths) == 1
    assert torch.equal(draft_tokens(wrapped, **batch.inputs), draft_tokens(model, **batch.inputs))


@pytest.mark.parametrize("kind", [list, tuple, torch.nn.ModuleList])
def test_of_a_list_of_chunks_the_one_with_a_head_is_patched(tiny, kind):
    model, first, batch = tiny(), without_head(tiny()), two_documents()
    wanted, _ = gradients(model, batch)
    model.zero_grad()
    chunks = kind([Wrapper(first, "module"), Wrapper(Wrapper(model, "language_model"), "module")])
    with patch_mtp_loss(chunks) as mtp:
        assert "forward" not in vars(first)
        policy_loss(chunks[1](**batch.inputs, **batch.targets), batch).backward()
    assert len(mtp.depths) == 1
    assert all(torch.equal(p.grad, wanted[name]) for name, p in model.named_parameters())
    assert torch.equal(draft_tokens(chunks, **batch.inputs), draft_tokens(model, **batch.inputs))


def test_chunks_without_a_head_pass_through(tiny):
    model, encoder_alone = without_head(tiny()), Wrapper(None, "language_model")
    encoder_alone.config = model.config
    for stage in (model, [model], [Wrapper(model, "module"), without_head(tiny())], encoder_alone):
        with patch_mtp_loss(stage) as mtp:
            assert "forward" not in vars(model) and mtp.depths == []


def test_a_list_must_hold_one_head(tiny):
    model = tiny()
    refused = [
        (TypeError, "Linear", torch.nn.Linear(2, 2)),
        (TypeError, "Linear", [model, torch.nn.Linear(2, 2)]),
        (TypeError, "NoneType", None),
        (TypeError, "NoneType", [Wrapper(None, "module")]),
        (ValueError, "2 chunks.*GPTModel, GPTModel", [model, tiny()]),
        (ValueError, "0 chunks.*GPTModel", [without_head(tiny(), pipeline_size=1)]),
        (ValueError, "list holds 0 chunks", []),
    ]
    for error, text, chunks in refused:
        with pytest.raises(error, match=text), patch_mtp_loss(chunks):
            pass
        with pytest.raises(error, match=text):
            draft_tokens(chunks, **two_documents().inputs)


@pytest.mark.parametrize("recompute", [False, True])
def test_it_composes_with_the_other_fixes_in_any_order(tiny, recompute):
    model, batch = tiny(**FULL_RECOMPUTE if recompute else {}), two_documents()
    with patch_mtp_recompute():  # before 0.19 packed sequences crash without
        plain, _ = gradients(model, batch)
    results = []
    for order in itertools.permutations(range(3)):
        model.zero_grad()
        with contextlib.ExitStack() as stack:
            for context in order:
                if context == 0:
                    mtp = stack.enter_context(patch_mtp_loss(model))
                elif context == 1:
                    stack.enter_context(match_vllm_mimo(model))
                else:
                    stack.enter_context(patch_mtp_recompute())
            logits = model(**batch.inputs, **batch.targets)
            policy_loss(logits, batch).backward()
            with skip_mtp(model), torch.no_grad():
                assert torch.equal(model(**batch.inputs, **batch.targets), logits)
            drafts = draft_tokens(model, **batch.inputs)
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        results.append((logits.detach(), drafts, mtp.depths[0]["loss_sum"], grads))
    for logits, drafts, loss_sum, grads in results:
        assert torch.equal(logits, results[0][0]) and torch.equal(drafts, results[0][1])
        assert loss_sum == results[0][2]
        for name, grad in grads.items():
            assert torch.equal(grad, results[0][3][name]), name
            # match_vllm_mimo feeds the MTP layer another state, and nothing else changes.
            assert torch.equal(grad, plain[name]) != name.startswith("mtp."), name


@pytest.mark.parametrize("objective", ["cross_entropy", "total_variation"])
@pytest.mark.parametrize("tied", [False, True])
def test_one_mtp_layer_is_trained_and_drafts_k_deep(any_tiny, tied, objective):
    pytest.importorskip("mtp_recursion")
    model, batch = any_tiny(tied=tied), two_documents()
    settings = dict(policy=0.0, objective=objective, denominator=7)
    alone, first = gradients(model, batch, **settings)
    same, one = gradients(model, batch, num_drafts=1, **settings)
    assert one == first and all(
        grad is alone[name] is None or torch.equal(grad, alone[name]) for name, grad in same.items()
    )
    got, depths = gradients(model, batch, num_drafts=3, **settings)
    assert [int(depth["tokens"]) for depth in depths] == [
        len(list(slow_pairs(batch, depth, "target"))) for depth in (1, 2, 3)
    ]
    assert depths[0] == first[0]
    for name, grad in got.items():
        assert grad.any() if name.startswith("mtp.") else grad is None or not grad.any(), name
    only_first, _ = gradients(
        model, batch, num_drafts=3, **settings | dict(denominator=[7] + [math.inf] * 2)
    )
    close(
        {name: None if grad is None else 3 * grad for name, grad in only_first.items()},
        alone,
        rtol=1e-5,
    )
    drafts = draft_tokens(model, **batch.inputs, num_drafts=3)
    assert drafts.shape == (3, *batch.ids.shape)
    assert torch.equal(drafts[0], draft_tokens(model, **batch.inputs))
    assert torch.equal(drafts[:1], draft_tokens(model, **batch.inputs, num_drafts=1))


def test_a_model_with_k_layers_trains_and_drafts_by_its_layers(any_tiny):
    model, batch = any_tiny(mtp_layers=2), two_documents()
    drafts = []
    call = lambda: drafts.append(draft_tokens(model, **batch.inputs, num_drafts=2))  # noqa: E731
    states = hidden_states_of(model, call)
    wanted = [(state @ head_weight(model).t()).argmax(-1).t() for state in states]
    assert torch.equal(drafts[0], torch.stack(wanted))
    assert gradients(model, batch, num_drafts=2)[1] == gradients(model, batch)[1]


# --------------------------------------------------------------------------------------------------
# Several ranks
# --------------------------------------------------------------------------------------------------


OBJECTIVES = ("cross_entropy", "total_variation")


def one_training_step(tied, detach_trunk, objective, **overrides):
    """What was recorded, {name: (gradient, the dimension that is cut, or -1)}, and the drafts."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    model, batch = build_tiny(mtp_layers=2, tied=tied, **overrides), two_documents()
    settings = dict(detach_trunk=detach_trunk, rule="drafted", objective=objective)
    with patch_mtp_loss(model, **settings, chunk_tokens=3) as mtp:
        logits = model(**batch.inputs, **batch.targets)
        loss = vocab_parallel_cross_entropy(logits.clone(), batch.targets["labels"])
        ((loss * batch.targets["loss_mask"]).sum() / 12).backward()
    depths = [{name: float(x) for name, x in depth.items()} for depth in mtp.depths]
    grads = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            dim = p.partition_dim if getattr(p, "tensor_model_parallel", False) else -1
            grads[name] = p.grad.clone(), dim
    return depths, grads, draft_tokens(model, **batch.inputs)


def column_parallel_head(tp_size=1, sequence_parallel=False, **settings):
    """A biased head of vocabulary 16 over hidden size 8.

    Tokens 4 and 12 (rank 0 and 1 of 2) tie and win everywhere.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=tp_size,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    head = ColumnParallelLinear(8, 16, config=config, init_method=torch.nn.init.zeros_, **settings)
    generator = torch.Generator().manual_seed(0)
    weight, bias = (
        torch.randn(16, 8, generator=generator) / 10,
        torch.randn(16, generator=generator) / 10,
    )
    weight[12], bias[4], bias[12] = weight[4], 5, 5
    rank = torch.distributed.get_rank() % tp_size
    with torch.no_grad():
        head.weight.copy_(weight.chunk(tp_size)[rank])
        head.bias.copy_(bias.chunk(tp_size)[rank])
    return head


def head_cases(rank=0, tp_size=1):
    """loss, correct, gradient: heads that share the logits, gather them, or cut the sequence."""
    hidden, _, targets, mask = random_slots(6, 2, h=8, vocab=16, num_counted=9)
    targets[0, :3], targets[1, :3], mask[:, :3] = 4, 12, 1
    settings = (dict(skip_bias_add=True), dict(skip_bias_add=False), dict(gather_output=True))
    heads = [column_parallel_head(tp_size, **setting) for setting in settings]
    results = [
        run(mtp_cross_entropy, hidden, head, targets, mask, chunk_tokens=4) for head in heads
    ]
    head, shard = (
        column_parallel_head(tp_size, sequence_parallel=tp_size > 1),
        hidden.chunk(tp_size)[rank],
    )
    results.append(run(mtp_cross_entropy, shard, head, targets, mask, chunk_tokens=4))
    with pytest.raises(ValueError, match="a masked-in slot has target 16; wanted 0 to 15"):
        mtp_cross_entropy(shard, head, torch.full_like(targets, 16), mask)
    assert head.sequence_parallel == (tp_size > 1)
    assert all(p.grad is None for head in (*heads, head) for p in head.parameters())
    return results


def tensor_parallel_rank(rank):
    steps = [
        one_training_step(*case, tensor_parallel=2)
        for case in itertools.product((False, True), (False, True), OBJECTIVES)
    ]
    return steps, head_cases(rank, tp_size=2)


def test_two_tensor_parallel_ranks_equal_one(megatron):
    ranks = run_on_ranks(2, tensor_parallel_rank, tensor_parallel=2)
    wanted_steps = [
        one_training_step(*case)
        for case in itertools.product((False, True), (False, True), OBJECTIVES)
    ]
    for got, wanted in zip(
        zip(*(steps for steps, _ in ranks), strict=True), wanted_steps, strict=True
    ):
        for depths, grads, drafts in got:
            assert torch.equal(drafts, wanted[2]) and grads.keys() == wanted[1].keys()
            for depth, wanted_depth in zip(depths, wanted[0], strict=True):
                assert depth == pytest.approx(wanted_depth, rel=1e-6)
        for name, (grad, _) in wanted[1].items():
            (first, dim), (second, _) = (grads[name] for _, grads, _ in got)
            if dim < 0:
                assert torch.equal(first, second), name  # a weight that every rank holds
            elif "linear_fc1" in name:  # [gate; up] is cut inside each half
                first = torch.cat(
                    [torch.cat(pair) for pair in zip(first.chunk(2), second.chunk(2), strict=True)]
                )
            else:
                first = torch.cat([first, second], dim)
            torch.testing.assert_close(
                first, grad, rtol=1e-4, atol=1e-5 * grad.abs().max().item(), msg=name
            )
    wanted_cases = head_cases()
    assert (
        wanted_cases[0][1][0, :3].all() and not wanted_cases[0][1][1, :3].any()
    )  # of tied tokens 4 and 12, 4 wins
    for rank, (_, cases) in enumerate(ranks):
        for index, (got, (loss, correct, grad)) in enumerate(zip(cases, wanted_cases, strict=True)):
            assert torch.equal(got[1], correct)
            grad = grad.chunk(2)[rank] if index == 3 else grad
            torch.testing.assert_close((got[0], got[2]), (loss, grad), rtol=1e-5, atol=1e-6)


def context_parallel_cases():
    """Settings, packed or not, offsets, documents, masks, states of the trunk and of two depths.

    Only rank 0 of 4 has tokens.
    """
    generator = torch.Generator().manual_seed(1)
    for rule, packed, objective in itertools.product(
        ("target", "drafted"), (True, False), OBJECTIVES
    ):
        settings = dict(rule=rule, objective=objective)
        documents = random_documents(32, 16, 48) if packed else random_documents(48, 48)
        masks = [torch.randint(2, (len(document),), generator=generator) for document in documents]
        for mask in masks:
            mask[len(mask) // 8 :] = 0
            mask[1 - len(mask) // 8 :] = 1
        cu_seqlens = (
            [0, *itertools.accumulate(len(document) for document in documents)]
            if packed
            else [0, 48]
        )
        states = [
            torch.randn((96, 1, 64) if packed else (48, 2, 64), generator=generator)
            for _ in range(3)
        ]
        yield settings, packed, cu_seqlens, documents, [mask.tolist() for mask in masks], states


def cut_states(state, *where):
    return context_parallel_slice(state.transpose(0, 2), *where).transpose(0, 2).contiguous()


def context_parallel_rank(rank, cp_size):
    """The patch rolls this rank's labels and masks; the hidden states of the depths are given."""
    model, results = build_tiny(mtp_layers=2, context_parallel_size=cp_size), []
    for settings, packed, cu_seqlens, documents, masks, states in context_parallel_cases():
        batch, where = batch_of(documents, masks, dense=not packed), (cu_seqlens, cp_size, rank)
        trunk, *leaves = [cut_states(state, *where).requires_grad_() for state in states]
        # The toy's attention knows no context parallelism, and Megatron's rotary embedding asks
        # for CUDA there.
        model.position_embedding_type = "none"
        model.decoder.forward = lambda trunk=trunk, **_: trunk
        model.mtp.forward = lambda hidden_states, states=leaves, **_: torch.cat(
            [hidden_states, *states]
        )
        with patch_mtp_loss(model, **settings, denominator=7, chunk_tokens=5) as mtp:
            ids = context_parallel_slice(batch.ids, *where)
            logits = model(
                input_ids=ids,
                position_ids=ids,
                attention_mask=None,
                labels=context_parallel_slice(batch.targets["labels"], *where),
                loss_mask=context_parallel_slice(batch.targets["loss_mask"], *where),
                packed_seq_params=batch.inputs["packed_seq_params"],
            )
            (logits.sum() * 0).backward()
        depths = [{name: float(x) for name, x in depth.items()} for depth in mtp.depths]
        results.append((depths, [leaf.grad for leaf in leaves]))
    return results


@pytest.mark.parametrize("cp_size", [2, 4])
def test_zig_zag_shards_together_equal_the_undivided_batch(megatron, cp_size):
    """Against mtp_mask.py, which rolls the whole buffer; some ranks are without a token."""
    weight = head_weight(build_tiny(mtp_layers=2)).detach()
    ranks = run_on_ranks(cp_size, context_parallel_rank, cp_size, context_parallel=cp_size)
    least = []
    for case, (settings, packed, cu_seqlens, documents, masks, states) in enumerate(
        context_parallel_cases()
    ):
        trunk, *states = states
        ids, mask = (torch.tensor([sum(x, [])] if packed else x) for x in (documents, masks))
        cut = dict(cu_seqlens=cu_seqlens) if packed else {}
        for depth, state in enumerate(states, start=1):
            counts = depth_mask(mask, depth, rule=settings["rule"], **cut)
            targets = depth_targets(ids, depth, **cut)
            state.requires_grad_()
            if settings["objective"] == "cross_entropy":
                loss, correct = full_logits(state, weight, targets, counts)
            else:  # the main head predicts token t+1+depth at slot t+depth
                slots = torch.arange(ids.shape[1]).expand_as(ids)
                slots_BS = depth_targets(slots, depth - 1, **cut)
                policy = trunk.transpose(0, 1)[torch.arange(len(ids))[:, None], slots_BS]
                policy = policy.transpose(0, 1)
                loss, correct = full_total_variation(state, weight, targets, counts, policy=policy)
            wanted = dict(
                loss_sum=loss.sum().item(), tokens=int(counts.sum()), correct=int(correct.sum())
            )
            got = [results[case][0][depth - 1] for results in ranks]
            assert {name: sum(part[name] for part in got) for name in wanted} == pytest.approx(
                wanted, rel=1e-5
            )
            assert wanted["tokens"] > 0
            least.append(min(part["tokens"] for part in got))
            (grad,) = torch.autograd.grad(loss.sum() * 0.2 / 2 / 7, state)
            for rank, results in enumerate(ranks):
                share = cut_states(grad, cu_seqlens, cp_size, rank)
                torch.testing.assert_close(results[case][1][depth - 1], share, rtol=1e-4, atol=1e-7)
    assert 0 in least


def uneven_documents():
    return random_documents(6, 9), [
        [1, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 1, 1, 0, 0],
    ]  # nothing to train in the first


def data_parallel_rank(rank):
    documents, masks = uneven_documents()
    batch = batch_of(documents[rank : rank + 1], masks[rank : rank + 1])
    got, depths = gradients(build_tiny(mtp_layers=2), batch, policy=0.0, denominator=[3, 2])
    return got, [float(depth["tokens"]) for depth in depths]


def test_data_parallel_gradients_with_denominator_sum_to_the_undivided_batchs(megatron):
    (first, no_tokens), (second, tokens) = run_on_ranks(2, data_parallel_rank)
    whole, _ = gradients(
        build_tiny(mtp_layers=2), batch_of(*uneven_documents()), policy=0.0, denominator=[3, 2]
    )
    assert no_tokens == [0, 0] and tokens == [3, 3]
    close(
        {name: None if grad is None else grad + second[name] for name, grad in first.items()},
        whole,
        rtol=1e-6,
    )


# --------------------------------------------------------------------------------------------------
# draft_tokens
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("depths", [1, 2])
def test_a_draft_is_depth_ones_arg_max_for_the_token_after_next(any_tiny, depths, tied):
    model, batch = any_tiny(mtp_layers=depths, tied=tied, vocab_size=4), two_documents(vocab=4)
    model.decoder.eval()  # a mixture of modes, to be kept
    modes = [module.training for module in model.modules()]
    drafts = []
    states = hidden_states_of(model, lambda: drafts.append(draft_tokens(model, **batch.inputs)))
    (draft,) = drafts
    assert draft.shape == batch.ids.shape and draft.dtype == torch.int64
    assert torch.equal(draft, (states[0] @ head_weight(model).t()).argmax(-1).t())
    assert modes == [module.training for module in model.modules()]
    with patch_mtp_loss(
        model
    ) as mtp:  # top-1 of depth 1 is how often the draft in slot t is token t+2
        model(**batch.inputs, **batch.targets)
        assert torch.equal(draft_tokens(model, **batch.inputs), draft)
        correct = sum(int(draft[0, t] == y) for t, y in slow_pairs(batch, 1, "target"))
        assert mtp.depths[0]["correct"] == correct > 0
        model(**batch.inputs, **batch.targets)
        assert len(mtp.depths) == depths


def test_a_draft_sees_no_token_beyond_the_next_and_no_other_document(any_tiny):
    model = any_tiny()
    documents = random_documents(12, 8)
    whole = draft_tokens(model, **batch_of(documents).inputs)[0]
    for end in (2, 7):
        assert torch.equal(
            draft_tokens(model, **batch_of([documents[0][:end]]).inputs)[0, : end - 1],
            whole[: end - 1],
        )
    assert torch.equal(draft_tokens(model, **batch_of(documents[1:]).inputs)[0], whole[12:])
