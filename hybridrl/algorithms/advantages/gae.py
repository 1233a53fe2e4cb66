"""Generalized advantage estimation: how much better each token, or turn, did than expected."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hybridrl.algorithms.response_tokens import ResponseTokens, Turns, next_values, sum_discounted
from hybridrl.algorithms.response_tokens import whiten as whiten_tokens
from hybridrl.config.limits import Discount, NotNegative


@dataclass(frozen=True, slots=True)
class AdvantageEstimate:
    """The targets of policy and critic; both columns are 0 where the mask is False.

    Without gradient. Whitening leaves the returns in reward units.
    """

    advantages_BL: Tensor  # float32 reward units, jagged
    returns_BL: Tensor  # float32 reward units, jagged, target of each value


def gae(
    rewards_BL: Tensor,
    values_BL: Tensor,
    response_mask_BL: Tensor,
    *,
    gamma: Discount = 1.0,
    lam: Discount = 0.95,
    length_factor: NotNegative = 0.0,
    whiten: bool = True,
) -> AdvantageEstimate:
    """Compare the rewards after each token with the critic's value before it.

    Over the n response tokens of a row, others left out, with ``V[n] = 0``
    (arXiv:1506.02438, eq. 16): ``delta[t] = r[t] + gamma * V[t+1] - V[t]`` and
    ``A[t] = delta[t] + gamma * lam * A[t+1]``. The returns are ``A[t] + V[t]``.

    ``V[n] = 0`` holds for a truncated response too: nothing is bootstrapped from its last token.
    The length limit is part of the task, the same in training and in evaluation, and the truncated
    response has its final reward. The reward of a longer response is not the objective
    (arXiv:1712.00378, 2). A critic sees positions, so it can learn the distance to the end.

    Args:
        lam: in [0, 1]. 1 is the rewards to come minus the value, 0 is ``delta``.
        length_factor: above 0 it replaces ``lam`` by ``1 - 1 / (length_factor * n)``, at least 0:
            a reward reaches further in a longer response. The returns are then the rewards to come,
            the ``lam=1`` of the critic (VAPO, arXiv:2504.05118, 4.1 and 4.2, with 0.05).
    """
    tokens = ResponseTokens.of(response_mask_BL)
    values_S, deltas_S = tokens.select(values_BL), tokens.select(rewards_BL)
    deltas_S -= values_S
    deltas_S += np.float32(gamma) * next_values(values_S, tokens.lengths_B)
    if length_factor:
        reach_B = np.maximum(length_factor * tokens.lengths_B, 1.0)
        discount_B = gamma * (1.0 - 1.0 / reach_B)
        advantages_S = sum_discounted(deltas_S, tokens.lengths_B, discount=discount_B)
        rewards_S = tokens.select(rewards_BL)
        returns_S = sum_discounted(rewards_S, tokens.lengths_B, discount=gamma)
    else:
        advantages_S = sum_discounted(deltas_S, tokens.lengths_B, discount=gamma * lam)
        returns_S = advantages_S + values_S
    returns_BL = tokens.to_rows(returns_S)
    if whiten:
        advantages_S = whiten_tokens(advantages_S)
    return AdvantageEstimate(tokens.to_rows(advantages_S), returns_BL)


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
