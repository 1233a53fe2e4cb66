"""The micro-batches of one call, in step with those of the other ranks.

Legend: B rows of a batch, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.models.packed import AttentionKernel
from hybridrl.models.packed_share import ContextParallelRank
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.packing import Pack, RowPacker


class Packs:
    """The packs of one batch; iterating lays them out one by one.

    All ranks have as many, at least one: some may be fillers (see ``RowPacker.pack``).
    """

    def __init__(self, packer: RowPacker, plan: list[list[int]]) -> None:
        self._packer = packer
        self._plan = plan

    @property
    def response_lengths_B(self) -> Tensor:
        """Response tokens of each row, int64 [B]."""
        return self._packer.response_lengths_B

    @property
    def num_tokens(self) -> int:
        """Tokens of rows that all packs together compute; a prompt that siblings share, once."""
        return sum(self._packer.num_tokens(rows) for rows in self._plan)

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[Pack]:
        return map(self._packer.pack, self._plan)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How this rank cuts batches into packs."""

    kernel: AttentionKernel
    """The attention that packs are laid out for."""

    max_tokens: int
    """Packed tokens of a pack; a single longer row is alone in its own."""

    ranks: Ranks
    """The data-parallel ranks, which compute in step."""

    device: torch.device
    """Where the model computes."""

    multiple: int = 1
    """Of which each pack's tokens are a multiple, where ranks share them evenly."""

    share: ContextParallelRank | None = None
    """This rank's part of each pack, where ranks share tokens."""

    group_size: int = 1
    """Of which the number of packs is a multiple, where a schedule asks for it."""

    def cut(
        self,
        token_ids_BL: Tensor,
        response_mask_BL: Tensor,
        *,
        routed_experts_BLJK: Tensor | None = None,
    ) -> Packs:
        """Plan this rank's rows, all jagged. A collective call.

        Raises:
            DataError: a row begins with a response token, which no token predicts.
        """
        packer = RowPacker(
            token_ids_BL,
            response_mask_BL,
            kernel=self.kernel,
            device=self.device,
            multiple=self.multiple,
            share=self.share,
            routed_experts_BLJK=routed_experts_BLJK,
        )
        plan = packer.plan(self.max_tokens)
        longest = int(self.ranks.gather([len(plan)]).max())
        num_packs = -(-max(longest, 1) // self.group_size) * self.group_size
        fillers: list[list[int]] = [[]] * (num_packs - len(plan))
        return Packs(packer, plan + fillers)
