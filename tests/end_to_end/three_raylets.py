"""What a driver sees of a Ray cluster of three nodes; a process of its own, prints one JSON."""

# ruff: noqa: T201

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group, remove_placement_group

from hybridrl.errors import ResourceError
from hybridrl.run.launch import run
from hybridrl.run.workers import start_group
from hybridrl.single_controller import RayClassWithInitArgs
from tests.end_to_end.small import VARIED, read_metrics, small_config
from tests.single_controller.workers import Scaler
from tests.warm_workers.forking import workers_forked

_NUM_NODES, _NUM_CPUS = 3, 3  # so that all three entries of a pool of 3 x 1 would fit on one node


def main(folder: Path, *, trains: bool) -> None:
    with workers_forked(folder):
        _watch(folder, trains=trains)


def _watch(folder: Path, *, trains: bool) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": _NUM_CPUS})
    try:
        for _ in range(_NUM_NODES - 1):
            cluster.add_node(num_cpus=_NUM_CPUS)
        ray.init(address=cluster.address, log_to_driver=False)
        if trains:
            seen: dict[str, Any] = {
                "across": _train(folder / "across", "cluster.num_nodes=3"),
                "on one": _train(folder / "on-one", "cluster.num_ranks_per_node=3"),
            }
            print(json.dumps(seen))
            return
        seen = {
            "3 x 1": _places(folder, num_ranks_per_node=1, num_threads=3),  # raylets have 1
            "3 x 2": _places(folder, num_ranks_per_node=2, num_threads=1),
            "too many nodes": _refusal(folder, num_nodes=4, num_ranks_per_node=1),
            "too many ranks": _refusal(folder, num_nodes=1, num_ranks_per_node=4),
            "busy": _refusal_while_busy(folder),
        }
        print(json.dumps(seen))
    finally:
        ray.shutdown()
        cluster.shutdown()


def _places(folder: Path, *, num_ranks_per_node: int, num_threads: int) -> dict[str, Any]:
    config = replace(
        small_config(folder / "run").cluster,
        ray_address="auto",
        num_nodes=_NUM_NODES,
        num_ranks_per_node=num_ranks_per_node,
        num_threads_per_rank=num_threads,
    )
    with start_group(config, RayClassWithInitArgs(Scaler)) as group:
        places = group.describe()
        described = group.describe_places()
    nodes = [place["node_id"] for place in places]
    return {
        "nodes": [sorted(set(nodes)).index(node) for node in nodes],  # ids sort as ranks do
        "local_ranks": [int(place["env"]["LOCAL_RANK"]) for place in places],
        "local_world_sizes": [int(place["env"]["LOCAL_WORLD_SIZE"]) for place in places],
        "threads": sorted({place["env"]["OMP_NUM_THREADS"] for place in places}),
        "described": described.replace(ray.util.get_node_ip_address(), "HOST"),
        "node_ids": [node[:8] for node in nodes],
    }


def _refusal(folder: Path, *, num_nodes: int, num_ranks_per_node: int) -> str:
    config = replace(
        small_config(folder / "run").cluster,
        ray_address="auto",
        num_nodes=num_nodes,
        num_ranks_per_node=num_ranks_per_node,
        start_timeout_s=1.5,
    )
    try:
        start_group(config, RayClassWithInitArgs(Scaler))
    except ResourceError as error:
        return str(error)
    return "it started"


def _refusal_while_busy(folder: Path) -> str:
    others = placement_group([{"CPU": 2}] * _NUM_NODES, strategy="STRICT_SPREAD")
    others.wait(30)
    try:
        return _refusal(folder, num_nodes=2, num_ranks_per_node=2)
    finally:
        remove_placement_group(others)


def _train(folder: Path, *overrides: str) -> dict[str, Any]:
    config = small_config(
        folder,
        "cluster.ray_address=auto",
        "cluster.start_timeout_s=120",
        "trainer.num_prompts_per_step=3",
        "trainer.num_steps=2",
        VARIED,
        *overrides,
    )
    run(config, resolved_yaml="")
    names = ("reward/mean", "policy/grad_norm", "policy/entropy_nats/mean", "eval/reward/mean")
    weights = (folder / "hf" / "model.safetensors").read_bytes()
    return {
        "metrics": [{n: line.get(n) for n in names} for line in read_metrics(folder)],
        "weights": hashlib.sha256(weights).hexdigest(),
        "log": (folder / "log.txt").read_text(),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), trains=sys.argv[2] == "trains")
