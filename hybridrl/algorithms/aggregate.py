"""Aggregate the losses of many tokens to one number.

Legend: B rows. ``global`` counts are taken over all ranks and micro-batches of one optimizer step.
So the sum of all weighted losses is the loss, for any division of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_weights(
    response_lengths_B: Tensor,
    *,
    aggregation: str,
    num_tokens_global: int,
    num_sequences_global: int,
    max_response_tokens: int,
) -> Tensor:
    """Return the weight of one token of each row in the loss.

    ``token_mean``: every token the same, so long responses weigh more (arXiv:2503.14476, 3.3).
    ``sequence_mean_token_mean``: every response the same (arXiv:2402.03300, eq. 3).
    ``sequence_mean_token_sum``: mean over responses of the sum over tokens; grows with length.
    ``sequence_mean_fixed_length``: the same over a constant length (Dr. GRPO, arXiv:2503.20783, 3).

    Args:
        response_lengths_B: int64 [B], response tokens of this rank's rows; 0 is an empty response.
        aggregation: one of the four above.
        num_tokens_global: response tokens over all rows of the optimizer step, >= 0.
        num_sequences_global: rows of the optimizer step, empty ones included, >= 1.
        max_response_tokens: the constant length.

    Returns:
        float32 [B], the weight of *each* token of row b; 0 for an empty response.

    Raises:
        ValueError: unknown aggregation.
    """
    lengths_B = response_lengths_B.float()
    if aggregation == "token_mean":
        weights_B = torch.full_like(lengths_B, 1 / max(num_tokens_global, 1))
    elif aggregation == "sequence_mean_token_mean":
        weights_B = 1 / (num_sequences_global * lengths_B)
    elif aggregation == "sequence_mean_token_sum":
        weights_B = torch.full_like(lengths_B, 1 / num_sequences_global)
    elif aggregation == "sequence_mean_fixed_length":
        weights_B = torch.full_like(lengths_B, 1 / (num_sequences_global * max_response_tokens))
    else:
        raise ValueError(
            f"unknown aggregation {aggregation!r}; set algorithm.loss_aggregation to token_mean, "
            "sequence_mean_token_mean, sequence_mean_token_sum or sequence_mean_fixed_length"
        )
    return weights_B.masked_fill(response_lengths_B == 0, 0.0)
