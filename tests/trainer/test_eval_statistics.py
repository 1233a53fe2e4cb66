"""pass@k, majority@k and bootstrap intervals against definitions and by hand."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import pytest
import torch

from hybridrl.trainer.evaluate import bootstrap_intervals, majority_at_k, pass_at_k


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_choices_of_k(k: int) -> None:
    rows = [[n < right for n in range(5)] for right in range(6)]
    expected = [fmean(any(chosen) for chosen in combinations(row, k)) for row in rows]
    assert pass_at_k(torch.tensor(rows), k=k).tolist() == pytest.approx(expected)


def test_pass_at_k_of_thousands_of_responses_stays_finite() -> None:
    right = torch.zeros(1, 5000, dtype=torch.bool)
    right[0, 7] = True
    assert float(pass_at_k(right, k=2500)) == pytest.approx(0.5)
    assert pass_at_k(right, k=5000).tolist() == [1.0]


def test_majority_counts_votes_in_groups_of_k() -> None:
    answers = torch.tensor(
        [[1, 2, 2, 1, 1, 2, 9], [-1, -1, 3, -1, -1, -1, 3], [4, 5, 4, 5, 5, 4, 5]]
    )
    right = (answers == torch.tensor([[1], [3], [4]])) & (answers >= 0)
    # Groups of three, the seventh is left over: wrong, right; right, no vote; right, wrong.
    assert majority_at_k(answers, right, k=3).tolist() == [0.5, 0.5, 0.5]
    # Of two votes for each answer the one that came first decides: right, right.
    assert majority_at_k(answers[2:, :4], right[2:, :4], k=4).tolist() == [1.0]
    assert majority_at_k(answers, right, k=1).tolist() == pytest.approx([3 / 7, 2 / 7, 3 / 7])


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = (torch.rand(300, 60, 1, generator=generator) < 0.4).double()
    intervals = [bootstrap_intervals(s, num_resamples=400, seed=1) for s in samples]
    covered = fmean(bool(low <= 0.4 <= high) for low, high in intervals)
    assert 0.90 <= covered <= 0.985


def test_intervals_are_of_each_metric_and_of_the_seed() -> None:
    values = torch.rand(40, 2, generator=torch.Generator().manual_seed(0))
    values[:, 1] = 0.25
    low, high = bootstrap_intervals(values, num_resamples=500, seed=3)
    assert float(low[1]) == float(high[1]) == 0.25
    assert low[0] < values[:, 0].mean() < high[0]
    again = bootstrap_intervals(values, num_resamples=500, seed=3)
    assert torch.equal(low, again[0])
    assert not torch.equal(low, bootstrap_intervals(values, num_resamples=500, seed=4)[0])
