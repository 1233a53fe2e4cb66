"""Rewards to come, against the step's tokens, the greedy response, or nothing."""

from __future__ import annotations

from typing import Literal

import numpy as np
from torch import Tensor

from hybridrl.algorithms.groups import Groups
from hybridrl.algorithms.response_tokens import ResponseTokens, sum_discounted, whiten, whiten_rows
from hybridrl.batch import response_lengths
from hybridrl.config.limits import Discount


def reinforce(rewards_BL: Tensor, response_mask_BL: Tensor, *, gamma: Discount = 1.0) -> Tensor:
    """Return the rewards to come: ``G[t] = r[t] + gamma * G[t+1]`` (Williams 1992).

    There is no baseline: with rewards of one sign, all responses grow or all shrink.

    Args:
        response_mask_BL: jagged bool; other tokens are left out and not discounted, as in verl.
    """
    tokens = ResponseTokens.of(response_mask_BL)
    returns_S = sum_discounted(tokens.select(rewards_BL), tokens.lengths_B, discount=gamma)
    return tokens.to_rows(returns_S)


def batch_baseline(rewards_B: Tensor) -> Tensor:
    """Subtract the mean reward of the step: ``A[b] = r[b] - mean r``, float32 [B].

    Neither group nor critic, so one response per prompt is enough (FlashREINFORCE, Hu et al. 2026,
    https://yifanzhang-pro.github.io/FlashREINFORCE/). A step of one response has no signal.
    """
    rewards_B = rewards_B.detach().double()
    return (rewards_B - rewards_B.mean()).float()


def reinforce_plus_plus(
    rewards_BL: Tensor, response_mask_BL: Tensor, *, gamma: Discount = 1.0
) -> Tensor:
    """Whiten the rewards to come over all response tokens of the step (arXiv:2501.03262).

    ``A = (G - mean G) / sqrt(var G + 1e-8)``, ``G`` as in ``reinforce``; no groups, one response
    per prompt is enough. Without a KL charge and with ``gamma=1``, ``G`` is the same for all tokens
    of a row, so that long rows weigh more in mean and variance. The paper charges k1 per token in
    the reward. As verl; OpenRLHF divides the variance by n. Skips other tokens without discount,
    as verl does; OpenRLHF and slime discount through them.

    Returns:
        Jagged float32 [B, L], without gradient, 0 where the mask is False. Equal rewards to come
        give exact zeros.
    """
    tokens = ResponseTokens.of(response_mask_BL)
    returns_S = sum_discounted(tokens.select(rewards_BL), tokens.lengths_B, discount=gamma)
    return tokens.to_rows(whiten(returns_S))


def reinforce_plus_plus_baseline(
    rewards_B: Tensor,
    group_B: Tensor,
    response_mask_BL: Tensor,
    *,
    singletons: Literal["zero", "reward"] = "zero",
) -> Tensor:
    """Subtract the mean of the group, then whiten over all response tokens (arXiv:2501.03262).

    ``A = whiten(r[b] - mean_g r)``, in which each row counts once for each of its tokens.
    verl is ``singletons=reward``. TRL approximates it with RLOO, whitened over rows.

    Args:
        singletons: either is whitened with the others.
    """
    rewards_B, groups = rewards_B.detach().double(), Groups.of(group_B)
    centered_B = groups.subtract(rewards_B, groups.mean(rewards_B), singletons=singletons)
    lengths_B = response_lengths(response_mask_BL)
    return whiten_rows(centered_B, lengths_B).float()


def remax(rewards_BL: Tensor, greedy_rewards_B: Tensor, response_mask_BL: Tensor) -> Tensor:
    """Subtract the reward of the greedy response from the rewards to come (arXiv:2310.10505).

    ``A[b, t] = sum_{s >= t} r[b, s] - greedy_rewards[b]``. The paper has one reward at the end.
    With rewards at several tokens the full baseline is subtracted at each, as verl does.

    Args:
        greedy_rewards_B: float32 [B], reward of the greedy response to the row's prompt.
    """
    tokens = ResponseTokens.of(response_mask_BL)
    returns_S = sum_discounted(tokens.select(rewards_BL), tokens.lengths_B, discount=1.0)
    greedy_B = greedy_rewards_B.detach().float().numpy()
    return tokens.to_rows(returns_S - np.repeat(greedy_B, tokens.lengths_B))
