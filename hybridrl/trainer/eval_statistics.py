"""Numbers of an evaluation, for all prompts at once. Legend: P prompts, G responses to each."""

from __future__ import annotations

import torch
from torch import Tensor

_COVERAGE = 0.95
_NUMBERS_AT_ONCE = 1 << 22


def pass_at_k(is_correct_PG: Tensor, *, k: int) -> Tensor:
    """Estimate, for each prompt, the probability that one of k responses is correct.

    ``1 - C(n - c, k) / C(n, k)`` with c correct ones of n responses: unbiased, unlike
    ``1 - (1 - c / n)^k`` (arXiv:2107.03374, equation 1). As a product of ratios, since binomial
    coefficients overflow.

    Args:
        is_correct_PG: bool [P, n].
        k: 1 to n.

    Returns:
        float64 [P].
    """
    n = is_correct_PG.shape[1]
    num_left = torch.arange(n, 0, -1, dtype=torch.float64)  # n - i, i = 0 ... n - 1
    missed = torch.cat(
        [torch.ones(1).double(), ((num_left - k).clamp(min=0) / num_left).cumprod(0)]
    )
    return 1.0 - missed[is_correct_PG.sum(dim=1)]


def majority_at_k(answer_PG: Tensor, is_correct_PG: Tensor, *, k: int) -> Tensor:
    """Average over groups of k responses whether the most frequent answer is correct.

    The responses to a prompt are cut into n // k groups of k in their order; those left over are
    not used. Of equally frequent answers the one that came first counts. A response without an
    answer has no vote, and a group without votes is wrong. Otherwise as ``pass_at_k``.

    Args:
        answer_PG: int64 [P, n], the same number for the same answer; -1 is no answer.
    """
    num_groups = is_correct_PG.shape[1] // k
    answer_NK = answer_PG[:, : num_groups * k].reshape(-1, k)
    is_correct_NK = is_correct_PG[:, : num_groups * k].reshape(-1, k)
    group_N1 = torch.arange(len(answer_NK))[:, None]
    # One number for each pair of group and answer, so that equal answers are counted by sorting.
    pair_NK = group_N1 * (int(answer_PG.max()) + 2) + answer_NK + 1
    _, index_NK, counts = torch.unique(pair_NK, return_inverse=True, return_counts=True)
    votes_NK = torch.where(answer_NK < 0, 0, counts[index_NK])
    # The position decides between equal votes: torch does not say which maximum it returns.
    winner_N = (votes_NK * k - torch.arange(k)).argmax(dim=1, keepdim=True)
    is_right_N = is_correct_NK.gather(1, winner_N) & (votes_NK.gather(1, winner_N) > 0)
    return is_right_N.view(-1, num_groups).double().mean(dim=1)


def bootstrap_intervals(
    values_PM: Tensor, *, num_resamples: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Return the 95 % intervals of means over prompts, by the percentile bootstrap.

    Prompts are drawn, not responses: those to one prompt are not independent of each other. All
    metrics are taken over the same draws.

    Args:
        values_PM: [P, M], P >= 1 prompts, M metrics.
        num_resamples: draws of P prompts with replacement, >= 1.
        seed: the same seed gives the same intervals.

    Returns:
        Lower and upper ends, float64 [M] each.
    """
    generator = torch.Generator().manual_seed(seed)
    num_prompts = len(values_PM)
    values_PM = values_PM.double()
    num_at_once = max(1, _NUMBERS_AT_ONCE // values_PM.numel())
    means = []
    for begin in range(0, num_resamples, num_at_once):
        num_draws = min(num_at_once, num_resamples - begin)
        drawn = torch.randint(num_prompts, (num_draws, num_prompts), generator=generator)
        means.append(values_PM[drawn].mean(dim=1))
    tail = (1.0 - _COVERAGE) / 2
    low_M, high_M = torch.cat(means).quantile(torch.tensor([tail, 1 - tail]).double(), dim=0)
    return low_M, high_M
