"""Distance to another policy, estimated from the sampled tokens alone.

Legend: B rows, L tokens of a row (jagged), T packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.batch import jagged_from, row_lengths

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 nats before ``exp``: e^20 = 5e8 is far outside of every clip
range, and float32 stays finite. Past it no gradient flows."""


def estimate_kl(logprobs_T: Tensor, reference_logprobs_T: Tensor, *, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) per token, for tokens that the policy sampled.

    With ``d = logprob - reference_logprob`` (http://joschu.net/blog/kl-approx.html):
    ``k1 = d`` (unbiased, of either sign), ``k2 = d^2 / 2`` (biased, low variance),
    ``k3 = exp(-d) - 1 + d`` (unbiased, never negative; the one of GRPO, arXiv:2402.03300, eq. 4).

    As a *loss* the three differ in another way (arXiv:2506.09477). On-policy, the gradient of k1 is
    0 in expectation. That of k2 is the true KL gradient, and that of k3 is the gradient of
    KL(reference || policy). The *reward* carries no gradient, and k1 is the plain choice.

    Args:
        logprobs_T: float32 nats, any shape.
        reference_logprobs_T: float32 nats, same shape.
        estimator: ``k1``, ``k2`` or ``k3``.

    Returns:
        float32 nats, same shape.

    Raises:
        ValueError: unknown estimator.
    """
    difference_T = logprobs_T - reference_logprobs_T
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return difference_T.square() / 2
    if estimator == "k3":
        opposite_T = (-difference_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # expm1, since exp(x) - 1 of a small x keeps no digit of the x^2 / 2 that is wanted.
        return torch.expm1(opposite_T) - opposite_T
    raise ValueError(
        f"unknown KL estimator {estimator!r}; set algorithm.kl.estimator to k1, k2 or k3"
    )


def subtract_sequence_kl(
    rewards_B: Tensor,
    *,
    old_logprobs_BL: Tensor,
    reference_logprobs_BL: Tensor,
    response_mask_BL: Tensor,
    estimator: str,
    coefficient: float,
) -> Tensor:
    """Charge each response for leaving the reference: ``r_b - coefficient * sum_t kl[b, t]``.

    Done before the advantages, so that responses to a prompt are compared after the charge.

    Args:
        rewards_B: float [B].
        old_logprobs_BL: jagged float32 nats, of the policy that sampled.
        reference_logprobs_BL: jagged float32 nats.
        response_mask_BL: jagged bool; other tokens are not charged.
        estimator: as in ``estimate_kl``.
        coefficient: reward units per nat, >= 0.

    Returns:
        float32 [B], without gradient. An empty response is charged nothing.
    """
    kl_BL = estimate_response_kl(
        old_logprobs_BL, reference_logprobs_BL, response_mask_BL, estimator=estimator
    )
    lengths_B = row_lengths(response_mask_BL)
    kl_B = torch.segment_reduce(kl_BL.values(), "sum", lengths=lengths_B, initial=0.0)
    return rewards_B.float() - coefficient * kl_B


def estimate_response_kl(
    old_logprobs_BL: Tensor,
    reference_logprobs_BL: Tensor,
    response_mask_BL: Tensor,
    *,
    estimator: str,
) -> Tensor:
    """Estimate KL(policy || reference) at each response token, as ``estimate_kl`` does.

    Args:
        old_logprobs_BL: jagged float32 nats, of the policy that sampled.
        reference_logprobs_BL: jagged float32 nats.
        response_mask_BL: jagged bool.
        estimator: as in ``estimate_kl``.

    Returns:
        Jagged float32 nats [B, L], without gradient, 0 where the mask is False.
    """
    kl_T = estimate_kl(
        old_logprobs_BL.values().detach(), reference_logprobs_BL.values(), estimator=estimator
    )
    kl_T = torch.where(response_mask_BL.values(), kl_T, 0.0)
    return jagged_from(kl_T, row_lengths(response_mask_BL))
