"""Boxes of whole tensors: where what a rank holds of a tensor lies in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

TensorRange = tuple[tuple[int, int], ...]
"""Begin and end along each dimension of a whole tensor."""


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Where one rank's part lies in its whole tensor."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> ShardSpec:
        """Return the place of what this rank holds of ``tensor``, plain or sharded."""
        if not isinstance(tensor, DTensor):
            return cls(tuple(tensor.shape), (0,) * tensor.ndim)
        _, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        return cls(tuple(tensor.shape), tuple(offset))

    def box(self, local_shape: Sequence[int]) -> TensorRange:
        """Return what a part of ``local_shape`` covers."""
        return tuple((o, o + n) for o, n in zip(self.offset, local_shape, strict=True))


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A box of a tensor with its values."""

    values: Tensor
    place: ShardSpec

    @property
    def box(self) -> TensorRange:
        """What it covers."""
        return self.place.box(self.values.shape)


@dataclass(frozen=True, slots=True)
class ShardedPieces:
    """What this rank holds of one tensor, where that is not one box: several, or nothing.

    A rank that holds nothing of a tensor names it all the same, so that a checkpoint of another
    model is told from one whose tensors lie elsewhere.
    """

    shape: tuple[int, ...]
    """Of the whole tensor."""

    pieces: tuple[TensorShard, ...]
    """Boxes that do not overlap; values are views of the live memory."""


CheckpointTensor = Tensor | ShardedPieces
"""What an engine names for its checkpoint: a tensor that is plain or sharded, or pieces of one."""


def size_of(box: TensorRange) -> int:
    """Return how many values a box holds; a box without dimensions is one number."""
    return math.prod(end - begin for begin, end in box)


def common_box(first: TensorRange, second: TensorRange) -> TensorRange | None:
    """Return what two boxes share, or None."""
    both = zip(first, second, strict=True)
    box = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in both)
    return box if all(begin < end for begin, end in box) else None


def rest_of(box: TensorRange, common: TensorRange) -> list[TensorRange]:
    """Cut ``box`` without its part ``common`` into boxes that do not overlap."""
    remaining: list[TensorRange] = []
    for dim, ((begin, end), (low, high)) in enumerate(zip(box, common, strict=True)):
        before, after = common[:dim], box[dim + 1 :]
        remaining += [
            (*before, cut, *after) for cut in ((begin, low), (high, end)) if cut[0] < cut[1]
        ]
    return remaining


def index_in(outer: TensorRange, inner: TensorRange) -> tuple[slice, ...]:
    """Return how a tensor that covers ``outer`` is indexed for its part ``inner``."""
    return tuple(
        slice(begin - low, end - low) for (begin, end), (low, _) in zip(inner, outer, strict=True)
    )
