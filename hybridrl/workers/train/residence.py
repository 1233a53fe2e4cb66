"""A model whose parts leave the device and come back: what all training engines have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from hybridrl.errors import PhaseError, RunFolderError
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.offload import OffloadedTensors, resident_bytes
from hybridrl.workers.train.protocol import NamedTensors, TrainState


class ResidentModel(ABC):
    """Tensors of a model, by parts that leave the device separately."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parked: dict[TrainState, OffloadedTensors] = {}

    def offload(self, part: TrainState) -> None:
        """Move a part to host memory and free its device memory. Twice is a no-op."""
        if part not in self._parked:
            self._parked[part] = OffloadedTensors(self._tensors(part))

    def restore(self, part: TrainState) -> None:
        """Bring a part back, bit by bit. Twice is a no-op."""
        if part in self._parked:
            self._parked[part].restore()  # may fail for want of memory, and be tried again
            del self._parked[part]

    def resident_bytes(self, part: TrainState) -> int:
        """Return the bytes that this part holds on the device of this rank, measured."""
        return resident_bytes(self._tensors(part))

    @abstractmethod
    def _tensors(self, part: TrainState) -> list[Tensor]:
        """Return the plain tensors of a part on this rank."""

    def _require(self, action: str, *parts: TrainState) -> None:
        away = [part.value for part in parts if part in self._parked]
        if away:
            raise PhaseError(
                f"{action} needs {' and '.join(away)} on {self._device}, which are offloaded; "
                "leave the rollout phase first, or call restore() for each of them"
            )


def write_on_first(
    ranks: Ranks, weights: NamedTensors, write: Callable[[NamedTensors], None]
) -> None:
    """Let the first rank write what all ranks gather; all return, or raise, when it is done.

    Raises:
        RunFolderError: it could not be written. On the first rank whatever ``write`` raised.
    """
    failure: Exception | None = None
    if ranks.rank == 0:
        try:
            write(weights)
        except Exception as err:  # raised below, once nobody waits for this rank
            failure = err
    for _ in weights:  # the other ranks' part; and the first one's, where it failed half-way
        pass
    message = ranks.share_text("" if failure is None else str(failure) or repr(failure))
    if failure is not None:
        raise failure
    if message:
        raise RunFolderError(message)
