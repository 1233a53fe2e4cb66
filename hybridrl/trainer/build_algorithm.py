"""From the ``algorithm`` section to the object that takes a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from hybridrl.batch import CriticBatch, LogprobBatch, RolloutBatch, TrainBatch, row_lengths
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.data.source import PromptStep
from hybridrl.trainer.advantages import Generalized, GroupRelative, GroupRelativeWithKL, KLCharge
from hybridrl.trainer.policy import Critic, Policy, WithoutLogprobs, WithoutUpdate
from hybridrl.trainer.step import ActorCriticOptimization, Advantages, PolicyOptimization, Reward
from hybridrl.trainer.step_metrics import StepReport
from hybridrl.workers.rollout.protocol import SamplingParams
from hybridrl.workers.train.microbatch import balance_over_ranks

Rows = TypeVar("Rows", TrainBatch, CriticBatch)


class Algorithm(Protocol):
    """Turns the prompts of a step into updates."""

    def step(self, task: PromptStep) -> StepReport:
        """Sample, score, update."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The ingredients of every algorithm."""

    policy: Policy
    sampling: SamplingParams
    reward: Reward
    on_phase: Callable[[str], None]


def build_group_relative(config: ExperimentConfig, parts: Parts) -> PolicyOptimization:
    """Build GRPO and its relatives."""
    return PolicyOptimization(
        policy=parts.policy,
        sampling=parts.sampling,
        reward=parts.reward,
        logprobs=_choose_logprobs(config, parts.policy),
        advantages=_build_advantages(config),
        charge=KLCharge(config.algorithm.kl),
        balance=_balance_for_policy(config),
        on_phase=parts.on_phase,
    )


def build_actor_critic(
    config: ExperimentConfig, parts: Parts, critic: Critic
) -> Callable[[int], ActorCriticOptimization]:
    """Build PPO's step function of step n, from 1. In the critic's warm-up the policy is frozen."""

    def balance_for_critic(batch: CriticBatch) -> CriticBatch:
        return _balance(
            batch, dp_size=config.num_critic_groups, num_minibatches=config.critic.num_minibatches
        )

    actor_critic = ActorCriticOptimization(
        policy=parts.policy,
        critic=critic,
        sampling=parts.sampling,
        reward=parts.reward,
        logprobs=_choose_logprobs(config, parts.policy),
        advantages=Generalized(gae=config.algorithm.gae, kl=config.algorithm.kl),
        charge=KLCharge(config.algorithm.kl),
        balance=_balance_for_policy(config),
        balance_critic=balance_for_critic,
        update_policy=parts.policy.update,
        on_phase=parts.on_phase,
    )
    warm_up = replace(actor_critic, update_policy=WithoutUpdate())
    return lambda step: warm_up if step <= config.critic.num_warmup_steps else actor_critic


def _choose_logprobs(
    config: ExperimentConfig, policy: Policy
) -> Callable[[RolloutBatch], LogprobBatch]:
    algorithm = config.algorithm
    needs_logprobs = algorithm.old_logprobs == "recompute" or algorithm.kl.placement != "none"
    return policy.compute_logprobs if needs_logprobs else WithoutLogprobs()


def _build_advantages(config: ExperimentConfig) -> Advantages:
    group = GroupRelative(
        num_responses=config.rollout.num_responses_per_prompt,
        divide_by_std=config.algorithm.divide_by_std,
    )
    if config.algorithm.kl.placement == "reward":
        return GroupRelativeWithKL(group=group, kl=config.algorithm.kl)
    return group


def _balance_for_policy(config: ExperimentConfig) -> Callable[[TrainBatch], TrainBatch]:
    def balance(batch: TrainBatch) -> TrainBatch:
        return _balance(
            batch,
            dp_size=config.num_train_groups,
            num_minibatches=config.algorithm.num_minibatches,
        )

    return balance


def _balance(batch: Rows, *, dp_size: int, num_minibatches: int) -> Rows:
    lengths = row_lengths(batch.token_ids_BL).tolist()
    order = balance_over_ranks(lengths, dp_size=dp_size, num_minibatches=num_minibatches)
    return batch if order == list(range(len(batch))) else batch[order]
