#!/usr/bin/env bash
# Table 1 on this machine's GPU in ten minutes: full attention, SWA, SA and SA + SWA, a model of 24M
# parameters on the default corpus, as many of three seeds as the time allows.
#
#   scripts/gpu_table1.sh [folder for the results, runs/table1_gpu by default]
#
# PYTHON chooses the interpreter, DATA_DIR where the corpus is kept, SECONDS_IN_ALL another time. The
# same command goes on from where the time ran out.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
out=${1:-runs/table1_gpu}
seconds=${SECONDS_IN_ALL:-600}  # the report's half minute included

if ! device=$("$python" -c '
import sys, jax
device = jax.devices()[0]
print(device.device_kind)
sys.exit(device.platform != "gpu")' 2>&1); then
  echo "No GPU for JAX here, nothing is trained: ${device##*$'\n'}" >&2
  exit 1
fi
mkdir -p "$out" || exit
echo "On ${device##*$'\n'}:"
export PYTHONUNBUFFERED=1
compare=("$python" -m experiments.compare --config=configs/pretrain/table1_gpu.py --workdir="$out"
  --data_dir="${DATA_DIR:-$HOME/.cache/sa_jax}")

# The last half minute is the report's. A run that is stopped saves, and goes on next time.
timeout --signal=TERM --kill-after=20 $((seconds - 30 - SECONDS)) "${compare[@]}"
status=$?
"${compare[@]}" --report_only || exit
if ((status == 124 || status == 137)); then
  echo "The time is up; repeat the command to continue. $SECONDS s."
elif ((status)); then
  echo "Training failed with exit code $status." >&2
  exit "$status"
else
  echo "Done in $SECONDS s. Results are in $out."
fi
