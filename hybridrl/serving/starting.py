"""Starts the rollout servers of a run, and ends them."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import ray

from hybridrl import env
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.serving.launching import ServerDevices, ServerKeys
from hybridrl.serving.manager import RolloutManager
from hybridrl.serving.placement import find_places
from hybridrl.serving.plan import plan_own_engines
from hybridrl.single_controller import RayResourcePool
from hybridrl.workers.engine_settings import driver_variables
from hybridrl.workers.sharding.manager_client import ManagerClient


@contextmanager
def start_servers(
    config: ExperimentConfig, model_folder: Path, *, variables: Mapping[str, str]
) -> Iterator[ManagerClient]:
    """Start the servers of a run, and end them.

    Args:
        config: of the run, with absolute paths.
        model_folder: Hugging Face folder of the policy, absolute.
        variables: environment of the processes, besides that of the driver which concerns engines.

    Raises:
        ResourceError: the cluster lacks the resources.
        StageError: an engine did not start.
    """
    cluster, rollout = config.cluster, config.rollout
    variables = {**driver_variables(config, env.everything()), **variables}
    folder = Path(mkdtemp(prefix="hybridrl-served-weights-"))
    key = secrets.token_urlsafe()
    try:
        with _own_devices(config) as placements:
            manager = _start_manager(config, model_folder, placements, variables, key)
            limit_s = cluster.start_timeout_s + rollout.start_timeout_s
            num_frozen = len(config.serving.frozen)
            limit_s += num_frozen * (2 * rollout.start_timeout_s + rollout.stage_timeout_s)
            starting = ManagerClient(manager, timeout_s=limit_s)
            try:
                starting.start()
                yield ManagerClient(
                    manager,
                    timeout_s=cluster.call_timeout_s,
                    # No server of an embedded engine could join a group.
                    weights=config.serving.weights if rollout.engine == "sglang" else "files",
                    folder=folder,
                    stage_timeout_s=rollout.stage_timeout_s,
                    key=key,
                )
            finally:
                starting.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # which dead ranks leave behind


@contextmanager
def _own_devices(config: ExperimentConfig) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Reserve the devices of the servers that are not the trainer's.

    Yields options of Ray for a process on each device of the servers, in order. The place of a
    device of the trainer, where the manager starts no process, has those of the first other one of
    its node.
    """
    cluster, num_shared = config.cluster, config.num_shared_per_node
    num_own = config.num_own_server_devices // cluster.num_nodes
    if not num_own:
        yield ()
        return
    pool = RayResourcePool(
        process_on_nodes=[num_own] * cluster.num_nodes,
        use_gpu=cluster.device == "cuda",
        num_cpus_per_rank=cluster.num_cpus_per_rank,
        wait_s=cluster.start_timeout_s,
        is_spread=True,
    )
    own = pool.lease()
    try:
        yield [
            own[first + max(0, number - num_shared)]
            for first in range(0, len(own), num_own)
            for number in range(config.serving.num_devices_per_node)
        ]
    finally:
        pool.give_back()


def _start_manager(
    config: ExperimentConfig,
    model_folder: Path,
    placements: Sequence[Mapping[str, Any]],
    variables: Mapping[str, str],
    key: str,
) -> Any:  # noqa: ANN401 - Ray's
    places = find_places(config, plan_own_engines(config), placements, variables=variables)
    environment = {"env_vars": dict(variables)} if variables else {}
    actor_class = ray.remote(RolloutManager)
    # The end of a run must not wait behind a batch.
    num_calls = 2 if config.samples_ahead else 1
    options = {"num_cpus": 0, "runtime_env": environment, "max_concurrency": num_calls}
    return actor_class.options(**options).remote(
        config,
        model_folder,
        devices=ServerDevices(placements=placements, variables=variables, places=places),
        keys=ServerKeys.read(config, own=key),
    )
