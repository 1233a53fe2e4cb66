"""Start a group over two Ray nodes and print where its ranks are; a process of its own."""

# ruff: noqa: T201

from __future__ import annotations

import json

import ray
from ray.cluster_utils import Cluster

from hybridrl.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from tests.single_controller.workers import Scaler


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        cluster.add_node(num_cpus=2)
        ray.init(address=cluster.address, log_to_driver=False)
        pool = RayResourcePool([2, 2], num_cpus_per_rank=1)
        with RayWorkerGroup(pool, RayClassWithInitArgs(Scaler)) as group:
            places = group.describe()
        nodes = [place["node_id"] for place in places]
        print(
            json.dumps(
                {
                    "local_ranks": [place["env"]["LOCAL_RANK"] for place in places],
                    "local_world_sizes": [place["env"]["LOCAL_WORLD_SIZE"] for place in places],
                    "num_nodes_of_first_two": len(set(nodes[:2])),
                    "num_nodes": len(set(nodes)),
                }
            )
        )
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
