"""Fix 7 of 7: several drafts from one MTP layer, trained as the engine drafts them.

Bug     An engine drafts k tokens with one MTP layer: it feeds the layer its own output k-1 times. Training at depth 1
        never shows the layer its own output. Megatron's mtp_use_repeated_layer does, but lets depth j attend to the
        keys of depth j alone, which no engine ever has: it rolls the whole sequence and runs the layer anew.
Rule    Depth j at slot t takes the embedding of token t+j, the layer's own output of depth j-1 at slot t, and position
        t+j-1. It attends to depth 1's keys of slots 0 to t, the verified tokens, and to one key of each depth 2 to j,
        its own chain's. The tokens are those that came: an engine's later draft counts only if all before it did.

            k = 3, five slots                 the keys that exist, by depth and slot
            query       depth 1, slots 0-4    depth 2, slots 0-4    depth 3, slots 0-4
            depth 1       # . . . .             . . . . .             . . . . .          Megatron's own causal mask
                          # # . . .             . . . . .             . . . . .
                          # # # . .             . . . . .             . . . . .
                          # # # # .             . . . . .             . . . . .
                          # # # # #             . . . . .             . . . . .
            depth 2       # . . . .             # . . . .             . . . . .          the same on depth 1's keys,
                          # # . . .             . # . . .             . . . . .          a diagonal on depth 2's
                          # # # . .             . . # . .             . . . . .
                          # # # # .             . . . # .             . . . . .
                          # # # # #             . . . . #             . . . . .
            depth 3       # . . . .             # . . . .             # . . . .          and one on depth 3's
                          # # . . .             . # . . .             . # . . .
                          # # # . .             . . # . .             . . # . .
                          # # # # .             . . . # .             . . . # .
                          # # # # #             . . . . #             . . . . #

        All slots run at once: a depth costs one causal matrix and j-1 columns, joined in one softmax.
Source  vllm@0.32.0 v1/spec_decode/llm_base_proposer.py, propose; stands around _proj_and_transformer_layer of
        megatron/core/transformer/multi_token_prediction.py, megatron-core 0.16.1, 0.17.1, 0.18.2 and 0.19.2. FastMTP
        (arXiv 2509.18362) trains one head recursively, by rolling.
Shapes  s slots, b rows, h hidden size; packed: T slots of all documents. N query heads of D numbers; Q rows of queries
        and S of keys in one document.
Limits  Not run: Transformer Engine's attention, whose inputs are the same, and FP8.
Use     with draft_recursion(model, num_drafts=3):
            states = model.mtp(hidden_states=..., ...)  # [(1 + 3) s, b, h]: trunk, depth 1, depth 2, depth 3
        patch_mtp_loss(model, num_drafts=3) and draft_tokens(..., num_drafts=3) of mtp_loss.py do that for you.
Run     python mtp_recursion.py prints the picture, taken from a toy model's gradients; tests/test_mtp_recursion.py is
        the specification.
"""

import contextlib
import copy
import functools
import inspect
import itertools

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_ROWS = (
    1024  # rows of queries whose scores exist at a time: 1 GiB in fp32 for 32 heads and 8192 keys
)


@contextlib.contextmanager
def draft_recursion(model, num_drafts):
    """Inside, model.mtp returns the trunk's state and num_drafts depths of its one layer, one behind the other.

    model       GPTModel or HybridModel (a chunk with MTP, unwrapped) with one MTP layer, megatron-core 0.16 to 0.19;
                an inner HybridStack of attention, MLP and MoE layers. Dense [b, s] or packed input.
    num_drafts  k, 1 or more. 1 is Megatron's own forward, bit for bit.

    model.mtp(...) then gives [(1 + k) s, b, h]; depth j at slot t predicts token t+1+j. Slots whose token t+j is not in
    the document hold numbers without a meaning, which reach no other slot. Gradient flows through the chain, to depth
    1's keys and values, and to hidden_states and embedding as far as the caller did not detach them. Full recompute
    runs the whole chain inside one of Megatron's checkpoints, also after this context has ended.

    In any order with match_vllm_mimo: the embedding at position 0 is zero for depth 1 alone, since later depths stand
    at later positions, as in vLLM. ValueError: several MTP layers, or a setting whose attention is another (see
    _check_model); RuntimeError: entered twice, or Megatron's parts are not the ones expected. On exit, also after an
    error, the model is as it was found.
    """
    _check_model(model, num_drafts)
    layer = model.mtp.layers[0]
    signature = inspect.signature(layer._proj_and_transformer_layer)
    attentions = [module for module in layer.modules() if hasattr(module, "core_attention")]

    def chain(*args, **kwargs):
        first = signature.bind(*args, **kwargs).arguments
        states = []
        with contextlib.ExitStack() as stack:
            for attention in attentions:
                stack.enter_context(_chain_attention(attention, num_drafts))
            for depth in range(1, num_drafts + 1):
                shifted = {name: _ahead(first.get(name), depth - 1) for name in SHIFTED}
                state = {"hidden_states": states[-1]} if states else {}
                states.append(layer._proj_and_transformer_layer(**first | shifted | state))
        return torch.cat(states)

    def forward(*args, **kwargs):
        # A copy that shares every parameter. Recompute calls the layer's method in the backward pass, when this context
        # may have ended: what is set on the copy lives as long as the graph.
        twin = copy.copy(layer)
        twin._proj_and_transformer_layer = chain
        return type(layer).forward(twin, *args, **kwargs)

    with _replaced(layer, "forward", forward):
        yield


# What depth j takes from slot t+j-1 of depth 1: the embedding of token t+j, and position t+j-1. The shift crosses into
# the next document only where token t+j is not in this one.
SHIFTED = ("decoder_input", "rotary_pos_emb")


def _ahead(tensor_S, slots):
    """Row t holds row t + slots; the last row stands in for those behind the end."""
    if tensor_S is None or not slots:
        return tensor_S
    return torch.cat(
        [tensor_S[slots:], tensor_S[-1:].expand(min(slots, len(tensor_S)), *tensor_S.shape[1:])]
    )


@contextlib.contextmanager
def _chain_attention(attention, num_drafts):
    """Inside, the first call of the attention's core is its own, and each later one is the next depth's."""
    core, keys, values = attention.core_attention, [], []
    stock = core.forward

    def forward(query, key, value, attention_mask=None, packed_seq_params=None, **rest):
        keys.append(key)
        values.append(value)
        if len(keys) == 1:
            return stock(
                query, key, value, attention_mask, packed_seq_params=packed_seq_params, **rest
            )
        scale = attention.config.softmax_scale or query.shape[-1] ** -0.5
        return _attend(query * scale, keys, values, attention_mask, packed_seq_params)

    # Megatron's recompute of the core alone would hand out depth 1's keys without their graph.
    with (
        _replaced(core, "forward", forward),
        _replaced(attention, "checkpoint_core_attention", False),
    ):
        yield
    if len(keys) != num_drafts:
        came = f"{type(attention).__name__} called its core_attention {len(keys)} times"
        raise RuntimeError(
            f"{came}; wanted {num_drafts}, once a depth: use megatron-core 0.16 to 0.19"
        )


def _attend(query, keys, values, attention_mask, packed):
    """Depth len(keys): causal over keys[0] within each document, and one key of each later depth a slot.

    query, keys, values  [s, b, N, D], or packed [T, N, D]; keys and values may have fewer heads (GQA).
    attention_mask       None, or bool [b or 1, 1, s, s]: what a dense slot may not see, beside its future.
    """
    batch = packed is None
    repeats = query.shape[-2] // keys[0].shape[-2]
    states = [query] + [x.repeat_interleave(repeats, -2) for x in (*keys, *values)]
    states = [(x if batch else x[:, None]).permute(1, 2, 0, 3) for x in states]  # [b, N, s, D]
    query, keys, values = states[0], states[1 : 1 + len(keys)], states[1 + len(keys) :]
    outs = []
    for first, end in [(0, query.shape[2])] if batch else _documents(packed):
        run = _attend_rows
        if end - first > CHUNK_ROWS:  # or the backward pass would keep the scores of all chunks
            run = functools.partial(checkpoint, _attend_rows, use_reentrant=False)
        for start in range(first, end, CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, end)
            seen, rows = slice(first, stop), slice(start, stop)
            hidden_QS = torch.ones(
                stop - start, stop - first, dtype=torch.bool, device=query.device
            )
            hidden_QS = hidden_QS.triu(1 + start - first)
            if batch and attention_mask is not None:
                hidden_QS = hidden_QS | attention_mask[..., rows, seen]
            chain = [x[:, :, rows] for x in (*keys[1:], *values[1:])]
            outs.append(
                run(
                    query[:, :, rows], keys[0][:, :, seen], values[0][:, :, seen], hidden_QS, *chain
                )
            )
    out = torch.cat(outs, 2).permute(2, 0, 1, 3).flatten(2)  # [s, b, N * D]
    return out if batch else out[:, 0]


def _attend_rows(query, key, value, hidden_QS, *chain):
    """One softmax over S keys of depth 1 and the slot's own keys of later depths; query is scaled already."""
    keys, values = chain[: len(chain) // 2], chain[len(chain) // 2 :]
    scores = (query @ key.mT).masked_fill(hidden_QS, -torch.inf)
    own = torch.stack([(query * x).sum(-1) for x in keys], -1)  # [b, N, Q, depths 2 to j]
    weights = torch.cat([scores, own], -1).softmax(-1, dtype=torch.float32).to(query.dtype)
    weights, own = weights.split([scores.shape[-1], own.shape[-1]], -1)
    return weights @ value + (own[..., None, :] @ torch.stack(values, -2))[..., 0, :]


def _documents(packed):
    """(first slot, end) of each document that is not empty, padding behind it included."""
    padded = packed.cu_seqlens_q_padded
    offsets = (packed.cu_seqlens_q if padded is None else padded).tolist()
    return [(first, end) for first, end in itertools.pairwise(offsets) if first < end]


@contextlib.contextmanager
def _replaced(owner, name, value):
    """Sets owner.name, and afterwards puts back what was there, or nothing where only the class had it."""
    before = {name: vars(owner)[name]} if name in vars(owner) else {}
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        vars(owner).update(before)


def _check_model(model, num_drafts):
    import megatron.core

    layers, config = model.mtp.layers, model.config
    # With mtp_use_repeated_layer one layer is called several times.
    if len(layers) != 1 or config.mtp_num_layers not in (None, 1) or num_drafts < 1:
        came = f"{len(layers)} MTP layers, mtp_num_layers {config.mtp_num_layers}, num_drafts {num_drafts}"
        raise ValueError(
            f"{came}; wanted one layer called once, and a draft or more: build it with mtp_num_layers=1"
        )
    served = {
        "context_parallel_size": 1,  # a rank's slots see keys of other ranks
        "sequence_parallel": False,  # the shift by a slot crosses ranks
        "attention_dropout": 0,
        "multi_latent_attention": False,  # makes its own rotary embedding, not shifted
        "experimental_attention_variant": None,
        "window_size": None,
        "softmax_type": "vanilla",
        "cuda_graph_impl": "none",  # a graph would not call what stands in for the attention
    }
    wrong = {name: getattr(config, name, good) for name, good in served.items()}
    wrong = {name: value for name, value in wrong.items() if value != served[name]}
    if wrong:
        wanted = ", ".join(f"{name} {served[name]}" for name in wrong)
        raise ValueError(
            f"the config has {wrong}; wanted {wanted}: k drafts from one layer run without"
        )
    pattern = getattr(layers[0], "mtp_layer_pattern", None) or ""
    if set(pattern) - set("*-E"):
        raise ValueError(
            f"the MTP layer is {pattern!r}; wanted attention, MLP and MoE alone: a state has no diagonal"
        )
    if "forward" in vars(layers[0]):
        raise RuntimeError(
            "the MTP layer has a forward of its own: draft_recursion is on already, or another patch"
        )
    if not hasattr(layers[0], "_proj_and_transformer_layer"):
        came = f"megatron-core {megatron.core.__version__} has no _proj_and_transformer_layer"
        raise RuntimeError(f"{came}; wanted what 0.16 to 0.19 have: install one of those")


def draw_attention(num_drafts=3, slots=5):
    """Lines of the picture above, from a toy model: "#" where a state has a gradient from a slot's value."""
    import toy.model

    config = toy.model.mimo_config(hidden_size=32, num_heads=2, ffn_size=32)
    model, values = toy.model.build_model(config), []
    tokens = torch.arange(slots)[None]
    trunk = torch.randn(slots, 1, 32)
    projection = [name for name, _ in model.mtp.named_modules() if name.endswith("linear_qkv")][0]
    hook = model.mtp.get_submodule(projection).register_forward_hook(
        lambda module, args, out: values.append(out[0])
    )
    rotary = model.rotary_pos_emb(slots)
    inputs = dict(input_ids=tokens, position_ids=tokens, hidden_states=trunk, attention_mask=None)
    with draft_recursion(model, num_drafts):
        states = model.mtp(rotary_pos_emb=rotary, embedding=model.embedding, **inputs)[slots:]
    hook.remove()
    for i, state in enumerate(states):
        grads = torch.autograd.grad(state.sum(), values, retain_graph=True, allow_unused=True)
        seen = [[] if g is None else g[:, 0, -16:].any(-1).tolist() for g in grads]
        cells = [" ".join(".#"[x] for x in row or [0] * slots) for row in seen]
        yield f"{f'depth {i // slots + 1}' if i % slots == 0 else '':<14}" + f"{'':<13}".join(cells)


def main():
    import toy.model

    toy.model.init_megatron("cpu")
    print("\n".join(draw_attention()))


if __name__ == "__main__":
    main()
