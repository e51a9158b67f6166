"""MiMo-7B's shape on one card: what the fixes cost and save where tensors are large. Random weights in bf16.

    reference   bytes and log-prob time with and without the MTP layer, 36 layers (fix 4)
    push        all 7.8 B parameters to target and drafter, plain, sampled, verified (fix 5)
    push-ipc    the same with the engine in a process of its own, over CUDA IPC
    ppo         one PPO step of a model cut in depth: rollout, scores, update, push

The loss of one depth at this size is bench_mtp_loss.py's, recompute bench_recompute.py's, rollouts bench_rollout7b.py's.
Each part runs in a process of its own. A push's rate is bytes of weights by seconds, beside a copy of the same bytes on the same card.

Run   python benchmarks/bench_mimo7b.py push     all parts if none is named; --tiny: does it run?
Out   OUT/mimo7b_PART.json
"""

import contextlib
import functools
import gc
import statistics
import sys
import time
import unittest.mock

import common  # isort: skip, before torch: it sets paths
import torch
from common import GB, copy_rate, random_tensors

import toy.model
import train_mimo
from drafter_sync import DrafterSyncExtension, sync_weights
from ref_disable import skip_mtp, without_mtp_config


class PushWorker(DrafterSyncExtension):
    """Also tells how far memory rose in vLLM's worker."""

    def bench_memory(self, reset):
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        if reset:
            torch.cuda.reset_peak_memory_stats()
            self.bench_held = torch.cuda.memory_allocated()
        return torch.cuda.max_memory_allocated() - self.bench_held


def build(hf_config, device, dtype, **overrides):
    """A Megatron model filled where it lies: drawing 7.8 B weights on CPU takes minutes."""
    where = dict(perform_initialization=False, use_cpu_initialization=device == "cpu")
    # Norms too: Megatron's local ones are float32, vLLM's are not.
    model = toy.model.build_model(hf_config, dtype=dtype, **(where | overrides)).to(device, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
            else:  # uninitialised, Megatron's biases hold what the memory held
                parameter.fill_(0 if name.endswith("bias") else 1)
    return model


def packed_batch(hf_config, num_tokens, device):
    """Four documents of random tokens in one buffer, as keywords of GPTModel.forward."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(hf_config["vocab_size"], (num_tokens,), generator=generator)
    input_ids, position_ids, packed = toy.model.pack([x.tolist() for x in tokens.chunk(4)], device)
    batch = dict(input_ids=input_ids, position_ids=position_ids, attention_mask=None)
    return batch | dict(packed_seq_params=packed)


def start(options, hf_config, dtype, folder=None, **settings):
    """vLLM, eager, small batches: its trial run at start is short then."""
    small = dict(max_num_seqs=8, max_model_len=256, max_num_batched_tokens=2048)
    small |= dict(worker_extension_cls="bench_mimo7b.PushWorker")
    folder = folder or f"{options.work}/dummy"
    return common.start_engine(folder, hf_config, dtype, **(small | settings))


def greedy_tokens(llm):
    """What the engine's weights say, to tell whether two engines or two pushes hold the same."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": list(range(i, i + 5))} for i in range(8)]
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


# ---- Training side ------------------------------------------------------------------------------
def bench_reference(options, hf_config, device, dtype, save):
    """Built in turns, so that each is measured alone."""
    toy.model.init_megatron(device)
    batch, rows = packed_batch(hf_config, options.tokens, device), []
    off = contextlib.nullcontext
    for config, mtp, passes in (
        (hf_config, True, {"with MTP": off, "with MTP, skip_mtp": skip_mtp}),
        (without_mtp_config(hf_config), False, {"without": off}),
    ):
        gc.collect()
        model = build(config, device, dtype, mtp=mtp).requires_grad_(False)
        num_bytes = sum(p.nbytes for p in model.parameters())
        for name, context in passes.items():

            def run(model=model, context=context):
                with torch.no_grad(), context(model):
                    model(**batch)

            ms = 1e3 * common.median_seconds(device, run, options.repeats)
            rows.append({"model": name, "bytes": num_bytes, "forward_ms": ms})
            save(rows=rows, tokens=options.tokens)
        del model, run
    common.table(rows)


# ---- Pushes -------------------------------------------------------------------------------------
def timed_push(llm, device, push, repeats):
    """Median seconds, one call left out, and bytes that memory rose: here, and in the worker."""
    push()
    llm.collective_rpc("bench_memory", args=(True,))
    peak = common.peak_bytes(device, push)
    worker_peak = llm.collective_rpc("bench_memory", args=(False,))[0]
    seconds = statistics.median(common.seconds(device, push) for _ in range(repeats))
    return {"seconds": seconds, "peak_bytes": peak, "worker_peak_bytes": worker_peak}


def tensors_to_push(options, hf_config, device, dtype, save):
    tensors = random_tensors(hf_config, device, dtype)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    rate = copy_rate(tensors, device, options.repeats)
    if device == "cuda":
        torch.cuda.empty_cache()
    print(f"{num_bytes:,} bytes in {len(tensors)} tensors; a copy: {rate:,.0f} GB/s", flush=True)
    save(bytes=num_bytes, tensors=len(tensors), copy_gb_s=rate)
    return tensors, num_bytes, rate


def bench_push(options, hf_config, device, dtype, save, process=False):
    """sync_weights with each kind of check, and of the target alone."""
    tensors, num_bytes, rate = tensors_to_push(options, hf_config, device, dtype, save)
    llm, facts = start(options, hf_config, dtype, process=process)
    before, rows = greedy_tokens(llm), []
    hows = [dict(verify=verify) for verify in (False, "sample", True)]
    for how in [*hows, dict(verify=False, drafter=False)]:
        row = timed_push(
            llm, device, lambda how=how: sync_weights(llm, tensors, **how), options.repeats
        )
        rows.append({"verify": str(how["verify"]), "drafter": how.get("drafter", True)} | row)
        rows[-1]["gb_s"] = num_bytes / row["seconds"] / GB
        save(rows=rows, engine=facts)
    save(tokens_changed=greedy_tokens(llm) != before)
    common.table(rows)


def bench_push_ipc(options, hf_config, device, dtype, save):
    bench_push(options, hf_config, device, dtype, save, process=True)


# ---- One PPO step -------------------------------------------------------------------------------
def bench_ppo(options, hf_config, device, dtype, save):
    """Warm-up of a few steps, so that drafts are accepted at all, then PPO steps, each part timed."""
    args = train_mimo.Args(
        device=device, out=f"{options.work}/ppo", layers=options.layers, vocab=hf_config["vocab_size"],
        hidden=hf_config["hidden_size"], heads=hf_config["num_attention_heads"],
        groups=hf_config["num_key_value_heads"], ffn=hf_config["intermediate_size"],
        symbols=min(256, hf_config["vocab_size"]), lr=1e-4, mtp_lr=2e-4, prompts=options.prompts,
        response_tokens=options.response_tokens, warmup_steps=options.warmup_steps,
    )  # fmt: skip
    building = functools.partial(build, device=device)
    with unittest.mock.patch.object(
        train_mimo, "build_model", lambda config, **settings: building(config, **settings)
    ):
        trainer = train_mimo.build_trainer(args)
        train_mimo.warm_up(trainer, args)
        reference = train_mimo.load_reference(trainer, args)
    settings = dict(max_num_seqs=args.prompts, max_model_len=args.response_tokens + 64)
    folder, steps = f"{args.out}/reference", []
    llm, _ = start(options, trainer.hf_config, dtype, folder, **settings)
    for step in range(options.steps + 1):
        clock, seconds = [time.perf_counter()], {}

        def tick(name, clock=clock, seconds=seconds):
            common.synchronize(device)
            clock.append(time.perf_counter())
            seconds[f"{name}_s"] = clock[-1] - clock[-2]

        samples = train_mimo.roll_out(llm, trainer, step, args)
        tick("rollout")
        batch = train_mimo.make_batch(samples, device)
        metrics = train_mimo.score(trainer, reference, batch, samples, args)
        drafts = train_mimo.trainer_drafts(trainer.actor, batch, args)
        metrics |= train_mimo.acceptance(trainer.actor, batch, samples, drafts, args)
        tick("score")
        metrics |= train_mimo.update(trainer, samples, step, args)
        tick("update")
        train_mimo.push(llm, trainer, args)
        tick("push")
        columns = ["reward", "accept_rate", "replay_agreement", *seconds]
        steps.append({"step": step} | {key: (metrics | seconds)[key] for key in columns})
        save(steps=steps, layers=args.layers, prompts=args.prompts)
    common.table(steps)


# ---- The run ------------------------------------------------------------------------------------
PARTS = {  # and the seconds after which a part is cut off
    "reference": (bench_reference, 150),
    "push": (bench_push, 300),
    "push-ipc": (bench_push_ipc, 300),
    "ppo": (bench_ppo, 450),
}


def main():
    parser = common.parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--tokens", type=int, default=8192, help="of recompute and reference")
    parser.add_argument("--layers", type=int, default=20, help="of ppo's model: what 141 GB hold")
    parser.add_argument("--prompts", type=int, default=32, help="of ppo's rollout")
    parser.add_argument("--response-tokens", type=int, default=128, help="of ppo's rollout")
    parser.add_argument("--warmup-steps", type=int, default=40, help="before ppo's first rollout")
    parser.add_argument("--steps", type=int, default=2, help="of PPO after the first")
    options = parser.parse_args()
    if options.tiny:
        options.tokens, options.response_tokens, options.prompts, options.layers = 128, 16, 8, 2
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    hf_config = toy.model.mimo_config(**(common.TINY if options.tiny else common.MIMO_7B))
    if options.part:
        run = functools.partial(PARTS[options.part][0], options, hf_config, options.device, dtype)
        common.child_main(run, options)

    began, failed = time.perf_counter(), []
    about = {"model": hf_config} | common.provenance(options.device, options.commit)
    for part in options.parts or PARTS:
        print(f"\n== {part}", flush=True)
        left = options.limit_s - (time.perf_counter() - began)
        at = time.perf_counter()
        result = common.run_child(part, min(left, PARTS[part][1]))
        result["part_s"] = time.perf_counter() - at
        path = f"{options.out}/mimo7b_{part}.json"
        common.write_json(path, {"benchmark": f"mimo7b {part}"} | about | result)
        failed += [f"{part}: {result['error']}"] if "error" in result else []
        print(f"{result.get('error', 'done')}; {result['part_s']:.0f} s; {path}", flush=True)
    sys.exit("\n".join(failed) or 0)


if __name__ == "__main__":
    main()
