"""Statistics of the rows that answer the same prompt, in any order and in groups of any size.

Legend: B rows, P prompts of these rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Groups:
    """Which of B rows answer the same prompt.

    Statistics are float64 [B]: each row gets that of its group. The mean of equal float32 values is
    exactly their value in float64, so that a group without differences has exact zeros.
    """

    index_B: Tensor  # int64, number of the row's group, from 0 to P - 1
    sizes_P: Tensor  # int64, rows of each group

    @classmethod
    def of(cls, group_B: Tensor) -> Groups:
        """Group rows with equal numbers; ``group_B`` is int64 [B], its numbers are arbitrary."""
        _, index_B, sizes_P = torch.unique(group_B, return_inverse=True, return_counts=True)
        return cls(index_B, sizes_P)

    @property
    def sizes_B(self) -> Tensor:
        """Rows of each row's group, int64 [B]."""
        return self.sizes_P[self.index_B]

    def sum(self, values_B: Tensor) -> Tensor:
        """Return the sum over the group."""
        sums_P = torch.zeros(len(self.sizes_P), dtype=torch.float64)
        return sums_P.index_add_(0, self.index_B, values_B.double())[self.index_B]

    def mean(self, values_B: Tensor) -> Tensor:
        """Return the mean of the group."""
        return self.sum(values_B) / self.sizes_B

    def mean_of_others(self, values_B: Tensor) -> Tensor:
        """Return the mean of the group without the row itself, 0 in a group of one."""
        return (self.sum(values_B) - values_B.double()) / (self.sizes_B - 1).clamp(min=1)

    def std(self, values_B: Tensor, *, correction: int = 1) -> Tensor:
        """Return the standard deviation of the group, 0 in a group of one.

        A ``correction`` of 1 divides the squares by n - 1 (the sample's std), 0 by n.
        """
        squares_B = (values_B.double() - self.mean(values_B)).square()
        return (self.sum(squares_B) / (self.sizes_B - correction).clamp(min=1)).sqrt()

    def max(self, values_B: Tensor) -> Tensor:
        """Return the largest value of the group."""
        ordered_B, ends_P = self._sort(values_B)
        return ordered_B[ends_P - 1][self.index_B]

    def second_max(self, values_B: Tensor) -> Tensor:
        """Return the second largest value of the group; of a group of one its only value.

        Where two rows share the largest value, it is the second largest, too.
        """
        ordered_B, ends_P = self._sort(values_B)
        return ordered_B[ends_P - self.sizes_P.clamp(max=2)][self.index_B]

    def is_flat(self, values_B: Tensor) -> Tensor:
        """Return bool [B]: True where all values of the group are equal."""
        return self.max(values_B) == -self.max(-values_B)

    def subtract(
        self, rewards_B: Tensor, baselines_B: Tensor, *, singletons: Literal["zero", "reward"]
    ) -> Tensor:
        """Return rewards minus baselines, float64 [B].

        In a group of one there is nothing to compare with: ``zero`` gives 0, no signal, and
        ``reward`` the reward itself.
        """
        rewards_B = rewards_B.double()
        alone_B = torch.zeros_like(rewards_B) if singletons == "zero" else rewards_B
        return torch.where(self.sizes_B == 1, alone_B, rewards_B - baselines_B)

    def _sort(self, values_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return values by group and ascending within it, float64 [B], and each group's end [P]."""
        order_B = values_B.argsort(stable=True)
        order_B = order_B[self.index_B[order_B].argsort(stable=True)]
        return values_B.double()[order_B], self.sizes_P.cumsum(0)
