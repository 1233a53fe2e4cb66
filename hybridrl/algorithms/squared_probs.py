"""Squared probabilities of full distributions, from the log-probs of single tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.batch import jagged_from, row_lengths


def squared_probs(
    logprobs_BL: Tensor, half_temperature_logprobs_BL: Tensor, response_mask_BL: Tensor
) -> Tensor:
    """Return the sum of ``p^2`` over the vocabulary, from scores at two temperatures.

    With logits z at the sampler's temperature, ``log p = z - lse(z)``, and at half of it
    ``log q = 2 z - lse(2 z)``. So ``2 log p - log q = lse(2 z) - 2 lse(z)``, the logarithm of the
    sum, is the same for every token.

    Args:
        logprobs_BL: jagged float32 nats.
        half_temperature_logprobs_BL: jagged float32 nats, of the same tokens.
        response_mask_BL: jagged bool.

    Returns:
        Jagged float32 in (0, 1], 0 where the mask is False.
    """
    log_sums_T = 2 * logprobs_BL.values() - half_temperature_logprobs_BL.values()
    sums_T = log_sums_T.clamp(max=0.0).exp()
    sums_T = torch.where(response_mask_BL.values(), sums_T, 0.0)
    return jagged_from(sums_T, row_lengths(response_mask_BL))
