"""Online policy mirror descent: rewards against a soft baseline."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from hybridrl.algorithms.groups import Groups


def opmd(
    rewards_B: Tensor,
    group_B: Tensor,
    *,
    baseline: Literal["mean", "logavgexp"] = "mean",
    tau: Annotated[
        float, Field(gt=0.0, le=1e6, examples=[1.0], description="the policy does not move")
    ] = 1.0,
    singletons: Literal["zero", "reward"] = "zero",
) -> Tensor:
    """Subtract the group's baseline and divide by ``1 + tau``, as Trinity-RFT defines OPMD.

    ``A[b] = (r[b] - baseline_g) / (1 + tau)`` for the loss ``-A * logprob`` averaged over tokens,
    ``policy_loss=reinforce`` (arXiv:2509.24203; derived from Kimi k1.5's mirror descent: a squared
    error, in which a baseline makes off-policy samples valid). Trinity divides the loss, which is
    the same. The gradient needs no log-probs of the policy that sampled. verl and TRL lack it.

    Args:
        baseline: ``mean`` of the group, or ``logavgexp``: ``tau * log mean_g exp(r / tau)``, which
            goes from the mean (large tau) to the largest reward (small tau).
        tau: weight of staying near the policy that sampled, reward units.
        singletons: ``reward`` is Trinity's baseline of 0 in a group of one.
    """
    rewards_B, groups = rewards_B.detach().double(), Groups.of(group_B)
    baselines_B = groups.mean(rewards_B)
    if baseline == "logavgexp":
        largest_B = groups.max(rewards_B)
        baselines_B = largest_B + tau * groups.mean(((rewards_B - largest_B) / tau).exp()).log()
    advantages_B = groups.subtract(rewards_B, baselines_B, singletons=singletons)
    return (advantages_B / (1 + tau)).float()
