"""Moving the bytes of tensors to the host and back, while the tensors stay what they are.

The storage behind a tensor is emptied and refilled, so every view of it, every shard and every
reference that an optimizer or FSDP2 holds survives.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage


class ParkedTensors:
    """The bytes of some tensors, in host memory (pinned, if they come from a GPU).

    The constructor frees the tensors' own memory; reading them until ``restore`` is an error.

    Args:
        tensors: plain tensors; views of one storage are moved once.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._parked: list[tuple[UntypedStorage, Tensor]] = []
        storages = distinct_storages(tensors)
        for storage in storages:
            is_pinned = storage.device.type == "cuda"
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_pinned)
            host.copy_(_bytes_of(storage), non_blocking=is_pinned)
            self._parked.append((storage, host))
        _wait_for_copies(storages)
        for storage in storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Give every tensor its memory and its bytes back, bit by bit the same."""
        for storage, host in self._parked:
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host, non_blocking=host.is_pinned())
        _wait_for_copies([storage for storage, _ in self._parked])
        self._parked.clear()


def distinct_storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return each storage behind the tensors once."""
    return list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())


def resident_bytes(tensors: Iterable[Tensor]) -> int:
    """Measure the bytes that the tensors' storages hold."""
    return sum(storage.nbytes() for storage in distinct_storages(tensors))


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait_for_copies(storages: list[UntypedStorage]) -> None:
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)
