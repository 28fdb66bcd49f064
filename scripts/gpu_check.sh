#!/usr/bin/env bash
# Checks the GPU kernels on this machine's card, in eight minutes at most: their numbers, their speed
# beside cuDNN and FlexAttention (where PyTorch is installed), and the launch table, which is tuned.
#
#   scripts/gpu_check.sh [folder for the results, runs/gpu_check by default]
#
# PYTHON chooses the interpreter. A part that fails or takes too long doesn't keep the next ones from
# running; the same command continues what was cut off. Ends with 1 if a part failed.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
out=${1:-runs/gpu_check}
seconds_in_all=470

if ! device=$("$python" -c '
import sys, jax
device = jax.devices()[0]
print(device.device_kind)
sys.exit(device.platform != "gpu")' 2>&1); then
  echo "No GPU for JAX here, nothing is checked: ${device##*$'\n'}" >&2
  exit 1
fi
mkdir -p "$out"
# What is compiled once is there when the command is repeated.
JAX_COMPILATION_CACHE_DIR=$(realpath "$out")/cache
export JAX_COMPILATION_CACHE_DIR PYTHONUNBUFFERED=1
summary=("Checked on ${device##*$'\n'}:")
failed=0

# part NAME SECONDS COMMAND…: runs a part, bounded in time, with its output in NAME.log as well.
part() {
  local name=$1 seconds=$2 start=$SECONDS status left result
  shift 2
  echo "== $name"
  for _ in 1 2 3; do
    left=$((seconds - SECONDS + start))
    ((left > seconds_in_all - SECONDS)) && left=$((seconds_in_all - SECONDS))
    if ((left < 5)); then
      status=124
      break
    fi
    timeout --kill-after=5 "$left" "$@" 2>&1 | tee -a "$out/$name.log"
    status=${PIPESTATUS[0]}
    # A crash of the compiler (128 and more): what continues leaves out what led to it.
    ((status >= 128 && status != 130)) || break
  done
  case $status in
    0) result=done ;;
    124 | 137) result='time is up; repeat the command to continue' ;;
    *) result="failed with exit code $status, see $out/$name.log" ;;
  esac
  ((status == 0)) || failed=1
  summary+=("$name: $result, $((SECONDS - start)) s")
  echo "== $name: $result, $((SECONDS - start)) s"
}

part numbers 130 "$python" -m experiments.kernel_check --workdir="$out/numbers"

# sweep NAME SECONDS PEER HEAD_DIM LENGTHS KINDS
sweep() {
  part "$1" "$2" "$python" -m experiments.efficiency --workdir="$out/$1" --peers="$3" \
    --head_dim="$4" --lengths="$5" --kinds="$6" --dtypes=bfloat16 --batch=1 --heads=16 \
    --window=256 --rounds=7
}
sweep speed_64 75 jax_cudnn 64 8192,32768 full,sliding_window,stochastic
sweep speed_128 75 jax_cudnn 128 8192,32768 full,sliding_window,stochastic
if "$python" -c 'import torch' 2>/dev/null; then
  sweep flex_64 60 torch_flex 64 32768 sliding_window,stochastic
  sweep flex_128 60 torch_flex 128 32768 sliding_window,stochastic
else
  summary+=('FlexAttention: not measured, PyTorch is not installed')
fi

# With what is left of the time: it ends by itself, half a minute before it would be stopped.
left=$((seconds_in_all - SECONDS))
part launches "$left" "$python" -m experiments.tune_kernel --workdir="$out/launches" \
  --dtypes=bfloat16 --head_dims=64,128 --seconds=$((left > 40 ? left - 30 : 10))
cp sa_jax/attention/launch_table.json "$out/"

printf '%s\n' '' "${summary[@]}" "In all: $SECONDS s. Results are in $out." | tee "$out/summary.txt"
exit "$failed"
