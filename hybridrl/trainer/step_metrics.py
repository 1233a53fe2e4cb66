"""The results of one step, and the metrics that describe it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hybridrl.batch import RolloutBatch, response_lengths, row_lengths
from hybridrl.data.source import PromptStep
from hybridrl.metrics import Max, Mean, Metrics, Min
from hybridrl.rewards.report import reward_metrics
from hybridrl.rewards.scorer import Scores
from hybridrl.trainer.clock import Clock


@dataclass(frozen=True, slots=True)
class StepReport:
    """All that a step leaves behind."""

    task: PromptStep
    rollouts: RolloutBatch
    scores: Scores
    update: Metrics
    clock: Clock

    def metrics(self) -> Metrics:
        """Describe the step; see ``hybridrl/metrics.py`` for each name."""
        timings = self.clock.metrics()
        return {
            **reward_metrics(self.scores, num_responses=len(self.rollouts) // len(self.task.rows)),
            **describe_lengths(self.rollouts),
            **self.update,
            **timings,
            **_throughput(self.rollouts, self.update, timings),
        }


def describe_lengths(rollouts: RolloutBatch) -> Metrics:
    """Summarise lengths, in tokens, and how responses ended."""
    response_lengths_B = response_lengths(rollouts.response_mask_BL)
    prompt_lengths_B = row_lengths(rollouts.token_ids_BL) - response_lengths_B
    return {
        "length/prompt_tokens/mean": _mean(prompt_lengths_B),
        "length/prompt_tokens/max": Max(float(prompt_lengths_B.max())),
        "length/response_tokens/mean": _mean(response_lengths_B),
        "length/response_tokens/max": Max(float(response_lengths_B.max())),
        "length/response_tokens/min": Min(float(response_lengths_B.min())),
        "rollout/truncated_fraction": _mean(rollouts.is_truncated_B),
        "rollout/empty_fraction": _mean(response_lengths_B == 0),
    }


def _throughput(rollouts: RolloutBatch, update: Metrics, timings: Metrics) -> Metrics:
    num_tokens = rollouts.token_ids_BL.values().numel()
    num_response_tokens = int(rollouts.response_mask_BL.values().sum())
    rates: Metrics = {
        "throughput/tokens_per_s": Mean(num_tokens / timings["time/step_s"].value),
        "throughput/response_tokens_per_s": Mean(
            num_response_tokens / timings["time/generate_s"].value
        ),
    }
    if "data/train_tokens" in update:
        rate = update["data/train_tokens"].value / timings["time/update_s"].value
        rates["throughput/train_tokens_per_s"] = Mean(rate)
    return rates


def _mean(values_B: Tensor) -> Mean:
    return Mean(float(values_B.double().sum()), float(len(values_B)))
