#!/usr/bin/env bash
# Runs a command as N processes of one run on this machine, over Gloo: what several hosts do.
#
#   scripts/launch_local.sh 2 python -m experiments.pretrain --config=configs/pretrain/demo.py \
#       --workdir=runs/two
#
# Each gets --coordinator, --processes and --process. The first one's output is shown, another's if it
# fails. SIGTERM and SIGINT reach all. Where one fails the others end as well, within a minute.
set -uo pipefail

if (($# < 2)) || ! [[ $1 =~ ^[1-9][0-9]*$ ]]; then
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
count=$1
shift
logs=$(mktemp -d) || exit
port=$("${PYTHON:-python3}" -c '
import socket
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    print(s.getsockname()[1])') || exit

pids=()
trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM INT
trap 'kill -KILL "${pids[@]}" 2>/dev/null; rm -rf "$logs"' EXIT
start() {
  JAX_PLATFORMS=cpu exec "$@" --coordinator="127.0.0.1:$port" --processes="$count" \
    --process="${#pids[@]}"
}
for ((process = 0; process < count; process++)); do
  if ((process)); then
    start "$@" >"$logs/$process" 2>&1 &
  else
    start "$@" &
  fi
  pids+=($!)
done

worst=0
for ((process = 0; process < count; process++)); do
  # A signal that is passed on interrupts the wait.
  while
    wait "${pids[process]}"
    status=$?
    kill -0 "${pids[process]}" 2>/dev/null
  do :; done
  if ((status)); then
    echo "Process $process ended with exit code $status." >&2
    ((process)) && tail -n 20 "$logs/$process" >&2
    worst=$status
  fi
done
exit "$worst"
