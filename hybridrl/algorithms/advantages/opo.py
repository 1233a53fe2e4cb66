"""The baseline of least variance, if gradients grow with length."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from hybridrl.algorithms.groups import Groups
from hybridrl.batch import response_lengths


def opo(
    rewards_B: Tensor,
    group_B: Tensor,
    response_mask_BL: Tensor,
    *,
    singletons: Literal["zero", "reward"] = "zero",
) -> Tensor:
    """Subtract the mean reward of the group, weighted by length (arXiv:2505.23585).

    ``A[b] = r[b] - sum_j n[j] r[j] / sum_j n[j]``, ``n`` the response tokens: they stand for the
    squared norm of a response's gradient. The paper demands one optimizer step per rollout.

    Args:
        singletons: ``zero`` is what the formula gives a group of one, ``reward`` is verl.

    Returns:
        float32 [B], without gradient. A group of equal rewards gives exact zeros. Where a
        group has no response tokens the baseline is 0; verl gives NaN.
    """
    rewards_B, groups = rewards_B.detach().double(), Groups.of(group_B)
    lengths_B = response_lengths(response_mask_BL)
    baselines_B = groups.sum(rewards_B * lengths_B) / groups.sum(lengths_B).clamp(min=1)
    return groups.subtract(rewards_B, baselines_B, singletons=singletons).float()
