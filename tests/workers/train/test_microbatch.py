from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.errors import DispatchError
from hybridrl.trainer.train_batch import balance_over_ranks
from hybridrl.workers.train.microbatcher import plan_microbatches

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


@given(lengths=LENGTHS, max_tokens=st.integers(1, 100))
def test_plan_covers_every_row_within_the_token_budget(lengths: list[int], max_tokens: int) -> None:
    plan = plan_microbatches(lengths, max_tokens=max_tokens)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    for rows in plan:
        assert len(rows) == 1 or sum(lengths[row] for row in rows) <= max_tokens


@given(lengths=LENGTHS, max_tokens=st.integers(60, 200))
def test_microbatches_are_few_and_group_similar_lengths(
    lengths: list[int], max_tokens: int
) -> None:
    plan = plan_microbatches(lengths, max_tokens=max_tokens)
    in_order = [lengths[row] for rows in plan for row in rows]
    assert in_order == sorted(lengths, reverse=True)
    # Two neighbours never fit in one: half-full at worst.
    tokens = [sum(lengths[row] for row in rows) for rows in plan]
    assert len(plan) <= 2 * sum(lengths) / max_tokens + 1
    assert not tokens or max(tokens) - min(tokens) <= max_tokens


def test_microbatches_are_nearly_equal() -> None:
    # First fit would give 100 + 100 + 20 tokens.
    plan = plan_microbatches([10] * 22, max_tokens=100)
    assert sorted(len(rows) for rows in plan) == [6, 8, 8]


def test_one_rank_keeps_the_order_of_its_rows() -> None:
    assert balance_over_ranks([3, 9, 1, 7], dp_size=1, num_minibatches=2) == [0, 1, 2, 3]


@given(
    lengths=st.lists(st.integers(0, 1000), min_size=24, max_size=24),
    dp_size=st.sampled_from([1, 2, 3, 4]),
    num_minibatches=st.sampled_from([1, 2]),
)
def test_balancing_deals_each_minibatch_out_to_all_ranks(
    lengths: list[int], dp_size: int, num_minibatches: int
) -> None:
    order = balance_over_ranks(lengths, dp_size=dp_size, num_minibatches=num_minibatches)
    assert sorted(order) == list(range(24))
    size = 24 // num_minibatches
    share = size // dp_size
    for minibatch in range(num_minibatches):
        shares = [
            order[rank * (24 // dp_size) + minibatch * share :][:share] for rank in range(dp_size)
        ]
        given_rows = list(range(minibatch * size, (minibatch + 1) * size))
        assert sorted(row for rows in shares for row in rows) == given_rows
        dealt = [sum(lengths[row] for row in rows) for rows in shares]
        unbalanced = [
            sum(lengths[row] for row in given_rows[rank * share :][:share])
            for rank in range(dp_size)
        ]
        assert max(dealt) - min(dealt) <= max(unbalanced) - min(unbalanced)


def test_indivisible_rows_are_rejected_with_legal_sizes() -> None:
    with pytest.raises(DispatchError, match=r"cannot divide 10 rows .* rollout.\w+ 8 or 12"):
        balance_over_ranks([1] * 10, dp_size=2, num_minibatches=2)
