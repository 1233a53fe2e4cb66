"""Which groups of responses are worth training on. Legend: B rows.

A filter takes ``rewards_B`` and ``group_B`` of ``advantages``, and returns bool [B]: True to keep
the row. After it the denominators of the losses are those of the kept rows.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from hybridrl.algorithms.groups import Groups


def zero_variance(
    rewards_B: Tensor,
    group_B: Tensor,
    *,
    std_floor: Annotated[
        float, Field(ge=0.0, le=1e6, description="rewards differ by less than it")
    ] = 1e-6,
) -> Tensor:
    """Drop groups whose rewards do not differ: dynamic sampling (DAPO, arXiv:2503.14476).

    A group is kept if its std (n - 1) is above ``std_floor``. slime's floor is the default 1e-6;
    verl's is 0, and verl keeps groups of one. With rewards 0 and 1 it is the paper's rule
    ``0 < correct < n``. A group of one is dropped: there is nothing to compare it with.
    """
    return Groups.of(group_B).std(rewards_B.detach()) > std_floor


def mean_within(
    rewards_B: Tensor,
    group_B: Tensor,
    *,
    low: Annotated[float, Field(ge=-1e6, le=1e6, description="float32 keeps seven digits")] = 0.0,
    high: Annotated[float, Field(ge=-1e6, le=1e6, description="float32 keeps seven digits")] = 1.0,
) -> Tensor:
    """Keep groups whose mean reward lies strictly between two bounds, as OpenRLHF does.

    Prompts that are too hard or too easy go. Unlike ``zero_variance`` it keeps a group of equal
    rewards inside the bounds, and a group of one.
    """
    means_B = Groups.of(group_B).mean(rewards_B.detach())
    return (means_B > low) & (means_B < high)
