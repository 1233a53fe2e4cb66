"""Each response against the greedy response to its prompt."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from hybridrl.algorithms.response_tokens import ResponseTokens, sum_discounted


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
