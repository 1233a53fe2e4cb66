"""A baseline of its own for each token, of least variance over the responses to its prompt."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hybridrl.algorithms.groups import Groups
from hybridrl.algorithms.response_tokens import (
    Doubles,
    Integers,
    ResponseTokens,
    sum_discounted,
)
from hybridrl.batch import jagged_from, row_lengths


def optimal_token_baseline(
    rewards_BL: Tensor,
    group_B: Tensor,
    response_mask_BL: Tensor,
    old_logprobs_BL: Tensor,
    squared_probs_BL: Tensor,
    *,
    align: Literal["response", "position"] = "response",
    singletons: Literal["zero", "reward"] = "zero",
) -> Tensor:
    """Weigh the other responses' rewards to come by the size of their gradients (arXiv:2602.07078).

    At step t of a group, ``A[b, t] = G[b, t] - sum_j G[j, t] W[j, t] / (sum_j W[j, t] + 1e-8)``,
    ``G`` the rewards to come, ``W[b, t] = sum_{s <= t} (1 - 2 p[b, s] + sum_v p_v^2)``: the summed
    squared norms of the gradients by the logits. Where a response is longer than all others of its
    group, the steps that it alone reaches have the baseline 0, or it would be its own.

    Args:
        squared_probs_BL: jagged float32, sum over the vocabulary of p^2 at each token, of the same
            logits and temperature as ``old_logprobs_BL``.
        align: Step t is the t-th ``response`` token of each row (verl's
            tir_optimal_token_baseline): right with gaps and without. ``position`` also counts the
            tokens in gaps (verl's optimal_token_baseline), so that rows with different gaps are
            compared at different moments, and the steps of the longest row are cut off by the
            number of response tokens all the same.
        singletons: ``reward`` (verl) gives a group of one its rewards to come, ``zero`` nothing.
    """
    tokens, groups = ResponseTokens.of(response_mask_BL), Groups.of(group_B)
    returns_S = sum_discounted(tokens.select(rewards_BL), tokens.lengths_B, discount=1.0)
    norms_S = tokens.select(squared_probs_BL) + 1 - 2 * np.exp(tokens.select(old_logprobs_BL))
    np.maximum(norms_S, 0.0, out=norms_S)  # sure tokens round below it, and means need weights >= 0
    is_response = align == "response"
    steps_S = tokens.indices_in_row() if is_response else tokens.distances_from_first()
    first_S = np.repeat(groups.index_B.numpy() * (steps_S.max(initial=0) + 1), tokens.lengths_B)
    step_of_group_S, weights_S = first_S + steps_S, tokens.accumulate(norms_S)
    weighted = np.bincount(step_of_group_S, weights=returns_S * weights_S)
    means: Doubles = weighted / (np.bincount(step_of_group_S, weights=weights_S) + 1e-8)
    baselines_S = means[step_of_group_S]
    ends_S = np.repeat(_shared_steps(groups, tokens.lengths_B), tokens.lengths_B)
    baselines_S[steps_S >= ends_S] = 0.0
    advantages_S = returns_S - baselines_S
    if singletons == "zero":
        advantages_S[np.repeat(groups.sizes_B.numpy() == 1, tokens.lengths_B)] = 0.0
    return tokens.to_rows(advantages_S)


def squared_probs(
    logprobs_BL: Tensor, half_temperature_logprobs_BL: Tensor, response_mask_BL: Tensor
) -> Tensor:
    """Return the sum of ``p^2`` over the vocabulary, from scores at two temperatures.

    With logits z at the sampler's temperature, ``log p = z - lse(z)``, and at half of it
    ``log q = 2 z - lse(2 z)``. So ``2 log p - log q = lse(2 z) - 2 lse(z)``, the logarithm of the
    sum, is the same for every token.

    Returns:
        Jagged float32 in (0, 1], 0 where the mask is False.
    """
    log_sums_T = 2 * logprobs_BL.values() - half_temperature_logprobs_BL.values()
    sums_T = log_sums_T.clamp(max=0.0).exp()
    sums_T = torch.where(response_mask_BL.values(), sums_T, 0.0)
    return jagged_from(sums_T, row_lengths(response_mask_BL))


def _shared_steps(groups: Groups, lengths_B: Integers) -> Integers:
    """Return the steps of each row that other rows of its group reach, too; int64 [B].

    Only the strictly longest row has fewer than it is long. A group of one has no others.
    """
    lengths = torch.from_numpy(lengths_B)
    second_B = groups.second_max(lengths).long()
    is_longest_B = (lengths > second_B) | (groups.sizes_B == 1)
    unlimited_B = torch.full_like(second_B, torch.iinfo(torch.int64).max)
    second_B = second_B.masked_fill(groups.sizes_B == 1, 0)
    ends: Integers = torch.where(is_longest_B, second_B, unlimited_B).numpy()
    return ends
