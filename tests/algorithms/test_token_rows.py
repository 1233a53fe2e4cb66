"""Sums of whole responses, on one rank and on several that share the tokens of each."""

from __future__ import annotations

import torch

from hybridrl.algorithms.token_rows import TokenRows
from tests.algorithms.packed import shared_rows
from tests.ranks import run_ranks

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
