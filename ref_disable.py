"""Fix 4 of 6: the reference model is built without MTP, and the actor's log-prob pass runs none.

Bug     RL compares the actor, the model in training, with a frozen reference and with its own
        state before the update. Both passes want the main head's log-probs alone. But built from
        the checkpoint's config, the reference gets MTP layers too: they are loaded, run in every
        pass, and their output is thrown away. Switching them off on the config object that both
        models share takes them from the actor as well, if it is built later. And megatron-core
        0.16 crashes where labels are absent, as in such a pass, unless mtp_num_layers is None.
Rule    The reference is built from copies that say no MTP, and filled from the checkpoint without
        its MTP tensors. The actor keeps its MTP layers, and skips them for the length of a pass.

            a toy MiMo, one HF config          MTP layers  MTP forwards a pass  next actor has MTP
            reference, as the config says               1                    1  yes
            reference, shared config set to 0           0                    0  no
            reference, from copies                      0                    0  yes
            actor, inside skip_mtp                      1                    0  yes

Source  verl#6626 (shared config), Megatron-Bridge#4188 (an export without MTP); megatron-core
        0.16.1, megatron/core/models/gpt/gpt_model.py, GPTModel._postprocess (the crash).
Use     reference_hf = without_mtp_config(hf_config)
        with safetensors.safe_open(path, "pt") as file:  # by name first: no MTP tensor is read
            for name, _ in drop_mtp_weights((name, None) for name in file.keys()):
                load(name, file.get_tensor(name))
        with skip_mtp(actor), torch.no_grad():
            old_logits = actor(input_ids, position_ids, attention_mask)
Run     python figures/demos.py reference prints the table, computed; tests/test_ref_disable.py is
        the specification.
"""

import contextlib
import copy
import re

# MiMo, DeepSeek-V3, GLM-4.5 and newer; Qwen3-Next and Qwen3.5.
COUNT_NAMES = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def without_mtp_config(hf_config):
    """A deep copy of a Hugging Face config in which every MTP layer count is 0.

    hf_config  a PretrainedConfig or a plain dict. Where num_nextn_predict_layers and
               mtp_num_hidden_layers exist they become 0, also inside text_config; a field that
               does not exist is not added.

    Returns the copy, of hf_config's own class; hf_config is unchanged and stays the actor's.
    """
    disabled = copy.deepcopy(hf_config)
    fields = disabled if isinstance(disabled, dict) else vars(disabled)
    for part in (disabled, fields.get("text_config")):
        for name in COUNT_NAMES:
            if isinstance(part, dict) and name in part:
                part[name] = 0
            elif hasattr(part, name):
                setattr(part, name, 0)
    return disabled


def reference_transformer_config(config):
    """A copy of a Megatron TransformerConfig with mtp_num_layers None, to build the reference with.

    config  the actor's. Its lists, dicts and sets are copied; all else (process groups, callables
            such as grad_scale_func and what they are bound to) is shared.

    Returns the copy, of config's own class; config is unchanged. None and not 0, which
    megatron-core 0.16 takes for "on". What __post_init__ derived is copied, not derived anew.
    """
    reference = copy.copy(config)
    for name, value in vars(config).items():
        setattr(reference, name, _copy_containers(value))
    reference.mtp_num_layers = None
    return reference


def _copy_containers(value):
    if type(value) is dict:
        return {key: _copy_containers(item) for key, item in value.items()}
    if type(value) in (list, set):
        return type(value)(_copy_containers(item) for item in value)
    return value


def drop_mtp_weights(named_tensors, *, num_hidden_layers=None):
    """The tensors of a checkpoint that do not belong to MTP, in order, one at a time.

    named_tensors      (name, tensor) pairs or a state dict, with Hugging Face names (mtp.*,
                       model.mtp_layers.*) or Megatron's (mtp.*), behind any prefix. The tensors
                       are passed on untouched, so they may be anything: slices of a file, or None
                       where names alone are to be picked.
    num_hidden_layers  the trunk's, for checkpoints like DeepSeek-V3's and GLM's, whose MTP layers
                       are model.layers.N with N from num_hidden_layers on.

    Returns an iterator of pairs. ValueError, while it runs, for an MTP layer that only its number
    tells from the trunk: num_hidden_layers did not come, or is not the trunk's.
    """
    pairs = named_tensors.items() if hasattr(named_tensors, "items") else named_tensors
    for name, tensor in pairs:
        if not _is_mtp(name, num_hidden_layers):
            yield name, tensor


def _is_mtp(name, num_hidden_layers):
    parts = name.split(".")
    if any(part == "mtp" or part.startswith("mtp_") for part in parts):
        return True
    # A trunk layer's number comes after these; a vision tower's layers stand elsewhere.
    layer = re.search(r"(?:^|\.)(?:model|language_model|decoder)\.layers\.(\d+)\.", name)
    if layer and 0 < (num_hidden_layers or 0) <= int(layer[1]):
        return True
    if {"eh_proj", "enorm", "hnorm", "shared_head"} & set(parts):  # what no trunk layer has
        came = f"{name} is an MTP tensor by its name, num_hidden_layers is {num_hidden_layers}"
        raise ValueError(f"{came}; wanted the trunk's number of layers: pass the config's")
    return False


@contextlib.contextmanager
def skip_mtp(model):
    """Inside, an already built model runs as if it had no MTP: for the actor's own log-prob passes.

    model  a Megatron GPTModel or HybridModel, or the list of chunks that a pipeline has, wrapped
           in any number of .module and .language_model. Without MTP on this rank nothing changes.

    Inside, logits are bitwise the same and no MTP layer runs, with labels or without; gradient
    flows as ever. In any order with patch_mtp_loss (fix 1) and match_vllm_mimo (fix 5); nested
    use is fine. The model is as it was found afterwards, also after an error. TypeError: a model
    of neither class. ValueError: a list of chunks of which two have a head.
    """
    chunk = _chunk_with_head(model)
    if chunk is None or chunk.config.mtp_num_layers is None:
        yield
        return
    # The model calls its MTP block for the states of trunk and depths, and takes their loss if its
    # config has MTP. Both go; mtp_process stays: from 0.17 it also says which weight a tied head
    # has on a last pipeline stage.
    config, mtp = chunk.config, getattr(chunk, "mtp", None)
    outer_forward = None if mtp is None else vars(mtp).get("forward")  # another context's

    def forward(*, hidden_states, **unused):
        return hidden_states  # the trunk's alone

    # A copy for the model itself; all layers keep the one that they share, since MoE routers size
    # their loss tracker by its mtp_num_layers.
    chunk.config = copy.copy(config)
    chunk.config.mtp_num_layers = None
    if mtp is not None:
        mtp.forward = forward
    try:
        yield
    finally:
        chunk.config = config
        if mtp is not None:
            del mtp.forward
            if outer_forward is not None:
                mtp.forward = outer_forward


# The same lines as in mtp_loss.py and drafter_sync.py; tests/test_house.py compares them.
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
