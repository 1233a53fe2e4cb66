from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algorithms.advantages import (
    flat_groups,
    group_relative_advantages,
    grpo_advantages,
)
from hybridrl.batch import jagged, spread_over_tokens

rewards = st.floats(-100, 100, width=32)
groups = st.integers(2, 9).flatmap(
    lambda size: st.lists(st.lists(rewards, min_size=size, max_size=size), min_size=1, max_size=6)
)


@pytest.mark.shows("4.18")
def test_advantages_are_what_a_pocket_calculator_says() -> None:
    rewards_PG = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 4.0]])
    centered = group_relative_advantages(rewards_PG, divide_by_std=False)
    assert centered.tolist() == [[0.5, -0.5, -0.5, 0.5], [-1.0, -1.0, -1.0, 3.0]]
    scaled = group_relative_advantages(rewards_PG, divide_by_std=True, std_floor=0.0)
    first = 0.5 / math.sqrt(1 / 3)  # squares sum to 1, over G - 1 = 3
    assert scaled[0].tolist() == pytest.approx([first, -first, -first, first])
    assert scaled[1].tolist() == pytest.approx([-0.5, -0.5, -0.5, 1.5])  # std is 2


@pytest.mark.parametrize("divide_by_std", [True, False])
@pytest.mark.parametrize("group_size", [2, 8, 12])
@pytest.mark.parametrize("reward", [0.0, 0.7, -1e6, 1 / 3])
def test_a_group_of_equal_rewards_gives_exact_zeros(
    reward: float, group_size: int, divide_by_std: bool
) -> None:
    rewards_PG = torch.full((1, group_size), reward)
    advantages = group_relative_advantages(rewards_PG, divide_by_std=divide_by_std)
    assert torch.equal(advantages, torch.zeros(1, group_size))


@given(groups)
def test_a_group_sums_to_zero_and_keeps_the_order_of_its_rewards(rows: list[list[float]]) -> None:
    rewards_PG = torch.tensor(rows)
    advantages = group_relative_advantages(rewards_PG, divide_by_std=False)
    assert advantages.sum(dim=1).abs().max().item() < 1e-2  # float32 rounding of values up to 100
    for reward_G, advantage_G in zip(rewards_PG, advantages, strict=True):
        best, worst = reward_G.argmax(), reward_G.argmin()
        assert advantage_G[best] >= advantage_G.max() - 1e-5
        assert advantage_G[worst] <= advantage_G.min() + 1e-5


@given(groups, st.permutations(range(6)))
def test_a_group_does_not_see_other_groups(rows: list[list[float]], order: list[int]) -> None:
    order = [place for place in order if place < len(rows)]
    rewards_PG = torch.tensor(rows)
    moved = group_relative_advantages(rewards_PG[order], divide_by_std=True)
    assert torch.equal(moved, group_relative_advantages(rewards_PG, divide_by_std=True)[order])


@given(groups, st.floats(0.5, 4.0))
def test_dividing_by_the_std_takes_the_unit_away(rows: list[list[float]], factor: float) -> None:
    rewards_PG = torch.tensor(rows).double().round().float()
    one = group_relative_advantages(rewards_PG, divide_by_std=True)
    other = group_relative_advantages(rewards_PG * factor, divide_by_std=True)
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_no_gradient_flows_through_advantages() -> None:
    rewards_PG = torch.tensor([[0.0, 1.0]], requires_grad=True)
    assert not group_relative_advantages(rewards_PG, divide_by_std=True).requires_grad


def test_flat_groups_are_those_without_any_difference() -> None:
    assert flat_groups(torch.tensor([[1.0, 1.0], [1.0, 0.0]])).tolist() == [True, False]


@pytest.mark.parametrize("shape", [(4,), (2, 1), (2, 2, 2)])
def test_rewards_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must be \[num_prompts, num_responses >= 2\]"):
        group_relative_advantages(torch.zeros(shape), divide_by_std=True)


def test_flat_rewards_are_compared_within_groups() -> None:
    rewards_B = torch.tensor([0.0, 1.0, 5.0, 5.0])
    advantages_B = grpo_advantages(rewards_B, num_responses=2, divide_by_std=False)
    assert advantages_B.tolist() == [-0.5, 0.5, 0.0, 0.0]


@pytest.mark.shows("4.18")
def test_rows_that_do_not_divide_into_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="does not divide into groups of 3"):
        grpo_advantages(torch.zeros(4), num_responses=3, divide_by_std=True)


@pytest.mark.shows("4.17")
def test_each_response_token_gets_the_advantage_of_its_row() -> None:
    mask_BL = jagged([torch.tensor([False, True, True]), torch.tensor([False, False])])
    spread = spread_over_tokens(torch.tensor([2.0, float("nan")]), mask_BL)
    assert spread.values().tolist() == [0.0, 2.0, 2.0, 0.0, 0.0]


def test_an_infinite_advantage_leaves_other_tokens_at_zero() -> None:
    mask_BL = jagged([torch.tensor([True, False]), torch.tensor([False, True, False])])
    spread = spread_over_tokens(torch.tensor([-0.1, float("inf")]), mask_BL)
    assert spread.values().tolist() == [torch.tensor(-0.1).item(), 0.0, 0.0, float("inf"), 0.0]
