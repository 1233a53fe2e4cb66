"""Named tensors whose memory is freed and allocated again while the tensors themselves stay."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from hybridrl.errors import EngineError, PhaseError, suggest_name


class TensorMemory:
    """The storages behind a set of tensors on one device, freed and allocated again as one.

    Modules keep their references: a released tensor has its shape but no bytes, and must not be
    read. Float tensors without a backup come back filled with ``lost_value``: NaN makes lost
    weights impossible to overlook. Integer tensors get their smallest value. ``what`` names the
    tensors in errors.
    """

    def __init__(self, what: str, tensors: Mapping[str, Tensor], *, lost_value: float) -> None:
        self._what = what
        self._tensors = dict(tensors)
        self._lost_value = lost_value
        self._backups: dict[str, Tensor] = {}
        storages = [tensor.untyped_storage() for tensor in self._tensors.values()]
        unique = {storage.data_ptr(): storage for storage in storages}
        self._storages = [(storage, storage.nbytes()) for storage in unique.values()]
        self.is_resident = True

    def resident_bytes(self) -> int:
        """Measure the bytes held now; a storage shared by several tensors counts once."""
        return sum(storage.nbytes() for storage, _ in self._storages)

    def release(self, backup: frozenset[str]) -> None:
        """Free all storages, after copying the tensors named in ``backup`` to the host."""
        if not self.is_resident:
            raise PhaseError(f"{self._what} are released already; resume them before the next one")
        for name in sorted(backup - self._tensors.keys()):
            raise EngineError(
                f"cannot back up {name!r} on releasing {self._what}: there is no such tensor, "
                f"{suggest_name(name, list(self._tensors))}"
            )
        self._backups = {name: self._tensors[name].to("cpu", copy=True) for name in backup}
        self.free()

    def free(self) -> None:
        """Free all storages; idempotent."""
        self.is_resident = False
        for storage, _ in self._storages:
            storage.resize_(0)

    @torch.no_grad()
    def resume(self) -> None:
        """Allocate all storages again and refill them.

        An EngineError if the device lacks memory; all storages are free again then.
        """
        if self.is_resident:
            raise PhaseError(f"{self._what} are resident already; release them before resuming")
        try:
            for storage, num_bytes in self._storages:
                storage.resize_(num_bytes)
        except (torch.OutOfMemoryError, RuntimeError) as err:
            self.free()
            needed_gib = sum(num_bytes for _, num_bytes in self._storages) / 2**30
            raise EngineError(
                f"resuming {self._what} needs {needed_gib:.2f} GiB and the device has not that "
                "much left; lower rollout.num_slots, or see what else is still resident"
            ) from err
        self.is_resident = True
        self.fill_lost()
        for name, backup in self._backups.items():
            self._tensors[name].copy_(backup)
        self._backups = {}

    @torch.no_grad()
    def fill_lost(self) -> None:
        """Overwrite every tensor with the value that marks lost content."""
        for tensor in self._tensors.values():
            is_float = tensor.is_floating_point()
            tensor.fill_(self._lost_value if is_float else torch.iinfo(tensor.dtype).min)


def checksum(tensor: Tensor) -> int:
    """Return a CRC-32 of the values of a tensor of any shape; equal bits have equal sums."""
    # A copy: a storage that numpy has seen can never be freed or resized again.
    flat = tensor.detach().to("cpu", copy=True).contiguous().flatten()
    return zlib.crc32(flat.view(torch.uint8).numpy().data)
