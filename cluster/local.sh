#!/usr/bin/env bash
# A Dask cluster on this machine that is not started by dkrr: one scheduler, and worker processes of one thread each.
#
#   cluster/local.sh [-n WORKERS] [-m MEMORY] [-p PORT] [COMMAND ...]
#
#   cluster/local.sh dkrr fit cluster/job.toml      runs the command, ends the cluster, returns the command's status
#   cluster/local.sh                                keeps the cluster until Ctrl-C; run commands in another terminal
#
# Two workers of 2GiB on port 8786 by default. PYTHON names the interpreter that has dkrr (default: python3). Everything
# listens on the loopback interface only: whoever reaches a Dask scheduler can run code on its workers.
set -euo pipefail

workers=2 memory=2GiB port=8786 python=${PYTHON:-python3}
while getopts n:m:p: option; do
    case $option in
        n) workers=$OPTARG ;;
        m) memory=$OPTARG ;;
        p) port=$OPTARG ;;
        *) sed -n '4,7s/^# *//p' "$0" >&2; exit 2 ;;
    esac
done
shift $((OPTIND - 1))

listening() { (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; }
if listening; then
    echo "port $port is in use: end what listens there, or give another one with -p" >&2
    exit 2
fi

# One BLAS thread a process, and the fastest BLAS kernel that passed a self-test on this machine. NumPy reads these when
# it loads, so they have to be set before a worker starts; workers that differ in them are refused by dkrr.
environment=$("$python" -m dkrr.cli doctor --env)
eval "$environment"
# Tasks return receipts of a few numbers: there is nothing to spill, and a paused worker could free nothing.
export DASK_DISTRIBUTED__WORKER__MEMORY__TARGET=False
export DASK_DISTRIBUTED__WORKER__MEMORY__SPILL=False
export DASK_DISTRIBUTED__WORKER__MEMORY__PAUSE=False

scratch=$(mktemp -d)
pids=()
finish() {
    trap '' INT TERM HUP
    for pid in "${pids[@]}"; do
        # a process that ended before it was told to has something to say
        kill "$pid" 2>/dev/null || cat "$scratch"/*.log >&2
        wait "$pid" 2>/dev/null || true
    done
    rm -rf "$scratch"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

set -m   # a process group each, so that Ctrl-C does not end them below a command that still cleans up
"$python" -m dask scheduler --host 127.0.0.1 --port "$port" --no-dashboard >"$scratch/scheduler.log" 2>&1 &
scheduler=$!
"$python" -m dask worker "tcp://127.0.0.1:$port" --host 127.0.0.1 --nworkers "$workers" --nthreads 1 \
    --memory-limit "$memory" --no-dashboard --local-directory "$scratch" >"$scratch/workers.log" 2>&1 &
pids=($! "$scheduler")   # workers end first: they would try to reach a scheduler that is gone
set +m

for ((tenths = 0; tenths < 300; tenths++)); do
    if listening; then break; fi
    for pid in "${pids[@]}"; do
        kill -0 "$pid" 2>/dev/null || exit 6
    done
    sleep 0.1
done
echo "scheduler at tcp://127.0.0.1:$port, $workers workers of $memory" >&2

if [ $# -gt 0 ]; then
    "$@" <&0 &   # in the background, so that a signal is passed on at once and not when the command has ended
    command=$!
    trap 'kill "$command" 2>/dev/null || true' INT TERM HUP
    status=0
    wait "$command" || status=$?
    while kill -0 "$command" 2>/dev/null; do   # a signal ends the wait, not the command
        status=0
        wait "$command" || status=$?
    done
    exit "$status"
else
    wait -n "${pids[@]}" || true
    exit 6   # one of them ended by itself
fi
