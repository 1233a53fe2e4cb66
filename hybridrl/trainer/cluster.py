"""From the ``cluster`` section to Ray, a resource pool and a worker group."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import ray

from hybridrl import env
from hybridrl.config.cluster import ClusterConfig
from hybridrl.errors import ResourceError
from hybridrl.single_controller import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
)


@contextmanager
def ray_cluster(cluster: ClusterConfig) -> Iterator[Future[None]]:
    """Connect to ``cluster.ray_address``, or start Ray on this machine and end it afterwards.

    Yields:
        Done when Ray is there; its ``result()`` raises ResourceError if no cluster answers.
    """
    if ray.is_initialized():  # the caller's own: a test, a notebook, a job
        done: Future[None] = Future()
        done.set_result(None)
        yield done
        return
    with ThreadPoolExecutor(1, thread_name_prefix="start-ray") as thread:
        started = thread.submit(_start_ray, cluster)
        try:
            yield started
        finally:
            if started.exception() is None:
                ray.shutdown()


def _start_ray(cluster: ClusterConfig) -> None:
    for name, value in env.process_environment(cluster.num_threads_per_rank).items():
        env.set_default(name, value)
    # A GPU is visible to a rank only if Ray gives it; ranks on CPUs see none, and that is no news.
    env.set_default("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray.init(**_init_arguments(cluster))
    except (ConnectionError, ValueError) as err:
        raise ResourceError(
            f"no Ray cluster answers at cluster.ray_address={cluster.ray_address}: {err}; "
            "start one with `ray start --head`, or set cluster.ray_address=null to start one here"
        ) from err


def _init_arguments(cluster: ClusterConfig) -> dict[str, Any]:
    if cluster.ray_address is not None:
        return {"address": cluster.ray_address, "logging_level": logging.WARNING}
    num_cpus = max(1, round(cluster.num_ranks_per_node * cluster.num_cpus_per_rank))
    return {
        "address": "local",
        # As many as the ranks ask for: more ranks than cores is a choice, not an error.
        "num_cpus": num_cpus,
        "include_dashboard": False,
        "logging_level": logging.WARNING,
    }


def start_group(cluster: ClusterConfig, worker: type[Worker], *args: object) -> RayWorkerGroup:
    """Start one process per rank and construct ``worker(*args)`` in each.

    Raises:
        ResourceError: the cluster lacks the resources; names what is asked for and what there is.
        RemoteCallError: a constructor raised.
    """
    pool = RayResourcePool(
        process_on_nodes=[cluster.num_ranks_per_node] * cluster.num_nodes,
        use_gpu=cluster.device == "cuda",
        num_cpus_per_rank=cluster.num_cpus_per_rank,
        wait_s=cluster.start_timeout_s,
    )
    return RayWorkerGroup(
        resource_pool=pool,
        ray_cls_with_init=RayClassWithInitArgs(worker, *args),
        env_vars=env.process_environment(cluster.num_threads_per_rank),
        timeout_s=cluster.call_timeout_s,
        start_timeout_s=cluster.start_timeout_s,
    )
