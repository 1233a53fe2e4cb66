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
        "reward/zero_variance_groups/1.0": 1,
        "reward/failed_fraction": 0.25,
    }
    check_declared(metrics)


@pytest.mark.shows("4.20")
def test_groups_of_equal_rewards_are_counted_by_their_reward() -> None:
    rewards_PG = torch.tensor([[0.0, 0.0], [-0.0, 0.0], [0.52, 0.52], [0.0, 1.0], [1.0, 1.0]])
    wide = torch.arange(2, 40).float()[:, None].expand(-1, 2)
    for rewards, counts in (
        (rewards_PG, {"0.0": 2, "0.5": 1, "1.0": 1}),
        (wide, {f"{reward:.1f}": 1 for reward in range(2, 10)}),  # a bounded number of metrics
    ):
        rewards_B = rewards.reshape(-1)
        scores = scores_of(rewards_B, torch.zeros(len(rewards_B), dtype=torch.bool))
        metrics = reward_metrics(scores, num_responses=2)
        prefix = "reward/zero_variance_groups/"
        assert {
            name.removeprefix(prefix): metric.value
            for name, metric in metrics.items()
            if name.startswith(prefix)
        } == counts
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
