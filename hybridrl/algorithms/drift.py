"""The cause of a difference between sampler and trainer, from measurements.

Trainer and sampler are two programs that should be one policy. Their difference is measured in
log-probs of the same tokens, and the cause is found by changing one thing at a time.

Legend: N sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Drift:
    """Distance of two engines' log-probs of the same tokens."""

    mean_nats: float
    max_nats: float

    def is_within(self, limit_nats: float) -> bool:
        """True if every token is; a log-prob that is not a number is not."""
        return self.max_nats <= limit_nats

    def __str__(self) -> str:
        return f"mean {self.mean_nats:.3g}, max {self.max_nats:.3g} nats"


class Cause(Enum):
    """The cause of a difference between the sampler's and the trainer's policy."""

    TOKENS = "tokens: the sampler answers with ids that the trainer's vocabulary has not"
    WEIGHTS = "weights: the sampler had others than the trainer; sent again, the drift was gone"
    SAMPLING = (
        "temperature or top-p: without them both agree, so the sampler's log-probs are of another "
        "distribution than the trainer scores"
    )
    KERNELS = (
        "kernels or number types: with the same tokens, with weights just sent, and with neither "
        "temperature nor truncation, both still disagree"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftMeasurement:
    """The measurement after the weights were sent again."""

    as_sampled: Drift
    """Of tokens drawn as in training, scored at its temperature."""

    greedy: Drift
    """Of the likeliest tokens, scored at temperature 1."""

    num_foreign_ids: int
    """Answered ids that are not in the trainer's vocabulary."""


def measure_drift(one_N: Tensor, other_N: Tensor) -> Drift:
    """Compare two engines' log-probs.

    Args:
        one_N: float [N] nats.
        other_N: float [N] nats, of the same tokens. No tokens give a drift of 0.
    """
    if not one_N.numel():
        return Drift(0.0, 0.0)
    apart_N = (one_N.float() - other_N.float()).abs()
    # A maximum may drop NaN; it always keeps infinity.
    apart_N = apart_N.nan_to_num(nan=float("inf"), posinf=float("inf"))
    return Drift(float(apart_N.mean()), float(apart_N.max()))


def attribute_drift(evidence: DriftMeasurement, *, limit_nats: float) -> Cause:
    """Name the cause of a drift that was above ``limit_nats`` before the weights were sent again.

    Args:
        evidence: measured afterwards, so a difference that has gone was due to the weights.
        limit_nats: > 0, the permitted difference between trainer and sampler.
    """
    if evidence.num_foreign_ids:
        return Cause.TOKENS
    if not evidence.greedy.is_within(limit_nats):
        return Cause.KERNELS
    if not evidence.as_sampled.is_within(limit_nats):
        return Cause.SAMPLING
    return Cause.WEIGHTS
