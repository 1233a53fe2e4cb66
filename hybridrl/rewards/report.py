"""Metrics of a step's rewards. Legend: B responses, those to one prompt adjacent."""

from __future__ import annotations

from hybridrl.algorithms.advantages import flat_groups
from hybridrl.metrics import Max, Mean, Metrics, Min
from hybridrl.rewards.scorer import Scores


def reward_metrics(scores: Scores, *, num_responses: int) -> Metrics:
    """Describe the rewards of one step.

    Args:
        scores: B responses, B >= 1.
        num_responses: G, responses per prompt; divides B.
    """
    rewards_B = scores.rewards_B
    metrics: Metrics = {
        "reward/mean": Mean(rewards_B.sum().item(), len(rewards_B)),
        "reward/std": Mean(rewards_B.std(correction=0).item()),
        "reward/max": Max(rewards_B.max().item()),
        "reward/min": Min(rewards_B.min().item()),
        "reward/failed_fraction": Mean(scores.is_failed_B.sum().item(), len(rewards_B)),
    }
    if num_responses > 1:
        flat_P = flat_groups(rewards_B.view(-1, num_responses))
        metrics["reward/zero_variance_group_fraction"] = Mean(flat_P.sum().item(), len(flat_P))
    return metrics
