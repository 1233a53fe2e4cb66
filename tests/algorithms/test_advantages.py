from __future__ import annotations

import math
import random
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridrl.algorithms.advantages.grpo import grpo
from hybridrl.batch import jagged, spread_over_tokens

Scale = Literal["group", "batch", "none"]
SCALES: tuple[Scale, ...] = ("group", "batch", "none")

# Rows of (group, reward): groups of any size, groups of one among them.
row = st.tuples(st.integers(-3, 3), st.floats(-100, 100, width=32))
batches = st.lists(row, min_size=1, max_size=24)


def columns_of(rows: list[tuple[int, float]]) -> tuple[Tensor, Tensor]:
    return torch.tensor([reward for _, reward in rows]), torch.tensor([group for group, _ in rows])


@pytest.mark.shows("4.18")
def test_advantages_are_what_a_pocket_calculator_says() -> None:
    rewards_B = torch.tensor([1.0, 0.0, 0.0, 0.0, 4.0, 0.0, 1.0, 0.0, 7.0])
    group_B = torch.tensor([5, 5, -1, 5, -1, -1, 5, -1, 9])
    centered = [0.5, -0.5, -1.0, -0.5, 3.0, -1.0, 0.5, -1.0, 0.0]
    assert grpo(rewards_B, group_B, scale="none").tolist() == centered
    stds = [math.sqrt(1 / 3), 2.0]  # squares sum to 1 and 12, over n - 1 = 3
    expected = [a / (stds[g < 0] + 1e-6) for a, g in zip(centered, group_B.tolist(), strict=True)]
    assert grpo(rewards_B, group_B).tolist() == pytest.approx(expected)
    mean = 13 / 9
    batch_std = math.sqrt(sum((r - mean) ** 2 for r in rewards_B.tolist()) / 8)
    expected = [a / (batch_std + 0.5) for a in centered]
    assert grpo(rewards_B, group_B, scale="batch", std_floor=0.5).tolist() == pytest.approx(
        expected
    )


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("group_size", [1, 2, 8, 12])
@pytest.mark.parametrize("reward", [0.0, 0.7, -1e6, 1 / 3])
def test_a_group_of_equal_rewards_gives_exact_zeros(
    reward: float, group_size: int, scale: Scale
) -> None:
    advantages_B = grpo(
        torch.full((group_size,), reward), torch.zeros(group_size).long(), scale=scale
    )
    assert torch.equal(advantages_B, torch.zeros(group_size))


@given(batches)
def test_a_group_sums_to_zero_and_keeps_the_order_of_its_rewards(
    rows: list[tuple[int, float]],
) -> None:
    rewards_B, group_B = columns_of(rows)
    advantages_B = grpo(rewards_B, group_B, scale="none")
    for group in group_B.unique():
        rewards_G, advantages_G = rewards_B[group_B == group], advantages_B[group_B == group]
        assert abs(float(advantages_G.double().sum())) < 1e-3
        assert advantages_G[rewards_G.argmax()] == advantages_G.max()
        assert advantages_G[rewards_G.argmin()] == advantages_G.min()


@given(batches, st.randoms(use_true_random=False))
def test_rows_in_another_order_have_the_same_advantages(
    rows: list[tuple[int, float]], source: random.Random
) -> None:
    rewards_B, group_B = columns_of(rows)
    order = list(range(len(rows)))
    source.shuffle(order)
    for scale in SCALES:
        moved_B = grpo(rewards_B[order], group_B[order] * 7 - 2, scale=scale)
        torch.testing.assert_close(moved_B, grpo(rewards_B, group_B, scale=scale)[order])


@given(batches, st.floats(0.5, 4.0))
def test_dividing_by_the_std_takes_the_unit_away(
    rows: list[tuple[int, float]], factor: float
) -> None:
    rewards_B, group_B = columns_of(rows)
    rewards_B = rewards_B.round()
    for scale in SCALES[:2]:
        scaled_B = grpo(rewards_B * factor, group_B, scale=scale)
        torch.testing.assert_close(
            scaled_B, grpo(rewards_B, group_B, scale=scale), atol=1e-4, rtol=1e-4
        )


def test_no_gradient_flows_through_advantages() -> None:
    rewards_B = torch.tensor([0.0, 1.0], requires_grad=True)
    assert not grpo(rewards_B, torch.zeros(2).long()).requires_grad


@pytest.mark.shows("4.17")
def test_each_response_token_gets_the_advantage_of_its_row() -> None:
    mask_BL = jagged([torch.tensor([False, True, True]), torch.tensor([False, False])])
    spread = spread_over_tokens(torch.tensor([2.0, float("nan")]), mask_BL)
    assert spread.values().tolist() == [0.0, 2.0, 2.0, 0.0, 0.0]


def test_an_infinite_advantage_leaves_other_tokens_at_zero() -> None:
    mask_BL = jagged([torch.tensor([True, False]), torch.tensor([False, True, False])])
    spread = spread_over_tokens(torch.tensor([-0.1, float("inf")]), mask_BL)
    assert spread.values().tolist() == [torch.tensor(-0.1).item(), 0.0, 0.0, float("inf"), 0.0]
