"""GRPO: rewards normalised within the group of responses to the same prompt."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hybridrl.algorithms.groups import Groups
from hybridrl.algorithms.response_tokens import whiten_rows
from hybridrl.batch import response_lengths
from hybridrl.config.limits import StdFloor


def grpo(
    rewards_B: Tensor,
    group_B: Tensor,
    *,
    scale: Literal["group", "batch", "mean", "none"] = "group",
    std_floor: StdFloor = 1e-6,
    unbiased: bool = True,
    singletons: Literal["zero", "reward"] = "zero",
) -> Tensor:
    """Subtract the mean of the group and divide by a standard deviation.

    ``A[b] = (r[b] - mean_g r) / (std r + std_floor)``. The papers name neither Bessel's correction
    nor a floor. verl is ``singletons=reward``; its 1e-6 is the default here. TRL is
    ``std_floor=1e-4``, and its AsyncGRPO ``std_floor=1e-8, unbiased=False``.

    Args:
        scale: The std of the ``group`` is GRPO (arXiv:2402.03300, 4.1.2), that of all rewards of
            the ``batch``, not centred, is Lite PPO (arXiv:2508.08221). ``none`` does not divide:
            Dr. GRPO (arXiv:2503.20783, 3), since the division favours prompts that are nearly
            always right or nearly always wrong. ``mean`` divides by the group's mean reward: MaxRL
            (arXiv:2602.02710), for 0 and 1 the gradient of ``log pass rate``, truncated at the
            size of the group. The rarer a success, the more it weighs.
        std_floor: keeps near-constant groups from exploding.
        unbiased: True divides the squares by n - 1, False by n.
        singletons: ``reward`` does not divide by a group's std.

    Returns:
        float32 [B], without gradient, unitless or with ``none`` in reward units. A group of equal
        rewards gives exact zeros: it teaches nothing.

    Raises:
        ValueError: a reward below 0 with ``mean``, which would turn the sign of a group.
    """
    rewards_B, groups = rewards_B.detach().double(), Groups.of(group_B)
    advantages_B = groups.subtract(rewards_B, groups.mean(rewards_B), singletons=singletons)
    correction = int(unbiased)
    if scale == "group":
        std_B = groups.std(rewards_B, correction=correction)
        advantages_B /= std_B.masked_fill(groups.sizes_B == 1, 1.0) + std_floor
    elif scale == "batch" and len(rewards_B) > 1:
        advantages_B /= rewards_B.std(correction=correction) + std_floor
    elif scale == "mean":
        if (lowest := float(rewards_B.min())) < 0:
            raise ValueError(
                f"scale=mean divides by the mean reward of a group, and a reward is {lowest:g}; "
                "give rewards of at least 0, with no KL charge in them"
            )
        advantages_B /= groups.mean(rewards_B) + std_floor
    return advantages_B.float()


def grpo_passk(
    rewards_B: Tensor,
    group_B: Tensor,
    *,
    scale: Literal["group", "none"] = "group",
    std_floor: StdFloor = 1e-6,
) -> Tensor:
    """Give the best response of a group its lead over the second best, and others 0.

    ``A = (r_max - r_second) / (std_g r + std_floor)``: the gradient of the largest reward of the
    group (pass@k with k = n, arXiv:2503.19595). Without the std it is the exact leave-one-out
    marginal of that maximum. The division is verl's default; whether the paper has it was not seen.

    Returns:
        float32 [B], without gradient. All 0 where two responses share the largest reward, and in
        a group of one, which verl refuses.
    """
    rewards_B, groups = rewards_B.detach().double(), Groups.of(group_B)
    best_B = groups.max(rewards_B)
    lead_B = (best_B - groups.second_max(rewards_B)) * (rewards_B == best_B)
    if scale == "group":
        lead_B /= groups.std(rewards_B) + std_floor
    return lead_B.float()


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
