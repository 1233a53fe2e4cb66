from __future__ import annotations

import pytest
import torch

from hybridrl.metrics import check_declared
from hybridrl.rewards.report import reward_metrics
from hybridrl.rewards.scorer import Scores


def scores_of(rewards_B: torch.Tensor, is_failed_B: torch.Tensor) -> Scores:
    return Scores(("exact",), torch.ones(1), rewards_B[:, None], is_failed_B[:, None])


def test_rewards_are_described_by_step_and_by_group() -> None:
    is_failed_B = torch.tensor([False, False, True, False])
    scores = scores_of(torch.tensor([1.0, 1.0, 0.0, 2.0]), is_failed_B)
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
    scores = scores_of(torch.tensor([3.0]), torch.tensor([False]))
    assert reward_metrics(scores, num_responses=1)["reward/std"].value == 0.0


def test_each_of_several_functions_is_described_by_its_name() -> None:
    parts_BK = torch.tensor([[1.0, 0.0], [1.0, 0.5], [0.0, 0.0], [1.0, 0.5]])
    is_failed_BK = torch.tensor([[False, False], [False, False], [True, False], [False, False]])
    scores = Scores(("right", "form"), torch.tensor([1.0, 2.0]), parts_BK, is_failed_BK)
    metrics = reward_metrics(scores, num_responses=2)
    values = {name: metric.value for name, metric in metrics.items()}
    assert values["reward/mean"] == 0.75 + 2 * 0.25
    assert (values["reward/right/mean"], values["reward/form/mean"]) == (0.75, 0.25)
    assert values["reward/form/std"] == 0.25
    assert values["reward/right/failed_fraction"] == 0.25
    assert values["reward/right/zero_variance_group_fraction"] == 0.5
    assert values["reward/form/zero_variance_group_fraction"] == 0.0
    check_declared(metrics)
