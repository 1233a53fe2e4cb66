"""One step of policy optimisation, as in the paper: GRPO without a critic, PPO with one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridrl.algorithms.kl import KLCoefficient
from hybridrl.batch import CriticBatch, LogprobBatch, RolloutBatch
from hybridrl.sampler import SamplingParams
from hybridrl.trainer.advantages import Advantages, describe_values
from hybridrl.trainer.batches import Batches, ScoredRollouts
from hybridrl.trainer.collect import Collected, Collector, Reward
from hybridrl.trainer.policy import Critic, Policy
from hybridrl.trainer.step_metrics import Clock, StepReport
from hybridrl.trainer.train_batch import TrainBatches, build_critic_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyOptimization:
    """One policy update, end to end. Owns no tensors on a device and no Ray handles."""

    policy: Policy
    collect: Collector
    logprobs: Callable[[RolloutBatch], LogprobBatch]
    advantages: Advantages
    kl: KLCoefficient
    build_batch: TrainBatches
    on_phase: Callable[[str], None] | None = None

    def step(self) -> StepReport:
        """Sample, score, compare responses to the same prompt, update."""
        clock = Clock(self.on_phase)
        collected = self.collect(clock)  # draws prompts, syncs weights, samples, scores
        with clock("logprobs"):
            logprobs = self.logprobs(collected.rollouts)  # old and reference at once
        with clock("advantage"):
            targets = self.advantages(collected, logprobs, kl=self.kl.value)
            batch = self.build_batch(collected, logprobs, targets.advantages_BL)
        with clock("update"):
            update = self.policy.update(batch, kl_coefficient=self.kl.in_loss) | targets.charged
        metrics = update | collected.metrics | self.kl.adapt(update)
        return StepReport(collected.everything, metrics, clock)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorCriticOptimization:
    """One update of policy and critic. The critic's calls overlap others where it has own ranks."""

    policy: Policy
    batches: Batches
    critic: Critic
    sampling: SamplingParams
    reward: Reward
    logprobs: Callable[[RolloutBatch], LogprobBatch]
    advantages: Advantages
    kl: KLCoefficient
    build_batch: TrainBatches
    balance_critic: Callable[[CriticBatch], CriticBatch]
    policy_learns: bool = True
    """False in the critic's warm-up."""

    on_phase: Callable[[str], None] | None = None

    def step(self) -> StepReport:
        """Sample, score, compare with the critic's values, update both."""
        clock = Clock(self.on_phase)
        with clock("generate"):
            task, rollouts = self.batches(self.sampling)  # draws prompts, syncs weights, samples
        with clock("reward"):
            values_future = self.critic.compute_values(rollouts)  # runs while the driver scores
            scores = self.reward(rollouts, task)
            collected = Collected.of(ScoredRollouts(task, rollouts, scores))
        with clock("logprobs"):
            logprobs = self.logprobs(rollouts)  # old and reference at once
            values_BL = values_future.get().values_BL
        with clock("advantage"):
            targets = self.advantages(collected, logprobs, kl=self.kl.value, values_BL=values_BL)
            batch = self.build_batch(collected, logprobs, targets.advantages_BL)
            critic_batch = build_critic_batch(
                rollouts, values_BL, targets, is_kept_B=collected.is_kept_B
            )
            mask_BL = critic_batch.response_mask_BL
            values = describe_values(critic_batch.returns_BL, values_BL, mask_BL)
        with clock("update"):
            critic_update = self.critic.update(self.balance_critic(critic_batch))  # meanwhile:
            update = targets.charged
            if self.policy_learns:
                update = self.policy.update(batch, kl_coefficient=self.kl.in_loss) | update
            update = update | critic_update.get() | values
        metrics = update | self.kl.adapt(update)
        return StepReport(collected.everything, metrics, clock)
