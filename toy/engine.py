"""A vLLM engine that starts in seconds and ends with its trainer: environment, signals, watch.

Nothing here is a fix. Import it before torch and vLLM, in the main file too: both read their
environment when they are imported, and an engine in a process of its own imports the main file
first. Imports none of the fixes.
"""

import collections
import contextlib
import ctypes
import itertools
import json
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
import time

if multiprocessing.current_process().name != "MainProcess":  # an engine's
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not to outlive a killed trainer,
    if not os.path.exists(
        f"/proc/{os.environ.get('TRAINER_PID', 'self')}/root"
    ):  # or one dead already
        os._exit(1)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is the trainer's; vLLM sets a handler later
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from safetensors.torch import save_file

if not torch.cuda.is_available():
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling costs 16 to 20 s

# The real MiMo checkpoint ships such a file: transformers does not know model_type "mimo".
MIMO_CONFIGURATION = """import transformers


class MiMoConfig(transformers.Qwen2Config):
    model_type = "mimo"
"""


def write_checkpoint(folder, hf_config, named_tensors):
    """A Hugging Face MiMo checkpoint that stock vLLM loads, from (HF name, tensor) pairs."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in named_tensors}
    write_config(folder, hf_config, next(iter(tensors.values())).dtype)
    path = f"{folder}/model.safetensors"
    save_file(tensors, f"{path}.new", metadata={"format": "pt"})
    os.replace(f"{path}.new", path)  # a kill leaves the last one whole


def write_config(folder, hf_config, dtype):
    """All of a checkpoint but its tensors, which vLLM's load_format="dummy" does not ask for."""
    os.makedirs(folder, exist_ok=True)
    pathlib.Path(f"{folder}/configuration_mimo.py").write_text(MIMO_CONFIGURATION)
    config = hf_config | {
        "torch_dtype": str(dtype).removeprefix("torch."),
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
    }
    pathlib.Path(f"{folder}/config.json").write_text(json.dumps(config, indent=2))


def start_engine(
    folder, *, process=False, num_drafts=1, dtype="float32", max_num_seqs=256, **overrides
):
    """Stock `vllm.LLM` on a checkpoint folder; in this process or (process=True) its own.

    num_drafts  tokens that the MTP layer drafts a step; 0 samples without speculation.
    overrides   go to vllm.LLM; speculative_config's entries are merged into ours.
    """
    set_environment(process)
    import vllm

    settings = dict(
        skip_tokenizer_init=True,
        trust_remote_code=True,
        dtype=dtype,
        enforce_eager=True,
        max_num_seqs=max_num_seqs,
        # On CPU, vLLM 0.32 dies of a request with a seed whose prefill is split.
        enable_chunked_prefill=torch.cuda.is_available(),
        worker_extension_cls="drafter_sync.DrafterSyncExtension",
        logprobs_mode="processed_logprobs",
        use_tqdm_on_load=False,
    )
    of_caller = overrides.pop("speculative_config", {})
    if num_drafts:
        speculative = {"method": "mtp", "num_speculative_tokens": num_drafts}
        settings["speculative_config"] = speculative | of_caller
        if hasattr(vllm.EngineArgs, "per_request_spec_decode_metrics"):  # 0.32 has it, 0.25 has not
            settings["per_request_spec_decode_metrics"] = "detailed"
    with contextlib.ExitStack() as stack:
        if process and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # vLLM's start can lose a Ctrl-C.
            before = signal.signal(signal.SIGINT, end_at_once)
            stack.callback(signal.signal, signal.SIGINT, before)
        llm = vllm.LLM(folder, **(settings | overrides))
    llm.collective_rpc("mend_cpu_sampler")  # a fault of vLLM's CPU backend
    if process:
        core = llm.llm_engine.engine_core
        watch = threading.Thread(
            target=end_generate, args=(core.resources, core.outputs_queue), daemon=True
        )
        watch.start()
    return llm


def set_environment(process):
    """What vLLM reads when it is imported or started."""
    os.environ["TRAINER_PID"] = str(os.getpid())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(process))
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork would inherit Megatron's groups
    for name in list(os.environ):  # torchrun's are the trainer's; vLLM makes a world of its own
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") or name.startswith(
            ("MASTER_", "TORCHELASTIC")
        ):
            del os.environ[name]


def end_at_once(*unused):
    print("interrupted while vLLM started", file=sys.stderr, flush=True)
    os._exit(130)


def end_generate(resources, outputs):
    """Ends a LLM.generate whose engine's process died; 0.32's own waits for ever."""
    from vllm.v1.engine.exceptions import EngineDeadError

    while not resources.engine_dead:
        time.sleep(0.5)
    outputs.put(EngineDeadError())


def generate(llm, prompts, params):
    """(RequestOutput, accepted, drafted) of each prompt: counts of each verify step, in order.

    Without speculation both are None. An entry of accepted is None where it can't be known: on
    vLLM 0.25.1 the last step of a request, whose tokens the stop may have cut off.
    """
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    config = llm.llm_engine.vllm_config
    if hasattr(config.observability_config, "per_request_spec_decode_metrics"):
        for output in llm.generate(inputs, params, use_tqdm=False):
            record = output.outputs[0].spec_decode_metrics
            yield output, record and record.per_step_accepted, record and record.per_step_drafted
        return
    # vLLM 0.25.1 keeps no record: step the engine and see how many tokens each request gains.
    lengths, last = collections.defaultdict(lambda: [0]), {}
    for i, (request, param) in enumerate(zip(inputs, params, strict=True)):
        llm.llm_engine.add_request(str(i), request, param)
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            lengths[output.request_id].append(len(output.outputs[0].token_ids))
            last[output.request_id] = output
    for i in map(str, range(len(inputs))):
        if config.speculative_config is None:
            yield last[i], None, None
            continue
        num_drafts = config.speculative_config.num_speculative_tokens
        gains = [after - before for before, after in itertools.pairwise(lengths[i])]
        accepted = [gain - 1 for gain in gains if gain][1:]  # the first token is prefill's
        if accepted and accepted[-1] < num_drafts:
            accepted[-1] = None
        yield last[i], accepted, [num_drafts] * len(accepted)


def sample(llm, prompts, max_tokens, seeds, *, temperature=1.0):
    """One response a prompt: dicts of prompt, response, logprobs, accepted, drafted, output.

    logprobs are of the tempered distribution. A seed a request, so that scheduling does not change
    it; accepted and drafted as in `generate`.
    """
    from vllm import SamplingParams

    shared = dict(temperature=temperature, ignore_eos=True, detokenize=False, logprobs=0)
    limits = zip(max_tokens, seeds, strict=True)
    params = [SamplingParams(max_tokens=n, seed=seed, **shared) for n, seed in limits]
    samples = []
    for output, accepted, drafted in generate(llm, prompts, params):
        prompt, response = output.prompt_token_ids, list(output.outputs[0].token_ids)
        entries = zip(output.outputs[0].logprobs, response, strict=True)
        logprobs = [entry[token].logprob for entry, token in entries]
        sample = dict(prompt=prompt, response=response, logprobs=logprobs)
        samples.append(sample | dict(accepted=accepted, drafted=drafted, output=output))
    return samples
