#!/usr/bin/env bash
# Plain Ray, on the first machine: start the head, wait for the others, train, and end.
# A test runs it in two networks of one machine; with GPUs it is unproved.
#
#   SHARED=/mnt/shared NUM_NODES=2 NUM_RANKS_PER_NODE=8 RAY_AUTH_TOKEN=$(openssl rand -hex 32) \
#       ./ray_head.sh trainer.num_steps=200
#
# SHARED is a folder that all machines see under the same name: the made model, the run folder and
# the exported weights lie there. Give every machine the same RAY_AUTH_TOKEN: whoever reaches a Ray
# head without one can run code on it.
set -euo pipefail
: "${SHARED:?a folder that all machines share}" "${RAY_AUTH_TOKEN:?one token for all machines}"
: "${NUM_NODES:=2}" "${NUM_RANKS_PER_NODE:=8}" "${PORT:=6379}" "${DEVICE:=one_gpu}"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN HYBRIDRL_CACHE="$SHARED/cache"

ray start --head --port="$PORT" --disable-usage-stats --block &
head=$!
end_ray() { # and no `ray stop`, which ends every Ray on this machine
    kill "$head" 2> /dev/null || return 0
    for _ in {1..60}; do
        kill -0 "$head" 2> /dev/null || return 0
        sleep 1
    done
    pkill -9 -P "$head" || true # Ray did not end by itself
    kill -9 "$head" || true
}
trap end_ray EXIT
until ray status --address="127.0.0.1:$PORT" > /dev/null 2>&1; do
    kill -0 "$head" || exit 1
    sleep 1
done

# Waits cluster.start_timeout_s for the other machines, and says every 5 s what is missing.
python -m hybridrl.main \
    cluster="$DEVICE" \
    cluster.ray_address="127.0.0.1:$PORT" \
    cluster.num_nodes="$NUM_NODES" \
    cluster.num_ranks_per_node="$NUM_RANKS_PER_NODE" \
    trainer.run_dir="$SHARED/runs/$(date +%Y-%m-%d_%H-%M-%S)" \
    "$@"
