"""The critic's loss, token by token. Legend: T packed response tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ClippedValueLoss:
    """Losses to be weighted and summed, with the effect of the clip on each token."""

    losses_T: Tensor  # float32, squared reward units, with gradient
    is_clipped_T: Tensor  # bool, the value moved far enough already: no gradient


def clipped_value_loss(
    values_T: Tensor, *, old_values_T: Tensor, returns_T: Tensor, value_clip: float
) -> ClippedValueLoss:
    """Return half the squared error, the larger of the value's own and the clipped value's.

    ``max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2``, as in PPO2 (OpenAI baselines,
    ``ppo2/model.py``): once a value has moved by more than ``c`` towards its return, the step's
    other mini-batches leave it alone; one that moved away is still called back.

    Args:
        values_T: float32 reward units, with gradient.
        old_values_T: float32, before the step's first update.
        returns_T: float32, targets of the values.
        value_clip: c in reward units; 0 is off.
    """
    losses_T = (values_T - returns_T).square() / 2
    if not value_clip:
        return ClippedValueLoss(losses_T, torch.zeros_like(losses_T, dtype=torch.bool))
    moved_T = values_T - old_values_T
    clipped_T = old_values_T + moved_T.clamp(-value_clip, value_clip)
    clipped_losses_T = (clipped_T - returns_T).square() / 2
    is_clipped_T = (moved_T.abs() > value_clip) & (clipped_losses_T > losses_T)
    return ClippedValueLoss(torch.maximum(losses_T, clipped_losses_T), is_clipped_T)
