"""How far the weights that sampled tokens are behind those that learn from them."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.metrics import Max, Mean, Metrics

_AGES = (
    *(("0", 0, 0), ("1", 1, 1), ("2", 2, 2), ("3", 3, 3), ("4_to_7", 4, 7)),
    ("8_or_more", 8, torch.inf),
)
"""Name, first and last step of each bin of the histogram, the same ones in every run."""


def describe_staleness(steps_T: Tensor) -> Metrics:
    """Describe the ages of T >= 1 tokens: mean, maximum, and a histogram.

    The shares of the histogram are means over tokens, so those of several ranks can be merged,
    which percentiles could not.

    Args:
        steps_T: >= 0, between the weights that sampled a token and its update.
    """
    num_tokens = len(steps_T)
    return {
        "rollout/staleness_steps/mean": Mean(float(steps_T.sum()), num_tokens),
        "rollout/staleness_steps/max": Max(float(steps_T.max())),
        **{
            f"rollout/staleness_fraction/{name}": Mean(
                float(((steps_T >= first) & (steps_T < last + 1)).sum()), num_tokens
            )
            for name, first, last in _AGES
        },
    }
