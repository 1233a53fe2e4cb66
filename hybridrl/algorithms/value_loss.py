"""The losses of value models: a critic's, token by token, and a reward model's, pair by pair.

Legend: T packed response tokens, P pairs of a chosen and a rejected answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


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


def bradley_terry(
    chosen_scores_P: Tensor,
    rejected_scores_P: Tensor,
    *,
    margins_P: Tensor | None = None,
    center_coefficient: float = 0.0,
) -> Tensor:
    """Return ``-log sigmoid(chosen - rejected - margin)`` of each pair, float32 [P].

    Bradley-Terry (Ouyang et al. 2022, arXiv:2203.02155, eq. 1); with margins Llama 2
    (arXiv:2307.09288, eq. 2). ``center_coefficient * (chosen + rejected)^2`` is added, which keeps
    scores near 0 (arXiv:2312.09244, eq. 2): the rest learns differences alone. The mean over pairs
    is that of TRL 1.16's ``RewardTrainer``.

    Args:
        margins_P: score units, how much better the chosen answer is; None is 0.
    """
    differences_P = chosen_scores_P - rejected_scores_P
    if margins_P is not None:
        differences_P = differences_P - margins_P
    losses_P = -logsigmoid(differences_P)
    if center_coefficient:
        losses_P = losses_P + center_coefficient * (chosen_scores_P + rejected_scores_P).square()
    return losses_P
