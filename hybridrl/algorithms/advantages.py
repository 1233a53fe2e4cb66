"""From rewards to advantages: how much better each response was than expected.

Legend: P prompts, G responses per prompt, B = P * G rows; the G responses to a prompt are adjacent.
"""

from __future__ import annotations

from torch import Tensor


def group_relative_advantages(
    rewards_PG: Tensor, *, divide_by_std: bool, std_floor: float = 1e-6
) -> Tensor:
    """Score each response against the other responses to the same prompt.

    ``A[p, g] = (r[p, g] - mean_g r[p, g]) / (std_g r[p, g] + std_floor)``, where the division
    happens only if ``divide_by_std``; the std is the sample's (G - 1 in its denominator). No
    gradient flows through the result.

    Args:
        rewards_PG: float [P, G], one scalar reward per response: P prompts, G responses.
        divide_by_std: True is GRPO (arXiv:2402.03300, 4.1.2); False is Dr. GRPO
            (arXiv:2503.20783, 3), which drops the division because it favours
            prompts that are nearly always right or nearly always wrong.
        std_floor: reward units. Keeps near-constant groups from exploding.

    Returns:
        float32 [P, G]. Unitless if ``divide_by_std``, else in reward units. A group of
        equal rewards gives exact zeros: it teaches nothing.

    Raises:
        ValueError: not [P, G], or G < 2, where every advantage would silently be 0.
    """
    if rewards_PG.ndim != 2 or rewards_PG.shape[1] < 2:
        raise ValueError(
            f"rewards_PG must be [num_prompts, num_responses >= 2], got {list(rewards_PG.shape)}; "
            "reshape flat rewards with rewards.view(num_prompts, num_responses)"
        )
    rewards_PG = rewards_PG.detach().float()
    centered_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    # Rounding leaves 6e-8 in a group of eight times 0.7; divided by its std that is 0.056, not 0.
    centered_PG = centered_PG.masked_fill(flat_groups(rewards_PG)[:, None], 0.0)
    if not divide_by_std:
        return centered_PG
    return centered_PG / (rewards_PG.std(dim=1, keepdim=True) + std_floor)


def flat_groups(rewards_PG: Tensor) -> Tensor:
    """Find the prompts whose responses all got the same reward.

    Args:
        rewards_PG: [P, G].

    Returns:
        bool [P], True where the group has nothing to teach.
    """
    return (rewards_PG == rewards_PG[:, :1]).all(dim=1)


def grpo_advantages(rewards_B: Tensor, *, num_responses: int, divide_by_std: bool) -> Tensor:
    """Give each row its group-relative advantage; the flat form of ``group_relative_advantages``.

    Args:
        rewards_B: float [B], responses to a prompt adjacent.
        num_responses: G >= 2.
        divide_by_std: True is GRPO, False Dr. GRPO.

    Returns:
        float32 [B]; ``batch.spread_over_tokens`` gives it to the tokens.

    Raises:
        ValueError: B is not a multiple of G, or G < 2.
    """
    if rewards_B.ndim != 1 or len(rewards_B) % num_responses:
        raise ValueError(
            f"rewards_B of shape {list(rewards_B.shape)} does not divide into groups of "
            f"{num_responses}; pass one reward per response, group by group"
        )
    rewards_PG = rewards_B.view(-1, num_responses)
    return group_relative_advantages(rewards_PG, divide_by_std=divide_by_std).view(-1)
