"""From the ``cluster`` section to Ray, a resource pool and a worker group."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
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
    create_colocated_worker_cls,
)

_NVIDIA = Path("/dev/nvidiactl")


@contextmanager
def ray_cluster(cluster: ClusterConfig, *, num_more_ranks: int = 0) -> Iterator[None]:
    """Connect to ``cluster.ray_address``, or start Ray on this machine and end it afterwards.

    Args:
        cluster: where, and for how many ranks.
        num_more_ranks: processes beside them: a critic that has a pool of its own.

    Raises:
        ResourceError: no cluster answers at the address.
    """
    if ray.is_initialized():  # the caller's own: a test, a notebook, a job
        yield
        return
    require_device(cluster)
    _start_ray(cluster, num_ranks=cluster.num_ranks_per_node + num_more_ranks)
    try:
        yield
    finally:
        ray.shutdown()


def require_device(cluster: ClusterConfig) -> None:
    """Say at once what Ray would only find out by waiting for a node that has a GPU.

    Raises:
        ResourceError: GPUs are asked for, of this machine alone, and it has none.
    """
    if cluster.ray_address is None and cluster.device == "cuda" and not _NVIDIA.exists():
        raise ResourceError(
            "cluster.device=cuda, but this machine has no NVIDIA device; set cluster=cpu, or "
            "cluster.ray_address to a Ray cluster that has GPUs"
        )


def _start_ray(cluster: ClusterConfig, *, num_ranks: int) -> None:
    for name, value in env.process_environment(cluster.num_threads_per_rank).items():
        env.set_default(name, value)
    # A GPU is visible to a rank only if Ray gives it; ranks on CPUs see none, and that is no news.
    env.set_default("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ranks import what this process does, whether hybridrl is installed or run from a checkout.
    paths = [str(Path(__file__).resolve().parents[2]), env.get("PYTHONPATH")]
    env.set_value("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    # Ray's idle processes import what ranks need while this one still imports: 3 s less to step 1.
    env.set_default("RAY_preload_python_modules", "hybridrl.workers.actor_rollout")
    try:
        ray.init(**_init_arguments(cluster, num_ranks))
    except (ConnectionError, ValueError) as err:
        raise ResourceError(
            f"no Ray cluster answers at cluster.ray_address={cluster.ray_address}: {err}; "
            "start one with `ray start --head`, or set cluster.ray_address=null to start one here"
        ) from err


def _init_arguments(cluster: ClusterConfig, num_ranks: int) -> dict[str, Any]:
    if cluster.ray_address is not None:
        return {"address": cluster.ray_address, "logging_level": logging.WARNING}
    num_cpus = max(1, round(num_ranks * cluster.num_cpus_per_rank))
    return {
        "address": "local",
        # As many as the ranks ask for: more ranks than cores is a choice, not an error.
        "num_cpus": num_cpus,
        "include_dashboard": False,
        "logging_level": logging.WARNING,
    }


def _rank_environment(cluster: ClusterConfig) -> dict[str, str]:
    """Return what ranks need set and do not inherit.

    On this machine they inherit all of this process's environment; then there is nothing to set,
    and
    Ray can give them its idle processes, which one with an environment of its own cannot be.
    """
    needed = env.process_environment(cluster.num_threads_per_rank)
    if cluster.ray_address is not None:
        return needed
    return {name: value for name, value in needed.items() if env.get(name) != value}


def start_group(cluster: ClusterConfig, worker: type[Worker], *args: object) -> RayWorkerGroup:
    """Start one process per rank and construct ``worker(*args)`` in each.

    Raises:
        ResourceError: the cluster lacks the resources; names what is asked for and what there is.
        RemoteCallError: a constructor raised.
    """
    return _start_group(cluster, RayClassWithInitArgs(worker, *args))


def start_fused_group(
    cluster: ClusterConfig, roles: Mapping[str, tuple[type[Worker], object]]
) -> RayWorkerGroup:
    """Start one process per rank that holds a worker of each role.

    Args:
        cluster: how many ranks, and what each gets.
        roles: by prefix, the worker's class and the argument of its constructor.

    Raises:
        ResourceError: the cluster lacks the resources; names what is asked for and what there is.
        RemoteCallError: a constructor raised.
    """
    classes = {prefix: RayClassWithInitArgs(cls, spec) for prefix, (cls, spec) in roles.items()}
    return _start_group(cluster, create_colocated_worker_cls(classes))


def _start_group(cluster: ClusterConfig, worker: RayClassWithInitArgs) -> RayWorkerGroup:
    pool = RayResourcePool(
        process_on_nodes=[cluster.num_ranks_per_node] * cluster.num_nodes,
        use_gpu=cluster.device == "cuda",
        num_cpus_per_rank=cluster.num_cpus_per_rank,
        wait_s=cluster.start_timeout_s,
    )
    return RayWorkerGroup(
        resource_pool=pool,
        ray_cls_with_init=worker,
        env_vars=_rank_environment(cluster),
        timeout_s=cluster.call_timeout_s,
        start_timeout_s=cluster.start_timeout_s,
    )
