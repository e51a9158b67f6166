#!/usr/bin/env bash
# What is measured on an H200, most valuable first; each part has a time limit and fails alone.
#
#   bash benchmarks/h200.sh [PART...]     all parts if none is named
#
#   KIT    folder with part* (an archive of site-packages in pieces) and wheels, for /tmp/site
#   OUT    folder that gets every JSON so far and log.txt
#   TINY   --tiny rehearses all on CPU
set -u
PYTHON=${PYTHON:-python3} KIT=${KIT:-/tmp/kit} OUT=${OUT:-/tmp/out}
TINY=${TINY:-} COMMIT=${COMMIT:-}
results=${RESULTS:-/tmp/results}
mkdir -p "$results" "$OUT"
cd "$(dirname "$0")/.."

if [ -d "$KIT" ] && [ ! -e /tmp/site/done ]; then
    mkdir -p /tmp/site
    cat "$KIT"/part* | xz -dc -T0 | tar -C /tmp/site -xf - || exit 1
    for wheel in "$KIT"/*.whl; do "$PYTHON" -m zipfile -e "$wheel" /tmp/site; done
    touch /tmp/site/done
fi
[ -n "$TINY" ] || export PYTHONPATH=/tmp/site VLLM_USE_FLASHINFER_SAMPLER=0
export PYTHONUNBUFFERED=1

part() { # NAME LIMIT_S COMMAND...
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    timeout -k 5 "$limit" "$PYTHON" "$@" >"$results/$name.txt" 2>"$results/$name.err"
    echo "== $name: exit status $?, $((SECONDS - began)) s" | tee -a "$results/$name.txt"
    cp "$results"/*.json "$OUT" 2>/dev/null
    cat "$results"/*.txt "$results"/*.err >"$OUT/log.txt"
}
bench() { # NAME LIMIT_S SCRIPT...
    local name=$1 limit=$2 script=$3
    shift 3
    part "$name" "$limit" "$script" $TINY --out "$results" --commit "$COMMIT" "$@"
}

parts=${*:-loss cuda push rollout rollout7b push-ipc recompute}
for name in $parts; do
    case $name in
        loss) bench loss 150 benchmarks/bench_mtp_loss.py --repeats 10 ;;
        cuda) part cuda 240 -m pytest -q -p no:cacheprovider -m cuda tests/test_cuda.py ;;
        push) bench push 130 benchmarks/bench_mimo7b.py push --limit-s 120 ;;
        push-ipc) bench push-ipc 130 benchmarks/bench_mimo7b.py push-ipc --limit-s 120 ;;
        recompute) bench recompute 60 benchmarks/bench_recompute.py ;;
        rollout)
            bench rollout 310 benchmarks/bench_rollout.py --drafts "${DRAFTS:-3}" --limit-s 300 \
                --repeats 2 --warmup-limit-s 50 --ppo-limit-s 40 --shift-limit-s 15 ;;
        rollout7b)
            bench rollout7b 350 benchmarks/bench_rollout7b.py --repeats 1 --limit-s 340 \
                --rates-from "$results/rollout_medium_k3.json" ;;
    esac
done
for name in $parts; do tail -n 40 "$results/$name.txt"; done | cut -c1-160
