"""An engine over two Ray nodes: a process of its own, prints one JSON.

``python -m tests.sglang.two_node_engine MODEL OTHER_MODEL``.
"""

# ruff: noqa: T201

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import ray
from ray.cluster_utils import Cluster

from hybridrl.serving.launching import start_servers
from hybridrl.workers.sharding.manager_client import ManagerClient
from tests.config.values import config_of
from tests.serving.processes import servers_below
from tests.sglang.topologies import GREEDY, PROMPTS, SMALL, groups
from tests.waiting import wait_until


def main(*folders: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        cluster.add_node(num_cpus=2)
        ray.init(address=cluster.address, log_to_driver=False)
        config = config_of(
            *(*SMALL, "cluster.num_nodes=2", "cluster.ray_address=auto"),
            groups(main="num_devices: 2, devices_per_engine: 2"),
            "serving.num_devices_per_node=1",
        )
        answers = []
        with start_servers(config, folders[0], variables={}) as servers:
            for version, folder in enumerate(folders):
                servers.update(folder, version=version)
                answers.append(_answers(servers, version))
            followers = [one for one in servers_below() if _follows(one)]
            followers[0].kill()
            answers.append(_answers(servers, 1))  # by the engine that replaces it
        wait_until(lambda: not servers_below())
        print(json.dumps(answers))
    finally:
        ray.shutdown()
        cluster.shutdown()


def _answers(servers: ManagerClient, version: int) -> list[tuple[list[int], list[float]]]:
    samples, _ = servers.sample(PROMPTS, GREEDY, version=version)
    return [(one.token_ids.tolist(), one.logprobs.tolist()) for one in samples]


def _follows(server: psutil.Process) -> bool:
    return any("FollowerProcess" in word for one in server.parents() for word in one.cmdline())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
