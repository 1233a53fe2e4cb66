"""Move the bytes of tensors to the host and back; the tensor objects stay the same.

The storage behind a tensor is emptied and refilled. So every view of it, every shard and every
reference of an optimizer or of FSDP2 stays valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, UntypedStorage

SLAB_BYTES = 256 * 2**20
"""Bytes of one slab, an allocation of pinned host memory.

Torch rounds each pinned allocation up to a power of two (pytorch issue 150517): one copy per tensor
would take 162 GiB of host memory for the 85 GiB of masters and moments of a 7B model. Full slabs of
a power of two waste less than one slab."""


class OffloadedTensors:
    """The bytes of some tensors, in host memory (pinned, if they come from a GPU).

    The constructor frees the tensors' own memory; reading them until ``restore`` is an error. They
    are plain, of one kind of device; views of one storage are moved once.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._storages = distinct_storages(tensors)
        self._sizes = [storage.nbytes() for storage in self._storages]
        is_pinned = any(storage.device.type == "cuda" for storage in self._storages)
        self._slabs = _allocate(sum(self._sizes), is_pinned=is_pinned)
        self._copy(to_host=True)
        for storage in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Give every tensor its memory and its bytes back, bitwise identical."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        self._copy(to_host=False)
        self._storages, self._sizes, self._slabs = [], [], []

    def _copy(self, *, to_host: bool) -> None:
        flat_bytes = (
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            for storage in self._storages
        )
        for device, host in _pairs(flat_bytes, self._slabs):
            target, source = (host, device) if to_host else (device, host)
            target.copy_(source, non_blocking=host.is_pinned())
        _wait_for_copies(self._storages)


def copy_to_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copy the bytes of plain tensors of one kind of device, end to end, and wait for the copies.

    Returns uint8 slabs, pinned if the tensors come from a GPU; a tensor may lie across several.
    """
    tensors = list(tensors)
    is_pinned = any(tensor.is_cuda for tensor in tensors)
    slabs = _allocate(sum(tensor.nbytes for tensor in tensors), is_pinned=is_pinned)
    flat_bytes = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors)
    for device, host in _pairs(flat_bytes, slabs):
        host.copy_(device, non_blocking=is_pinned)
    _wait_for_copies([tensor.untyped_storage() for tensor in tensors])
    return slabs


def _pairs(
    flat_bytes: Iterable[Tensor], slabs: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Lay tensors and slabs end to end beside each other; yield pairs of pieces of equal size."""
    free_slabs = iter(slabs)
    slab = torch.empty(0, dtype=torch.uint8)
    for remaining in flat_bytes:
        while len(remaining):
            slab = slab if len(slab) else next(free_slabs)
            size = min(len(remaining), len(slab))
            yield remaining[:size], slab[:size]
            remaining, slab = remaining[size:], slab[size:]


def distinct_storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return each storage behind the tensors once."""
    return list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())


def resident_bytes(tensors: Iterable[Tensor]) -> int:
    """Measure the bytes that the tensors' storages hold."""
    return sum(storage.nbytes() for storage in distinct_storages(tensors))


def _allocate(num_bytes: int, *, is_pinned: bool) -> list[Tensor]:
    sizes = [SLAB_BYTES] * (num_bytes // SLAB_BYTES)
    if num_bytes % SLAB_BYTES:
        sizes.append(num_bytes % SLAB_BYTES)
    return [torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned) for size in sizes]


def _wait_for_copies(storages: list[UntypedStorage]) -> None:
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)
