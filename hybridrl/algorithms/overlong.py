"""Responses that come near the length limit, or are cut off by it (DAPO, arXiv:2503.14476).

Legend: B rows, L tokens of a row (jagged).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hybridrl.batch import jagged_from, row_lengths


def overlong_punishment(
    lengths_B: Tensor, *, max_response_tokens: int, buffer_tokens: int
) -> Tensor:
    """Return the punishment of long responses, to be added to their rewards (eq. 13).

    Add it before the advantages. It is 0 up to ``max_response_tokens - buffer_tokens``, falls
    linearly to -1 at ``max_response_tokens``, and is -1 beyond. The paper has 20,480 and 4,096.
    TRL's get_soft_overlong_punishment is the same. verl and OpenRLHF multiply by a factor: multiply
    the result. verl's falls below -1 beyond the limit, which no response reaches.

    Args:
        lengths_B: int64 [B], response tokens of each row.
        max_response_tokens: at which a response is cut off.
        buffer_tokens: tokens before that limit in which it costs more and more; 0 punishes those
            beyond the limit alone.

    Returns:
        float32 [B], from -1 to 0.
    """
    excess_B = lengths_B.double() - (max_response_tokens - buffer_tokens)
    if buffer_tokens == 0:
        return -(excess_B > 0).float()
    return -(excess_B / buffer_tokens).clamp(0.0, 1.0).float()


def without_rows(response_mask_BL: Tensor, is_left_out_B: Tensor) -> Tensor:
    """Take all tokens of some rows out of the loss, as those of truncated responses.

    Their rewards still count in their group's baseline, as in TRL's mask_truncated_completions.

    Args:
        response_mask_BL: jagged bool.
        is_left_out_B: bool [B].

    Returns:
        Jagged bool [B, L], False in each row that is left out.
    """
    lengths_B = row_lengths(response_mask_BL)
    is_kept_T = np.repeat(np.logical_not(is_left_out_B.numpy()), lengths_B.numpy())
    is_kept_T &= response_mask_BL.values().numpy()
    return jagged_from(torch.from_numpy(is_kept_T), lengths_B)
