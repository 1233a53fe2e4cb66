from __future__ import annotations

import pytest
import torch

from hybridrl.metrics import check_declared
from hybridrl.rewards.report import reward_metrics
from hybridrl.rewards.scorer import Scores


def test_rewards_are_described_by_step_and_by_group() -> None:
    scores = Scores(
        rewards_B=torch.tensor([1.0, 1.0, 0.0, 2.0]),
        is_failed_B=torch.tensor([False, False, True, False]),
    )
    metrics = reward_metrics(scores, num_responses=2)
    assert {name: metric.value for name, metric in metrics.items()} == {
        "reward/mean": 1.0,
        "reward/std": pytest.approx(0.5**0.5),
        "reward/max": 2.0,
        "reward/min": 0.0,
        "reward/zero_variance_group_fraction": 0.5,
        "reward/failed_fraction": 0.25,
    }
    check_declared(metrics)


def test_a_step_with_one_response_has_no_spread() -> None:
    scores = Scores(torch.tensor([3.0]), torch.tensor([False]))
    assert reward_metrics(scores, num_responses=1)["reward/std"].value == 0.0
