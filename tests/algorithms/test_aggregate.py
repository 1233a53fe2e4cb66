from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algorithms.aggregate import token_weights

AGGREGATIONS = [
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_fixed_length",
]


def weights(lengths: list[int], aggregation: str, *, of: list[int]) -> list[float]:
    """Weights of some rows of a step whose rows have the lengths ``of``."""
    return token_weights(
        torch.tensor(lengths),
        aggregation=aggregation,
        num_tokens_global=sum(of),
        num_sequences_global=len(of),
        max_response_tokens=10,
    ).tolist()


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 5, 1 / 5, 0.0]),
        ("sequence_mean_token_mean", [1 / 12, 1 / 3, 0.0]),
        ("sequence_mean_token_sum", [1 / 3, 1 / 3, 0.0]),
        ("sequence_mean_fixed_length", [1 / 30, 1 / 30, 0.0]),
    ],
)
def test_weights_are_what_a_pocket_calculator_says(aggregation: str, expected: list[float]) -> None:
    assert weights([4, 1, 0], aggregation, of=[4, 1, 0]) == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(lengths=st.lists(st.integers(0, 10), min_size=1, max_size=12), data=st.data())
def test_a_rows_weight_does_not_depend_on_the_rank_it_falls_on(
    aggregation: str, lengths: list[int], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(lengths)))
    apart = weights(lengths[:cut], aggregation, of=lengths)
    apart += weights(lengths[cut:], aggregation, of=lengths)
    assert apart == weights(lengths, aggregation, of=lengths)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_step_of_empty_responses_weighs_nothing(aggregation: str) -> None:
    assert weights([0, 0], aggregation, of=[0, 0]) == [0.0, 0.0]


@given(st.lists(st.integers(1, 10), min_size=1, max_size=12))
def test_mean_aggregations_sum_to_one(lengths: list[int]) -> None:
    for aggregation in ("token_mean", "sequence_mean_token_mean"):
        per_token = weights(lengths, aggregation, of=lengths)
        total = sum(w * n for w, n in zip(per_token, lengths, strict=True))
        assert total == pytest.approx(1.0, rel=1e-5)


def test_an_unknown_aggregation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'mean'; set algorithm.loss_aggregation"):
        weights([1], "mean", of=[1])
