"""Ranks of FSDP2 that share the tokens of their rows, and what they exchange.

Legend: U tokens of a rank, W ranks that share tokens, F numbers of a token for one rank.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridrl.models.packed_share import ContextParallelRank
from hybridrl.workers.train.collectives import Ranks


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """This rank's groups, of neighbours and across them."""

    tokens: Ranks  # they have the same rows, and other tokens of them
    rows: Ranks  # they have other rows

    def share(self, num_heads: int) -> ContextParallelRank:
        """Return this rank's part of each micro-batch: a share of the heads, if W divides them."""
        rank, size, group = self.tokens.rank, self.tokens.size, self.tokens.group
        gather, exchange = partial(_call, _Gather, group), partial(_call, _Exchange, group)
        return ContextParallelRank(rank, size, gather, None if num_heads % size else exchange)


def start_context_parallel(
    size: int, device: torch.device, *, timeout_s: float
) -> ContextParallel | None:
    """Make the groups, once for all engines of a process; None for a size of 1.

    A collective call. ``size`` divides the number of ranks.
    """
    if size == 1:
        return None
    tokens, rows = _groups(size, timeout_s)
    return ContextParallel(Ranks(device, group=tokens), Ranks(device, group=rows))


@functools.cache
def _groups(size: int, timeout_s: float) -> tuple[ProcessGroup, ProcessGroup]:
    ranks = torch.arange(dist.get_world_size()).view(-1, size)  # neighbours are on one node
    timeout = timedelta(seconds=timeout_s)
    tokens, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout)  # type: ignore[no-untyped-call]
    rows, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout)  # type: ignore[no-untyped-call]
    return tokens, rows


def _call(function: Any, group: ProcessGroup | None, own: Tensor) -> Tensor:  # noqa: ANN401
    return cast(Tensor, function.apply(own, group))


class _Gather(torch.autograd.Function):
    """From [U, ...] to [W U, ...]; gradients of a token are summed on the rank that has it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: ProcessGroup) -> Tensor:  # noqa: ANN401
        ctx.group = group
        everyone = own.new_empty(dist.get_world_size(group) * len(own), *own.shape[1:])
        dist.all_gather_into_tensor(everyone, own.contiguous(), group=group)
        return everyone

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        grad, size = grads[0].contiguous(), dist.get_world_size(ctx.group)
        own = grad.new_empty(len(grad) // size, *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad, group=ctx.group)
        return own, None


class _Exchange(torch.autograd.Function):
    """From [U, W, F], a part for each rank, to [U, W, F], a part from each: its own inverse."""

    @staticmethod
    def forward(ctx: Any, parts_UWF: Tensor, group: ProcessGroup) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return _exchange(parts_UWF, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return _exchange(grads[0], ctx.group), None


def _exchange(parts_UWF: Tensor, group: ProcessGroup) -> Tensor:
    sent_WUF = parts_UWF.transpose(0, 1).contiguous()
    received_WUF = torch.empty_like(sent_WUF)
    dist.all_to_all_single(received_WUF, sent_WUF, group=group)
    return received_WUF.transpose(0, 1)
