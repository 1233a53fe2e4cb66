"""The loss of a reward model. Legend: P pairs of a chosen and a rejected answer."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


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
        chosen_scores_P: float32, with gradient.
        rejected_scores_P: float32, with gradient.
        margins_P: score units, how much better the chosen answer is; None is 0.
        center_coefficient: 0 is off.
    """
    differences_P = chosen_scores_P - rejected_scores_P
    if margins_P is not None:
        differences_P = differences_P - margins_P
    losses_P = -logsigmoid(differences_P)
    if center_coefficient:
        losses_P = losses_P + center_coefficient * (chosen_scores_P + rejected_scores_P).square()
    return losses_P
