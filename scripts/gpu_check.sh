#!/usr/bin/env bash
# One prepared run on a machine with a GPU: scripts/gpu_check.sh [FOLDER] [--device cuda] [--tiny]
#
# Tests the kernels and the recorded steps, compares trees and tokens with tests/golden, and measures what a cycle costs
# beside a plain step. It takes under eight minutes and installs nothing: torch, triton, numpy, pytest and safetensors
# are what it needs. FOLDER (gpu-check) gets gpu_check.json, gpu_cycle.json and log.txt.
# With --tiny or EAGLE2_GPU_CHECK_TINY=1 everything runs in small, on a CPU too (--device cpu).
set -u -o pipefail

out=gpu-check device=cuda tiny=${EAGLE2_GPU_CHECK_TINY:-0}
while [ $# -gt 0 ]; do
  case $1 in
    --device) device=$2; shift ;;
    --tiny) tiny=1 ;;
    -*) echo "gpu_check: $1 is no option of it" >&2; exit 2 ;;
    *) out=$1 ;;
  esac
  shift
done
mkdir -p "$out" && out=$(cd "$out" && pwd) && cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
export PYTHONPATH="$PWD/services:$PWD" PYTHONUNBUFFERED=1 EAGLE2_GPU_CHECK_DEVICE=$device
slack=3 # a CPU is asked for no speed
[ "$device" = cpu ] || { slack=1; export TRITON_INTERPRET=0; }
log=$out/log.txt
: >"$log"

began=$SECONDS
parts=()
# NAME SECONDS COMMAND...: runs a part within its time; the others run whatever becomes of it.
part() {
  local name=$1 limit=$2 start=$SECONDS code
  shift 2
  echo "== $name" | tee -a "$log"
  timeout $((limit * slack)) "$@" 2>&1 | tee -a "$log"
  code=${PIPESTATUS[0]}
  echo "== $name: exit $code after $((SECONDS - start)) s" | tee -a "$log"
  parts+=("\"$name\": {\"exit\": $code, \"seconds\": $((SECONDS - start))}")
  [ "$code" = 0 ] || failed=1
}
failed=0
small=()
[ "$tiny" = 1 ] && small=(--tiny)

{ nvidia-smi || true; git rev-parse HEAD || true; } >>"$log" 2>&1
pytest=("$python" -m pytest -q -c tests/gpu/pytest.ini -p no:cacheprovider -m gpu -s)
part kernels 110 "${pytest[@]}" tests/gpu/test_gpu_attention.py
part golden 100 "${pytest[@]}" tests/gpu/test_golden.py
part graphs 60 "${pytest[@]}" tests/gpu/test_graphs.py
part cycle 200 "$python" -m benchmarks.gpu_cycle --out "$out" --device "$device" "${small[@]}"

joined=$(IFS=,; echo "${parts[*]}")
echo "{\"device\": \"$device\", \"tiny\": $tiny, \"seconds\": $((SECONDS - began)), \"parts\": {$joined}}" >"$out/gpu_check.json"
cat "$out/gpu_check.json"
exit "$failed"
