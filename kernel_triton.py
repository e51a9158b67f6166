"""PROTOTYPE, to be pasted into mtp_loss.py: the elementwise step of a chunk as two Triton kernels.

_fused() returns (row_statistics, softmax) of _elementwise_steps(True), with the same arguments; nothing else changes.
Between the two lies what tensor-parallel ranks exchange (_over_ranks), so that vocabulary shares work.

Run   TRITON_INTERPRET=1 python kernel_triton.py     on a CPU: both against float64
      python kernel_triton.py                        on a GPU: the same at MiMo-7B's vocabulary, then block sizes timed
      python kernel_triton.py --compare ARGS         bench_mtp_loss.py with torch.compile and Triton side by side
"""

import functools
import os
import sys
import unittest.mock

import torch


# ---- begin of what goes into mtp_loss.py -------------------------------------------------------------------------
@functools.cache
def _fused(block=4096, num_warps=8, in_place=False):
    """_row_statistics and _softmax as one kernel each, without a float32 copy of the logits: 1 read; 1 read, 1 write.

    row of V logits   |  block  |  block  |  block  | bl      one program a row walks its blocks:
    statistics        top, token, total ------------->        a larger top shrinks the total so far
    softmax           one program a row and block             exp(logit - top) / total
    """
    import triton  # comes with torch for CUDA
    import triton.language as tl

    @triton.jit
    def statistics_kernel(logits, tops, tokens, totals, num_columns, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        top, token = -3.4e38, 0  # finite: a block of -inf then adds exp(-inf) and not exp(nan)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, num_columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(logits + row * num_columns + column, column < num_columns, float("-inf"))
            x = x.to(tl.float32)
            largest = tl.max(x, 0)
            if largest > top:  # seldom, so the arg-max costs little; not on a tie: the first stays
                token = start + tl.argmax(x, 0)
                total *= tl.exp(top - largest)
                top = largest
            total += tl.exp(x - top)
        tl.store(tops + row, top)
        tl.store(tokens + row, token)
        tl.store(totals + row, tl.sum(total, 0))

    @triton.jit
    def softmax_kernel(logits, out, tops, totals, num_columns, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * num_columns + column, column < num_columns, 0).to(tl.float32)
        p = tl.exp(x - tl.load(tops + row)) / tl.load(totals + row)
        tl.store(out + row * num_columns + column, p.to(out.dtype.element_ty), column < num_columns)

    def statistics(logits_NV):
        logits_NV = logits_NV.contiguous()  # as they are, but for a head of another layout
        num_rows, num_columns = logits_NV.shape
        top_N = logits_NV.new_empty(num_rows, dtype=torch.float32)
        token_N, total_N = torch.empty_like(top_N, dtype=torch.int64), torch.empty_like(top_N)
        outputs = top_N, token_N, total_N
        statistics_kernel[num_rows,](logits_NV, *outputs, num_columns, block, num_warps=num_warps)
        return outputs

    def softmax(logits_NV, top_N, total_N):
        logits_NV = logits_NV.contiguous()
        num_rows, num_columns = logits_NV.shape
        if in_place:
            torch.autograd.graph.increment_version(logits_NV)  # a head that saved them must refuse
        out_NV = logits_NV if in_place else torch.empty_like(logits_NV)
        tensors = logits_NV, out_NV, top_N, total_N
        grid = num_rows, triton.cdiv(num_columns, block)
        softmax_kernel[grid](*tensors, num_columns, block, num_warps=num_warps)
        return out_NV

    return statistics, softmax


# ---- end ---------------------------------------------------------------------------------------------------------


def check(device, num_rows, vocab, dtype, ties=False):
    """Largest relative errors of total, loss and softmax against float64; arg-max must be equal."""
    generator = torch.Generator().manual_seed(0)
    logits_NV = (torch.randn(num_rows, vocab, generator=generator) * 4).to(dtype)
    logits_NV[0, 1] = 300  # the largest comes first, and far off
    logits_NV[1, -1] = 300  # last
    logits_NV[2, : vocab // 2] = float("-inf")  # blocks of -inf first
    if ties:
        logits_NV[3] = 1.0
        logits_NV[4, [vocab // 3, vocab // 2, vocab - 1]] = 99.0
    exact = logits_NV.double()
    logits_NV = logits_NV.to(device)
    for in_place in (False, True):
        statistics, softmax = _fused(in_place=in_place)
        top_N, token_N, total_N = statistics(logits_NV)
        out_NV = softmax(logits_NV.clone(), top_N, total_N).cpu().double()
        lse = top_N.cpu().double() + total_N.cpu().double().log()
        assert torch.equal(token_N.cpu(), exact.to(dtype).max(1).indices), "arg-max"
        first = (exact == exact.max(1, keepdim=True).values).int().argmax(1)
        assert torch.equal(token_N.cpu(), first), "the first of a tie"
        assert torch.equal(top_N.cpu().double(), exact.max(1).values)
        lse_error = (lse - exact.logsumexp(1)).abs().max().item()
        p_NV = exact.softmax(1)
        p_error = ((out_NV - p_NV).abs() / p_NV.clamp(min=1e-30))[p_NV > 1e-30].max().item()
        assert out_NV.isfinite().all()
        print(
            f"{device} {dtype} {num_rows} x {vocab} in_place={in_place}: log-sum-exp {lse_error:.1e} nats, "
            f"softmax {p_error:.1e} relative",
            flush=True,
        )
        of_bf16 = 4.2e-3 if logits_NV.is_cuda else 8e-3  # the interpreter truncates
        assert lse_error < 1e-5 and p_error < (of_bf16 if dtype == torch.bfloat16 else 2e-5)


def sweep(num_rows=1024, vocab=151_680):
    """Milliseconds of each kernel a chunk, for block sizes and warps; the floor is bytes by 4.3 TB/s."""
    from triton.testing import do_bench

    logits_NV = torch.randn(num_rows, vocab, device="cuda", dtype=torch.bfloat16)
    gb = logits_NV.nbytes / 1e9
    print(f"floors: statistics {gb / 4.3:.3f} ms, softmax {2 * gb / 4.3:.3f} ms")
    for block in (2048, 4096, 8192, 16384):
        for num_warps in (4, 8, 16):
            statistics, softmax = _fused(block, num_warps)
            top_N, _, total_N = statistics(logits_NV)
            in_place = _fused(block, num_warps, in_place=True)[1]
            runs = [functools.partial(statistics, logits_NV)]
            runs += [functools.partial(f, logits_NV, top_N, total_N) for f in (softmax, in_place)]
            times = [do_bench(run, warmup=5, rep=30, return_mode="median") for run in runs]
            print(
                f"block {block:6d} warps {num_warps:2d}: statistics {times[0]:.3f} ms, softmax {times[1]:.3f} ms, "
                f"in place {times[2]:.3f} ms",
                flush=True,
            )


def compare():
    """bench_mtp_loss with torch.compile and Triton side by side, whichever of them mtp_loss.py holds."""
    sys.path.insert(0, "benchmarks")
    import bench_mtp_loss

    import mtp_loss

    cuda = torch.cuda.is_available()
    step = torch.compile if cuda else lambda function: function
    compiled = {function: step(function) for function in mtp_loss._steps(False)}
    names = mtp_loss._row_statistics, mtp_loss._softmax
    pairs = {"compile": compiled}
    if cuda or os.environ.get("TRITON_INTERPRET"):
        for label, pair in {"triton": _fused(), "in place": _fused(in_place=True)}.items():
            pairs[label] = compiled | dict(zip(names, pair, strict=True))
    stock = bench_mtp_loss.contestants

    def contestants(*args):
        runs = {}
        for (name, share), run in stock(*args).items():
            if not name.startswith("chunked"):
                runs[name, share] = run
                continue
            for label, pair in pairs.items():
                if label == "compile" and name.endswith(" 2048"):  # its peak is over today's
                    continue

                def patched(run=run, steps=pair):
                    how = "_steps", lambda is_cuda: steps
                    with unittest.mock.patch.object(mtp_loss, *how):
                        run()

                runs[f"{name} {label}", share] = patched
        return runs

    bench_mtp_loss.contestants = contestants
    bench_mtp_loss.main()


if __name__ == "__main__":
    if "--compare" in sys.argv:
        sys.argv.remove("--compare")
        compare()
        sys.exit()
    cuda = torch.cuda.is_available()
    device, vocab = ("cuda", 151_680) if cuda else ("cpu", 10_007)
    for dtype in (torch.bfloat16, torch.float32):
        check(device, 64 if cuda else 6, vocab, dtype, ties=True)
        check(device, 6, 4096, dtype, ties=True)  # divides
        check(device, 6, 37, dtype, ties=True)
    if cuda:
        sweep()
