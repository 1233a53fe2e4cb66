"""The training side of the device: the training state of all roles, which moves together."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hybridrl.errors import PhaseError
from hybridrl.metrics import Max, Metrics, merge
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.memory import DeviceMemory, Holder
from hybridrl.workers.train.protocol import OffloadableModel, TrainState

_MAY_STAY_BYTES = 2**30
"""Part of torch's memory besides the listed tensors: tables, workspaces of cuBLAS and kernels."""


class OffloadableModels:
    """All training engines of this device; each verb runs on all ranks and fails on all alike."""

    def __init__(self, *, device: torch.device, control: ControlGroup) -> None:
        self._engines: dict[str, OffloadableModel] = {}
        self._control = control
        self._metrics: Metrics = {}
        self.memory = DeviceMemory(device)
        """Of the device, as torch's allocator counts it."""
        self.engine_bytes: Callable[[], int] = int
        """Torch's memory in this process that is known to be for rollout engines."""

    def register(self, name: str, engine: OffloadableModel) -> None:
        """Add a colocated engine; PhaseError if the name is taken."""
        if name in self._engines:
            raise PhaseError(f"training engine {name!r} is registered already; a role has one")
        self._engines[name] = engine

    def holders(self) -> list[Holder]:
        """Return the memory of each engine on the device, item by item."""
        return [
            Holder(f"{name} {part.value}", engine.resident_bytes(part))
            for name, engine in self._engines.items()
            for part in TrainState
        ]

    def offload_optimizer(self) -> None:
        """Offload gradients and optimizer state."""
        parts = (TrainState.GRADIENTS, TrainState.OPTIMIZER)
        self._control.everywhere("offload_optimizer", lambda: self._offload(*parts))

    def offload_parameters(self) -> None:
        """Offload parameters, and check that neither engines nor torch have more on the device."""
        self._control.everywhere("offload_parameters", self._offload_parameters)

    def onload_training(self) -> None:
        """Bring everything back; state that never left stays."""
        self._control.everywhere("onload_training", self._restore)

    def _offload(self, *parts: TrainState) -> None:
        for engine in self._engines.values():
            for part in parts:
                engine.offload(part)
        self.memory.empty_cache()

    def _offload_parameters(self) -> None:
        self._offload(TrainState.PARAMETERS)
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
        self._require_nothing_unlisted()

    def _require_nothing_unlisted(self) -> None:
        """Compare the engines' lists with torch's own count: a list may be incomplete."""
        allocated = self.memory.allocated_bytes()
        if allocated is None:
            return
        unlisted = allocated - self.engine_bytes()
        self._metrics = merge([self._metrics, {"memory/left_allocated_bytes/max": Max(unlisted)}])
        if unlisted > _MAY_STAY_BYTES:
            raise PhaseError(
                "the KV cache may not wake while training state is on the device: "
                f"{', '.join(self._engines)} list nothing, and torch has {unlisted / 2**20:,.1f} "
                f"MiB of {self.memory.device} allocated, of which {_MAY_STAY_BYTES / 2**20:,.0f} "
                "may stay (tables, workspaces). Something keeps tensors that offload() does not "
                "know: see torch.cuda.memory_snapshot(), or set rollout.sleep=false and a lower "
                "rollout.memory_fraction"
            )

    def take_metrics(self) -> Metrics:
        """Return the bytes left since the last call, and reset them."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _restore(self) -> None:
        for engine in self._engines.values():
            for part in TrainState:
                engine.restore(part)
