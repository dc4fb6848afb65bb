#!/usr/bin/env bash
# A Dask cluster on hosts that you reach by ssh, on TLS: for one command, or until Ctrl-C.
#
#   cluster/ssh/cluster.sh [-n WORKERS] [-m MEMORY] [-p PORT] [-t TLS] [-b BIN] [-i INTERFACE] HOST ... [-- COMMAND ...]
#
#   cluster/ssh/cluster.sh -n 8 -m 4GiB node1 node2 -- dkrr fit job.toml
#
# The scheduler is on the first HOST; WORKERS (2) processes of one thread and MEMORY (2GiB) are on each. COMMAND runs
# here, for jobs that name no [cluster] scheduler; its status is returned. HOST is what ssh takes: a name of
# ~/.ssh/config, or user@host. Each host has dkrr in the folder BIN (without -b: on the PATH of `ssh HOST`), and sees
# the store of the job.
#
# Certificates are made in TLS (~/.dkrr/tls) if they are not there; the scheduler's and the workers' are on the hosts for
# as long as the cluster lives. What runs there ends with its connection: with this script, however it ends, and when
# this machine is gone. The variable SSH holds more options of ssh, e.g. SSH="-F my_config".
set -euo pipefail

usage() { sed -n '4p' "$0" | sed 's/^# *//' >&2; exit 2; }
workers=2 memory=2GiB port=8786 tls=${HOME:-/root}/.dkrr/tls bin='' interface=''
while getopts n:m:p:t:b:i: option; do
    case $option in
        n) workers=$OPTARG ;;
        m) memory=$OPTARG ;;
        p) port=$OPTARG ;;
        t) tls=$OPTARG ;;
        b) bin=$OPTARG/ ;;
        i) interface=$OPTARG ;;
        *) usage ;;
    esac
done
last=$((OPTIND - 1))
if [ "$last" -gt 0 ] && [ "${!last}" = -- ]; then usage; fi   # no host before the command
shift "$last"
hosts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    hosts+=("$1")
    shift
done
[ "${#hosts[@]}" -gt 0 ] || usage
[ $# -eq 0 ] || shift
case $workers,$port in *[!0-9,]* | ,* | *, | 0,*) echo "-n $workers -p $port: numbers expected" >&2; exit 2 ;; esac
command -v ssh >/dev/null || { echo "ssh is not installed" >&2; exit 2; }

here=$(cd "$(dirname "$0")" && pwd)
for role in scheduler worker client; do
    if [ ! -e "$tls/$role/$role.pem" ]; then
        "$here/../tls/make-certificates.sh" "$tls"
        break
    fi
done
tls=$(cd "$tls" && pwd)

read -ra more <<<"${SSH:-}"
remote=(ssh -o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4 "${more[@]}")
scratch=$(mktemp -d)
connections=() inputs=()
finish() {
    trap '' INT TERM HUP
    # the hosts see the end of their input; the scheduler's last, for workers would try to reach it
    for ((number = ${#connections[@]} - 1; number >= 0; number--)); do
        kill "${inputs[number]}" 2>/dev/null || true
        for ((tenths = 0; tenths < 150; tenths++)); do
            kill -0 "${connections[number]}" 2>/dev/null || break
            sleep 0.1
        done
        kill "${connections[number]}" 2>/dev/null || true
        wait "${connections[number]}" 2>/dev/null || true
    done
    rm -rf "$scratch"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

fail() {   # fail WHAT: with what the hosts have said
    echo "$1" >&2
    tail -n 20 "$scratch"/*.log >&2 2>/dev/null || true
    exit 6
}

# What a host does: it has the certificates in a folder of their own, runs a server, and ends it at the end of input.
# shellcheck disable=SC2016  # these are for the host to expand
SERVE='
    role=$1 folder=$2 bin=$3
    shift 3
    sed -i "s|\"[^\"]*/$role/|\"$folder/|" "$folder/dask.yaml"
    variables=$("${bin}dkrr" doctor --env) || exit 6
    eval "$variables"
    export DASK_CONFIG="$folder"
    "${bin}dask" "$@" --no-dashboard --dashboard-address 127.0.0.1:0 </dev/null &
    server=$!
    exec 3<&0
    (cat; kill "$server") <&3 >/dev/null 2>&1 &
    watch=$!
    wait "$server"
    status=$?
    kill "$watch" 2>/dev/null
    rm -rf "$folder"
    exit "$status"'

send() {   # send HOST ROLE: its certificates; prints the folder that they are in
    # shellcheck disable=SC2016
    tar -C "$tls/$2" -cf - . | "${remote[@]}" "$1" \
        'umask 077 && folder=$(mktemp -d) && tar -C "$folder" -xf - && echo "$folder"'
}

quoted() {   # quoted WORD ...: for any shell that the host may have
    local word
    for word in "$@"; do printf "'%s' " "${word//\'/\'\\\'\'}"; done
}

serve() {   # serve HOST ROLE FOLDER ARGUMENT ...: start a server on a host
    local host=$1 role=$2 folder=$3 input
    shift 3
    # input that never comes, and that ends with this script even if it is killed
    exec {input}< <(exec tail --pid=$$ -s 0.5 -f /dev/null)
    inputs+=("$!")
    # shellcheck disable=SC2029
    "${remote[@]}" "$host" "$(quoted sh -c "$SERVE" serve "$role" "$folder" "$bin" "$@")" \
        <&"$input" >"$scratch/${#connections[@]}-$role.log" 2>&1 &
    connections+=("$!")
    exec {input}<&-
}

network=()
[ -z "$interface" ] || network=(--interface "$interface")

folder=$(send "${hosts[0]}" scheduler) || fail "${hosts[0]} cannot be reached, or has no room"
serve "${hosts[0]}" scheduler "$folder" scheduler --protocol tls --port "$port" \
    --scheduler-file "$folder/scheduler.json" "${network[@]}"
for ((tries = 0; tries < 60; tries++)); do
    kill -0 "${connections[0]}" 2>/dev/null || fail "the scheduler on ${hosts[0]} did not start"
    "${remote[@]}" "${hosts[0]}" "$(quoted cat "$folder/scheduler.json")" >"$scratch/scheduler.json" 2>/dev/null && break
    sleep 0.5
done
address=$(sed -n 's/.*"address": *"\([^"]*\)".*/\1/p' "$scratch/scheduler.json")
[ -n "$address" ] || fail "the scheduler on ${hosts[0]} did not start within half a minute"

for host in "${hosts[@]}"; do
    folder=$(send "$host" worker) || fail "$host cannot be reached, or has no room"
    serve "$host" worker "$folder" worker "$address" --nworkers "$workers" --nthreads 1 --memory-limit "$memory" \
        --death-timeout 60 --local-directory "$folder" "${network[@]}"
done

export DASK_CONFIG=$tls/client
export DASK_DKRR__CLUSTER__SCHEDULER=$address
export DASK_DKRR__CLUSTER__WORKERS=$((workers * ${#hosts[@]}))
export DASK_DKRR__CLUSTER__MEMORY_LIMIT=$memory
export DASK_DKRR__TIMEOUTS__WORKERS=${DASK_DKRR__TIMEOUTS__WORKERS:-120s}
echo "scheduler at $address, $workers workers of $memory on each of ${#hosts[@]} hosts" >&2

if [ $# -gt 0 ]; then
    "$@" <&0 &   # in the background, so that a signal is passed on at once and not when the command has ended
    command=$!
    trap 'kill "$command" 2>/dev/null || true' INT TERM HUP
    while kill -0 "$command" 2>/dev/null; do wait "$command" || true; done   # a signal ends the wait, not the command
    status=0
    wait "$command" || status=$?
    exit "$status"
fi
echo "export DASK_CONFIG=$DASK_CONFIG DASK_DKRR__CLUSTER__SCHEDULER=$address" >&2
wait -n "${connections[@]}" || true
fail "one of the servers ended"
