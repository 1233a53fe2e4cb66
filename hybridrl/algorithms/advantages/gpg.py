"""Group policy gradient: centred rewards, scaled up where few groups have a signal."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from hybridrl.algorithms.groups import Groups


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
