"""Which slice of each full tensor this rank holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

TensorRange = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """The range of a full tensor that one shard covers."""

    full_shape: tuple[int, ...]
    range: TensorRange

    @classmethod
    def at(
        cls, full_shape: Sequence[int], offset: Sequence[int], shape: Sequence[int]
    ) -> ShardSpec:
        """Describe a shard of ``shape`` that begins at ``offset``."""
        covered = tuple((begin, begin + size) for begin, size in zip(offset, shape, strict=True))
        return cls(tuple(full_shape), covered)

    @classmethod
    def of(cls, tensor: Tensor) -> ShardSpec:
        """Describe this rank's shard of ``tensor``; a plain tensor is its own shard."""
        if not isinstance(tensor, DTensor):
            return cls(tuple(tensor.shape), full_range(tensor.shape))
        shape, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        return cls.at(tensor.shape, offset, shape)

    @property
    def offset(self) -> tuple[int, ...]:
        """Index of the first value in the full tensor."""
        return tuple(begin for begin, _ in self.range)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the shard."""
        return tuple(end - begin for begin, end in self.range)

    @property
    def num_values(self) -> int:
        """See ``size_of``."""
        return size_of(self.range)


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A shard and its values."""

    values: Tensor
    spec: ShardSpec


@dataclass(frozen=True, slots=True)
class RankShards:
    """This rank's shards of one tensor that an engine saves.

    A rank without a shard lists the tensor, too. So a checkpoint of another model differs from a
    checkpoint whose shards are on other ranks.
    """

    full_shape: tuple[int, ...]
    shards: tuple[TensorShard, ...]  # views of the live memory that do not overlap
    is_copy: bool = False  # another rank, of another replica, has the same shards and saves them


def full_range(shape: Sequence[int]) -> TensorRange:
    """Return the range of a tensor that covers all of it."""
    return tuple((0, size) for size in shape)


def size_of(values: TensorRange) -> int:
    """Return the number of values in a range; a range without dimensions is one number."""
    return math.prod(end - begin for begin, end in values)


def intersect(first: TensorRange, second: TensorRange) -> TensorRange | None:
    """Return the range that two ranges share, or None."""
    both = zip(first, second, strict=True)
    shared = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in both)
    return shared if all(begin < end for begin, end in shared) else None


def subtract(outer: TensorRange, inner: TensorRange) -> list[TensorRange]:
    """Divide ``outer`` without ``inner``, which lies in it, into ranges that do not overlap."""
    remaining: list[TensorRange] = []
    for dim, ((begin, end), (low, high)) in enumerate(zip(outer, inner, strict=True)):
        before, after = inner[:dim], outer[dim + 1 :]
        remaining += [
            (*before, side, *after) for side in ((begin, low), (high, end)) if side[0] < side[1]
        ]
    return remaining


def relative_slices(inner: TensorRange, *, outer: TensorRange) -> tuple[slice, ...]:
    """Return the index of ``inner`` in a tensor that covers ``outer``."""
    return tuple(
        slice(begin - low, end - low) for (begin, end), (low, _) in zip(inner, outer, strict=True)
    )
