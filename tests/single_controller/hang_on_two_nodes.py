"""Hang a rank of each of two Ray nodes, and print what the driver is told; a process of its own."""

# ruff: noqa: T201

from __future__ import annotations

import json
import os
import signal

import ray
from ray.cluster_utils import Cluster

from hybridrl.diagnostics.process_report import reports_on
from hybridrl.errors import DeadlineError, WorkerDiedError
from hybridrl.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from tests.single_controller.workers import Scaler


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        second = cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        workers = RayClassWithInitArgs(Scaler)
        pool = RayResourcePool([1, 1], num_cpus_per_rank=1)
        with RayWorkerGroup(pool, workers) as group:
            nodes = {place["node_id"] for place in group.describe()}
            try:
                group.hang_on_both()
            except DeadlineError as error:
                message = str(error)
                tops = [report.top for report in reports_on(error)]
        with RayWorkerGroup(pool, workers, grace_s=1.0) as group:
            [lost] = [place for place in group.describe() if place["node_id"] == second.node_id]
            os.kill(lost["pid"], signal.SIGKILL)
            cluster.remove_node(second)
            try:
                group.describe()
            except WorkerDiedError as error:
                death, state = error.rank, reports_on(error)[error.rank].state
        told = {"nodes": len(nodes), "message": message, "tops": tops}
        print(json.dumps(told | {"death": death, "lost": lost["rank"], "state": state}))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
