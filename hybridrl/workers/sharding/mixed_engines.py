"""Engines of the ranks beside engines of servers: both get the weights in the same stage."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from hybridrl.metrics import Metrics, merge
from hybridrl.workers.rollout.protocol import RolloutEngine
from hybridrl.workers.sharding.control import Failures
from hybridrl.workers.sharding.fused_engines import FusedEngines
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.served_engines import ServedEngines, Servers
from hybridrl.workers.train.protocol import TrainEngine


@dataclass(frozen=True, slots=True)
class MixedRollout:
    """The engine of a rank, and servers that have engines beside those of the ranks."""

    engine: RolloutEngine | None
    """Of this rank; None on a rank without one."""

    servers: Servers
    """Whose own engines get the weights, too."""


class MixedEngines:
    """An ``EngineSet`` of the ranks' engines, whose sync publishes the weights for others, too.

    The others belong to the rollout manager. They stop only to take weights, so in this stage.
    """

    def __init__(self, fused: FusedEngines, served: ServedEngines) -> None:
        """Assemble the set.

        Args:
            served: the weights on their way to the others.
        """
        self._fused = fused
        self._served = served
        self.managed = fused.managed
        self.num_engines = fused.num_engines

    @property
    def trained_version(self) -> int:
        """Policy version of the weights that a sync sends."""
        return self._fused.trained_version

    @trained_version.setter
    def trained_version(self, version: int) -> None:
        self._fused.trained_version = self._served.trained_version = version

    def attach(self, source: TrainEngine) -> None:
        """Make ``source`` the training engine whose weights a sync sends."""
        self._fused.attach(source)
        self._served.attach(source)

    def require_source(self) -> TrainEngine:
        """Return the training engine; see ``FusedEngines``."""
        return self._fused.require_source()

    def run(
        self, stage: str, action: Callable[[ManagedEngine], object], *, members: Collection[int]
    ) -> Failures:
        """Run ``action`` on engines of the ranks."""
        return self._fused.run(stage, action, members=members)

    def sync(self) -> Failures:
        """Send the weights to the ranks' engines; if all have them, publish them for the others.

        Raises:
            StageError: on all ranks, if the others could not load them.
        """
        return self._fused.sync() or self._served.sync()

    def take_metrics(self) -> Metrics:
        """Return the metrics of the syncs since the last call, and reset them."""
        return merge([self._fused.take_metrics(), self._served.take_metrics()])

    def close(self) -> None:
        """Remove the published weights. Idempotent."""
        self._served.close()
