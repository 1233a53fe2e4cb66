"""Metrics of a step's rewards. Legend: B responses, those to one prompt adjacent, K functions."""

from __future__ import annotations

import logging
from collections import Counter

import torch
from torch import Tensor

from hybridrl.algorithms.groups import Groups
from hybridrl.metrics import Max, Mean, Metrics, Min, Sum
from hybridrl.rewards.scorer import Scores

log = logging.getLogger(__name__)

_NUM_COUNTED = 8
"""Rewards by which groups are counted: each is a metric of its own."""


def warn_of_useless_rewards(scores: Scores) -> None:
    """Warn if the rewards of a run's first step can teach nothing."""
    rewards_B = scores.rewards_B
    if scores.is_failed_B.all():
        log.warning(
            "ALARM: none of the first %d responses could be scored, so there is nothing to learn "
            "from; correct the reward function, or set reward.on_error=stop to see the error",
            len(rewards_B),
        )
    elif bool((rewards_B == rewards_B[0]).all()):
        log.warning(
            "ALARM: the first %d rewards are all %g, and equal rewards teach nothing; look at "
            "samples.jsonl: either the reward function does not recognise a right answer, or the "
            "task is too hard or too easy for this model",
            *(len(rewards_B), float(rewards_B[0])),
        )


def reward_metrics(scores: Scores, *, num_responses: int) -> Metrics:
    """Describe B >= 1 rewards, G to each prompt; of several functions each by its name, too."""
    rewards_B = scores.rewards_B
    metrics: Metrics = {
        "reward/mean": mean_of(rewards_B),
        "reward/std": _std(rewards_B),
        "reward/max": Max(rewards_B.max().item()),
        "reward/min": Min(rewards_B.min().item()),
        "reward/failed_fraction": mean_of(scores.is_failed_B),
    }
    if scores.is_early_B is not None:
        metrics["reward/early_fraction"] = mean_of(scores.is_early_B)
    if scores.is_unreadable_B is not None:
        metrics["reward/unreadable_fraction"] = mean_of(scores.is_unreadable_B)
    if scores.is_left_out_B is not None:
        metrics["reward/left_out_fraction"] = mean_of(scores.is_left_out_B)
    if num_responses > 1:
        metrics["reward/zero_variance_group_fraction"] = flat_fraction(rewards_B, num_responses)
        metrics |= _flat_groups(rewards_B, num_responses)
    for at, name in enumerate(scores.names if len(scores.names) > 1 else ()):
        parts_B = scores.reward_parts_BK[:, at]
        metrics[f"reward/{name}/mean"] = mean_of(parts_B)
        metrics[f"reward/{name}/std"] = _std(parts_B)
        metrics[f"reward/{name}/failed_fraction"] = mean_of(scores.is_failed_BK[:, at])
        if num_responses > 1:
            flat = flat_fraction(parts_B, num_responses)
            metrics[f"reward/{name}/zero_variance_group_fraction"] = flat
    return metrics


def _flat_groups(rewards_B: Tensor, num_responses: int) -> Metrics:
    """Count the groups whose responses all got one reward, by that reward to one decimal."""
    rewards_PG = rewards_B.view(-1, num_responses)
    is_flat_P = (rewards_PG == rewards_PG[:, :1]).all(dim=1)
    counts = Counter(
        f"{round(reward, 1) + 0.0:.1f}" for reward in rewards_PG[is_flat_P, 0].tolist()
    )
    return {
        f"reward/zero_variance_groups/{reward}": Sum(count)
        for reward, count in counts.most_common(_NUM_COUNTED)
    }


def mean_of(values_B: Tensor) -> Mean:
    """Return the mean of a value of each row."""
    return Mean(float(values_B.double().sum()), len(values_B))


def _std(rewards_B: Tensor) -> Mean:
    return Mean(rewards_B.std(correction=0).item())


def flat_fraction(rewards_B: Tensor, num_responses: int) -> Mean:
    """Return how many of the groups have one reward for all their responses, as a fraction."""
    return mean_of(Groups.of(torch.arange(len(rewards_B)) // num_responses).is_flat(rewards_B))
