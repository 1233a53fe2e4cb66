"""The worker groups of a run: the policy's, and a critic's beside it or in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.trainer.cluster import start_fused_group, start_group
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
    if config.has_critic_pool:
        pool = replace(config.cluster, num_ranks_per_node=config.critic.num_ranks_per_node)
        with (
            start_group(config.cluster, ActorRolloutWorker, actor_spec) as policy,
            start_group(pool, CriticWorker, critic_spec) as critic,
        ):
            yield Workers(cast(Policy, policy), cast(Critic, critic))
    elif config.has_critic:
        roles = {"actor": (ActorRolloutWorker, actor_spec), "critic": (CriticWorker, critic_spec)}
        with start_fused_group(config.cluster, roles) as fused:
            groups = fused.spawn(roles)
            yield Workers(cast(Policy, groups["actor"]), cast(Critic, groups["critic"]))
    else:
        with start_group(config.cluster, ActorRolloutWorker, actor_spec) as policy:
            yield Workers(cast(Policy, policy), None)


def build_actor_spec(config: ExperimentConfig, folder: Path) -> ActorRolloutSpec:
    """Say what a rank of the policy needs to know."""
    return ActorRolloutSpec(
        model_folder=folder.absolute(),
        model=config.model,
        actor=config.actor,
        rollout=config.rollout,
        algorithm=config.algorithm,
        device=config.cluster.device,
        num_total_updates=config.num_policy_updates,
        max_response_tokens=config.rollout.max_response_tokens,
        max_context_tokens=config.max_row_tokens,
        collective_timeout_s=config.cluster.collective_timeout_s,
    )


def build_critic_spec(config: ExperimentConfig, folder: Path) -> CriticSpec:
    """Say what a rank of the critic needs to know."""
    return CriticSpec(
        model_folder=folder.absolute(),
        model=config.model,
        critic=config.critic,
        device=config.cluster.device,
        num_total_updates=config.trainer.num_steps * config.critic.num_updates_per_step,
        collective_timeout_s=config.cluster.collective_timeout_s,
    )
