"""Several reward functions, each compared within the group before they are summed."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hybridrl.algorithms.advantages.grpo import grpo
from hybridrl.algorithms.response_tokens import whiten_rows
from hybridrl.batch import response_lengths
from hybridrl.config.limits import StdFloor


def gdpo(
    reward_parts_BK: Tensor,
    reward_weights_K: Tensor,
    group_B: Tensor,
    response_mask_BL: Tensor,
    *,
    whiten_over: Literal["sequences", "tokens"] = "sequences",
    std_floor: StdFloor = 1e-6,
    singletons: Literal["zero", "reward"] = "zero",
) -> Tensor:
    """Apply GRPO to each reward, sum with weights, and whiten over the step (arXiv:2601.05242).

    ``A = whiten(sum_k w[k] * grpo(r[:, k]))``. Equal sums of different rewards stay apart, and a
    reward with a large range does not drown the others.

    Args:
        reward_parts_BK: float32 [B, K], each less what the response is charged. So with one reward
            it is GRPO's, whitened.
        reward_weights_K: float32 [K].
        whiten_over: ``sequences`` counts each row once, ``(x - mean) / (std + std_floor)``: the
            paper as TRL restates it; TRL is ``std_floor=1e-4``. ``tokens`` is verl: a row counts
            once for each of its tokens, ``(x - mean) / sqrt(var + 1e-8)``.
        singletons: ``reward`` is verl; either is whitened with the others.
    """
    summed_B = torch.zeros(len(group_B), dtype=torch.float64)
    for rewards_B, weight in zip(reward_parts_BK.unbind(1), reward_weights_K.double(), strict=True):
        scaled_B = grpo(rewards_B, group_B, std_floor=std_floor, singletons=singletons)
        summed_B += weight * scaled_B.double()
    if whiten_over == "tokens":
        lengths_B = response_lengths(response_mask_BL)
        return whiten_rows(summed_B, lengths_B).float()
    if len(summed_B) < 2:
        return torch.zeros(len(summed_B))
    return ((summed_B - summed_B.mean()) / (summed_B.std() + std_floor)).float()
