from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algorithms import aggregate
from hybridrl.algorithms.load import Part

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
