"""Mean 0 and standard deviation 1 over all response tokens of a step.

Both functions compute verl's formula ``(x - mean) / sqrt(var + 1e-8)`` with the sample's variance
(n - 1). The 1e-8 changes float32 results only where the std is below 0.3; OpenRLHF divides by n.
Sums are float64, so that equal values give exact zeros.

Legend: B rows, S response tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hybridrl.algorithms.response_tokens import Floats

_VARIANCE_FLOOR = 1e-8


def whiten(values_S: Floats) -> Floats:
    """Whiten one value per token, float32 [S]."""
    mean = np.float32(values_S.sum(dtype=np.float64) / max(len(values_S), 1))
    white_S: Floats = values_S - mean
    norm = float(torch.linalg.vector_norm(torch.from_numpy(white_S), dtype=torch.float64))
    variance = norm**2 / max(len(values_S) - 1, 1)
    white_S *= np.float32((variance + _VARIANCE_FLOOR) ** -0.5)
    return white_S


def whiten_rows(values_B: Tensor, lengths_B: Tensor) -> Tensor:
    """Whiten one value per row, which counts once for each of the row's tokens.

    Args:
        values_B: float64 [B], the same for all tokens of a row.
        lengths_B: int64 [B], response tokens of each row.

    Returns:
        float64 [B].
    """
    num_tokens = int(lengths_B.sum())
    centered_B = values_B - (values_B * lengths_B).sum() / max(num_tokens, 1)
    variance = (centered_B.square() * lengths_B).sum() / max(num_tokens - 1, 1)
    return centered_B / (variance + _VARIANCE_FLOOR).sqrt()
