"""Starts the rollout servers of a run, and ends them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import ray

from hybridrl import env
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.serving.external import ServerKeys
from hybridrl.serving.managed_servers import ManagedServers
from hybridrl.serving.manager import RolloutManager
from hybridrl.serving.placement import find_places
from hybridrl.serving.plan import plan_servers
from hybridrl.serving.settings import driver_variables
from hybridrl.single_controller import RayResourcePool


@contextmanager
def start_servers(
    config: ExperimentConfig, model_folder: Path, *, variables: Mapping[str, str]
) -> Iterator[ManagedServers]:
    """Start the servers of a run, and end them.

    Args:
        config: of the run, with absolute paths.
        model_folder: Hugging Face folder of the policy, absolute.
        variables: environment of the processes, besides that of the driver which concerns engines.

    Raises:
        ResourceError: the cluster lacks the resources.
        StageError: an engine did not start.
    """
    cluster = config.cluster
    variables = {**driver_variables(config, env.everything()), **variables}
    pool = RayResourcePool(
        process_on_nodes=[config.serving.num_devices_per_node] * cluster.num_nodes,
        use_gpu=cluster.device == "cuda",
        num_cpus_per_rank=cluster.num_cpus_per_rank,
        wait_s=cluster.start_timeout_s,
        is_spread=True,
    )
    placements = pool.lease()
    folder = Path(mkdtemp(prefix="hybridrl-served-weights-"))
    try:
        manager = _start_manager(config, model_folder, placements, variables, folder)
        rollout = config.rollout
        limit_s = cluster.start_timeout_s + rollout.start_timeout_s
        limit_s += len(config.serving.frozen) * (rollout.start_timeout_s + rollout.stage_timeout_s)
        starting = ManagedServers(manager, timeout_s=limit_s)
        try:
            starting.start()
            yield ManagedServers(
                manager, timeout_s=cluster.call_timeout_s, weights=config.serving.weights
            )
        finally:
            starting.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # which a dead manager leaves behind
        pool.give_back()


def _start_manager(
    config: ExperimentConfig,
    model_folder: Path,
    placements: Sequence[Mapping[str, Any]],
    variables: Mapping[str, str],
    folder: Path,
) -> Any:  # noqa: ANN401 - Ray's
    places = find_places(config, plan_servers(config), placements, variables=variables)
    environment = {"env_vars": dict(variables)} if variables else {}
    actor_class = ray.remote(RolloutManager)
    return actor_class.options(num_cpus=0, runtime_env=environment).remote(
        config,
        model_folder,
        placements=placements,
        variables=variables,
        places=places,
        folder=folder,
        keys=ServerKeys.read(config),
    )
