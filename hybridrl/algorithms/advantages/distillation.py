"""On-policy distillation: a teacher scores the student's own tokens, instead of rewards."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from hybridrl.algorithms.response_tokens import ResponseTokens


def distillation(
    old_logprobs_BL: Tensor,
    teacher_logprobs_BL: Tensor,
    response_mask_BL: Tensor,
    *,
    estimator: Literal["k1", "k3"] = "k1",
    limit: Annotated[
        float, Field(gt=0.0, le=1e3, examples=[20.0], description="float32 keeps seven digits")
    ] = 20.0,
) -> Tensor:
    """Return minus the reverse KL to the teacher, token by token (arXiv:2306.13649).

    ``A[t] = teacher_logprob[t] - old_logprob[t]``: with the loss ``-A * logprob`` its expectation
    is the gradient of KL(student || teacher) at each token. The KL of later tokens is not counted
    (gamma 0), as in verl, slime, Trinity and TRL. verl's default is ``estimator=k3, limit=10``,
    with the current student's log-probs, which are the old ones at the first optimizer step.

    Args:
        teacher_logprobs_BL: jagged float32 nats, of the same tokens at the same temperature.
        response_mask_BL: other tokens may hold anything, NaN too.
        estimator: ``k1`` is the difference. ``k3`` is ``-(exp(d) - 1 - d)``, ``d`` the difference:
            never positive, and biased as an advantage.
        limit: nats; advantages are clamped to +-limit.
    """
    tokens = ResponseTokens.of(response_mask_BL)
    advantages_S = tokens.select(teacher_logprobs_BL)
    advantages_S -= tokens.select(old_logprobs_BL)
    if estimator == "k3":
        clamped_S = advantages_S.clip(-20.0, 20.0)
        advantages_S = clamped_S - np.expm1(clamped_S)
    return tokens.to_rows(advantages_S.clip(-limit, limit))


def zero(response_mask_BL: Tensor) -> Tensor:
    """Return 0 for each response: what is learned is in other parts of the loss.

    As the divergence from a teacher (``algorithm.divergence_coefficient``).
    """
    return torch.zeros(len(response_mask_BL))
