"""The training side of the device: all roles' training state, which leaves and returns together."""

from __future__ import annotations

from typing import Protocol

import torch

from hybridrl.errors import PhaseError
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.memory import empty_cache
from hybridrl.workers.sharding.memory_table import Holder
from hybridrl.workers.train.protocol import TrainState


class Tenant(Protocol):
    """Training state that shares the device: a training engine, trainable or frozen."""

    def offload(self, part: TrainState) -> None:
        """Move a part to host memory. Twice is a no-op."""
        ...

    def restore(self, part: TrainState) -> None:
        """Bring a part back. Twice is a no-op."""
        ...

    def resident_bytes(self, part: TrainState) -> int:
        """Return the bytes that the part holds on the device."""
        ...


class Tenants:
    """All tenants of this process's device; each verb runs on all ranks and fails on all alike."""

    def __init__(self, *, device: torch.device, control: ControlGroup) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._device = device
        self._control = control

    def register(self, name: str, tenant: Tenant) -> None:
        """Add a tenant.

        Raises:
            PhaseError: the name is taken.
        """
        if name in self._tenants:
            raise PhaseError(f"tenant {name!r} is registered already; one training engine per role")
        self._tenants[name] = tenant

    def holders(self) -> list[Holder]:
        """Return what each tenant holds on the device, part by part."""
        return [
            Holder(f"{name} {part.value}", tenant.resident_bytes(part))
            for name, tenant in self._tenants.items()
            for part in TrainState
        ]

    def make_room(self) -> None:
        """Gradients and optimizer state leave."""
        self._control.everywhere("make_room", self._offload_all_but_parameters)

    def leave(self) -> None:
        """Parameters leave.

        Raises:
            StageError: on all ranks, if anything of any tenant is still on a device.
        """
        self._control.everywhere("leave", self._offload_parameters)

    def come_back(self) -> None:
        """Everything returns; what never left stays."""
        self._control.everywhere("come_back", self._restore)

    def _offload_all_but_parameters(self) -> None:
        for tenant in self._tenants.values():
            tenant.offload(TrainState.GRADIENTS)
            tenant.offload(TrainState.OPTIMIZER)
        empty_cache(self._device)

    def _offload_parameters(self) -> None:
        for tenant in self._tenants.values():
            tenant.offload(TrainState.PARAMETERS)
        empty_cache(self._device)
        left = [
            f"{holder.name} {holder.num_bytes / 2**20:.1f} MiB"
            for holder in self.holders()
            if holder.num_bytes
        ]
        if left:
            raise PhaseError(
                "the KV cache may not wake while training state is on the device: "
                + ", ".join(left)
            )

    def _restore(self) -> None:
        for tenant in self._tenants.values():
            for part in TrainState:
                tenant.restore(part)
