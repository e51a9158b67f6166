"""Fix 5 of 6: actor weights reach vLLM's target AND its MTP drafter, and it is proven that they did.

Bug     A weight update loads the target only. The drafter keeps the weights that it started with: text and reward stay
        right, since the target verifies every draft, and acceptance decays silently while the policy walks away from it.
        Just as silent: MTP halves in the wrong order, FP8 scales of the old weights, buckets reused too early.
Rule    One push sends every tensor to both models, through vLLM's own layerwise reload (which repacks and quantises as
        at load), and afterwards reads back what the workers hold.

            trainer (Megatron)                      vLLM worker
            decoder.*, embedding, head  --------->  runner.model          target     before: only this arrow
            mtp.*                       --------->  runner.drafter.model  drafter    after: both
                      digests  <---- compare ---->  digests of what is held

        That the two then compute the same takes three conventions more, all silent when wrong (`match_vllm_mimo`):
            state      vLLM feeds the MTP layer the trunk state before the final norm, Megatron the one after it
            halves     eh_proj reads [embedding, hidden], MiMo's input_proj [hidden, embedding]      (in the name map)
            position 0 vLLM zeroes the embedding at position 0 of every document
Source  vllm@0.32.0 model_executor/models/mimo_mtp.py, model_executor/model_loader/reload/layerwise.py;
        megatron-core@0.19.2 transformer/multi_token_prediction.py; slime#691, miles#1926, verl#6661, SGLang#27718
Native  vLLM 0.32 has `start_weight_update` / `start_draft_weight_update` of its own. They run the same layerwise reload,
        but need a weight transfer engine chosen at start (IPC and NCCL want CUDA), load one model a session, and
        compare nothing. This module needs only `worker_extension_cls` and runs on 0.25.1 too.
Limits  MiMo's architecture (name map and shapes). Pipeline and expert parallel trainers must gather names themselves.
        Transformer Engine's names are mapped but no test here runs them; sequence parallel is refused.
Run     pytest tests/test_drafter_sync.py
"""

import contextlib
import os
import tempfile
import time
import zlib
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


def _get(hf_config, key, default=None):
    return hf_config.get(key, default) if isinstance(hf_config, dict) else getattr(hf_config, key, default)


def _name_map(hf_config):
    """{Megatron name: (kind, [HF names])}, both inner-block names and both spec's norm names included."""
    names = {
        "embedding.word_embeddings.weight": ("vocab", ["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": ("copy", ["model.norm.weight"]),
    }
    if not _get(hf_config, "tie_word_embeddings"):
        names["output_layer.weight"] = ("vocab", ["lm_head.weight"])

    def transformer_layer(ours, theirs):
        for norm in (
            "input_layernorm.weight",
            "self_attention.linear_qkv.layer_norm_weight",
        ):  # local, Transformer Engine
            names[f"{ours}.{norm}"] = ("copy", [f"{theirs}.input_layernorm.weight"])
        for norm in ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"):
            names[f"{ours}.{norm}"] = ("copy", [f"{theirs}.post_attention_layernorm.weight"])
        for part in ("weight", "bias"):
            qkv = [f"{theirs}.self_attn.{x}_proj.{part}" for x in "qkv"]
            names[f"{ours}.self_attention.linear_qkv.{part}"] = ("qkv", qkv)
        names[f"{ours}.self_attention.linear_proj.weight"] = ("columns", [f"{theirs}.self_attn.o_proj.weight"])
        gate_up = [f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight"]
        names[f"{ours}.mlp.linear_fc1.weight"] = ("gate_up", gate_up)
        names[f"{ours}.mlp.linear_fc2.weight"] = ("columns", [f"{theirs}.mlp.down_proj.weight"])

    for i in range(_get(hf_config, "num_hidden_layers")):
        transformer_layer(f"decoder.layers.{i}", f"model.layers.{i}")
    for i in range(_get(hf_config, "num_nextn_predict_layers") or 0):
        ours, theirs = f"mtp.layers.{i}", f"model.mtp_layers.{i}"
        names[f"{ours}.enorm.weight"] = ("copy", [f"{theirs}.token_layernorm.weight"])
        names[f"{ours}.hnorm.weight"] = ("copy", [f"{theirs}.hidden_layernorm.weight"])
        names[f"{ours}.eh_proj.weight"] = ("halves", [f"{theirs}.input_proj.weight"])
        names[f"{ours}.final_layernorm.weight"] = ("copy", [f"{theirs}.final_layernorm.weight"])
        for inner in ("transformer_layer", "mtp_model_layer"):  # up to megatron-core 0.16, from 0.17 on
            transformer_layer(f"{ours}.{inner}", theirs)
    return names


def _hf_shapes(hf_config):
    """{HF name: shape} of every tensor of a MiMo checkpoint, MTP layers included."""
    hidden, heads = _get(hf_config, "hidden_size"), _get(hf_config, "num_attention_heads")
    head = _get(hf_config, "head_dim") or hidden // heads
    kv, ffn = _get(hf_config, "num_key_value_heads") * head, _get(hf_config, "intermediate_size")
    of_suffix = {
        "embed_tokens.weight": (_get(hf_config, "vocab_size"), hidden),
        "lm_head.weight": (_get(hf_config, "vocab_size"), hidden),
        "input_proj.weight": (hidden, 2 * hidden),
        "q_proj.weight": (heads * head, hidden),
        "k_proj.weight": (kv, hidden),
        "v_proj.weight": (kv, hidden),
        "q_proj.bias": (heads * head,),
        "k_proj.bias": (kv,),
        "v_proj.bias": (kv,),
        "o_proj.weight": (hidden, heads * head),
        "gate_proj.weight": (ffn, hidden),
        "up_proj.weight": (ffn, hidden),
        "down_proj.weight": (hidden, ffn),
    }
    names = [name for _, hf_names in _name_map(hf_config).values() for name in hf_names]
    return {name: of_suffix.get(".".join(name.split(".")[-2:]), (hidden,)) for name in names}


def _tensor_parallel():
    """(rank, size, group) of Megatron's tensor parallelism; (0, 1, None) where it was never initialised."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 0, 1, None
    group = parallel_state.get_tensor_model_parallel_group()
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group), group


def _strip(name):
    while name.startswith("module."):  # DistributedDataParallel, Float16Module
        name = name[len("module.") :]
    return name


def megatron_to_hf(named_params, hf_config):
    """Names and layouts of Hugging Face MiMo for Megatron's parameters, tensor-parallel shards gathered.

    named_params: (name, tensor) pairs, such as `model.named_parameters()`; the local shards under tensor parallelism, and
    then every rank must iterate. hf_config: `PretrainedConfig` or dict. Yields (HF name, tensor) in the same order; tensors
    are detached and may share memory with the parameters. Vocabulary rows beyond `vocab_size` are dropped.
    Raises DrafterSyncError for a name that MiMo does not have or a shape that does not fit.
    """
    names, shapes = _name_map(hf_config), _hf_shapes(hf_config)
    _, tp_size, group = _tensor_parallel()
    for name, tensor in named_params:
        name = _strip(name)
        if name.endswith("_extra_state") or (name == "output_layer.weight" and _get(hf_config, "tie_word_embeddings")):
            continue  # Transformer Engine's FP8 bookkeeping; a tied head is the embedding
        if name not in names:
            raise DrafterSyncError(
                f"{name} is not a parameter of MiMo with these layer counts: pass the config of this model"
            )
        kind, hf_names = names[name]
        shards = [tensor.detach()]
        if tp_size > 1 and kind != "copy":
            shards = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(tp_size)]
            torch.distributed.all_gather(shards, tensor.detach().contiguous(), group=group)
        for hf_name, part in zip(hf_names, _to_hf(kind, shards, hf_config), strict=True):
            if tuple(part.shape) != shapes[hf_name]:
                raise DrafterSyncError(
                    f"{name} gives {hf_name} as {tuple(part.shape)}, the config wants {shapes[hf_name]}"
                )
            yield hf_name, part


def _to_hf(kind, shards, hf_config):
    if kind == "copy":
        return shards
    if kind == "columns":
        return [torch.cat(shards, 1)]
    if kind == "gate_up":  # each rank holds [its gate; its up]
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return [torch.cat(gates), torch.cat(ups)]
    whole = torch.cat(shards) if len(shards) > 1 else shards[0]
    if kind == "vocab":
        return [whole[: _get(hf_config, "vocab_size")]]
    if kind == "halves":
        embedding, hidden = whole.chunk(2, 1)
        return [torch.cat([hidden, embedding], 1)]
    groups = _get(hf_config, "num_key_value_heads")  # qkv: [q heads; k; v] of each query group in turn
    queries = _get(hf_config, "num_attention_heads") // groups
    grouped = whole.reshape(groups, queries + 2, -1, *whole.shape[1:])
    return [part.flatten(0, 2) for part in grouped.split([queries, 1, 1], 1)]


def hf_to_megatron(named_tensors, hf_config, megatron_names):
    """The exact inverse of `megatron_to_hf`, bit for bit; cut to this tensor-parallel rank.

    named_tensors: (HF name, whole tensor) pairs in any order, for instance read from safetensors one at a time; a fused
    parameter is yielded once its last piece came, so pieces are held no longer than that.
    megatron_names: the names of the model to fill, or a state dict of it; with a state dict, shapes are checked and a padded
    vocabulary is filled up with zeros. Yields (Megatron name, tensor).
    Raises DrafterSyncError for names left over, missing or unknown.
    """
    names = _name_map(hf_config)
    rank, tp_size, _ = _tensor_parallel()
    wanted = {name: _strip(name) for name in megatron_names if not name.endswith("_extra_state")}
    if _get(hf_config, "tie_word_embeddings"):
        wanted = {name: plain for name, plain in wanted.items() if plain != "output_layer.weight"}
    unknown = [name for name, plain in wanted.items() if plain not in names]
    if unknown:
        raise DrafterSyncError(f"not parameters of MiMo with these layer counts: {unknown}")
    owner = {hf_name: name for name, plain in wanted.items() for hf_name in names[plain][1]}
    pending, done = {}, set()
    for hf_name, tensor in named_tensors:
        if hf_name not in owner or hf_name in done:
            raise DrafterSyncError(
                f"{hf_name} is left over: the model has no place for it, or it came twice. A reference without MTP drops"
                " MTP tensors first (ref_disable.drop_mtp_weights)"
            )
        done.add(hf_name)
        name = owner[hf_name]
        kind, hf_names = names[wanted[name]]
        pieces = pending.setdefault(name, {})
        pieces[hf_name] = tensor
        if len(pieces) == len(hf_names):
            like = megatron_names[name] if hasattr(megatron_names, "keys") else None
            whole = _to_megatron(kind, [pieces[n] for n in hf_names], hf_config, rank, tp_size, like)
            del pending[name]
            if like is not None and like.shape != whole.shape:
                raise DrafterSyncError(
                    f"{hf_names} give {name} as {tuple(whole.shape)}, the model has {tuple(like.shape)}"
                )
            yield name, whole
    missing = sorted(set(owner) - done)
    if missing:
        raise DrafterSyncError(f"missing, the model stays partly unfilled: {missing}")


def _to_megatron(kind, pieces, hf_config, rank, tp_size, like):
    if kind == "copy":
        return pieces[0]
    if kind == "columns":
        return pieces[0].chunk(tp_size, 1)[rank]
    if kind == "gate_up":
        return torch.cat([piece.chunk(tp_size)[rank] for piece in pieces])
    if kind == "vocab":
        rows = pieces[0].shape[0] if like is None else like.shape[0] * tp_size
        padded = torch.nn.functional.pad(pieces[0], (0, 0, 0, max(0, rows - pieces[0].shape[0])))
        return padded.chunk(tp_size)[rank]
    if kind == "halves":
        hidden, embedding = pieces[0].chunk(2, 1)
        return torch.cat([embedding, hidden], 1).chunk(tp_size)[rank]
    groups = _get(hf_config, "num_key_value_heads")
    head = pieces[1].shape[0] // groups
    grouped = [piece.reshape(groups, -1, head, *piece.shape[1:]) for piece in pieces]
    return torch.cat(grouped, 1).flatten(0, 2).chunk(tp_size)[rank]


# ------------------------------------------------------------------------------------------------------------------
# Conventions: the trainer's MTP computes what vLLM's MiMo drafter computes
# ------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def match_vllm_mimo(model, *, pre_norm=True, zero_position0=True):
    """Inside, depth 1 of a Megatron GPTModel computes what vLLM's MiMo drafter computes, number for number.

    pre_norm: the MTP layer is fed the trunk state before the final norm (gradient flows there too, unless the caller cut the
    trunk). zero_position0: the token embedding in the MTP layer is zero at position 0 of every document, as vLLM has it (a
    reported fault, so it may go one day: hence the flag). The main logits do not change.
    Works on the model that comes out of DDP or Float16Module wrappers; in any order with `patch_mtp_loss`, `draft_tokens`,
    `patch_mtp_recompute` and `skip_mtp`. Undone on exit. Position 0 is the start of each document of `cu_seqlens_q`, or
    `position_ids == 0` in dense input.
    Raises ValueError for a model without MTP, with more than one depth (vLLM's MiMo drafts with one) or with sequence
    parallelism (its embedding is a shard, which no test here could run); RuntimeError where Megatron's parts are not found.
    """
    while hasattr(model, "module"):
        model = model.module
    if getattr(model, "mtp", None) is None:
        raise ValueError("match_vllm_mimo got a model without MTP layers, wanted one: build it with mtp_num_layers=1")
    if len(model.mtp.layers) != 1:
        raise ValueError(f"match_vllm_mimo got {len(model.mtp.layers)} MTP layers, vLLM's MiMo drafter has 1")
    if model.config.sequence_parallel:
        raise ValueError("match_vllm_mimo does not support sequence_parallel=True: turn it off")
    norm = getattr(model.decoder, "final_layernorm", None)
    if norm is None:
        raise RuntimeError(
            "model.decoder.final_layernorm was not found: the MTP layer must sit on the stage with the final norm"
        )
    state_before_norm = []
    original = model.mtp.__dict__.get("forward")
    stock_forward = model.mtp.forward

    def remember(module, args):
        state_before_norm[:] = args[:1]

    def forward(*, hidden_states, input_ids, position_ids, embedding, packed_seq_params=None, **rest):
        trunk = hidden_states
        if pre_norm:
            if not state_before_norm:
                raise RuntimeError("the final norm did not run before the MTP block: unexpected Megatron internals")
            hidden_states = state_before_norm.pop()
            if trunk.grad_fn is None:  # the caller cut the trunk (patch_mtp_loss does): keep the cut
                hidden_states = hidden_states.detach().requires_grad_(trunk.requires_grad)
        first_BS = _first_slots(position_ids, packed_seq_params)

        def embed(input_ids, position_ids):
            embedded_SBD = embedding(input_ids=input_ids, position_ids=position_ids)
            return embedded_SBD.masked_fill(first_BS.T[..., None], 0) if zero_position0 else embedded_SBD

        out = stock_forward(
            hidden_states=hidden_states,
            input_ids=input_ids,
            position_ids=position_ids,
            embedding=embed,
            packed_seq_params=packed_seq_params,
            **rest,
        )
        # The block returns [trunk state; depth 1]: the head's part must stay the one after the norm.
        return torch.cat([trunk, out[trunk.shape[0] :]]) if pre_norm else out

    handle = norm.register_forward_pre_hook(remember)
    model.mtp.forward = forward
    try:
        yield
    finally:
        handle.remove()
        del model.mtp.forward
        if original is not None:
            model.mtp.forward = original


def _first_slots(position_ids, packed_seq_params):
    """Bool `[b, s]`: the slots at position 0 of a document."""
    if packed_seq_params is None:
        return position_ids == 0
    first = torch.zeros_like(position_ids, dtype=torch.bool)
    starts = packed_seq_params.cu_seqlens_q[:-1].long()
    first[:, starts[starts < first.shape[1]]] = True  # an empty last document starts behind the buffer
    return first


# ------------------------------------------------------------------------------------------------------------------
# The worker's side
# ------------------------------------------------------------------------------------------------------------------


class DrafterSyncExtension:
    """vLLM `worker_extension_cls="drafter_sync.DrafterSyncExtension"`: what `sync_weights` calls in every worker.

    vLLM mixes this class into its Worker; calls come by `collective_rpc`, one after the other. vLLM takes one extension
    class, so whatever else must run in the worker goes into a subclass.
    """

    def _drafter_sync_models(self):
        # vLLM's V1 runner calls it drafter, its V2 runner speculator; an n-gram drafter has no model.
        drafter = getattr(self.model_runner, "drafter", None) or getattr(self.model_runner, "speculator", None)
        return self.model_runner.model, getattr(drafter, "model", None)

    def drafter_sync_describe(self):
        """What the sender must know of this worker."""
        target, drafter = self._drafter_sync_models()
        return {
            "pid": os.getpid(),
            "device": self.device.type,
            "dtype": str(self.vllm_config.model_config.dtype).removeprefix("torch."),
            "tp_size": self.vllm_config.parallel_config.tensor_parallel_size,
            "speculation": self.vllm_config.speculative_config is not None,
            "drafter": drafter is not None,
            "shares_embedding": drafter is not None and drafter.model.embed_tokens is target.model.embed_tokens,
        }

    def drafter_sync_begin(self, with_drafter, buffer):
        """Both models into vLLM's reload state; `buffer` is None in-process, else where the bytes will lie."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        target, drafter = self._drafter_sync_models()
        models = [target, drafter] if with_drafter else [target]
        self._drafter_sync = {"models": models, "loaded": [set() for _ in models], "partial": {}, "quantised": {}}
        self._drafter_sync["buffer"] = _open_buffer(buffer) if buffer else None
        self._drafter_sync["fp8"] = any(p.dtype == torch.float8_e4m3fn for p in target.parameters())
        with set_current_vllm_config(self.vllm_config):
            for model in models:
                initialize_layerwise_reload(model)

    def drafter_sync_load(self, named_tensors):
        """Whole tensors with HF names into the model that they belong to."""
        from vllm.config import set_current_vllm_config

        state = self._drafter_sync
        parts = [[], []]
        for name, tensor in named_tensors:
            parts[".mtp_layers." in name].append((name, tensor))
            if state["fp8"] and tensor.dim() == 2:  # once quantised it can no longer be compared bit for bit
                shard = _shard(name, tensor, self.rank, self.vllm_config.parallel_config.tensor_parallel_size)
                state["quantised"][name] = (_digest(shard), shard[[0, -1]].float())
        with set_current_vllm_config(self.vllm_config):
            for model, part, loaded in zip(state["models"], parts, state["loaded"], strict=False):
                loaded |= model.load_weights(iter(part)) or set()

    def drafter_sync_load_pieces(self, pieces):
        """pieces: (HF name, dtype, shape, first byte within the tensor, first byte within the buffer, number of bytes)."""
        state, whole = self._drafter_sync, []
        for name, dtype, shape, at, start, size in pieces:
            # A copy: layerwise reload keeps a tensor until its layer is complete, and the buffer is reused before that.
            if name not in state["partial"]:
                state["partial"][name] = torch.empty(shape, dtype=getattr(torch, dtype), device=state["buffer"].device)
            tensor = state["partial"][name]
            tensor.view(-1).view(torch.uint8)[at : at + size] = state["buffer"][start : start + size]
            if at + size == tensor.nbytes:
                whole.append((name, state["partial"].pop(name)))
        self.drafter_sync_load(whole)
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the sender overwrites the buffer next

    def drafter_sync_finish(self):
        """Ends the reload, after a failure too. Returns the counts and the parameters that nothing was written to."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        state, config = self._drafter_sync, self.vllm_config
        drafter_config = getattr(config.speculative_config, "draft_model_config", None)
        with set_current_vllm_config(config), self.device:
            for model, model_config in zip(state["models"], (config.model_config, drafter_config), strict=False):
                finalize_layerwise_reload(model, model_config)
        counts, missed, seen = [], [], set()
        for model, loaded in zip(state["models"], state["loaded"], strict=True):
            # The drafter shares embedding and head with the target; scales come from quantising, not from the sender.
            own = {n for n, p in model.named_parameters() if id(p) not in seen and not n.endswith("_scale")}
            seen |= {id(p) for p in model.parameters()}
            counts.append(len(own & loaded))
            missed += sorted(own - loaded)
        state["buffer"] = None
        return counts, missed

    def drafter_sync_held(self, verify, with_drafter):
        """{HF name: digest} of what target and drafter hold now, packing undone.

        For a quantised layer: the digest of what was received, if the first and last row held are its quantisation.
        """
        config, quantised, held = self.vllm_config.model_config.hf_config, self._drafter_sync["quantised"], {}
        for model in self._drafter_sync_models()[: 1 + with_drafter]:
            for name, tensor, scale in _held(model, config, lambda name: _in_sample(name, verify)):
                if scale is None:
                    held[name] = _digest(tensor)
                    continue
                digest, rows = quantised[name]
                # e4m3 has 3 mantissa bits: half a step is 1/16 of the value, or 2^-10 of the scale near zero.
                off = (tensor[[0, -1]].float() * scale - rows).abs() > rows.abs() / 16 + scale * 2**-9
                held[name] = "not the quantisation of what was received" if off.any() else digest
        if with_drafter:
            self._drafter_sync_known = self.drafter_sync_fingerprint()
        quantised.clear()
        return held

    def drafter_sync_fingerprint(self):
        """{HF name: digest} of the drafter's own layers, as held: quantised bytes and scales where quantised."""
        prints, config = {}, self.vllm_config.model_config.hf_config
        for name, tensor, scale in _held(self._drafter_sync_models()[1], config, lambda name: ".mtp_layers." in name):
            prints[name] = _digest(tensor) if scale is None else f"{_digest(tensor)} scale {_digest(scale)}"
        return prints

    def drafter_sync_lost(self):
        """Names of drafter tensors that are not those of the last push; without one, those that no drafter can have.

        Sleep level 2 discards the drafter's weights with the target's: a push of the target alone leaves it so.
        """
        now, known = self.drafter_sync_fingerprint(), getattr(self, "_drafter_sync_known", None)
        if known is not None:
            return sorted(name for name in now if now[name] != known[name])
        norms = [(n, p) for n, p in self._drafter_sync_models()[1].named_parameters() if "layernorm" in n]
        return sorted(n for n, p in norms if not p.isfinite().all() or not p.any())


def _held(model, hf_config, want):
    """Yields (HF name, tensor, FP8 scale or None): what the model computes with, fused layers split, CPU packing undone."""
    start = _get(hf_config, "num_hidden_layers")
    for path, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        if "weight" not in parameters:
            continue
        pieces = path.split(".")
        if (
            "mtp_layers" in pieces
        ):  # vLLM: model.mtp_layers.{layers + i}.mtp_block.*, checkpoint: model.mtp_layers.{i}.*
            at = pieces.index("mtp_layers") + 1
            pieces[at] = str(int(pieces[at]) - start)
            pieces = [piece for piece in pieces if piece != "mtp_block"]
        fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
        parts = fused.get(pieces[-1], [pieces[-1]])
        for key in ("weight", "bias"):
            names = [".".join([*pieces[:-1], part, key]) for part in parts]
            if parameters.get(key) is None or not any(map(want, names)):
                continue
            tensor, scale = _unpacked(module, key)
            sizes = [len(tensor)]
            if len(parts) == 3:
                sizes = [module.num_heads * module.head_size] + [module.num_kv_heads * module.head_size] * 2
            elif len(parts) == 2:
                sizes = [len(tensor) // 2] * 2
            elif hasattr(module, "shard_indices"):  # vocabulary rows of this rank, padding left out
                sizes = [module.shard_indices.num_org_elements, len(tensor) - module.shard_indices.num_org_elements]
            for name, part in zip(names, tensor.split(sizes), strict=False):
                if want(name):
                    yield name, part, scale


def _unpacked(module, key):
    """(tensor, FP8 scale or None) that the layer multiplies with."""
    tensor = getattr(module, key).data
    if key == "weight" and tensor.dtype == torch.float8_e4m3fn:
        return tensor.t(), module.weight_scale.data  # stored transposed, see Fp8PerTensorOnlineLinearMethod
    if key == "weight" and hasattr(module, "cpu_linear"):
        # The CPU backend packs the weight away; the identity matrix brings it back, bit for bit.
        columns = tensor.shape[1] if tensor.dim() == 2 else module.input_size_per_partition
        return module.cpu_linear(torch.eye(columns, dtype=tensor.dtype), tensor, None).t(), None
    return tensor, None


def _shard(name, tensor, rank, tp_size):
    """What one tensor-parallel worker of vLLM holds of a whole HF tensor."""
    layer = name.split(".")[-2]
    if tp_size == 1:
        return tensor
    if layer in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        return tensor.chunk(tp_size)[rank]
    if layer in ("o_proj", "down_proj"):
        return tensor.chunk(tp_size, 1)[rank]
    if layer in ("embed_tokens", "lm_head"):
        rows = -(-len(tensor) // 64) * 64 // tp_size  # vLLM pads the vocabulary to a multiple of 64
        return tensor[rank * rows : (rank + 1) * rows]
    return tensor


def _digest(tensor):
    """16 hex digits that change with any bit and any change of order; computed where the tensor lies, in one pass.

    Not cryptographic: it finds mistakes, not attacks. Integer arithmetic modulo 2^64, so the order of the sum is free.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % 8))
    words = (flat if flat.storage_offset() % 8 == 0 else flat.clone()).view(torch.int64)
    total = torch.full((), tensor.nbytes, dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), 1 << 20):  # chunks that stay in cache
        mixed = words[start : start + (1 << 20)] * 0x2545F4914F6CDD1D  # odd constant of xorshift*
        mixed ^= mixed >> 32  # not linear in the words: a swap cannot cancel out
        position = torch.arange(start, start + len(mixed), device=tensor.device) * 2 + 1
        total += (mixed * position).sum()
    return f"{total.item() & (1 << 64) - 1:016x}"


def _in_sample(name, verify):
    """verify="sample": the drafter whole, one in eight of the target's tensors."""
    return verify is True or ".mtp_layers." in name or zlib.crc32(name.encode()) % 8 == 0


# ------------------------------------------------------------------------------------------------------------------
# The trainer's side
# ------------------------------------------------------------------------------------------------------------------


def sync_weights(llm, named_tensors, *, drafter=True, verify=True, bucket_bytes=256 * 2**20):
    """Pushes the actor's weights to a running vLLM engine: target and MTP drafter, or an error.

    llm: `vllm.LLM` whose `worker_extension_cls` is `DrafterSyncExtension` or a subclass; in-process, in a process of its
    own, or tensor-parallel on one node. named_tensors: (HF name, whole tensor) pairs (list, dict or generator, as
    `megatron_to_hf` yields), each name of the checkpoint exactly once, in any order; any floating dtype, cast to the
    engine's. drafter=False pushes the target only (the frozen-drafter arm); MTP tensors in the stream are then passed
    over, as they are for an engine without speculation. verify: True compares digests of all that the workers hold with
    what was sent, "sample" of the drafter and one in eight target tensors, False of none. bucket_bytes: bytes on the way at
    once; extra memory is one bucket plus one layer.
    Returns SyncReport. The prefix cache is reset.
    Raises DrafterSyncError naming the tensors; the message says whether the engine still holds what it held or mixed
    weights. A whole push heals the latter. ValueError for arguments that make no sense.
    """
    if verify not in (True, False, "sample"):
        raise ValueError(f'verify={verify!r}: wanted True, False or "sample"')
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes!r}: wanted a positive int, such as 256 * 2**20")
    begun_at = time.perf_counter()
    worker, drafter = _ready_worker(llm, drafter)
    shapes = _hf_shapes(llm.llm_engine.model_config.hf_config)
    if not drafter:
        shapes = {name: shape for name, shape in shapes.items() if ".mtp_layers." not in name}
    named_tensors = named_tensors.items() if isinstance(named_tensors, dict) else named_tensors
    if isinstance(named_tensors, list):  # what can be seen at once is refused before anything is loaded
        _refuse_missing(shapes, {name for name, _ in named_tensors}, "The engine is unchanged.")

    expected, num_bytes, send = {}, 0, None
    try:
        for bucket, last in _buckets(_checked(named_tensors, shapes, worker["dtype"]), bucket_bytes):
            if send is None:
                send = _open_channel(llm, worker, drafter, bucket, bucket_bytes, last)
            send(bucket)
            for name, tensor in bucket:
                num_bytes += tensor.nbytes
                ranks = range(worker["tp_size"])
                digests = (
                    [_digest(_shard(name, tensor, rank, len(ranks))) for rank in ranks]
                    if verify and _in_sample(name, verify)
                    else []
                )
                expected[name] = digests
        _refuse_missing(shapes, expected, "")
        counts, missed = _rpc(llm, "drafter_sync_finish")[0]
        if missed:
            raise DrafterSyncError(f"vLLM wrote nothing to its parameters {missed}")
    except BaseException as error:
        if send is None:
            raise
        with contextlib.suppress(Exception):  # leaves the reload state, so that the next push can begin
            llm.collective_rpc("drafter_sync_finish")
        if not isinstance(error, Exception):
            raise
        raise DrafterSyncError(f"{error}. The engine now holds mixed weights, until a whole push succeeds") from error
    if verify:
        _compare(llm, expected, verify, drafter)
    if llm.reset_prefix_cache() is False:
        raise DrafterSyncError(
            "the weights arrived, but vLLM did not reset its prefix cache, which holds the old weights' keys"
        )
    return SyncReport(*(counts + [0])[:2], num_bytes, time.perf_counter() - begun_at)


def drafter_fingerprint(llm):
    """{HF name: digest} of the drafter's own layers, to compare before and after a push ("name@rank" from 2 workers on)."""
    worker, _ = _ready_worker(llm, True)
    if not worker["drafter"]:
        raise DrafterSyncError("the engine has no drafter: start vLLM with speculative_config={'method': 'mtp', ...}")
    prints = _rpc(llm, "drafter_sync_fingerprint")
    if len(prints) == 1:
        return prints[0]
    return {f"{name}@{rank}": digest for rank, of in enumerate(prints) for name, digest in of.items()}


def _rpc(llm, method, *args):
    try:
        return llm.collective_rpc(method, args=args)
    except Exception as error:
        raise DrafterSyncError(f"{method} failed in a vLLM worker: {type(error).__name__}: {error}") from error


def _ready_worker(llm, drafter):
    """(description of the first worker, whether the drafter takes part); refuses what a push would break."""
    if llm.llm_engine.has_unfinished_requests():
        raise DrafterSyncError(
            "requests are in flight, half of their tokens would come from other weights: finish or abort them"
        )
    worker = _rpc(llm, "drafter_sync_describe")[0]
    if worker["speculation"] and not worker["drafter"]:
        raise DrafterSyncError(
            "speculation is on, but the runner has no model under `drafter` or `speculator`: unknown vLLM"
        )
    if worker["drafter"] and not worker["shares_embedding"]:
        raise DrafterSyncError(
            "the drafter has an embedding of its own (pipeline parallel vLLM?), which is not supported"
        )
    if worker["drafter"] and not drafter:
        lost = sorted(set().union(*_rpc(llm, "drafter_sync_lost")))
        if lost:
            raise DrafterSyncError(
                f"drafter=False, but the drafter lost its weights (sleep level 2 discards them): push it too. Lost: {lost}"
            )
    return worker, drafter and worker["drafter"]


def _refuse_missing(shapes, names, state):
    missing = sorted(set(shapes) - set(names))
    if missing:
        raise DrafterSyncError(f"missing from the push: {missing}. {state}".rstrip(". "))


def _checked(named_tensors, shapes, dtype):
    """Passes on what may be loaded, in the engine's dtype; refuses the rest by name."""
    seen = set()
    for name, tensor in named_tensors:
        if name not in shapes and ".mtp_layers." in name:
            continue  # no drafter takes part
        if name not in shapes or name in seen:
            raise DrafterSyncError(f"{name} is left over: the engine's model has no such tensor, or it came twice")
        if tuple(tensor.shape) != shapes[name]:
            raise DrafterSyncError(f"{name} has shape {tuple(tensor.shape)}, the engine wants {shapes[name]}")
        tensor = tensor.detach().to(getattr(torch, dtype))
        # A sum is cheaper than isfinite over all: it is finite only if every term is.
        if not tensor.sum(dtype=torch.float32).isfinite() and not tensor.isfinite().all():
            raise DrafterSyncError(f"{name} holds NaN or infinity")
        seen.add(name)
        yield name, tensor


def _buckets(named_tensors, bucket_bytes):
    """Yields (list of pairs of at most bucket_bytes together, or one larger tensor; whether it is the last)."""
    bucket, size = [], 0
    for name, tensor in named_tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket, False
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket, True


def _open_channel(llm, worker, drafter, bucket, bucket_bytes, last):
    """Puts the workers into reload state; returns the function that sends one bucket."""
    if worker["pid"] == os.getpid():  # the worker lives in this process and reads the tensors where they are
        _rpc(llm, "drafter_sync_begin", drafter, None)
        return lambda bucket: _rpc(llm, "drafter_sync_load", bucket)
    size = min(bucket_bytes, sum(tensor.nbytes for _, tensor in bucket)) if last else bucket_bytes
    if bucket[0][1].is_cuda:
        buffer = torch.empty(size, dtype=torch.uint8, device=bucket[0][1].device)
        from torch.multiprocessing.reductions import reduce_tensor

        where = {
            "size": size,
            "ipc": list(reduce_tensor(buffer)[1][6:]),
        }  # device, handle, offsets, event: plain values
        _rpc(llm, "drafter_sync_begin", drafter, where)
    else:
        # A file in shared memory, unlinked as soon as the workers have it open: nothing can be left behind.
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # an error here instead of SIGBUS later when the space is short
            buffer = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
            _rpc(llm, "drafter_sync_begin", drafter, {"size": size, "path": file.name})
    return lambda bucket: _send_pieces(llm, buffer, bucket)


def _open_buffer(where):
    if "path" in where:
        return torch.from_file(where["path"], shared=True, size=where["size"], dtype=torch.uint8)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    size = torch.Size([where["size"]])
    return rebuild_cuda_tensor(torch.Tensor, size, (1,), 0, torch.UntypedStorage, torch.uint8, *where["ipc"])


def _send_pieces(llm, buffer, bucket):
    """Fills the buffer and has the workers empty it, as often as it takes; a large tensor goes in several pieces."""
    pieces, used = [], 0
    for name, tensor in bucket:
        content = tensor.contiguous().view(-1).view(torch.uint8)
        dtype, at = str(tensor.dtype).removeprefix("torch."), 0
        while at < len(content):
            size = min(len(content) - at, len(buffer) - used)
            buffer[used : used + size] = content[at : at + size]
            pieces.append((name, dtype, list(tensor.shape), at, used, size))
            at, used = at + size, used + size
            if used == len(buffer):
                _empty(llm, buffer, pieces)
                pieces, used = [], 0
    if pieces:
        _empty(llm, buffer, pieces)


def _empty(llm, buffer, pieces):
    if buffer.is_cuda:
        torch.cuda.synchronize()  # the workers read from another stream, in another process
    _rpc(llm, "drafter_sync_load_pieces", pieces)


def _compare(llm, expected, verify, drafter):
    for rank, held in enumerate(_rpc(llm, "drafter_sync_held", verify, drafter)):
        wrong = sorted(n for n, digests in expected.items() if digests and held.get(n) != digests[rank % len(digests)])
        if wrong:
            raise DrafterSyncError(
                f"worker {rank} holds something else than what was sent in {len(wrong)} tensors: {wrong[:8]}. The engine"
                " holds mixed weights, until a whole push succeeds"
            )
