"""The worker groups of a run: the policy's, and a critic's beside it or in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from hybridrl.config.cluster import ClusterConfig
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.planning.frozen_base import plan_base
from hybridrl.run.checkpoints import Saver
from hybridrl.run.cluster import rank_variables, start_fused_group, start_group
from hybridrl.single_controller import RayWorkerGroup, Worker, WorkerGroup
from hybridrl.trainer.policy import Critic, Policy
from hybridrl.workers.actor_rollout import ActorRolloutWorker
from hybridrl.workers.build import ActorRolloutSpec, CriticSpec
from hybridrl.workers.critic import CriticWorker


@dataclass(frozen=True, slots=True)
class Workers:
    """What the driver calls."""

    policy: Policy

    critic: Critic | None
    """None where the algorithm asks none: nothing of a critic was built."""

    savers: Mapping[str, Saver]
    """The same, by role, as those that are saved."""


@contextmanager
def start_workers(config: ExperimentConfig, folder: Path) -> Iterator[Workers]:
    """Start the processes of a run, and end them.

    Args:
        config: of the run.
        folder: the model that policy and critic start from.

    Raises:
        ResourceError: the cluster lacks the resources.
        RemoteCallError: a constructor raised.
    """
    actor_spec, critic_spec = build_actor_spec(config, folder), build_critic_spec(config, folder)
    cluster, variables = _with_server_start_timeout(config), rank_variables(config)
    with ExitStack() as opened:

        def start(cluster: ClusterConfig, cls: type[Worker], spec: object) -> RayWorkerGroup:
            return opened.enter_context(start_group(cluster, cls, spec, variables=variables))

        if config.has_critic_pool:
            pool = replace(config.cluster, num_ranks_per_node=config.critic.num_ranks_per_node)
            policy = start(cluster, ActorRolloutWorker, actor_spec)
            yield _as_workers(policy, start(pool, CriticWorker, critic_spec))
        elif config.has_critic:
            roles = {
                "actor": (ActorRolloutWorker, actor_spec),
                "critic": (CriticWorker, critic_spec),
            }
            fused = opened.enter_context(start_fused_group(cluster, roles, variables=variables))
            groups = fused.spawn(roles)
            yield _as_workers(groups["actor"], groups["critic"])
        else:
            yield _as_workers(start(cluster, ActorRolloutWorker, actor_spec))


def _with_server_start_timeout(config: ExperimentConfig) -> ClusterConfig:
    """Let the policy's workers take as long as the servers that they start may take."""
    if config.rollout.engine == "hf":
        return config.cluster
    limit_s = config.cluster.start_timeout_s + config.rollout.start_timeout_s
    return replace(config.cluster, start_timeout_s=limit_s)


def _as_workers(policy: WorkerGroup, critic: WorkerGroup | None = None) -> Workers:
    savers = {"actor": cast(Saver, policy)}
    if critic is not None:
        savers["critic"] = cast(Saver, critic)
    return Workers(cast(Policy, policy), cast("Critic | None", critic), savers)


def build_actor_spec(config: ExperimentConfig, folder: Path) -> ActorRolloutSpec:
    """Say what a rank of the policy needs to know."""
    return ActorRolloutSpec(
        model_folder=folder.absolute(),
        model=config.model,
        actor=config.actor,
        megatron=config.megatron,
        lora=config.lora,
        rollout=config.rollout,
        algorithm=config.algorithm,
        seed=config.seed,
        device=config.cluster.device,
        num_total_updates=config.num_policy_updates,
        max_response_tokens=config.rollout.max_response_tokens,
        max_context_tokens=config.max_row_tokens,
        num_ranks_per_node=config.cluster.num_ranks_per_node,
        base_plan=plan_base(config),
        collective_timeout_s=config.cluster.collective_timeout_s,
    )


def build_critic_spec(config: ExperimentConfig, folder: Path) -> CriticSpec:
    """Say what a rank of the critic needs to know."""
    return CriticSpec(
        model_folder=folder.absolute(),
        model=config.model,
        critic=config.critic,
        megatron=config.megatron,
        seed=config.seed,
        device=config.cluster.device,
        num_total_updates=config.trainer.num_steps * config.critic.num_updates_per_step,
        collective_timeout_s=config.cluster.collective_timeout_s,
    )
