#!/usr/bin/env bash
# Plain Ray, on every machine but the first: join the head and stay until it ends.
#
#   HEAD=10.0.0.1 RAY_AUTH_TOKEN=... ./ray_worker.sh
set -euo pipefail
: "${HEAD:?address of the first machine}" "${RAY_AUTH_TOKEN:?the token of the head}" "${PORT:=6379}"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
exec ray start --address="$HEAD:$PORT" --disable-usage-stats --block
