"""Aggregate the losses of many tokens to one number: the weight of each token in their sum.

Every function returns the weight of *each* token of row b, float32 [B], 0 for an empty response.
``global`` counts are taken over all ranks and micro-batches of one optimizer step. So the sum of
all weighted losses is the loss, for any division of rows. A row without response tokens, such as
one that a filter emptied, counts in no denominator, as in verl and OpenRLHF; TRL counts it.

Counts that a function may ask for, besides those that it describes itself:

    response_lengths_B: int64, response tokens of each row.
    num_sequences_global: rows with at least one response token, >= 0.

Legend: B rows of this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_mean(response_lengths_B: Tensor, num_tokens_global: int) -> Tensor:
    """Weigh every token the same, so long responses weigh more (arXiv:2503.14476, 3.3).

    The default of verl, of TRL (``dapo``) and of OpenRLHF.

    Args:
        num_tokens_global: response tokens of all rows, >= 0.
    """
    return _of_rows(response_lengths_B, 1 / max(num_tokens_global, 1))


def token_sum(response_lengths_B: Tensor) -> Tensor:
    """Add all tokens; the size of a step grows with the batch (verl's ``token-sum``)."""
    return _of_rows(response_lengths_B, 1.0)


def sequence_mean_token_mean(response_lengths_B: Tensor, num_sequences_global: int) -> Tensor:
    """Weigh every response the same (arXiv:2402.03300, eq. 3).

    It favours short responses among the right ones, and long ones among the wrong
    (arXiv:2503.20783). The default of slime, and TRL's ``grpo``.
    """
    lengths_B = response_lengths_B.clamp(min=1).float()
    return _of_rows(response_lengths_B, 1 / (max(num_sequences_global, 1) * lengths_B))


def sequence_mean_token_sum(response_lengths_B: Tensor, num_sequences_global: int) -> Tensor:
    """Average over responses the sum over their tokens; the loss grows with length."""
    return _of_rows(response_lengths_B, 1 / max(num_sequences_global, 1))


def sequence_mean_fixed_length(
    response_lengths_B: Tensor, num_sequences_global: int, max_response_tokens: int
) -> Tensor:
    """Divide the sum over tokens by a constant length (Dr. GRPO, arXiv:2503.20783, 3).

    verl's ``seq-mean-token-sum-norm`` divides by the padded width unless ``loss_scale_factor`` is
    set, and then depends on the division into micro-batches.

    Args:
        max_response_tokens: the constant length, >= 1.
    """
    weight = 1 / (max(num_sequences_global, 1) * max_response_tokens)
    return _of_rows(response_lengths_B, weight)


def prompt_mean_token_mean(
    response_lengths_B: Tensor, group_tokens_B: Tensor, num_prompts_global: int
) -> Tensor:
    """Weigh every prompt the same, and every token of its responses (ScaleRL, arXiv:2510.13786).

    Args:
        group_tokens_B: int64, response tokens of all rows of the step with the row's prompt.
        num_prompts_global: prompts with at least one response token, >= 0.
    """
    group_tokens_B = group_tokens_B.clamp(min=1).float()
    return _of_rows(response_lengths_B, 1 / (max(num_prompts_global, 1) * group_tokens_B))


def _of_rows(response_lengths_B: Tensor, weights: Tensor | float) -> Tensor:
    """Return the weights of rows, float32, 0 for an empty response."""
    weights_B = torch.as_tensor(weights, dtype=torch.float32, device=response_lengths_B.device)
    return torch.where(response_lengths_B > 0, weights_B, 0.0)
