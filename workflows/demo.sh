#!/usr/bin/env bash
# Fit the two demonstration jobs in a folder of their own, and remove it. Usage: demo.sh [DKRR]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dkrr=$(command -v "${1:-dkrr}") || { echo "no dkrr command: install the project first" >&2; exit 1; }
dkrr=$(cd "$(dirname "$dkrr")" && pwd)/$(basename "$dkrr")

needed_mib=3072   # the factor of large.toml has 1.7 GB; rows, model and what the file system wants come on top
folder=$(mktemp -d "$here/../.demo-XXXXXX")   # not /tmp, which may be memory
trap 'rm -rf "$folder"' EXIT
trap 'exit 75' INT TERM
free_mib=$(df -Pk "$folder" | awk 'NR == 2 {print int($4 / 1024)}')
echo "disk: $needed_mib MiB needed for a while, $free_mib MiB free" >&2
if [ "$free_mib" -lt "$needed_mib" ]; then
    echo "not enough disk below $(dirname "$folder")" >&2
    exit 3
fi

cp "$here"/digits.toml "$here"/large.toml "$folder"
for job in digits large; do
    "$dkrr" fit "$folder/$job.toml"
done
