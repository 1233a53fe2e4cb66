"""Generalized advantage estimation over turns, and over the tokens of each turn."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from hybridrl.algorithms.advantages.gae import AdvantageEstimate
from hybridrl.algorithms.response_tokens import ResponseTokens, Turns, next_values, sum_discounted
from hybridrl.algorithms.response_tokens import whiten as whiten_tokens
from hybridrl.config.limits import Discount


def bi_level_gae(
    rewards_BL: Tensor,
    values_BL: Tensor,
    response_mask_BL: Tensor,
    *,
    gamma: Discount = 1.0,
    lam: Discount = 0.95,
    gamma_turn: Discount = 0.95,
    whiten: bool = True,
) -> AdvantageEstimate:
    """Estimate the advantage of each turn, then of the tokens in it (VAGEN, arXiv:2510.16907).

    With ``V[k]`` and ``r[k]`` at the last token of turn ``k``, and 0 behind the last turn:
    ``delta[k] = r[k] + gamma_turn * V[k+1] - V[k]`` and
    ``A[k] = delta[k] + gamma_turn * lam * A[k+1]``. The last token of a turn has ``A[k]``.
    From there back to the turn's first token, ``A[t] = delta[t] + gamma * lam * A[t+1]`` with
    ``delta[t] = r[t] + gamma * V[t+1] - V[t]``. The returns are ``A + V``.

    So a reward reaches the turn before through ``gamma_turn`` once, whatever the number of tokens
    between. As the authors' code, with two differences. It takes a turn without a reward for no
    turn; here turns are runs of response tokens. And rewards inside of turn ``k + 1`` (a KL charge)
    count as part of ``V[k+1]``, so that with all three numbers 1 it is ``gae`` with ``lam=1``. Of
    rows with one turn it is ``gae``. The authors run with ``gamma_turn=0.95``.
    """
    tokens = ResponseTokens.of(response_mask_BL)
    rewards_S, values_S = tokens.select(rewards_BL), tokens.select(values_BL)
    turns = Turns.of(tokens)
    last_K = turns.last_K
    deltas_S = rewards_S - values_S
    deltas_S += np.float32(gamma) * next_values(values_S, turns.lengths_K)
    following_K = values_S[last_K] + turns.sum(rewards_S) - rewards_S[last_K]
    deltas_K = deltas_S[last_K]
    deltas_K += np.float32(gamma_turn) * next_values(following_K, turns.counts_B)
    deltas_S[last_K] = sum_discounted(deltas_K, turns.counts_B, discount=gamma_turn * lam)
    advantages_S = sum_discounted(deltas_S, turns.lengths_K, discount=gamma * lam)
    returns_BL = tokens.to_rows(advantages_S + values_S)
    if whiten:
        advantages_S = whiten_tokens(advantages_S)
    return AdvantageEstimate(tokens.to_rows(advantages_S), returns_BL)
