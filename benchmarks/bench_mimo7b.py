"""MiMo-7B's shape on one card: what the fixes cost and save where the tensors are large. Random weights in bf16.

    recompute   the MTP layer alone, 8,192 packed tokens: bytes kept for backward, peak, time, with and without (fix 3)
    reference   bytes and log-prob time with and without the MTP layer, 36 layers (fix 4)
    push        all 7.8 B parameters to target and drafter, engine in this process, beside a plain copy (fix 5)
    push-ipc    the same with the engine in a process of its own, over CUDA IPC
    native      the same through vLLM's own weight transfer, if it runs here
    ppo         one PPO step end to end of a model cut in depth, Adam with float32 masters: rollout, score, update, push
    checkpoint  a directory as MiMo-7B's (shards and index file), 2 layers deep: hf_to_megatron reads it one shard at a
                time, vLLM starts from it

The loss of one depth at this size is benchmarks/bench_mtp_loss.py. Each part runs in a process of its own, so that its
memory is free afterwards and a part that fails does not take the others along.

A push's rate is bytes of weights by seconds. A copy of the same bytes on the same card reads and writes them once;
a verified push loads, copies back and compares, so that a fifth of the copy's rate is the aim.

Run   python benchmarks/bench_mimo7b.py recompute reference push          all parts if none is named
      python benchmarks/bench_mimo7b.py --device cpu --tiny               does the script run? Its numbers mean nothing
Out   OUT/mimo7b_PART.json
"""

import argparse
import base64
import contextlib
import cProfile
import functools
import gc
import importlib.util
import io
import json
import os
import pathlib
import pickle
import pstats
import shutil
import statistics
import sys
import tempfile
import time
import traceback
import types

sys.path.insert(
    0, str(pathlib.Path(__file__).resolve().parent)
)  # vLLM's worker imports this file by its name
import bench_rollout as shared  # noqa: E402, sets the paths to the modules
import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

import toy.engine
import toy.model
import train_mimo  # noqa: E402
from drafter_sync import (  # noqa: E402
    DrafterSyncExtension,
    drafter_fingerprint,
    hf_to_megatron,
    megatron_to_hf,
    sync_weights,
)
from mtp_loss import patch_mtp_loss  # noqa: E402
from mtp_recompute import patch_mtp_recompute  # noqa: E402
from ref_disable import skip_mtp, without_mtp_config  # noqa: E402

# XiaomiMiMo/MiMo-7B-RL, config.json; max_positions is 32,768 there, but nothing here is longer than 8,192.
MIMO_7B = dict(
    num_layers=36,
    hidden_size=4096,
    num_heads=32,
    num_groups=8,
    ffn_size=11008,
    vocab_size=151_680,
    max_positions=8192,
)
TINY = dict(
    num_layers=2,
    hidden_size=128,
    num_heads=4,
    num_groups=2,
    ffn_size=256,
    vocab_size=512,
    max_positions=512,
)
GB = 1e9


def import_ipc_engine():
    """vLLM 0.25.1's IPC engine imports ray at its head, and uses it for a way of sending that is not taken here."""
    absent = importlib.util.find_spec("ray") is None
    if absent:
        sys.modules["ray"] = types.ModuleType("ray")
    try:
        from vllm.distributed.weight_transfer import ipc_engine
    finally:
        if absent:
            del sys.modules["ray"]  # or the rest of vLLM would take it for the real one
    return ipc_engine, absent


if os.environ.get(
    "BENCH_IMPORT_IPC"
):  # in vLLM's worker too, before it looks for its transfer engine
    import_ipc_engine()


class PushWorker(DrafterSyncExtension):
    """Also tells how far memory rose in vLLM's worker."""

    def bench_memory_reset(self):
        reset_peak(self.device.type)

    def bench_memory_peak(self):
        return peak_rise(self.device.type)


# ------------------------------------------------------------------------------------------------------------------
# Helpers
# ------------------------------------------------------------------------------------------------------------------

HELD = {}


def reset_peak(device):
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        HELD["bytes"] = torch.cuda.memory_allocated()


def peak_rise(device):
    """Bytes that the allocator of this process gave out above what it held at reset_peak; None on CPU."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - HELD["bytes"]


def hf_shapes(hf_config):
    """{name: shape} of every tensor of a MiMo checkpoint, in its order; any mistake here is one that a push refuses."""
    hidden, ffn, vocab = (
        hf_config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    queries = hf_config["num_attention_heads"] * hf_config["head_dim"]
    keys = hf_config["num_key_value_heads"] * hf_config["head_dim"]
    layer = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        layer |= {
            f"self_attn.{name}_proj.weight": (rows, hidden),
            f"self_attn.{name}_proj.bias": (rows,),
        }
    layer |= {"self_attn.o_proj.weight": (hidden, queries), "mlp.down_proj.weight": (hidden, ffn)}
    layer |= {"mlp.gate_proj.weight": (ffn, hidden), "mlp.up_proj.weight": (ffn, hidden)}
    mtp = layer | {f"{name}_layernorm.weight": (hidden,) for name in ("token", "hidden", "final")}
    mtp |= {"input_proj.weight": (hidden, 2 * hidden)}
    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(hf_config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    for i in range(hf_config["num_nextn_predict_layers"]):
        shapes |= {f"model.mtp_layers.{i}.{name}": shape for name, shape in mtp.items()}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def random_tensor(name, shape, device, dtype, generator):
    """Norm weights around 1 (all ones would hide which state they act on), everything else around 0."""
    tensor = torch.empty(shape, device=device, dtype=dtype).normal_(0, 0.02, generator=generator)
    return tensor.add_(1) if "norm" in name else tensor


def random_tensors(hf_config, device, dtype, seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    shapes = hf_shapes(hf_config).items()
    return {name: random_tensor(name, shape, device, dtype, generator) for name, shape in shapes}


def build(hf_config, device, dtype, **overrides):
    """A Megatron model filled with random weights where it lies: drawing 7.8 B of them on CPU takes minutes."""
    overrides = (
        dict(perform_initialization=False, use_cpu_initialization=device == "cpu") | overrides
    )
    model = toy.model.build_model(hf_config, dtype=dtype, **overrides).to(
        device=device, dtype=dtype
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
            else:  # without initialisation Megatron's biases hold what the memory held
                parameter.fill_(0 if name.endswith("bias") else 1)
    return model


def start(folder, options, device, dtype, *, process=False, **overrides):
    """vLLM, eager, with a cache of 1 GiB beside the trainer's tensors; (llm, seconds)."""
    # Sized by hand: vLLM's own sizing takes the trainer's memory for its own, where both are one process.
    cuda = dict(gpu_memory_utilization=0.3, kv_cache_memory_bytes=1 << 30)
    # Small batches also keep vLLM's trial run at start short.
    settings = dict(max_num_seqs=8, max_model_len=256, max_num_batched_tokens=2048)
    settings |= dict(worker_extension_cls="bench_mimo7b.PushWorker")
    settings |= cuda if device == "cuda" else {}
    began = time.perf_counter()
    settings |= dict(process=process, dtype=str(dtype).removeprefix("torch."))
    llm = toy.engine.start_engine(folder, **(settings | overrides))
    seconds = time.perf_counter() - began
    print(f"vLLM started in {seconds:.0f} s", flush=True)
    return llm, seconds


def greedy_tokens(llm):
    """What the engine's weights say, to tell whether two engines or two pushes hold the same."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": list(range(i, i + 5))} for i in range(8)]
    return [
        list(output.outputs[0].token_ids)
        for output in llm.generate(prompts, params, use_tqdm=False)
    ]


def median_seconds(run, device, repeats):
    """Median seconds of `run`, one call left out, and how far this process's memory rose."""
    run()
    seconds = []
    reset_peak(device)
    for _ in range(repeats):
        shared.synchronize(device)
        began = time.perf_counter()
        run()
        shared.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), peak_rise(device)


def packed_batch(hf_config, num_tokens, device):
    """Four documents of random tokens in one buffer, as keywords of GPTModel.forward."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(hf_config["vocab_size"], (num_tokens,), generator=generator)
    input_ids, position_ids, packed = toy.model.pack(
        [part.tolist() for part in tokens.chunk(4)], device
    )
    return dict(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=None,
        packed_seq_params=packed,
    )


def table(rows):
    """Aligned columns, floats to three figures after the point, bytes with separators."""
    columns = list(dict.fromkeys(key for row in rows for key in row))

    def cell(value):
        if value is None:
            return "-"
        return (
            f"{value:,.3f}"
            if isinstance(value, float)
            else f"{value:,}"
            if type(value) is int
            else str(value)
        )

    lines = [columns] + [[cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        print(
            line[0].ljust(widths[0]),
            *(x.rjust(width) for x, width in zip(line[1:], widths[1:], strict=True)),
            sep="  ",
        )
    sys.stdout.flush()


# ------------------------------------------------------------------------------------------------------------------
# Training side: recompute, reference
# ------------------------------------------------------------------------------------------------------------------


def bench_recompute(options, hf_config, device, dtype, save):
    """The MTP block, called as a training step calls it; the trunk in front of it is one layer deep."""
    toy.model.init_megatron(device)
    model = build(hf_config | {"num_hidden_layers": 1}, device, dtype)
    batch = packed_batch(hf_config, options.tokens, device)
    labels, calls = batch["input_ids"].roll(-1), []

    def remember(module, args, kwargs):
        calls.append((args, kwargs))

    handle = model.mtp.register_forward_pre_hook(remember, with_kwargs=True)
    with patch_mtp_recompute(), patch_mtp_loss(model):
        model(**batch, labels=labels, loss_mask=torch.ones_like(labels))
    handle.remove()
    (args, kwargs), rows = calls[0], []
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    settings = dict(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    )
    for name, values in (("kept", dict.fromkeys(settings)), ("recomputed", settings)):
        for key, value in values.items():
            setattr(model.config, key, value)
        rows.append(
            {"activations": name}
            | measure_block(model.mtp, args, kwargs, own, device, options.repeats)
        )
        save(rows=rows)
    table(rows)
    saved = 1 - rows[1]["saved_bytes"] / rows[0]["saved_bytes"]
    slower = sum(rows[1][key] for key in ("forward_ms", "backward_ms")) / sum(
        rows[0][key] for key in ("forward_ms", "backward_ms")
    )
    print(
        f"{options.tokens:,} tokens: recompute keeps {saved:.1%} less and takes {slower:.2f} times as long"
    )
    save(saved_share=saved, time_ratio=slower, tokens=options.tokens)


def measure_block(block, args, kwargs, own, device, repeats):
    """Bytes that autograd saved in one forward (each storage once, parameters left out), peak, and milliseconds."""
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    def zero():
        block.zero_grad()
        for value in kwargs.values():
            if isinstance(value, torch.Tensor):
                value.grad = None

    with patch_mtp_recompute():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            block(*args, **kwargs)
        saved = sum(storage.nbytes() for storage in storages.values())
        storages.clear()
        forward, backward, held = [], [], None
        for i in range(repeats + 1):
            zero()
            reset_peak(device)
            began = time.perf_counter()
            out = block(*args, **kwargs)
            shared.synchronize(device)
            between = time.perf_counter()
            if device == "cuda":
                held = torch.cuda.memory_allocated() - HELD["bytes"]
            out.backward(torch.ones_like(out))
            shared.synchronize(device)
            if i:  # the first call is slower
                forward.append(1e3 * (between - began))
                backward.append(1e3 * (time.perf_counter() - between))
            del out
        zero_free = peak_rise(device)
    return {
        "saved_bytes": saved, "held_bytes": held, "peak_bytes": zero_free,
        "forward_ms": statistics.median(forward), "backward_ms": statistics.median(backward),
    }  # fmt: skip


def bench_reference(options, hf_config, device, dtype, save):
    """Built in turns, so that each is measured alone."""
    toy.model.init_megatron(device)
    batch, rows = packed_batch(hf_config, options.tokens, device), []

    def row(name, model, bytes_allocated, context):
        @torch.no_grad()
        def run():
            with context(model):
                model(**batch)

        seconds, peak = median_seconds(run, device, options.repeats)
        num_bytes = sum(p.nbytes for p in model.parameters())
        rows.append(
            {
                "model": name,
                "bytes": num_bytes,
                "allocated": bytes_allocated,
                "forward_ms": 1e3 * seconds,
                "peak": peak,
            }
        )
        save(rows=rows)

    for name, config, mtp in (
        ("with MTP", hf_config, True),
        ("without", without_mtp_config(hf_config), False),
    ):
        gc.collect()
        before = torch.cuda.memory_allocated() if device == "cuda" else None
        model = build(config, device, dtype, mtp=mtp).requires_grad_(False)
        allocated = torch.cuda.memory_allocated() - before if device == "cuda" else None
        row(name, model, allocated, contextlib.nullcontext)
        if mtp:
            row("with MTP, skip_mtp", model, allocated, skip_mtp)
        del model
    table(rows)
    saved = rows[0]["bytes"] - rows[-1]["bytes"]
    print(
        f"not built: {saved:,} bytes; not run: {rows[0]['forward_ms'] - rows[-1]['forward_ms']:.1f} ms a pass"
    )
    save(saved_bytes=saved, tokens=options.tokens)


# ------------------------------------------------------------------------------------------------------------------
# Pushes
# ------------------------------------------------------------------------------------------------------------------


def copy_rate(tensors, device, repeats):
    """GB/s of a copy of the same tensors to others of the same device."""
    others = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}

    def run():
        for name, tensor in tensors.items():
            others[name].copy_(tensor)

    seconds, _ = median_seconds(run, device, max(3, repeats))
    return sum(tensor.nbytes for tensor in tensors.values()) / seconds / GB


def push_rows(llm, tensors, device, process, copy_gb_s, repeats, save):
    """sync_weights with each kind of check, and of the target alone."""
    rows = []
    hows = [dict(verify=verify) for verify in (False, "sample", True)]
    for how in [*hows, dict(verify=False, drafter=False)]:
        reports, seconds, peaks = [], [], []
        for _ in range(repeats + 1):
            reset_peak(device)
            llm.collective_rpc("bench_memory_reset")
            shared.synchronize(device)
            began = time.perf_counter()
            reports.append(sync_weights(llm, tensors, **how))
            shared.synchronize(device)
            seconds.append(time.perf_counter() - began)
            peaks.append(
                (peak_rise(device), llm.collective_rpc("bench_memory_peak")[0] if process else None)
            )
        median, last = statistics.median(seconds[1:]), reports[-1]
        rows.append({
            "verify": str(how["verify"]), "drafter": how.get("drafter", True), "bytes": last.bytes, "seconds": median,
            "gb_s": last.bytes / median / GB, "of_copy": last.bytes / median / GB / copy_gb_s,
            "peak_bytes": peaks[-1][0], "worker_peak_bytes": peaks[-1][1], "first_s": seconds[0],
            "parameters": f"{last.target_loaded}+{last.drafter_loaded}",
        })  # fmt: skip
        save(rows=rows)
    return rows


def profile(run, top=25):
    """Where the interpreter's time goes, as text."""
    profiler, text = cProfile.Profile(), io.StringIO()
    profiler.runcall(run)
    pstats.Stats(profiler, stream=text).sort_stats("cumulative").print_stats(top)
    return text.getvalue()


def bench_push(options, hf_config, device, dtype, save, process=False):
    folder = f"{options.work}/config"
    toy.engine.write_config(folder, hf_config, dtype)
    tensors = random_tensors(hf_config, device, dtype)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    copy_gb_s = copy_rate(tensors, device, options.repeats)
    if device == "cuda":
        torch.cuda.empty_cache()
    print(
        f"{num_bytes:,} bytes in {len(tensors)} tensors; a copy on the device: {copy_gb_s:,.0f} GB/s",
        flush=True,
    )
    save(bytes=num_bytes, tensors=len(tensors), copy_gb_s=copy_gb_s)
    llm, seconds = start(folder, options, device, dtype, process=process, load_format="dummy")
    before = greedy_tokens(llm)
    save(engine_start_s=seconds)
    rows = push_rows(llm, tensors, device, process, copy_gb_s, options.repeats, save)
    table(rows)
    changed = greedy_tokens(llm) != before
    print(f"the engine's greedy tokens changed: {changed}")
    save(tokens_changed=changed)
    if options.profile:
        text = profile(lambda: sync_weights(llm, tensors))
        print(text)
        save(profile=text)


def bench_push_ipc(options, hf_config, device, dtype, save):
    bench_push(options, hf_config, device, dtype, save, process=True)


def native_push(llm, tensors, packed):
    """vLLM 0.25.1's IPC weight transfer, of what its load_weights takes: the target."""
    ipc_engine, _ = import_ipc_engine()

    def send(update):
        fields = {
            key: getattr(update, key)
            for key in ("names", "dtype_names", "shapes", "tensor_sizes", "packed")
        }
        fields["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(update.ipc_handles)).decode()
        llm.update_weights(
            {"update_info": {key: value for key, value in fields.items() if value is not None}}
        )

    llm.start_weight_update()
    how = ipc_engine.IPCTrainerSendWeightsArgs(send_mode=send, packed=packed)
    ipc_engine.IPCWeightTransferEngine.trainer_send_weights(iter(tensors.items()), how)
    llm.finish_weight_update()


def bench_native(options, hf_config, device, dtype, save):
    """Against sync_weights in the same engine. What fails is the result, word for word."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = (
        "1"  # vLLM asks for it before it unpickles the IPC handles
    )
    folder, rows = f"{options.work}/config", []
    toy.engine.write_config(folder, hf_config, dtype)
    tensors = random_tensors(hf_config, device, dtype)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    of_target = sum(tensor.nbytes for name, tensor in tensors.items() if ".mtp_layers." not in name)
    copy_gb_s = copy_rate(tensors, device, options.repeats)
    if device == "cuda":
        torch.cuda.empty_cache()
    save(
        bytes=num_bytes,
        bytes_of_target=of_target,
        copy_gb_s=copy_gb_s,
        without_ray=import_ipc_engine()[1],
    )
    settings = dict(load_format="dummy", weight_transfer_config={"backend": "ipc"})
    llm, _ = start(folder, options, device, dtype, process=True, **settings)
    llm.init_weight_transfer_engine({"init_info": {}})
    drafter = drafter_fingerprint(llm)
    tokens = {}
    ways = {
        f"native, packed={packed}": functools.partial(native_push, llm, tensors, packed)
        for packed in (False, True)
    }
    for name, how in (
        ("target only", dict(drafter=False, verify=False)),
        ("verified", dict(verify=True)),
    ):
        ways[f"sync_weights, {name}"] = functools.partial(sync_weights, llm, tensors, **how)
    for name, push in ways.items():
        try:
            llm.collective_rpc("bench_memory_reset")
            seconds, peak = median_seconds(push, device, options.repeats)
            llm.reset_prefix_cache()
            tokens[name] = greedy_tokens(llm)
            rate = (num_bytes if "verified" in name else of_target) / seconds / GB
            row = {
                "seconds": seconds,
                "gb_s": rate,
                "of_copy": rate / copy_gb_s,
                "peak_bytes": peak,
            }
            row["worker_peak_bytes"] = llm.collective_rpc("bench_memory_peak")[0]
        except Exception as error:
            traceback.print_exc()
            row = {"error": f"{type(error).__name__}: {error}"[:300]}
        rows.append({"way": name} | row)
        if name == "native, packed=True":
            stale = sum(
                drafter[name] == digest for name, digest in drafter_fingerprint(llm).items()
            )
        save(rows=rows)
    table(rows)
    same = {name: of_name == list(tokens.values())[-1] for name, of_name in tokens.items()}
    print(
        f"drafter tensors left as they were by the native push: {stale} of {len(drafter)}; same tokens as ours: {same}"
    )
    save(drafter_tensors_stale=stale, drafter_tensors=len(drafter), same_tokens=same)


# ------------------------------------------------------------------------------------------------------------------
# One PPO step
# ------------------------------------------------------------------------------------------------------------------


def layers_that_fit(hf_config, device):
    """How deep a model can be: bytes a parameter times parameters, and what does not grow with depth."""
    if device == "cpu":
        return hf_config["num_hidden_layers"]
    numel = {name: torch.Size(shape).numel() for name, shape in hf_shapes(hf_config).items()}
    of_layer = sum(count for name, count in numel.items() if name.startswith("model.layers.0."))
    rest = sum(count for name, count in numel.items() if ".layers." not in name)
    # bf16 weight 2, master 4, Adam 8, gradient 4 while a step runs; reference 2; engine 2.
    a_parameter = 2 + 4 + 8 + 4 + 2 + 2
    fixed = (
        32 * GB
    )  # logits of a rollout (float32 several times), the engine's cache and buffers, fragments
    free = 0.95 * torch.cuda.get_device_properties(0).total_memory - fixed - a_parameter * rest
    return max(1, min(hf_config["num_hidden_layers"], int(free / (a_parameter * of_layer))))


def bench_ppo(options, hf_config, device, dtype, save):
    """Warm-up of a few steps, so that drafts are accepted at all, then PPO steps with the seconds of each part."""
    layers = options.layers or layers_that_fit(hf_config, device)
    hf_config = hf_config | {"num_hidden_layers": layers}
    heads = dict(heads=hf_config["num_attention_heads"], groups=hf_config["num_key_value_heads"])
    args = train_mimo.Args(
        device=device, layers=layers, hidden=hf_config["hidden_size"], **heads, ffn=hf_config["intermediate_size"],
        vocab=hf_config["vocab_size"], symbols=min(256, hf_config["vocab_size"]), lr=1e-4, mtp_lr=2e-4,
        prompts=options.prompts, response_tokens=options.response_tokens,
        warmup_steps=options.warmup_steps,
    )  # fmt: skip
    clock, seconds = [time.perf_counter()], {}

    def tick(name):
        shared.synchronize(device)
        clock.append(time.perf_counter())
        seconds[name] = clock[-1] - clock[-2]
        memory = f", {torch.cuda.memory_allocated() / GB:.1f} GB" if device == "cuda" else ""
        print(f"{name}: {seconds[name]:.1f} s{memory}", flush=True)
        save(seconds=seconds)

    toy.model.init_megatron(device)
    generator = torch.Generator().manual_seed(0)
    actor = build(hf_config, device, dtype, **shared.recompute_settings(args))
    trainer = shared.make_trainer(actor, args, device)
    parameters = sum(p.numel() for p in trainer.actor.parameters())
    print(f"{layers} layers, {parameters:,} parameters", flush=True)
    save(
        layers=layers,
        parameters=parameters,
        prompts=args.prompts,
        response_tokens=args.response_tokens,
    )
    tick("build")
    train_mimo.warm_up(trainer.actor, trainer.step, args, generator, device)
    tick("warm-up")
    folder = f"{options.work}/ppo"
    train_mimo.write_checkpoint(trainer.actor, hf_config, folder)
    tick("write checkpoint")
    settings = dict(perform_initialization=False, use_cpu_initialization=device == "cpu")
    reference = train_mimo.load_reference(folder, hf_config, dtype=dtype, **settings).to(
        device=device, dtype=dtype
    )
    tick("load reference")
    llm, _ = start(
        folder,
        options,
        device,
        dtype,
        max_num_seqs=args.prompts,
        max_model_len=args.response_tokens + 64,
    )
    tick("start vLLM")
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    steps = []
    for step_number in range(options.steps + 1):
        steps.append(
            shared.ppo_step(
                trainer,
                reference,
                llm,
                args,
                step_number,
                generator,
                device,
                hf_config,
                drafter=True,
            )
        )
        shared.print_ppo(steps[-1], header=not step_number)
        save(steps=steps)
    last = {
        key: statistics.median(step[key] for step in steps[1:])
        for key in steps[0]
        if key.endswith("_s")
    }
    rows = [{"part": key.removesuffix("_s"), "seconds": value} for key, value in last.items()]
    table([*rows, {"part": "all", "seconds": sum(last.values())}])
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    print(f"median of {options.steps} steps after the first; peak {peak or 0:,} bytes; replay agreement "
          f"{[round(step['replay_agreement'], 4) for step in steps]}")  # fmt: skip
    save(median=last, peak_bytes=peak)


# ------------------------------------------------------------------------------------------------------------------
# A checkpoint in shards
# ------------------------------------------------------------------------------------------------------------------


def write_sharded(folder, hf_config, dtype, num_shards, device):
    """A checkpoint laid out as MiMo-7B's: files model-0000i-of-0000n.safetensors and an index; returns its bytes."""
    toy.engine.write_config(folder, hf_config, dtype)
    generator = torch.Generator(device).manual_seed(0)
    shapes = list(hf_shapes(hf_config).items())
    total = sum(torch.Size(shape).numel() for _, shape in shapes) * dtype.itemsize
    weight_map, shard, size, number = {}, {}, 0, 1
    for i, (name, shape) in enumerate(shapes):
        shard[name] = random_tensor(name, shape, device, dtype, generator).cpu()
        size += shard[name].nbytes
        if size >= total * number / num_shards or i == len(shapes) - 1:
            file = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
            save_file(shard, f"{folder}/{file}", metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, file)
            shard, number = {}, number + 1
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    pathlib.Path(f"{folder}/model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return total


def read_sharded(folder):
    """(name, tensor) pairs, with one file open at a time."""
    index = json.loads(pathlib.Path(f"{folder}/model.safetensors.index.json").read_text())
    for file_name in sorted(set(index["weight_map"].values())):
        with safe_open(f"{folder}/{file_name}", "pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)


def bench_checkpoint(options, hf_config, device, dtype, save):
    toy.model.init_megatron(device)
    hf_config, folder = hf_config | {"num_hidden_layers": 2}, f"{options.work}/sharded"
    total = write_sharded(folder, hf_config, dtype, 4, device)  # MiMo-7B has 4 shards
    model = toy.model.build_model(
        hf_config, dtype=dtype, perform_initialization=False, use_cpu_initialization=device == "cpu"
    ).to(device=device, dtype=dtype)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(float("nan"))
        began = time.perf_counter()
        for name, tensor in hf_to_megatron(read_sharded(folder), hf_config, parameters):
            parameters[name].copy_(tensor)
        shared.synchronize(device)
        seconds = time.perf_counter() - began
    back = {
        name: tensor.cpu() for name, tensor in megatron_to_hf(model.named_parameters(), hf_config)
    }
    names = [name for name, tensor in read_sharded(folder) if torch.equal(back[name], tensor)]
    bitwise = sorted(names) == sorted(hf_shapes(hf_config)) == sorted(back)
    print(f"{total:,} bytes in 4 shards read in {seconds:.1f} s, bitwise: {bitwise}", flush=True)
    save(bytes=total, read_s=seconds, megatron_bitwise=bitwise, tensors=len(names))

    llm, start_s = start(folder, options, device, dtype)
    tokens, drafter = greedy_tokens(llm), drafter_fingerprint(llm)
    report = sync_weights(
        llm, read_sharded(folder), verify=True
    )  # what it started with, pushed: nothing may change
    same = {"tokens": greedy_tokens(llm) == tokens, "drafter": drafter_fingerprint(llm) == drafter}
    print(
        f"vLLM started from it in {start_s:.0f} s; a verified push of the same files left it the same: {same}"
    )
    save(engine_start_s=start_s, same_after_push=same, pushed=report._asdict())


# ------------------------------------------------------------------------------------------------------------------
# The run
# ------------------------------------------------------------------------------------------------------------------

PARTS = {  # and the seconds after which a part is cut off
    "recompute": (bench_recompute, 150),
    "reference": (bench_reference, 150),
    "push": (bench_push, 300),
    "push-ipc": (bench_push_ipc, 300),
    "native": (bench_native, 300),
    "ppo": (bench_ppo, 450),
    "checkpoint": (bench_checkpoint, 250),
}


def child(options, hf_config, device, dtype):
    """One part, its exit status; what it has so far is in options.result at any time."""
    result = {}

    def save(**more):
        result.update(more)
        shared.write_json(options.result, result)

    if device == "cpu":
        torch.set_num_threads(1)
    try:
        PARTS[options.part][0](options, hf_config, device, dtype, save)
    except BaseException as error:
        traceback.print_exc()
        save(error=f"{type(error).__name__}: {error}"[:2000])
        return 1
    return 0


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all if none is named"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--tiny", action="store_true", help="toy shape: does the script run?")
    parser.add_argument(
        "--tokens", type=int, default=8192, help="packed tokens of recompute and reference"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed calls after one that is left out"
    )
    parser.add_argument(
        "--layers", type=int, default=0, help="depth of ppo's model; 0: as deep as fits"
    )
    parser.add_argument("--prompts", type=int, default=32, help="of ppo's rollout")
    parser.add_argument(
        "--response-tokens", type=int, default=128, help="of ppo's rollout, at most"
    )
    parser.add_argument("--warmup-steps", type=int, default=40, help="before ppo's first rollout")
    parser.add_argument(
        "--steps", type=int, default=2, help="of PPO after the first, which compiles"
    )
    parser.add_argument(
        "--profile", action="store_true", help="also say where a push spends the interpreter's time"
    )
    parser.add_argument(
        "--limit-s", type=float, default=590, help="all parts together; the rest is cut off"
    )
    parser.add_argument("--out", default=str(shared.ROOT / "benchmarks/results"))
    parser.add_argument("--commit", default="", help="where there is no git checkout")
    parser.add_argument("--part", choices=PARTS, help="used by the script itself")
    parser.add_argument("--result", help="used by the script itself")
    parser.add_argument("--work", help="folder for checkpoints, kept; a temporary one by default")
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: give some of {', '.join(PARTS)}")
    if options.tiny:
        options.tokens, options.repeats, options.response_tokens, options.prompts = 128, 1, 16, 8
    return options


def run_part(part, argv, options, work, limit_s):
    """What the part found; a PPO model that did not fit is tried again with two thirds of the layers."""
    inner, more = f"{work}/{part}.json", []
    began = time.perf_counter()
    while True:
        left = limit_s - (time.perf_counter() - began)
        result = shared.run_child(
            [__file__, *argv, "--work", work, "--part", part, "--result", inner, *more], inner, left
        )
        too_large = (
            "out of memory" in result.get("error", "").lower() and result.get("layers", 0) > 2
        )
        if part != "ppo" or not too_large or left < 60:
            return result
        layers = result["layers"] * 2 // 3
        print(f"ppo: {result['layers']} layers did not fit, trying {layers}", flush=True)
        more = ["--layers", layers]
        os.remove(inner)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    device = options.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hf_config = toy.model.mimo_config(**(TINY if options.tiny else MIMO_7B))
    if options.part:
        shared.show_stacks_before_the_end()
        return child(options, hf_config, device, dtype)
    work, began, failed = (
        options.work or tempfile.mkdtemp(prefix="bench_mimo7b_"),
        time.perf_counter(),
        [],
    )
    about = {"command": " ".join(["benchmarks/bench_mimo7b.py", *argv]), "model": hf_config}
    about |= {"dtype": str(dtype)} | shared.provenance(device, options.commit)
    for part in options.parts or PARTS:
        if part == "native":
            os.environ["BENCH_IMPORT_IPC"] = "1"
        left = options.limit_s - (time.perf_counter() - began)
        print(f"\n== {part}", flush=True)
        at = time.perf_counter()
        if left < 20:
            result = {"error": "not started, the time was over"}
        else:
            result = run_part(part, argv, options, work, min(left, PARTS[part][1]))
        os.environ.pop("BENCH_IMPORT_IPC", None)
        result["part_s"] = time.perf_counter() - at
        path = f"{options.out}/mimo7b_{part}{'_tiny' if options.tiny else ''}.json"
        shared.write_json(path, {"benchmark": f"mimo7b {part}"} | about | result)
        failed += [part] if "error" in result else []
        print(f"{result.get('error', 'done')}; {result['part_s']:.0f} s; {path}", flush=True)
    if not options.work:
        shutil.rmtree(work, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    if "--part" in sys.argv:
        os._exit(status)  # vLLM's threads and process groups would delay the end, or break it
    sys.exit(status)
