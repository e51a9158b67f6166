"""Fix 4 of 6: the reference model is built without MTP, and the actor's log-prob pass runs none.

Bug     Reference and old-log-prob passes want the trunk's log-probs. Built from the checkpoint's config, the reference
        gets MTP layers as well: they are loaded, run in every pass, and their output is thrown away. Switching them off
        on the config object that both models share takes them from the actor too, if it is built later. And
        megatron-core 0.16 crashes where labels are absent, as in such a pass, unless mtp_num_layers is None: 0 is "on".
Rule    The reference is built from copies that say no MTP, and filled from the checkpoint without its MTP tensors. The
        actor keeps its layers, and skips them for the length of a pass.

            a toy MiMo, one HF config           MTP layers  parameters  MTP forwards a pass  MTP in an actor built next
            reference, as the config says                1     140,480                    1  yes
            reference, shared config set to 0            0      90,816                    0  no
            reference, from copies                       0      90,816                    0  yes
            actor, inside skip_mtp                       1     140,480                    0  yes

Source  verl#6626 (shared config), Megatron-Bridge#4188 (an export without MTP); megatron-core 0.16.1,
        megatron/core/models/gpt/gpt_model.py, GPTModel._postprocess (the crash).
Use     reference_hf = without_mtp_config(hf_config)
        with safetensors.safe_open(path, "pt") as file:     # by name first: no MTP tensor is read into memory
            for name, _ in drop_mtp_weights((name, None) for name in file.keys()):
                load(name, file.get_tensor(name))
        with skip_mtp(actor), torch.no_grad():
            old_logits = actor(input_ids, position_ids, attention_mask)
Run     python ref_disable.py prints the table, computed; tests/test_ref_disable.py is the specification.
"""

import contextlib
import copy
import re

# MiMo, DeepSeek-V3, GLM-4.5 and newer; Qwen3-Next and Qwen3.5.
COUNT_NAMES = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def without_mtp_config(hf_config):
    """A deep copy of a Hugging Face config in which every MTP layer count is 0.

    hf_config  a PretrainedConfig or a plain dict. Where num_nextn_predict_layers and mtp_num_hidden_layers exist they
               become 0, also inside text_config; a field that does not exist is not added.

    Returns the copy; hf_config is unchanged and stays the actor's. TypeError for what is no config or can't be copied.
    """
    _parts(hf_config)  # deepcopy would speak first, and of pickling
    try:
        disabled = copy.deepcopy(hf_config)
    except Exception as error:
        came = f"hf_config holds what cannot be copied ({error!s:.60})"
        raise TypeError(
            f"{came}; wanted plain values: take out locks, handles and the like"
        ) from error
    for part in _parts(disabled):
        for name in COUNT_NAMES:
            if isinstance(part, dict) and name in part:
                part[name] = 0
            elif hasattr(part, name):
                setattr(part, name, 0)
    return disabled


def mtp_layer_count(hf_config):
    """How many MTP layers a config has, for whoever asks for MTP.

    hf_config as above. Returns an int, 1 or more. ValueError if the config has none (no such field, 0 or None), if its
    fields differ, or if one is no count; TypeError for what is no config.
    """
    counts = []
    for part in _parts(hf_config):
        for name in COUNT_NAMES:
            count = part.get(name) if isinstance(part, dict) else getattr(part, name, None)
            if count is not None and (
                not isinstance(count, int) or isinstance(count, bool) or count < 0
            ):
                raise ValueError(
                    f"{name} is {count!r}; wanted an int, 0 or more: correct the config"
                )
            counts += [count] if count else []
    if not counts:
        came = f"MTP is asked for, and {' and '.join(COUNT_NAMES)} are absent, 0 or None in this config"
        raise ValueError(
            f"{came}; wanted 1 or more: take a checkpoint that has MTP layers, or train without MTP"
        )
    if len(set(counts)) > 1:
        came = f"the config gives the number of MTP layers as {' and as '.join(map(str, counts))}"
        raise ValueError(f"{came}; wanted one number: correct the config")
    return counts[0]


def reference_transformer_config(config):
    """A copy of a Megatron TransformerConfig with mtp_num_layers None, to build the reference with.

    None and not 0, which megatron-core 0.16 takes for "on". What __post_init__ derived is copied, not derived
    anew. Lists, dicts and sets are copied; everything else, in them and beside them, is shared.

    Returns the copy, of config's own class; config is unchanged. TypeError for what is no TransformerConfig.
    """
    if isinstance(config, type) or not hasattr(config, "mtp_num_layers"):
        came = f"config is {config!r:.60}, without mtp_num_layers"
        raise TypeError(
            f"{came}; wanted a Megatron TransformerConfig: pass the object that the actor was built with"
        )
    reference = copy.copy(config)
    for name, value in vars(reference).items():
        vars(reference)[name] = _copy_containers(value)
    reference.mtp_num_layers = None
    return reference


def drop_mtp_weights(named_tensors, *, num_hidden_layers=None):
    """The tensors of a checkpoint that do not belong to MTP, in order, one at a time.

    named_tensors      (name, tensor) pairs or a state dict, with Hugging Face names (mtp.*, model.mtp_layers.*) or
                       Megatron's (mtp.*), behind any prefix. The tensors are passed on untouched, so they may be
                       anything: slices of a file, or None where names alone are to be picked.
    num_hidden_layers  the trunk's, for checkpoints like DeepSeek-V3's and GLM's, whose MTP layers are model.layers.N
                       with N from num_hidden_layers on.

    Returns an iterator of pairs. ValueError where names alone do not tell (such a layer came and num_hidden_layers did
    not) or contradict it; TypeError for what is no pair.
    """
    is_count = (
        isinstance(num_hidden_layers, int)
        and not isinstance(num_hidden_layers, bool)
        and num_hidden_layers > 0
    )
    if num_hidden_layers is not None and not is_count:
        raise ValueError(
            f"num_hidden_layers is {num_hidden_layers!r}; wanted 1 or more: pass the trunk's, or leave it out"
        )
    if hasattr(named_tensors, "items"):
        named_tensors = named_tensors.items()
    try:
        pairs = iter(named_tensors)
    except TypeError:
        came = f"named_tensors is a {type(named_tensors).__name__}"
        raise TypeError(
            f"{came}; wanted (name, tensor) pairs or a state dict: pass model.state_dict()"
        ) from None
    return _drop(pairs, num_hidden_layers)


def _drop(pairs, num_hidden_layers):
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(
                f"named_tensors holds {pair!r:.60}; wanted (name, tensor): pass state_dict().items()"
            )
        if not _is_mtp(pair[0], num_hidden_layers):
            yield tuple(pair)


def _is_mtp(name, num_hidden_layers):
    parts = name.split(".")
    if any(part == "mtp" or part.startswith("mtp_") for part in parts):
        return True
    # A trunk layer's number comes after these; a vision tower's layers stand elsewhere.
    number = re.search(r"(?:^|\.)(?:model|language_model|decoder)\.layers\.(\d+)\.", name)
    is_beyond = bool(number and num_hidden_layers and int(number[1]) >= num_hidden_layers)
    if not is_beyond and not {"eh_proj", "enorm", "hnorm", "shared_head"}.isdisjoint(parts):
        came = f"{name} is an MTP tensor that its layer's number alone tells from the trunk, and num_hidden_layers is"
        raise ValueError(
            f"{came} {num_hidden_layers}; wanted the trunk's own number of layers: pass the config's"
        )
    return is_beyond


@contextlib.contextmanager
def skip_mtp(model):
    """Inside, an already built model runs as if it had no MTP: for the actor's own log-prob passes.

    model  a Megatron GPTModel, or DDP / Float16Module around it; one pipeline chunk. Without MTP it is left alone.

    Inside, logits are bitwise the same and no MTP layer runs, with labels or without; that also holds within
    patch_mtp_loss. The model is as it was found afterwards, also after an error; nested use is fine. TypeError for what
    is no GPTModel.
    """
    while hasattr(model, "module"):
        model = model.module
    if not hasattr(model, "_postprocess") or not hasattr(
        getattr(model, "config", None), "mtp_num_layers"
    ):
        came = f"model is a {type(model).__name__} without _postprocess and config.mtp_num_layers"
        raise TypeError(f"{came}; wanted a Megatron GPTModel: pass one chunk, not a list")
    if model.config.mtp_num_layers is None:
        yield
        return
    config, postprocess, own = model.config, model._postprocess, vars(model).get("_postprocess")

    def postprocess_without_mtp(**arguments):  # GPTModel.forward passes keywords only
        return postprocess(**arguments | {"mtp_in_postprocess": False})

    # model.mtp_process stays on: from 0.17 it also says which weight a tied head has on a last pipeline stage. Layers
    # keep the config object that all share: MoE routers size their loss tracker by its mtp_num_layers.
    model.config = copy.copy(config)
    model.config.mtp_num_layers = None
    model._postprocess = postprocess_without_mtp
    try:
        yield
    finally:
        model.config = config
        del model._postprocess
        if own is not None:
            model._postprocess = own


def _parts(hf_config):
    """The config itself, and its text_config where it has one; both are checked."""
    parts = []
    for name in ("hf_config", "text_config"):
        if isinstance(hf_config, type) or not (
            isinstance(hf_config, dict) or hasattr(hf_config, "to_dict")
        ):
            wanted = "a PretrainedConfig or a dict: pass the config itself, no path and no class"
            raise TypeError(f"{name} is {hf_config!r:.60}; wanted {wanted}")
        parts.append(hf_config)
        is_dict = isinstance(hf_config, dict)
        hf_config = (
            hf_config.get("text_config") if is_dict else getattr(hf_config, "text_config", None)
        )
        if hf_config is None:
            break
    return parts


def _copy_containers(value):
    if type(value) is dict:
        return {key: _copy_containers(item) for key, item in value.items()}
    return type(value)(map(_copy_containers, value)) if type(value) in (list, set) else value


def main():
    """Print the table at the head of this file from a computation."""
    import logging

    import torch

    import toy.model

    logging.getLogger("megatron").setLevel(logging.ERROR)
    toy.model.init_megatron("cpu")
    input_ids, position_ids, packed = toy.model.pack([list(range(16)), list(range(24))])

    def show(label, model, hf_config, context):
        layers, forwards = model.mtp.layers if model.mtp_process else [], []
        for layer in layers:
            layer.register_forward_hook(lambda *unused: forwards.append(1))
        with torch.no_grad(), context:  # labels, or 0.16 crashes wherever MTP is on
            model(input_ids, position_ids, None, labels=input_ids, packed_seq_params=packed)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        next_actor = "yes" if hf_config["num_nextn_predict_layers"] else "no"
        print(f"{label:<36}{len(layers):>10}{num_parameters:>12,}{len(forwards):>21}  {next_actor}")

    print(
        f"{'a toy MiMo, one HF config':<36}MTP layers  parameters  MTP forwards a pass  MTP in an actor built next"
    )
    off = contextlib.nullcontext()
    shared = toy.model.mimo_config(hidden_size=64, num_heads=2, ffn_size=128)
    actor, copies = toy.model.build_model(shared), toy.model.build_model(without_mtp_config(shared))
    show("reference, as the config says", actor, shared, off)
    set_to_0 = shared | {"num_nextn_predict_layers": 0}
    show("reference, shared config set to 0", toy.model.build_model(set_to_0), set_to_0, off)
    show("reference, from copies", copies, shared, off)
    show("actor, inside skip_mtp", actor, shared, skip_mtp(actor))


if __name__ == "__main__":
    main()
