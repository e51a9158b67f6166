"""Fix 7 of 7: several drafts from one MTP layer, trained as the engine drafts them.

Bug     To draft k tokens with one MTP layer, an engine feeds the layer its own output k-1 times.
        Depth 1 training never shows it that output. Megatron's mtp_use_repeated_layer does, but
        runs all of depth j anew on keys of depth j alone, which no engine has.
Rule    Depth j at slot t takes the embedding of token t+j, the layer's own output of depth j-1 at
        slot t, and position t+j-1. It attends to depth 1's keys of slots 0 to t, the verified
        tokens, and to its own chain: one key of each depth 2 to j. The tokens are those that came,
        since an engine's later draft counts only if all drafts before it came.

            k = 3, four slots; rows are queries, columns are keys

            key of       depth 1    depth 2    depth 3
            slot         0 1 2 3    0 1 2 3    0 1 2 3
            depth 1   0  # . . .    . . . .    . . . .    causal: Megatron's own attention
                      1  # # . .    . . . .    . . . .
                      2  # # # .    . . . .    . . . .
                      3  # # # #    . . . .    . . . .
            depth 2   0  # . . .    # . . .    . . . .    causal on depth 1, a diagonal on depth 2
                      1  # # . .    . # . .    . . . .
                      2  # # # .    . . # .    . . . .
                      3  # # # #    . . . #    . . . .
            depth 3   0  # . . .    # . . .    # . . .    and one on depth 3
                      1  # # . .    . # . .    . # . .
                      2  # # # .    . . # .    . . # .
                      3  # # # #    . . . #    . . . #

        So all slots run at once, and a depth costs one causal matrix and j-1 columns, in one
        softmax.

        Acceptance as the objective: an engine that draws its drafts from q accepts one with
        probability sum_v min(p_v, q_v), p the policy's distribution for that token. One minus this
        is their total variation, which patch_mtp_loss(objective="total_variation") lowers.
Source  vllm@0.32.0 v1/spec_decode/llm_base_proposer.py, propose (what the engine does); stands
        around megatron/core/transformer/multi_token_prediction.py, _proj_and_transformer_layer, in
        megatron-core 0.16.1, 0.17.1, 0.18.2 and 0.19.2. FastMTP (arXiv 2509.18362), SkyRL (k = 3);
        total variation as a loss: Bebop (arXiv 2606.12370).
Shapes  s slots, b rows, h hidden size (packed input: T slots, one row); N heads of D numbers; Q
        rows of queries, S keys of one document. In total_variation N rows of V tokens.
Limits  Run on CPU alone. Not run: a GPU, Transformer Engine's attention (its inputs are the same),
        FP8.
Use     with draft_recursion(model, num_drafts=3):
            states = model.mtp(...)  # [(1 + 3) s, b, h]: trunk, depth 1, depth 2, depth 3
        patch_mtp_loss(model, num_drafts=3) and draft_tokens(..., num_drafts=3) do that for you.
Run     tests/test_mtp_recursion.py is the specification: it steps an engine's way through a key
        cache, takes the picture from gradients, and predicts every drafted token of vLLM.
"""

import contextlib
import copy
import functools
import inspect
import itertools

import torch
from torch.utils.checkpoint import checkpoint

# Rows of queries whose scores exist at a time. 256 rows, 8192 keys and 32 heads take about 0.8 GiB
# in bf16: scores, masked scores, the same with the chain's columns, weights in fp32 and in bf16.
CHUNK_ROWS = 256


@contextlib.contextmanager
def draft_recursion(model, num_drafts):
    """Inside, model.mtp returns the trunk's state and num_drafts depths of its one layer.

    model       GPTModel or HybridModel (the chunk with MTP, unwrapped) with one MTP layer, dense or
                packed; a HybridModel's MTP layer of attention, MLP and MoE layers.
    num_drafts  k, 1 or more. 1 is Megatron's own forward, bit for bit.

    model.mtp(...) gives [(1 + k) s, b, h]; depth j at slot t predicts token t+1+j. A slot whose
    token t+j is not in its document holds numbers without meaning, which reach no other slot.
    Gradient flows through the chain and into depth 1's keys and values; beyond the layer, to
    hidden_states and the embedding, as far as the caller did not detach them. With full recompute
    the whole chain is one of Megatron's checkpoints, good for a backward pass after this context.

    In any order with match_vllm_mimo: its zero embedding at position 0 acts at depth 1 alone, as in
    vLLM, whose later depths stand at later positions. ValueError for several MTP layers and for the
    settings in _check_model; RuntimeError if entered twice, or if Megatron's parts are not those
    expected. On exit, also after an error, the model is as it was found.
    """
    _check_model(model, num_drafts)
    layer = model.mtp.layers[0]
    attentions = [module for module in layer.modules() if hasattr(module, "core_attention")]
    signature = inspect.signature(layer._proj_and_transformer_layer)

    def run_chain(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        with contextlib.ExitStack() as stack:
            for attention in attentions:
                stack.enter_context(_attend_along_chain(attention, num_drafts))
            states = [layer._proj_and_transformer_layer(**given)]
            while len(states) < num_drafts:
                given["hidden_states"] = states[-1]
                # Depth j at slot t takes what depth 1 takes at slot t+j-1. The roll brings in
                # another document's only where token t+j is not in this one.
                for name in ("decoder_input", "rotary_pos_emb"):
                    if given.get(name) is not None:
                        given[name] = given[name].roll(-1, 0)
                states.append(layer._proj_and_transformer_layer(**given))
        return torch.cat(states)

    def forward(*args, **kwargs):
        # The copy shares every parameter. Recompute looks the method up in the backward pass, when
        # this context may have ended; what is set on the copy lives as long as the graph.
        twin = copy.copy(layer)
        twin._proj_and_transformer_layer = run_chain
        return type(layer).forward(twin, *args, **kwargs)

    with _replaced(layer, "forward", forward):
        yield


@contextlib.contextmanager
def _attend_along_chain(attention, num_drafts):
    """Inside, the attention's core runs its own first call; each later one is a later depth."""
    core, keys, values = attention.core_attention, [], []
    stock = core.forward

    def forward(query, key, value, attention_mask=None, *, packed_seq_params=None, **rest):
        keys.append(key)
        values.append(value)
        if len(keys) == 1:
            rest["packed_seq_params"] = packed_seq_params
            return stock(query, key, value, attention_mask, **rest)
        query = query * (attention.config.softmax_scale or query.shape[-1] ** -0.5)
        return _attend(query, keys, values, attention_mask, packed_seq_params)

    # Megatron's recompute of the core alone would give out depth 1's keys without their graph.
    without_recompute = _replaced(attention, "checkpoint_core_attention", False)
    with _replaced(core, "forward", forward), without_recompute:
        yield
    if len(keys) != num_drafts:
        came = f"{type(attention).__name__} called its core_attention {len(keys)} times"
        raise RuntimeError(
            f"{came}; wanted {num_drafts}, once a depth: use megatron-core 0.16 to 0.19"
        )


def _attend(query, keys, values, attention_mask, packed):
    """Depth len(keys): causal over keys[0] in each document, its own slot in the others.

    query, keys, values  [s, b, N, D], or packed [T, N, D]; keys, values perhaps of fewer heads.
    attention_mask       None, or bool [b or 1, 1, s, s]: what a dense slot may not see.
    Returns [s, b, N * D], or packed [T, N * D].
    """
    repeats = query.shape[-2] // keys[0].shape[-2]
    states = [query, *(x.repeat_interleave(repeats, -2) for x in (*keys, *values))]
    if packed is not None:
        states = [x[:, None] for x in states]
    query, *states = [x.permute(1, 2, 0, 3) for x in states]  # [b, N, s, D]
    keys, values = states[: len(keys)], states[len(keys) :]
    outs = []
    for first, end in [(0, query.shape[2])] if packed is None else _documents(packed):
        run = _attend_rows
        if end - first > CHUNK_ROWS:  # or the backward pass would keep the scores of all chunks
            run = functools.partial(checkpoint, _attend_rows, use_reentrant=False)
        for start in range(first, end, CHUNK_ROWS):
            rows = slice(start, min(start + CHUNK_ROWS, end))
            seen = slice(first, rows.stop)
            shape = rows.stop - start, rows.stop - first
            hidden = torch.ones(shape, dtype=torch.bool, device=query.device).triu(
                1 + start - first
            )
            if packed is None and attention_mask is not None:
                hidden = hidden | attention_mask[..., rows, seen]
            chain = [x[:, :, rows] for x in (*keys[1:], *values[1:])]
            verified = keys[0][:, :, seen], values[0][:, :, seen]
            outs.append(run(query[:, :, rows], *verified, hidden, *chain))
    out = torch.cat(outs, 2).permute(2, 0, 1, 3).flatten(2)
    return out if packed is None else out[:, 0]


def _attend_rows(query, key, value, hidden_QS, *chain):
    """One softmax over depth 1's S keys and the slot's own of each later depth; query is scaled."""
    keys, values = chain[: len(chain) // 2], torch.stack(chain[len(chain) // 2 :], -2)
    scores = (query @ key.mT).masked_fill(hidden_QS, -torch.inf)
    own = [(query * x).sum(-1, keepdim=True) for x in keys]
    weights = torch.cat([scores, *own], -1).softmax(-1, dtype=torch.float32).to(query.dtype)
    weights, own = weights.split([scores.shape[-1], len(own)], -1)
    return weights @ value + (own[..., None, :] @ values)[..., 0, :]


def _documents(packed):
    """(first slot, end) of each document that is not empty, with the padding behind it."""
    padded = packed.cu_seqlens_q_padded
    offsets = (packed.cu_seqlens_q if padded is None else padded).tolist()
    return [(first, end) for first, end in itertools.pairwise(offsets) if first < end]


def total_variation(policy, draft, group, wants_grad):
    """One minus the acceptance of a probabilistic draft, 1 - sum_v min(p_v, q_v), of N rows.

    policy, draft  (logits_NV, top_N, token_N, total_N): logits (of one rank's share of the
                   vocabulary V), and over the whole of it each row's largest logit, that logit's
                   token, and the sum of exp(logit - largest). p and q are their softmaxes.
    group          the ranks that each hold a share; None where the logits are whole.

    Returns loss_N (no unit), the draft's arg-max token_N, and, if wants_grad, d loss / d draft
    logits [N, V]: q_i (sum of q where q < p, less 1 where q_i < p_i); arXiv 2606.12370.
    """
    overlap, overlap_gradient = _steps(draft[0].is_cuda)
    token_N = draft[2]
    rows = [(logits_NV, top_N, total_N) for logits_NV, top_N, _, total_N in (policy, draft)]
    sums_2N = torch.stack(overlap(*rows))
    if group:
        torch.distributed.all_reduce(sums_2N, group=group)
    loss_N, low_N = sums_2N
    return loss_N, token_N, overlap_gradient(*rows, low_N) if wants_grad else None


# Each reads the logits once when compiled, and makes no float32 copy of them.
def _overlap(policy, draft):
    """Each row's sum of max(p - q, 0), which is 1 - sum of min(p, q), and of q where q < p."""
    p_NV, q_NV = _probabilities(*policy), _probabilities(*draft)
    return (p_NV - q_NV).clamp(min=0).sum(dim=1), q_NV.where(q_NV < p_NV, 0).sum(dim=1)


def _overlap_gradient(policy, draft, low_N):
    p_NV, q_NV = _probabilities(*policy), _probabilities(*draft)
    return (q_NV * (low_N[:, None] - (q_NV < p_NV).to(q_NV.dtype))).to(draft[0].dtype)


def _probabilities(logits_NV, top_N, total_N):
    return (logits_NV - top_N[:, None]).exp_().div_(total_N[:, None])


@functools.cache  # torch.compile takes 30 ms even when all is compiled
def _steps(is_cuda):
    """The two above, compiled on CUDA; without dynamic=True, which is half as fast."""
    return [torch.compile(f) if is_cuda else f for f in (_overlap, _overlap_gradient)]


@contextlib.contextmanager
def _replaced(owner, name, value):
    """Sets owner.name, and afterwards puts back what was there, or nothing where none was."""
    before = {name: vars(owner)[name]} if name in vars(owner) else {}
    vars(owner)[name] = value
    try:
        yield
    finally:
        del vars(owner)[name]
        vars(owner).update(before)


def _check_model(model, num_drafts):
    config, layers = model.config, model.mtp.layers
    if len(layers) != 1 or config.mtp_num_layers != 1 or num_drafts < 1:
        came = f"{len(layers)} MTP layers, mtp_num_layers {config.mtp_num_layers}"
        wanted = (
            "wanted one layer, called once, and 1 draft or more: build it with mtp_num_layers=1"
        )
        raise ValueError(f"{came}, num_drafts {num_drafts}; {wanted}")
    served = {
        "context_parallel_size": 1,  # a slot would see keys of other ranks
        "sequence_parallel": False,  # the next slot may be another rank's
        "attention_dropout": 0,
        "multi_latent_attention": False,  # it makes its own rotary embedding, which is not rolled
        "experimental_attention_variant": None,
        "window_size": None,
        "softmax_type": "vanilla",
        "cuda_graph_impl": "none",  # a graph calls nothing that stands in for the attention
    }
    for name, wanted in served.items():
        if getattr(config, name, wanted) != wanted:
            came = f"config.{name} is {getattr(config, name)}"
            raise ValueError(f"{came}; wanted {wanted} to draft several tokens from one layer")
    pattern = getattr(layers[0], "mtp_layer_pattern", None) or ""
    if set(pattern) - set("*-E"):
        came = f"the MTP layer is {pattern}"
        raise ValueError(f"{came}; wanted attention (*), MLP (-) and MoE (E): others keep no keys")
    if "forward" in vars(layers[0]):
        came = "the MTP layer has a forward of its own: it is patched already"
        raise RuntimeError(f"{came}; wanted Megatron's: leave the other context first")
