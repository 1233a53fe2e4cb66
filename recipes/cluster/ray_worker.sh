#!/usr/bin/env bash
# Plain Ray, on every machine but the first: wait for the head, join it, and stay until it ends.
#
#   HEAD=10.0.0.1 RAY_AUTH_TOKEN=... ./ray_worker.sh
set -euo pipefail
: "${HEAD:?address of the first machine}" "${RAY_AUTH_TOKEN:?the token of the head}" "${PORT:=6379}"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN

deadline=$((SECONDS + ${START_TIMEOUT_S:-600}))
until ray status --address="$HEAD:$PORT" > /dev/null 2>&1; do
    if ((SECONDS > deadline)); then
        echo "no Ray head that takes this RAY_AUTH_TOKEN answers at $HEAD:$PORT; start ray_head.sh there" >&2
        exit 1
    fi
    echo "waiting for the Ray head at $HEAD:$PORT"
    sleep 5
done
exec ray start --address="$HEAD:$PORT" --disable-usage-stats --block
