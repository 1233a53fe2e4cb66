"""The worker groups of a run: the policy's, and a critic's, fused or in its own pool."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import ray

from hybridrl import env
from hybridrl.config.cluster import ClusterConfig, SetupHook
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.functions.paths import with_absolute_files
from hybridrl.diagnostics import trace
from hybridrl.serving.launching import start_servers
from hybridrl.single_controller import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    WorkerGroup,
    create_colocated_worker_cls,
)
from hybridrl.workers.actor_rollout import ActorRolloutWorker
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.offline import PreferenceWorker, RewardModelWorker, SupervisedWorker
from hybridrl.workers.sharding.manager_client import ManagerClient

log = logging.getLogger(__name__)


class Workers(dict[str, WorkerGroup]):
    """Worker groups by role: ``actor``, and ``critic`` if the algorithm uses one."""

    servers: ManagerClient | None = None
    """The rollout servers, if there are any."""


_OFFLINE_WORKERS: Mapping[str, type[Worker]] = {
    "sft": SupervisedWorker,
    "dpo": PreferenceWorker,
    "reward_model": RewardModelWorker,
}
"""By mode that learns from a data set."""

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_INSTALLED = ("site-packages", "dist-packages")


@contextmanager
def start_workers(config: ExperimentConfig, model_folder: Path) -> Iterator[Workers]:
    """Start the processes of a run, and end them; raises as ``start_group``."""
    model_folder = model_folder.absolute()  # ranks have a working folder of their own
    config = replace(
        config,
        model=replace(config.model, path=str(model_folder)),
        algorithm=with_absolute_files(config.algorithm),
        agent=with_absolute_files(config.agent),
        dpo=with_absolute_files(config.dpo),
        reward=with_absolute_files(config.reward),
        serving=with_absolute_files(config.serving),
        trainer=replace(config.trainer, run_dir=str(Path(config.trainer.run_dir).absolute())),
    )
    variables = rank_variables(config)
    workers = Workers()
    with ExitStack() as opened:
        arguments: dict[str, dict[str, ManagerClient]] = {"actor": {}}
        if config.has_servers:
            environment = {**_rank_environment(config.cluster), **variables}
            servers = start_servers(config, model_folder, variables=environment)
            with trace.span("start servers"):
                workers.servers = opened.enter_context(servers)
            arguments["actor"]["servers"] = workers.servers
        for cluster, roles in _pools_of(config):
            classes = {
                role: RayClassWithInitArgs(cls, config, model_folder, **arguments.get(role, {}))
                for role, cls in roles.items()
            }
            is_fused = len(classes) > 1
            made = create_colocated_worker_cls(classes) if is_fused else classes["".join(classes)]
            group = opened.enter_context(start_group(cluster, made, variables=variables))
            workers |= group.spawn(roles) if is_fused else dict.fromkeys(roles, group)
        yield workers


def _pools_of(config: ExperimentConfig) -> list[tuple[ClusterConfig, Mapping[str, type[Worker]]]]:
    """Return the processes to start: pools of ranks, each with the workers of one rank by role."""
    cluster = config.cluster
    if config.mode in _OFFLINE_WORKERS:
        return [(cluster, {"actor": _OFFLINE_WORKERS[config.mode]})]
    pool = replace(cluster, num_ranks_per_node=config.critic.num_ranks_per_node)
    if config.rollout.engine != "hf":  # the policy's workers start servers
        limit_s = cluster.start_timeout_s + config.rollout.start_timeout_s
        cluster = replace(cluster, start_timeout_s=limit_s)
    if config.has_critic_pool:
        return [(cluster, {"actor": ActorRolloutWorker}), (pool, {"critic": CriticWorker})]
    if config.has_critic:
        return [(cluster, {"actor": ActorRolloutWorker, "critic": CriticWorker})]
    return [(cluster, {"actor": ActorRolloutWorker})]


def start_group(
    cluster: ClusterConfig,
    worker: RayClassWithInitArgs,
    *,
    variables: Mapping[str, str] | None = None,
) -> RayWorkerGroup:
    """Start one process per rank and construct ``worker`` in each.

    ``cluster.num_nodes`` are that many machines: no two of them are the same Ray node.

    ``worker`` is a class with its arguments, or several fused ones.

    Raises:
        ResourceError: the cluster lacks the resources; names the requested and the existing ones.
        RemoteCallError: a constructor raised, or ``cluster.worker_setup_hook``.
    """
    pool = RayResourcePool(
        process_on_nodes=[cluster.num_ranks_per_node] * cluster.num_nodes,
        use_gpu=cluster.device == "cuda",
        wait_s=cluster.start_timeout_s,
        is_spread=True,
    )
    with trace.span("start workers"):
        group = RayWorkerGroup(
            resource_pool=pool,
            ray_cls_with_init=worker,
            env_vars={**_rank_environment(cluster), **(variables or {})},
            timeout_s=cluster.call_timeout_s,
            start_timeout_s=cluster.start_timeout_s,
            set_up=SetupHook(cluster.worker_setup_hook) if cluster.worker_setup_hook else None,
        )
    if len(ray.nodes()) > 1:
        log.info("%s", group.describe_places())
    return group


def rank_variables(config: ExperimentConfig) -> dict[str, str]:
    """Return the environment variables that the parallel sizes of the models require.

    Tensor-parallel layers of megatron-core start a collective before the matrix product that
    hides it. A device with one hardware queue keeps that order; with several the product may come
    first. The variable is read once, when CUDA starts. A value of the user stays.
    """
    cuts_matrices = config.megatron_worlds and config.megatron.tensor_parallel_size > 1
    if not cuts_matrices or config.cluster.device != "cuda" or env.get(_QUEUES):
        return {}
    return {_QUEUES: "1"}


def _rank_environment(cluster: ClusterConfig) -> dict[str, str]:
    """Return variables that ranks need and do not inherit.

    On this machine they inherit all of this process's environment, so nothing is set: Ray can
    give them its idle processes only without an environment of their own.
    On other machines they inherit the environment of `ray start` there.
    """
    needed = env.process_environment(cluster.num_threads_per_rank)
    if cluster.address is None and len(ray.nodes()) == 1:
        return {name: value for name, value in needed.items() if env.get(name) != value}
    if not any(name in env.ROOT.parts for name in _INSTALLED):
        # A checkout on a folder that all machines share; elsewhere the entry has no effect.
        needed["PYTHONPATH"] = str(env.ROOT)
    return needed
