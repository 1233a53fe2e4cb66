"""Masks of tokens, and the rows that tokens belong to, on one rank and on several."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.token_masks import (
    binary_kl_mask,
    off_policy_mask,
    second_moment_mask,
    top_entropy_mask,
)
from hybridrl.algorithms.token_rows import TokenRows
from tests.algorithms.packed import make_packed, shared_rows
from tests.ranks import run_ranks

ROWS = TokenRows.on_one_rank(torch.tensor([0, 0, 1, 1, 3]), 4)


def test_only_bad_responses_that_were_left_behind_are_masked() -> None:
    sampler_T = torch.zeros(5)
    current_T = torch.tensor([-0.3, -0.1, -0.3, 0.0, 0.5], requires_grad=True)
    advantages_T = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0])
    kept_T = off_policy_mask(current_T, sampler_T, advantages_T, ROWS, max_nats=0.15)
    assert kept_T.tolist() == [False, False, True, True, True]
    wider_T = off_policy_mask(current_T, sampler_T, advantages_T, ROWS, max_nats=0.25)
    assert wider_T.all()


def test_responses_that_are_drawn_otherwise_now_are_left_out_whichever_way_they_moved() -> None:
    probabilities_T = torch.tensor([0.5, 0.5, 0.5, 0.5, 1.0])
    current_T = torch.tensor([0.6, 0.4, 0.52, 0.5, 1.0]).log().requires_grad_()
    # Both tokens of the first response are 1/2 log(.25 / .24) = .0204 away, in two directions.
    kept_T = binary_kl_mask(current_T, probabilities_T.log(), ROWS, max_nats=0.0203)
    assert kept_T.tolist() == [False, False, True, True, True]
    assert binary_kl_mask(current_T, probabilities_T.log(), ROWS, max_nats=0.021).all()


def test_the_largest_moves_are_left_out_until_their_second_moment_fits() -> None:
    moved_T = torch.tensor([0.1, -0.4, 0.3, -0.5, 0.2], requires_grad=True)
    advantages_T = torch.tensor([1.0, -1.0, 1.0, 1.0, 0.0])  # of the last two none is bound
    sampler_T = torch.zeros(5)

    def kept(max_square: float) -> list[bool]:
        mask_T = second_moment_mask(moved_T, sampler_T, advantages_T, ROWS, max_square=max_square)
        assert not mask_T.requires_grad
        return mask_T.tolist()

    assert all(kept(0.26 / 3 + 1e-6))  # .01 + .16 + .09
    assert kept(0.26 / 3 - 1e-6) == [True, False, True, True, True]
    assert kept(0.10 / 2 - 1e-6) == [True, False, False, True, True]
    assert kept(0.01 - 1e-6) == [False, False, False, True, True]


def test_tokens_of_the_highest_entropy_are_kept() -> None:
    entropy_T = torch.tensor([0.1, 2.0, 0.3, 1.0, 0.2])
    assert top_entropy_mask(entropy_T, ROWS, fraction=0.25).tolist() == [
        *(False, True, False, True, False)
    ]
    assert top_entropy_mask(entropy_T, ROWS, fraction=1.0).all()
    # The threshold is the quantile of the same name.
    threshold = entropy_T.quantile(1 - 0.6)
    assert torch.equal(top_entropy_mask(entropy_T, ROWS, fraction=0.6), entropy_T >= threshold)


def test_no_tokens_have_an_empty_mask() -> None:
    rows = TokenRows.on_one_rank(torch.zeros(0, dtype=torch.int64), 1)
    empty_T = torch.zeros(0)
    assert len(top_entropy_mask(empty_T, rows)) == 0
    assert len(binary_kl_mask(empty_T, empty_T, rows)) == 0
    assert len(second_moment_mask(empty_T, empty_T, empty_T, rows)) == 0


def test_ranks_that_share_rows_mask_as_one() -> None:
    for shared, whole in run_ranks(2, _masks):
        assert [mask.tolist() for mask in shared] == [mask.tolist() for mask in whole]


def _masks(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    packed = make_packed()
    own_U = torch.arange(rank, packed.rows.num_tokens, 2)
    part = packed.at(own_U, shared_rows(packed.rows, own_U))
    masks = (
        (top_entropy_mask, {"fraction": 0.4}),
        (off_policy_mask, {"max_nats": 0.05}),
        (binary_kl_mask, {"max_nats": 0.02}),
        (second_moment_mask, {"max_square": 0.1}),
    )
    return (
        [part.call(mask, **numbers) for mask, numbers in masks],
        [packed.call(mask, **numbers)[own_U] for mask, numbers in masks],
    )


ROW_T = torch.tensor([2, 0, 0, 2, 2, 0, 0])


def test_sums_and_means_of_rows_leave_empty_rows_at_zero() -> None:
    rows = TokenRows.on_one_rank(ROW_T, 3)
    values_T = torch.tensor([1.0, 2, 3, 4, 5, 6, 7])
    assert (rows.lengths_R.tolist(), rows.num_tokens) == ([4, 0, 3], 7)
    assert rows.sum(values_T).tolist() == [18, 0, 10]
    assert rows.mean(values_T).tolist() == [4.5, 0, torch.tensor(10 / 3).item()]
    assert rows.spread(torch.tensor([7, 8, 9])).tolist() == [9, 7, 7, 9, 9, 7, 7]


def test_ranks_find_the_largest_values_of_rows() -> None:
    assert run_ranks(2, _maxima) == [[-2.0, 0.0, -1.0, -4.0]] * 2


def _maxima(rank: int) -> list[float]:
    rows = TokenRows.on_one_rank(torch.tensor([0, 0, 2, 3]), 4)
    own_U = torch.tensor([[0, 3], [1, 2]][rank])
    values_T = torch.tensor([-3.0, -2.0, -1.0, -4.0])
    maxima: list[float] = shared_rows(rows, own_U).max(values_T[own_U]).tolist()
    assert maxima == rows.max(values_T).tolist()
    return maxima
