"""One step of policy optimisation, as in the paper: GRPO without a critic, PPO with one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hybridrl.algorithms.gae import AdvantageEstimate
from hybridrl.batch import CriticBatch, LogprobBatch, RolloutBatch, TrainBatch
from hybridrl.data.source import PromptStep
from hybridrl.metrics import Metrics
from hybridrl.rewards.scorer import Scores
from hybridrl.trainer.advantages import describe_values
from hybridrl.trainer.clock import Clock
from hybridrl.trainer.policy import Critic, Policy
from hybridrl.trainer.step_metrics import StepReport
from hybridrl.workers.rollout.protocol import SamplingParams


class Reward(Protocol):
    """Scores responses on the driver."""

    def __call__(self, rollouts: RolloutBatch, task: PromptStep) -> Scores:
        """Return one reward per row."""
        ...


class Advantages(Protocol):
    """Turns rewards into the weight that each response token has in the loss."""

    def __call__(self, rewards_B: Tensor, rollouts: RolloutBatch, logprobs: LogprobBatch) -> Tensor:
        """Return jagged float32 [B, L], 0 where the response mask is False."""
        ...


class Charge(Protocol):
    """Charges responses for a distance to the reference."""

    def __call__(self, rollouts: RolloutBatch, logprobs: LogprobBatch) -> Metrics:
        """Return metrics of a step."""
        ...


class ValueAdvantages(Protocol):
    """Computes advantages and returns from rewards and a critic's values."""

    def __call__(
        self, rewards_B: Tensor, rollouts: RolloutBatch, logprobs: LogprobBatch, values_BL: Tensor
    ) -> AdvantageEstimate:
        """Return two columns, jagged float32 [B, L], 0 where the response mask is False."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyOptimization:
    """One policy update, end to end. Owns no tensors on a device and no Ray handles."""

    policy: Policy
    sampling: SamplingParams
    reward: Reward
    logprobs: Callable[[RolloutBatch], LogprobBatch]
    advantages: Advantages
    charge: Charge
    balance: Callable[[TrainBatch], TrainBatch]
    on_phase: Callable[[str], None] | None = None

    def step(self, task: PromptStep) -> StepReport:
        """Sample, score, compare responses to the same prompt, update."""
        clock = Clock(self.on_phase)
        with clock("generate"):
            rollouts = self.policy.generate(task.prompts, self.sampling)  # syncs weights, samples
        with clock("reward"):
            scores = self.reward(rollouts, task)  # driver, CPU
        with clock("logprobs"):
            logprobs = self.logprobs(rollouts)  # old and reference at once
        with clock("advantage"):
            advantages_BL = self.advantages(scores.rewards_B, rollouts, logprobs)
            charged = self.charge(rollouts, logprobs)
            batch = self.balance(build_train_batch(rollouts, logprobs, advantages_BL))
        with clock("update"):
            update = self.policy.update(batch) | charged
        return StepReport(task, rollouts, scores, update, clock)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorCriticOptimization:
    """One update of policy and critic. The critic's calls overlap others where it has own ranks."""

    policy: Policy
    critic: Critic
    sampling: SamplingParams
    reward: Reward
    logprobs: Callable[[RolloutBatch], LogprobBatch]
    advantages: ValueAdvantages
    charge: Charge
    balance: Callable[[TrainBatch], TrainBatch]
    balance_critic: Callable[[CriticBatch], CriticBatch]
    update_policy: Callable[[TrainBatch], Metrics]
    on_phase: Callable[[str], None] | None = None

    def step(self, task: PromptStep) -> StepReport:
        """Sample, score, compare with the critic's values, update both."""
        clock = Clock(self.on_phase)
        with clock("generate"):
            rollouts = self.policy.generate(task.prompts, self.sampling)  # syncs weights, samples
        with clock("reward"):
            values_future = self.critic.compute_values(rollouts)  # runs while the driver scores
            scores = self.reward(rollouts, task)
        with clock("logprobs"):
            logprobs = self.logprobs(rollouts)  # old and reference at once
            values_BL = values_future.get().values_BL
        with clock("advantage"):
            estimate = self.advantages(scores.rewards_B, rollouts, logprobs, values_BL)
            batch = self.balance(build_train_batch(rollouts, logprobs, estimate.advantages_BL))
            critic_batch = self.balance_critic(build_critic_batch(rollouts, values_BL, estimate))
            value_metrics = describe_values(estimate, values_BL, rollouts.response_mask_BL)
            charged = self.charge(rollouts, logprobs)
        with clock("update"):
            critic_update = self.critic.update(critic_batch)  # runs while the policy learns
            update = self.update_policy(batch) | critic_update.get() | value_metrics | charged
        return StepReport(task, rollouts, scores, update, clock)


def build_critic_batch(
    rollouts: RolloutBatch, values_BL: Tensor, estimate: AdvantageEstimate
) -> CriticBatch:
    """Build the batch of the critic's update, [B] rows."""
    return CriticBatch(
        token_ids_BL=rollouts.token_ids_BL,
        response_mask_BL=rollouts.response_mask_BL,
        old_values_BL=values_BL,
        returns_BL=estimate.returns_BL,
        batch_size=[len(rollouts)],
    )


def build_train_batch(
    rollouts: RolloutBatch, logprobs: LogprobBatch, advantages_BL: Tensor
) -> TrainBatch:
    """Build the batch of the update, [B] rows."""
    return TrainBatch(
        token_ids_BL=rollouts.token_ids_BL,
        response_mask_BL=rollouts.response_mask_BL,
        advantages_BL=advantages_BL,
        sampler_logprobs_BL=rollouts.sampler_logprobs_BL,
        old_logprobs_BL=logprobs.old_logprobs_BL,
        reference_logprobs_BL=logprobs.reference_logprobs_BL,
        routed_experts_BLJK=rollouts.routed_experts_BLJK,
        batch_size=[len(rollouts)],
    )
