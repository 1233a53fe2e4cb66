"""Each response against a baseline of its group: means of others, weighted, scaled, or soft."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from hybridrl.algorithms.groups import Groups
from hybridrl.batch import response_lengths
from hybridrl.config.limits import StdFloor


def rloo(
    rewards_B: Tensor,
    group_B: Tensor,
    *,
    scale: Literal["none", "batch"] = "none",
    std_floor: StdFloor = 1e-4,
    singletons: Literal["zero", "reward"] = "zero",
) -> Tensor:
    """Subtract the mean reward of the other responses (REINFORCE leave-one-out).

    ``A[b] = r[b] - mean of r[j] over j != b in the group`` (arXiv:2402.14740), which is unbiased
    for two responses and more, and ``n / (n - 1)`` times GRPO without division. The paper charges
    KL in the reward. verl's ``rloo`` is ``singletons=reward``; its ``rloo_vectorized`` and TRL
    give a group of one 0. TRL's ``normalize_advantages`` is ``scale=batch``.

    Args:
        scale: ``batch`` moves the advantages of all rows to mean 0 and divides them by their std
            (n - 1), each row counted once.
    """
    rewards_B, groups = rewards_B.detach().double(), Groups.of(group_B)
    others_B = groups.mean_of_others(rewards_B)
    advantages_B = groups.subtract(rewards_B, others_B, singletons=singletons)
    if scale == "batch" and len(rewards_B) > 1:
        centered_B = advantages_B - advantages_B.mean()
        advantages_B = centered_B / (advantages_B.std() + std_floor)
    return advantages_B.float()


def opo(
    rewards_B: Tensor,
    group_B: Tensor,
    response_mask_BL: Tensor,
    *,
    singletons: Literal["zero", "reward"] = "zero",
) -> Tensor:
    """Subtract the mean reward of the group, weighted by length (arXiv:2505.23585).

    ``A[b] = r[b] - sum_j n[j] r[j] / sum_j n[j]``, ``n`` the response tokens: they stand for the
    squared norm of a response's gradient. The paper demands one optimizer step per rollout.

    Args:
        singletons: ``zero`` is what the formula gives a group of one, ``reward`` is verl.

    Returns:
        float32 [B], without gradient. A group of equal rewards gives exact zeros. Where a
        group has no response tokens the baseline is 0; verl gives NaN.
    """
    rewards_B, groups = rewards_B.detach().double(), Groups.of(group_B)
    lengths_B = response_lengths(response_mask_BL)
    baselines_B = groups.sum(rewards_B * lengths_B) / groups.sum(lengths_B).clamp(min=1)
    return groups.subtract(rewards_B, baselines_B, singletons=singletons).float()


def gpg(
    rewards_B: Tensor,
    group_B: Tensor,
    *,
    signal: Literal["groups", "nonzero_rewards"] = "groups",
    singletons: Literal["zero", "reward"] = "zero",
) -> Tensor:
    """Subtract the group's mean and make up for the rows without a signal (arXiv:2504.02546).

    ``A[b] = alpha * (r[b] - mean_g r)`` with ``alpha = B / (rows with a signal)``, and the paper's
    ``F_norm`` as 1. For the loss ``-A * logprob``.

    Args:
        signal: ``groups`` counts rows whose group has a std above 1e-5, as the authors' code does,
            and a group of one whose reward is kept.
            ``nonzero_rewards`` is verl: it counts rows with a reward that is not 0, so that an
            all-correct group has a signal, and the wrong rows of a mixed group have none.
        singletons: ``reward`` is verl.
    """
    rewards_B, groups = rewards_B.detach().double(), Groups.of(group_B)
    centered_B = groups.subtract(rewards_B, groups.mean(rewards_B), singletons=singletons)
    has_signal_B = rewards_B != 0
    if signal == "groups":
        is_kept_alone_B = (groups.sizes_B == 1) & (centered_B != 0)
        has_signal_B = (groups.std(rewards_B) > 1e-5) | is_kept_alone_B
    alpha = len(rewards_B) / max(int(has_signal_B.sum()), 1)
    return (alpha * centered_B).float()


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
