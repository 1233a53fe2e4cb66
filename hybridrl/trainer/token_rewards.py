"""Rewards of tokens: those of an agent at their turns, all others with the last response token."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.batch import jagged_from, place_on_last_tokens, row_lengths
from hybridrl.trainer.collect import ScoredRollouts


def place_rewards(
    scored: ScoredRollouts, charges_B: Tensor, *, agent_names: tuple[str, ...]
) -> Tensor:
    """Return rewards by token, whose sum over a row is its reward less its charges.

    Args:
        scored: B rows with their scores.
        charges_B: float32, taken off with the last response token.
        agent_names: rewards that an agent gave to single turns or tokens.

    Returns:
        Jagged float32 [B, L], 0 outside the response.
    """
    rollouts, scores = scored.rollouts, scored.scores
    mask_BL, agent_BL = rollouts.response_mask_BL, rollouts.agent_rewards_BL
    if agent_BL is None or not agent_names:
        return place_on_last_tokens(scores.rewards_B - charges_B, mask_BL)
    is_agent_K = torch.tensor([name in agent_names for name in scores.names])
    weights_K = scores.reward_weights_K.double()
    others_B = scores.reward_parts_BK.double() @ (weights_K * ~is_agent_K)
    at_end_BL = place_on_last_tokens(others_B.float() - charges_B, mask_BL)
    weights_B = (~scores.is_failed_BK).double() @ (weights_K * is_agent_K)
    weights_T = weights_B.float().repeat_interleave(row_lengths(mask_BL))
    return jagged_from(at_end_BL.values() + weights_T * agent_BL.values(), row_lengths(mask_BL))
