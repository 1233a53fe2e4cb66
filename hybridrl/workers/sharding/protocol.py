"""What the life cycle drives: a set of engines, and the training side of their device."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from hybridrl.workers.sharding.control import Failures
from hybridrl.workers.sharding.managed_engine import ManagedEngine

Action = Callable[[ManagedEngine], None]


class EngineSet(Protocol):
    """Engines that change state together: local ones under a control group, or remote servers."""

    num_engines: int

    def run(self, stage: str, action: Action, *, members: Collection[int]) -> Failures:
        """Do ``action`` on the engines ``members``, wait for all; return the failed ones."""
        ...

    def sync(self) -> Failures:
        """Send the training weights to every engine, and return the failed ones with reasons."""
        ...


class TrainingSide(Protocol):
    """The training side of the device. Each method runs on all ranks and fails on all alike."""

    def offload_optimizer(self) -> None:
        """Take optimizer state and gradients off the device. Twice is a no-op."""
        ...

    def offload_parameters(self) -> None:
        """Take the parameters off the device; nothing of any tenant may be left on it."""
        ...

    def onload_training(self) -> None:
        """Bring everything back that left."""
        ...
