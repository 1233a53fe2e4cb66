"""Corrects for a sampler whose probabilities differ from the trainer's. Legend: T packed tokens."""

from __future__ import annotations

from torch import Tensor

from hybridrl.algorithms.kl import MAX_LOG_RATIO


def truncated_importance_weights(
    old_logprobs_T: Tensor, sampler_logprobs_T: Tensor, *, cap: float
) -> Tensor:
    """Weigh each token by how likely the trainer, not the sampler, would have drawn it.

    ``w = min(exp(old - sampler), cap)``: unbiased but for the cap, which bounds the variance
    (arXiv:1802.01561, 4.1; between engines: https://fengyao.notion.site/off-policy-rl).

    Args:
        old_logprobs_T: float32 nats, the training engine's, before the update.
        sampler_logprobs_T: float32 nats, the rollout engine's.
        cap: largest weight, > 0.

    Returns:
        float32 [T] in (0, cap], without gradient. Exactly 1 where both engines agree and cap >= 1.
    """
    log_weights_T = (old_logprobs_T - sampler_logprobs_T).detach()
    return log_weights_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cap)
