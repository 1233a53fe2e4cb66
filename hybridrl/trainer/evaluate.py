"""Evaluation on held-out prompts, through the same life cycle as training."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hybridrl.batch import RolloutBatch, response_lengths
from hybridrl.data.source import PromptStep
from hybridrl.metrics import Mean, Metrics
from hybridrl.rewards.scorer import Scores
from hybridrl.trainer.clock import Clock
from hybridrl.trainer.policy import Policy
from hybridrl.trainer.step import Reward
from hybridrl.workers.rollout.protocol import SamplingParams


@dataclass(frozen=True, slots=True)
class EvalReport:
    """The results of one evaluation."""

    rollouts: RolloutBatch
    scores: Scores
    metrics: Metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluator:
    """Samples the same held-out prompts with the same seeds each time."""

    policy: Policy
    task: PromptStep
    sampling: SamplingParams
    reward: Reward

    def evaluate(self) -> EvalReport:
        """Sample and score; the metrics are mean reward, overall and by source, lengths, seconds.

        Same prompts in the same order each time, so samples of two evaluations can be compared.
        """
        clock = Clock()
        with clock("eval"):
            rollouts = self.policy.generate(self.task.prompts, self.sampling)
            scores = self.reward(rollouts, self.task)
        metrics = self._describe(rollouts, scores)
        metrics["time/eval_s"] = clock.metrics()["time/eval_s"]
        return EvalReport(rollouts, scores, metrics)

    def _describe(self, rollouts: RolloutBatch, scores: Scores) -> Metrics:
        rewards = scores.rewards_B.tolist()
        num_responses = self.sampling.num_responses_per_prompt
        by_source: dict[str, list[float]] = defaultdict(list)
        for row, reward in enumerate(rewards):
            by_source[self.task.rows[row // num_responses].row.source].append(reward)
        lengths_B = response_lengths(rollouts.response_mask_BL)
        num_rows = float(len(rewards))
        metrics: Metrics = {
            "eval/reward/mean": Mean(sum(rewards), num_rows),
            "eval/length/response_tokens/mean": Mean(float(lengths_B.sum()), num_rows),
            "eval/truncated_fraction": Mean(float(rollouts.is_truncated_B.sum()), num_rows),
        }
        if len(by_source) > 1:
            for source, values in by_source.items():
                metrics[f"eval/reward/{source}"] = Mean(sum(values), float(len(values)))
        return metrics
