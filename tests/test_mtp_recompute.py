"""Fix 3: checkpoint_tensors, patch_mtp_recompute; megatron-core 0.16.1, 0.17.1, 0.18.2, 0.19.2."""

import collections
import contextlib
import functools
import gc
import importlib.util
import pathlib
import weakref
from dataclasses import dataclass

import conftest
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import toy.model
from mtp_loss import patch_mtp_loss
from mtp_recompute import checkpoint_tensors, patch_mtp_recompute
from toy.hybrid import build_hybrid_model

reentrant = functools.partial(torch_checkpoint, use_reentrant=True)
DOCUMENTS = [
    list(range(16)),
    list(range(20, 44)),
    list(range(50, 62)),
]  # 16, 24 and 12 tokens (case 19)


def before(checkpoint, function, *args, **kwargs):
    """megatron-core 0.16.1 and 0.17.1, MultiTokenPredictionLayer._checkpointed_forward."""
    return checkpoint(function, *args, *kwargs.values())


# --------------------------------------------------------------------------------------------------
# checkpoint_tensors
# --------------------------------------------------------------------------------------------------


def without_recompute(run, *tensors):
    return run(*tensors)


def test_the_checkpoint_gets_every_tensor_and_the_function_what_it_was_called_with():
    a, b, c, d = (torch.tensor(float(x)) for x in range(4))
    packed = toy.model.pack([[1, 2]])[2]
    given, seen = [], []

    def checkpoint(run, *tensors):
        given.extend(tensors)
        return run(*(tensor + 10 for tensor in tensors))

    def function(*args, **kwargs):
        seen.append((args, kwargs))
        return "out"

    result = checkpoint_tensors(
        checkpoint, function, a, None, [b, {"c": c}], packed, 3, last=(d, "x"), other=None
    )
    assert result == "out"
    assert [id(tensor) for tensor in given] == [id(tensor) for tensor in (a, b, c, d)]
    assert seen == [
        ((10.0, None, [11.0, {"c": 12.0}], packed, 3), {"last": (13.0, "x"), "other": None})
    ]
    assert seen[0][0][3] is packed


@dataclass
class Inputs:
    tensor: torch.Tensor


Pair = collections.namedtuple("Pair", "left right")


class MyDict(dict):
    label = "kept"


class MyList(list):
    pass


@pytest.mark.parametrize(
    "leaf", [None, 3, "x", Inputs(torch.ones(1)), [], [1, [2]], {"k": (1, 2)}, (), Pair(1, 2), {1}]
)
def test_what_holds_no_tensor_comes_back_as_the_identical_object(leaf):
    seen = checkpoint_tensors(
        without_recompute, lambda *args, **kwargs: (args, kwargs), leaf, torch.ones(1), k=[leaf]
    )
    assert seen[0][0] is leaf and seen[1]["k"][0] is leaf


def test_a_container_that_holds_a_tensor_is_rebuilt_as_its_own_type_and_the_callers_is_left_alone():
    x = torch.ones(1)
    my_dict, my_list = MyDict(t=x, b=1), MyList([x, None])
    my_dict.label = "mine"
    factory = collections.defaultdict(list, t=x)
    ordered = collections.OrderedDict([("z", x), ("a", x)])
    arguments = [my_dict, my_list, factory, ordered, Pair(x, 2), (x,), torch.ones(2, 2).max(0)]
    copies = [dict(my_dict), list(my_list)]
    seen = checkpoint_tensors(
        lambda run, *tensors: run(*[t + 1 for t in tensors]), lambda *args: args, *arguments
    )
    assert [type(value) for value in seen] == [type(value) for value in arguments]
    assert seen[0] == {"t": 2.0, "b": 1} and seen[0].label == "mine"
    assert (
        seen[1] == [2.0, None] and seen[2].default_factory is list and list(seen[3]) == ["z", "a"]
    )
    assert seen[4] == Pair(2.0, 2)
    assert [dict(my_dict), list(my_list)] == copies and my_dict["t"] is x


trees = st.recursive(
    st.one_of(
        st.integers(),
        st.none(),
        st.text(max_size=2),
        st.builds(lambda x: torch.tensor(float(x)), st.integers(0, 9)),
    ),
    lambda child: st.one_of(
        st.lists(child, max_size=3),
        st.lists(child, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), child, max_size=3),
        st.builds(Pair, child, child),
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(st.lists(trees, max_size=3), st.dictionaries(st.sampled_from("xyz"), trees, max_size=3))
def test_any_structure_arrives_as_it_was_given(args, kwargs):
    def count(tree):
        if isinstance(tree, (list, tuple)):
            return sum(count(value) for value in tree)
        return (
            sum(count(value) for value in tree.values())
            if isinstance(tree, dict)
            else isinstance(tree, torch.Tensor)
        )

    given = []

    def checkpoint(run, *tensors):
        given.extend(tensors)
        run(
            *[torch.full_like(tensor, -1) for tensor in tensors]
        )  # a first run leaves nothing behind
        return run(*tensors)

    seen = checkpoint_tensors(checkpoint, lambda *args, **kwargs: (args, kwargs), *args, **kwargs)
    assert len(given) == count(args) + count(kwargs)
    assert seen == (tuple(args), kwargs)  # tensors compare by their single element
    assert list(seen[1]) == list(kwargs)


def test_tensors_inside_tuples_and_dicts_keep_their_gradient():
    def function(x, pair, *, table, scale):
        return scale * (x * pair[0]).sum() + (pair[1] * table["t"][0]).exp().sum()

    def gradients(call):
        x, y, z, t = leaves = [torch.linspace(i, i + 1, 3, requires_grad=True) for i in range(4)]
        call(function, x, (y, z), table={"t": [t]}, scale=2.0).backward()
        return [leaf.grad for leaf in leaves]

    expected = gradients(lambda function, *args, **kwargs: function(*args, **kwargs))
    found = gradients(functools.partial(checkpoint_tensors, reentrant))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_order_of_keywords_is_irrelevant_and_the_old_code_swaps_them():
    def function(hidden, embedding):
        return hidden - embedding

    hidden, embedding = torch.tensor(3.0, requires_grad=True), torch.tensor(1.0)
    assert checkpoint_tensors(reentrant, function, embedding=embedding, hidden=hidden) == 2
    assert before(reentrant, function, embedding=embedding, hidden=hidden) == -2


def test_the_closure_holds_no_tensor_so_that_activations_are_freed_by_the_backward_pass():
    leaf = torch.ones(3, requires_grad=True)
    hidden = leaf * 2
    gone = weakref.ref(hidden)
    output = checkpoint_tensors(
        reentrant, lambda hidden, *, pair: (hidden + pair[0]).sum(), hidden, pair=(hidden,)
    )
    del hidden
    output.backward()
    gc.collect()
    assert gone() is None and leaf.grad.tolist() == [4, 4, 4]  # `output` is still there


def test_a_tensor_that_the_checkpoint_loses_is_missed():
    with pytest.raises((StopIteration, ValueError)):
        checkpoint_tensors(
            lambda run, *tensors: run(tensors[0]), print, torch.ones(1), torch.ones(1)
        )


# --------------------------------------------------------------------------------------------------
# patch_mtp_recompute: numbers
# --------------------------------------------------------------------------------------------------


def release():
    import megatron.core

    return megatron.core.__version__.rsplit(".", 1)[0]


def batch(packed):
    """Three documents in one buffer, or the first two of equal length as rows."""
    input_ids, position_ids, params = toy.model.pack(DOCUMENTS)
    if not packed:
        input_ids, params = input_ids[:, :48].reshape(2, 24), None
        position_ids = torch.arange(24).expand(2, -1)
    loss_mask = (
        torch.rand(input_ids.shape, generator=torch.Generator().manual_seed(3)) < 0.7
    ).float()
    kwargs = dict(labels=input_ids.roll(-1, -1), loss_mask=loss_mask, packed_seq_params=params)
    return (input_ids, position_ids, None), kwargs


def set_recompute(model, method="uniform", num_layers=1, granularity="full"):
    model.config.recompute_granularity = granularity
    model.config.recompute_method, model.config.recompute_num_layers = method, num_layers


def loss_and_gradients(model, order=((True, "fb"),)):
    """Runs `order`, pairs of (packed, f forward or b backward of the oldest); sums gradients."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker = {}  # sized by the first model that ran, of whatever depth
    model_parallel_cuda_manual_seed(11, force_reset_rng=True)
    torch.manual_seed(11)
    model.zero_grad()
    losses, pending = [], []
    for packed, steps in order:
        for step in steps:
            if step == "f":
                args, kwargs = batch(packed)
                pending.append((model(*args, **kwargs) * kwargs["loss_mask"]).sum())
                losses.append(pending[-1].detach())
            else:
                pending.pop(0).backward()
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(found, expected, *, rtol):
    assert [loss.item() for loss in found[0]] == [loss.item() for loss in expected[0]]
    for name, gradient in expected[1].items():
        assert (gradient is None) == (found[1][name] is None), name
        if gradient is not None:
            error = (found[1][name] - gradient).abs().max()
            assert error <= rtol * gradient.abs().max(), f"{name}: {error}"


@contextlib.contextmanager
def detached_trunk(model, *, view=True):
    """Both inputs of the first MTP layer detached, as in RL; depth 2 still gets depth 1's."""

    def detach(layer, args, kwargs):
        embedding = kwargs["embedding"]
        kwargs = kwargs | {"embedding": lambda **inputs: embedding(**inputs).detach()}
        if layer.layer_number == 1:
            hidden = kwargs["hidden_states"] if view else kwargs["hidden_states"].clone()
            kwargs["hidden_states"] = hidden.detach()
        return args, kwargs

    hooks = [
        layer.register_forward_pre_hook(detach, with_kwargs=True) for layer in model.mtp.layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


STOCK = {  # what full recompute of a packed batch does before the patch
    "0.16": (
        TypeError,
        "save_for_backward can only save variables, but argument .* is of type PackedSeqParams",
    ),
    "0.17": (
        TypeError,
        "save_for_backward can only save variables, but argument .* is of type PackedSeqParams",
    ),
    "0.18": (
        TypeError,
        "_checkpointed_forward.. got an unexpected keyword argument 'padding_mask'",
    ),
}


def test_stock_megatron_cannot_recompute_a_packed_mtp_layer_before_0_19(tiny):
    model = tiny()
    set_recompute(model)
    error, message = STOCK.get(release(), (None, None))
    with pytest.raises(error, match=message) if error else contextlib.nullcontext():
        loss_and_gradients(model)
    with patch_mtp_recompute() as needed:
        assert needed is (error is not None)
        loss_and_gradients(model)


@pytest.mark.parametrize("detached", [False, True], ids=["trunk", "detached"])
@pytest.mark.parametrize("depth", [1, 2])
def test_loss_and_every_gradient_are_those_without_recompute(tiny, depth, detached):
    model = tiny(mtp_layers=depth, hidden_dropout=0.1, attention_dropout=0.1)
    orders = [
        ((True, "fb"),),
        ((False, "fb"),),
        ((True, "ffbb"),),  # two forwards, then two backwards
        ((True, "f"), (False, "fb"), (True, "fbb")),  # accumulation over micro-batches, interleaved
    ]
    with detached_trunk(model) if detached else contextlib.nullcontext():
        for order in orders:
            set_recompute(model, granularity=None)
            expected = loss_and_gradients(model, order)
            set_recompute(model)
            with patch_mtp_recompute():
                found = loss_and_gradients(model, order)
            assert_same(found, expected, rtol=0 if depth == 1 else 1e-6)
            trained = [gradient for name, gradient in found[1].items() if name.startswith("mtp.")]
            assert trained and all(gradient is not None and gradient.any() for gradient in trained)


def test_dropout_is_on_in_the_tests_above(tiny):
    plain, dropping = (
        loss_and_gradients(tiny(hidden_dropout=p, attention_dropout=p))[0] for p in (0.0, 0.1)
    )
    assert plain != dropping


@pytest.mark.parametrize("view", [True, False], ids=["view", "no view"])
def test_with_both_inputs_detached_all_mtp_parameters_train_and_in_stock_0_16_and_0_17_none(
    tiny, view
):
    model = tiny()
    set_recompute(model)

    def trained(order):
        gradients = loss_and_gradients(model, order)[1]
        return {gradients[name] is not None for name in gradients if name.startswith("mtp.")}

    with detached_trunk(model, view=view):
        if release() in ("0.16", "0.17"):
            assert trained([(False, "fb")]) == {False}
        with patch_mtp_recompute():
            assert trained([(False, "fb")]) == trained([(True, "fb")]) == {True}


@pytest.mark.parametrize("detach_trunk", [True, False])
def test_it_composes_with_patch_mtp_loss_in_either_order(tiny, detach_trunk):
    model = tiny(hidden_dropout=0.1)
    args, kwargs = batch(packed=True)

    def gradients(granularity, *contexts):
        set_recompute(model, granularity=granularity)
        torch.manual_seed(5)
        model.zero_grad()
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            model(*args, **kwargs).logsumexp(-1).sum().backward()
        return [
            None if parameter.grad is None else parameter.grad.clone()
            for parameter in model.parameters()
        ]

    def mtp():
        return patch_mtp_loss(model, detach_trunk=detach_trunk)

    expected = gradients(None, mtp())
    for contexts in (mtp(), patch_mtp_recompute()), (patch_mtp_recompute(), mtp()):
        found = gradients("full", *contexts)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def hybrid(**settings):
    """A HybridModel with every weight random; dropout as in the tests of GPTModel."""
    if release() in ("0.16", "0.17"):
        pytest.skip("no HybridModel before 0.18")
    config = toy.model.mimo_config(hidden_size=64, num_heads=2, ffn_size=96, **settings)
    model = build_hybrid_model(config, hidden_dropout=0.1, attention_dropout=0.1)
    conftest.random_weights(model, 0)
    return model


def test_stock_0_18_cannot_recompute_a_hybrid_model_either(megatron):
    model = hybrid()
    set_recompute(model)
    error, message = STOCK.get(release(), (None, None))
    with pytest.raises(error, match=message) if error else contextlib.nullcontext():
        loss_and_gradients(model)


@pytest.mark.parametrize("detached", [False, True], ids=["trunk", "detached"])
@pytest.mark.parametrize("depth, tied", [(1, False), (1, True), (2, False)])
def test_a_hybrid_model_too_recomputes_with_the_gradients_of_a_run_without(
    megatron, depth, tied, detached
):
    model = hybrid(mtp_layers=depth, tied=tied)
    with detached_trunk(model) if detached else contextlib.nullcontext():
        for order in [(True, "fb")], [(False, "fb")], [(True, "f"), (False, "fb"), (True, "fbb")]:
            set_recompute(model, granularity=None)
            expected = loss_and_gradients(model, order)
            set_recompute(model)
            with patch_mtp_recompute():
                found = loss_and_gradients(model, order)
            assert_same(found, expected, rtol=0 if depth == 1 else 1e-6)
            trained = [gradient for name, gradient in found[1].items() if name.startswith("mtp.")]
            assert trained and all(gradient is not None and gradient.any() for gradient in trained)


def two_ranks(rank):
    """Tensor parallel 2: recompute against none, and the same loss as on one rank."""
    results = []
    for depth in (1, 2):
        model = conftest.build_tiny(
            mtp_layers=depth,
            tensor_model_parallel_size=2,
            hidden_dropout=0.1,
            attention_dropout=0.1,
        )
        for detached in (False, True):
            with (
                detached_trunk(model) if detached else contextlib.nullcontext(),
                patch_mtp_recompute(),
            ):
                for order in ((True, "fb"),), ((False, "ffbb"),):
                    set_recompute(model, granularity=None)
                    expected = loss_and_gradients(model, order)
                    set_recompute(model)
                    found = loss_and_gradients(model, order)
                    assert_same(found, expected, rtol=0 if depth == 1 else 1e-6)
                    assert all(
                        gradient is not None for name, gradient in found[1].items() if "mtp" in name
                    )
                    results.append(found[0])
    return results


def test_tensor_parallel_ranks_recompute_alike():
    first, second = conftest.run_on_ranks(2, two_ranks, tensor_parallel=2)
    assert first == second and len(first) == 8


# --------------------------------------------------------------------------------------------------
# patch_mtp_recompute: methods, nesting, other people's wrappers
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def layer_class(megatron):
    """Megatron's MTP layer class; whatever a test leaves on it is taken off again."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    found = MultiTokenPredictionLayer._checkpointed_forward
    yield MultiTokenPredictionLayer
    left, MultiTokenPredictionLayer._checkpointed_forward = (
        MultiTokenPredictionLayer._checkpointed_forward,
        found,
    )
    assert left is found, "the class was not left as it was found"


def test_block_runs_without_recompute_and_warns(tiny):
    model = tiny()
    set_recompute(model, granularity=None)
    expected = loss_and_gradients(model)
    set_recompute(model, "block", 1)
    with patch_mtp_recompute(), pytest.warns(UserWarning, match="block.*not supported for MTP"):
        assert_same(loss_and_gradients(model), expected, rtol=0)


def run_layer(model):
    """The MTP layer alone: the trunk has its own opinion about FP8 and recompute methods."""
    return model.mtp.layers[0](
        input_ids=torch.ones(1, 4, dtype=torch.long),
        position_ids=torch.arange(4)[None],
        hidden_states=torch.full((4, 1, 64), 0.5),
        attention_mask=None,
        packed_seq_params=toy.model.pack([[1, 1, 1, 1]])[2],
        embedding=lambda **unused: torch.full((4, 1, 64), 0.25),
    )[0]


def test_uniform_wants_one_layer_and_an_unknown_method_is_refused(tiny):
    model = tiny()
    with patch_mtp_recompute():
        set_recompute(model, "uniform", 2)
        with pytest.raises(AssertionError, match="recompute_num_layers must be 1"):
            run_layer(model)
        set_recompute(model, "every other", 1)
        with pytest.raises(ValueError, match="Invalid activation recompute method"):
            run_layer(model)


def test_fp8_goes_to_transformer_engines_checkpoint_with_tensors_only(tiny, monkeypatch):
    import megatron.core.extensions.transformer_engine as extension

    model = tiny()
    set_recompute(model)
    model.config.fp8 = "e4m3"
    calls = []

    def te_checkpoint(run, distribute, rng_tracker, group, *tensors):  # no keywords
        calls.append(tensors)
        return tensors[0]

    with patch_mtp_recompute():
        if not extension.HAVE_TE:
            with pytest.raises(ImportError, match="Transformer Engine is not installed"):
                run_layer(model)
        monkeypatch.setattr(extension, "te_checkpoint", te_checkpoint)
        run_layer(model)
    assert len(calls) == 1 and all(
        tensor is None or isinstance(tensor, torch.Tensor) for tensor in calls[0]
    )


def test_the_padding_mask_reaches_the_layer_now_and_in_the_backward_pass(tiny, monkeypatch):
    if release() in ("0.16", "0.17"):
        pytest.skip("no padding_mask before 0.18")
    layer, seen = tiny().mtp.layers[0], []
    set_recompute(layer)
    forward = layer._proj_and_transformer_layer

    def spy(**kwargs):
        seen.append(kwargs["padding_mask"])
        return forward(**kwargs)

    monkeypatch.setattr(layer, "_proj_and_transformer_layer", spy)
    mask = torch.zeros(1, 4, dtype=torch.bool)
    state = torch.ones(4, 1, 64, requires_grad=True)
    with patch_mtp_recompute():
        output = layer._checkpointed_forward(
            hidden_states=state, decoder_input=state, padding_mask=mask
        )
    output.sum().backward()
    assert len(seen) == 2 and all(given.data_ptr() == mask.data_ptr() for given in seen)


def test_nested_use_and_use_twice_leave_the_class_as_it_was_found(layer_class):
    found = layer_class._checkpointed_forward
    for _ in range(2):
        with patch_mtp_recompute() as outer:
            patched = layer_class._checkpointed_forward
            assert (patched is not found) is outer
            with patch_mtp_recompute() as inner:
                assert inner is outer and layer_class._checkpointed_forward is patched
            assert layer_class._checkpointed_forward is patched
        assert layer_class._checkpointed_forward is found


def test_an_error_inside_leaves_the_class_as_it_was_found(layer_class):
    found = layer_class._checkpointed_forward
    with pytest.raises(KeyError, match="inside"), patch_mtp_recompute(), patch_mtp_recompute():
        raise KeyError("inside")
    assert layer_class._checkpointed_forward is found


@pytest.mark.parametrize("wraps", [True, False])
def test_somebody_elses_wrapper_stays_in_the_chain(tiny, layer_class, wraps):
    original, calls = layer_class._checkpointed_forward, []
    model = tiny()
    set_recompute(model, granularity=None)
    expected = loss_and_gradients(model)
    set_recompute(model)
    if wraps:

        @functools.wraps(original)
        def theirs(*args, **kwargs):
            calls.append(args)
            return original(*args, **kwargs)

    elif release() in ("0.16", "0.17"):

        def theirs(self, forward_func, *args, **kwargs):
            calls.append(args)
            return original(self, forward_func, *args, **kwargs)

    else:
        pytest.skip("a signature of thirteen names is copied with functools.wraps or not at all")
    layer_class._checkpointed_forward = theirs
    with patch_mtp_recompute():
        assert_same(loss_and_gradients(model), expected, rtol=0)
        with patch_mtp_recompute():
            loss_and_gradients(model)
    assert len(calls) == 2 and layer_class._checkpointed_forward is theirs
    layer_class._checkpointed_forward = original


@pytest.mark.parametrize(
    "theirs",
    [lambda self, *args, **kwargs: None, functools.partial(print), staticmethod(print), None, 3],
)
def test_a_method_that_cannot_be_read_is_refused_by_name_and_left_in_place(layer_class, theirs):
    original = layer_class._checkpointed_forward
    layer_class._checkpointed_forward = theirs
    found = vars(layer_class)["_checkpointed_forward"]
    name = "test_mtp_recompute.py" if hasattr(theirs, "__code__") else str(theirs)[:9]
    with pytest.raises(
        RuntimeError, match=f"_checkpointed_forward is .*{name}.* megatron-core 0.16 to 0.19"
    ):
        with patch_mtp_recompute():
            pass
    assert vars(layer_class)["_checkpointed_forward"] is found
    layer_class._checkpointed_forward = original


def test_another_release_is_refused_by_what_was_looked_for(layer_class, monkeypatch):
    monkeypatch.setattr(
        layer_class, "_proj_and_transformer_layer", lambda self, hidden_states, new_input: None
    )
    message = "MultiTokenPredictionLayer._checkpointed_forward .* megatron-core 0.16 to 0.19"
    if release() in ("0.16", "0.17"):  # told by its own signature alone
        pytest.skip("their method takes whatever comes")
    with pytest.raises(RuntimeError, match=message):
        with patch_mtp_recompute():
            pass


def test_a_wrapper_put_on_inside_is_seen_through_and_announced_when_it_leaves_with_the_patch(
    layer_class,
):
    if release() not in STOCK:
        pytest.skip("this release is not patched")
    found = layer_class._checkpointed_forward
    with pytest.warns(
        UserWarning, match="theirs was put on inside patch_mtp_recompute and leaves with it"
    ):
        with patch_mtp_recompute():

            @functools.wraps(layer_class._checkpointed_forward)
            def theirs(self):
                pass

            layer_class._checkpointed_forward = theirs
            with patch_mtp_recompute() as needed:
                assert needed and layer_class._checkpointed_forward is theirs
    assert layer_class._checkpointed_forward is found


def test_the_benchmark_sees_far_fewer_bytes_saved_by_the_mtp_layer(megatron):
    path = pathlib.Path(__file__).parents[1] / "benchmarks" / "bench_recompute.py"
    spec = importlib.util.spec_from_file_location("bench_recompute", path)
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    result = bench.measure(hidden_size=64, num_tokens=64)
    assert 0 < result["bytes_recompute"] < 0.4 * result["bytes_plain"]
