"""Moving the bytes of tensors to the host and back, while the tensors stay what they are.

The storage behind a tensor is emptied and refilled, so every view of it, every shard and every
reference that an optimizer or FSDP2 holds survives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, UntypedStorage

SLAB_BYTES = 256 * 2**20
"""Bytes of one piece of pinned host memory.

Torch rounds each pinned allocation up to a power of two (pytorch issue 150517): one copy a tensor
would take 162 GiB of host memory for the 85 GiB of masters and moments of a 7B model. Pieces of a
power of two, filled to the brim, waste less than one of them."""

Span = tuple[int, int]
"""First byte, and the one after the last."""


class OffloadedTensors:
    """The bytes of some tensors, in host memory (pinned, if they come from a GPU).

    The constructor frees the tensors' own memory; reading them until ``restore`` is an error.

    Args:
        tensors: plain tensors of one kind of device; views of one storage are moved once.
        slab_bytes: size of a piece of host memory.
    """

    def __init__(self, tensors: Iterable[Tensor], *, slab_bytes: int = SLAB_BYTES) -> None:
        self._storages = distinct_storages(tensors)
        self._sizes = [storage.nbytes() for storage in self._storages]
        is_pinned = any(storage.device.type == "cuda" for storage in self._storages)
        self._slabs = _allocate(sum(self._sizes), slab_bytes=slab_bytes, is_pinned=is_pinned)
        self._copy(to_host=True)
        for storage in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Give every tensor its memory and its bytes back, bit by bit the same."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        self._copy(to_host=False)
        self._storages, self._sizes, self._slabs = [], [], []

    def _copy(self, *, to_host: bool) -> None:
        """Copy between storages and slabs, and wait until all bytes are there."""
        flat_bytes = [_bytes_of(storage) for storage in self._storages]
        for on_device, in_slab in _pieces(self._sizes, [len(slab) for slab in self._slabs]):
            number, (first, last) = on_device
            slab_number, (slab_first, slab_last) = in_slab
            device = flat_bytes[number][first:last]
            host = self._slabs[slab_number][slab_first:slab_last]
            target, source = (host, device) if to_host else (device, host)
            target.copy_(source, non_blocking=host.is_pinned())
        _wait_for_copies(self._storages)


def copy_to_host(tensors: Iterable[Tensor], *, slab_bytes: int = SLAB_BYTES) -> list[Tensor]:
    """Copy the bytes of tensors, end to end, to host memory, and wait until all are there.

    Args:
        tensors: plain tensors of one kind of device, of any type and stride.
        slab_bytes: size of a piece of host memory.

    Returns:
        uint8 pieces, pinned if the tensors come from a GPU; a tensor may lie across several.
    """
    tensors = list(tensors)
    is_pinned = any(tensor.is_cuda for tensor in tensors)
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    slabs = _allocate(num_bytes, slab_bytes=slab_bytes, is_pinned=is_pinned)
    begin = 0
    for tensor in tensors:
        source = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        while len(source):
            slab, place = slabs[begin // slab_bytes], begin % slab_bytes
            target = slab[place : place + len(source)]
            target.copy_(source[: len(target)], non_blocking=is_pinned)
            begin, source = begin + len(target), source[len(target) :]
    _wait_for_copies([tensor.untyped_storage() for tensor in tensors])
    return slabs


def distinct_storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return each storage behind the tensors once."""
    return list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())


def resident_bytes(tensors: Iterable[Tensor]) -> int:
    """Measure the bytes that the tensors' storages hold."""
    return sum(storage.nbytes() for storage in distinct_storages(tensors))


def _allocate(num_bytes: int, *, slab_bytes: int, is_pinned: bool) -> list[Tensor]:
    """Return uint8 pieces of host memory that together hold ``num_bytes``."""
    sizes = [slab_bytes] * (num_bytes // slab_bytes)
    if num_bytes % slab_bytes:
        sizes.append(num_bytes % slab_bytes)
    return [torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned) for size in sizes]


def _pieces(
    sizes: Sequence[int], others: Sequence[int]
) -> Iterator[tuple[tuple[int, Span], tuple[int, Span]]]:
    """Lay two rows of blocks of the same total beside each other, and cut wherever either ends.

    Yields, for each cut piece, the number of the block and the span within it, of both rows.
    """
    begins, other_begins = ([0, *_running_sum(row)] for row in (sizes, others))
    cuts = sorted({*begins, *other_begins})
    number = other = 0
    for first, last in pairwise(cuts):
        while begins[number + 1] <= first:
            number += 1
        while other_begins[other + 1] <= first:
            other += 1
        yield (
            (number, (first - begins[number], last - begins[number])),
            (other, (first - other_begins[other], last - other_begins[other])),
        )


def _running_sum(sizes: Sequence[int]) -> list[int]:
    total = 0
    return [total := total + size for size in sizes]


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait_for_copies(storages: list[UntypedStorage]) -> None:
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)
