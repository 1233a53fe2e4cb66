"""Statistics and filters of groups, and the weights of rows in the loss."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algorithms import aggregate
from hybridrl.algorithms.group_filter import mean_within, zero_variance
from hybridrl.algorithms.groups import Groups
from hybridrl.algorithms.load import Part
from hybridrl.batch import jagged, without_rows
from hybridrl.trainer.advantages import overlong_punishment

rows = st.lists(st.tuples(st.integers(-3, 3), st.integers(-8, 8)), max_size=20)


@given(rows)
def test_statistics_are_those_of_the_rows_with_the_same_number(rows: list[tuple[int, int]]) -> None:
    groups = Groups.of(torch.tensor([group for group, _ in rows], dtype=torch.int64))
    values_B = torch.tensor([value / 8 for _, value in rows])
    for number, (group, own) in enumerate(rows):
        members = [value / 8 for other, value in rows if other == group]
        ordered = sorted(members)
        others = (sum(members) - own / 8) / max(len(members) - 1, 1)
        pairs = (
            (groups.sum(values_B), sum(members)),
            (groups.mean(values_B), statistics.fmean(members)),
            (groups.mean_of_others(values_B), others if len(members) > 1 else 0.0),
            (groups.std(values_B), statistics.stdev(members) if len(members) > 1 else 0.0),
            (groups.std(values_B, correction=0), statistics.pstdev(members)),
            (groups.max(values_B), ordered[-1]),
            (groups.second_max(values_B), ordered[-2] if len(members) > 1 else ordered[-1]),
            (groups.is_flat(values_B), len(set(members)) == 1),
        )
        for actual_B, expected in pairs:
            assert actual_B[number].item() == pytest.approx(expected, abs=1e-12)


# Groups: all right, mixed, all wrong, one row, nearly equal.
REWARDS_B = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.5, 0.25, 0.25 + 1e-7])
GROUP_B = torch.tensor([4, 7, 2, 4, 7, 2, 0, 5, 5])


def test_groups_without_differences_are_dropped() -> None:
    kept_B = zero_variance(REWARDS_B, GROUP_B)
    assert GROUP_B[kept_B].tolist() == [7, 7]
    assert GROUP_B[zero_variance(REWARDS_B, GROUP_B, std_floor=0.0)].tolist() == [7, 7, 5, 5]
    assert not zero_variance(REWARDS_B, GROUP_B, std_floor=0.75).any()


def test_prompts_that_are_too_easy_or_too_hard_are_dropped() -> None:
    assert GROUP_B[mean_within(REWARDS_B, GROUP_B)].tolist() == [7, 7, 0, 5, 5]
    assert GROUP_B[mean_within(REWARDS_B, GROUP_B, low=0.3, high=0.5)].tolist() == []
    assert GROUP_B[mean_within(REWARDS_B, GROUP_B, low=-0.1, high=0.3)].tolist() == [2, 2, 5, 5]


def test_a_filter_of_no_rows_keeps_none() -> None:
    nothing_B = torch.zeros(0)
    assert zero_variance(nothing_B, nothing_B.long()).tolist() == []
    assert mean_within(nothing_B, nothing_B.long()).tolist() == []


def test_long_responses_pay_more_and_more() -> None:
    lengths_B = torch.tensor([0, 80, 81, 90, 95, 100, 101, 500])
    paid_B = overlong_punishment(lengths_B, max_response_tokens=100, buffer_tokens=20)
    assert paid_B.tolist() == pytest.approx([0, 0, -0.05, -0.5, -0.75, -1, -1, -1])


def test_a_truncated_response_has_no_token_in_the_loss() -> None:
    rows = [[False, True, True], [True, False, True], [True], []]
    mask_BL = jagged([torch.tensor(row, dtype=torch.bool) for row in rows])
    masked_BL = without_rows(mask_BL, torch.tensor([False, True, True, False]))
    assert [row.tolist() for row in masked_BL] == [rows[0], [False] * 3, [False], []]
    assert mask_BL[1].tolist() == rows[1]


AGGREGATIONS = {
    "token_mean": [1 / 8, 1 / 8, 0.0, 1 / 8],
    "token_sum": [1.0, 1.0, 0.0, 1.0],
    "sequence_mean_token_mean": [1 / 12, 1 / 3, 0.0, 1 / 9],
    "sequence_mean_token_sum": [1 / 3, 1 / 3, 0.0, 1 / 3],
    "sequence_mean_fixed_length": [1 / 30, 1 / 30, 0.0, 1 / 30],
    "prompt_mean_token_mean": [1 / 10, 1 / 10, 0.0, 1 / 6],
}
"""Weights of rows of 4, 1, 0 and 3 tokens; the last is alone with its prompt."""

ALL = slice(None)


def weights(of: list[int], aggregation: str, *, at: slice = ALL) -> list[float]:
    """Weights of some rows of a step whose rows have the lengths ``of``, three to a prompt."""
    lengths_B = torch.tensor(of)
    group_B = torch.arange(len(of)) // 3
    tokens_P = lengths_B.new_zeros(len(of)).index_add(0, group_B, lengths_B)
    return Part.of(vars(aggregate)[aggregation])(
        response_lengths_B=lengths_B[at],
        num_tokens_global=sum(of),
        num_sequences_global=sum(length > 0 for length in of),
        max_response_tokens=10,
        group_tokens_B=tokens_P[group_B][at],
        num_prompts_global=int(tokens_P.count_nonzero()),
    ).tolist()


@pytest.mark.parametrize(("aggregation", "expected"), AGGREGATIONS.items())
def test_weights_equal_hand_computed_ones_and_skip_empty_rows(
    aggregation: str, expected: list[float]
) -> None:
    assert weights([4, 1, 0, 3], aggregation) == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(lengths=st.lists(st.integers(0, 10), min_size=1, max_size=12), data=st.data())
def test_a_rows_weight_does_not_depend_on_the_rank_it_falls_on(
    aggregation: str, lengths: list[int], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(lengths)))
    apart = weights(lengths, aggregation, at=slice(cut))
    apart += weights(lengths, aggregation, at=slice(cut, None))
    assert apart == weights(lengths, aggregation)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_step_of_empty_responses_weighs_nothing(aggregation: str) -> None:
    assert weights([0, 0], aggregation) == [0.0, 0.0]
