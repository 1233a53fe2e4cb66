"""Policy losses: what each response token adds to the loss.

Each public top-level function that ``config/functions/parts.yaml`` lists takes some of these, one
number a token, and returns float32 [T] with gradient, or a ``PolicyLoss``:

    current_logprobs_T: float32 nats, with gradient.
    old_logprobs_T: float32 nats, before the update.
    advantages_T: float32.
    rows: ``TokenRows``, which tokens belong to which response.

Ranges of its numbers are those of their types in ``config/limits.py``.

Legend: T packed response tokens of this rank, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Losses to be weighted and summed, with the effect of the clip on each token.

    A loss without a range of its ratio may return ``losses_T`` alone.
    """

    losses_T: Tensor  # float32, with gradient
    ratio_T: Tensor  # float32, detached, current over old probability, of the token or its response
    is_clipped_low_T: Tensor  # bool, the ratio is below its range: the gradient is cut or bounded
    is_clipped_high_T: Tensor  # bool, the ratio is above its range: the same
