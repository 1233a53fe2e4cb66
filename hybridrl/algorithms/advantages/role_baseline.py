"""Rewards of players in a game, against the mean of those who played the same role before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from hybridrl.algorithms.response_tokens import Doubles, ResponseTokens
from hybridrl.batch import MAX_PLAYERS
from hybridrl.config.limits import Discount


def role_baseline(
    rewards_BL: Tensor,
    response_mask_BL: Tensor,
    players_BL: Tensor,
    source_B: Sequence[str],
    state: dict[str, float],
    *,
    decay: Discount = 0.95,
) -> Tensor:
    """Subtract from the reward of each player in a game its mean so far (RAE of SPIRAL).

    ``A[b, p] = R[b, p] - m[g, p]``, then ``m[g, p] = decay m[g, p] + (1 - decay) R[b, p]``, row by
    row (arXiv:2506.24119). ``R[b, p]`` adds the rewards of the player's tokens, and all of them get
    ``A[b, p]``; ``g`` is the source of the row. A mean begins at 0. There are no groups: one
    response per prompt is enough. As in the authors' code the mean is the one before the row; in
    the paper the row is in it.

    Args:
        players_BL: jagged int8, number of the player that sampled each token.
        state: has the means, by source and player.

    Returns:
        Jagged float32 [B, L], 0 where the mask is False.
    """
    tokens = ResponseTokens.of(response_mask_BL)
    row_S = np.repeat(np.arange(len(tokens.lengths_B)), tokens.lengths_B)
    player_S = tokens.select(players_BL).astype(np.int64)
    roles, role_S = np.unique(row_S * MAX_PLAYERS + player_S, return_inverse=True)
    totals_R: Doubles = np.zeros(len(roles))
    np.add.at(totals_R, role_S, tokens.select(rewards_BL))
    for number, role in enumerate(roles.tolist()):
        row, player = divmod(role, MAX_PLAYERS)
        name = f"{source_B[row]}_{player}"
        mean, reward = state.get(name, 0.0), float(totals_R[number])
        totals_R[number] = reward - mean
        state[name] = decay * mean + (1 - decay) * reward
    advantages_S: Doubles = totals_R[role_S]
    return tokens.to_rows(advantages_S)
