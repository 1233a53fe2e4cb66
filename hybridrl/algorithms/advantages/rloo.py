"""Each response against the mean of the others to its prompt."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from hybridrl.algorithms.groups import Groups
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
