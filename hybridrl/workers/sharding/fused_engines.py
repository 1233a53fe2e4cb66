"""The rollout engines of a fused worker group as one set.

Each rank drives its own, all share the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from hybridrl.errors import PhaseError
from hybridrl.metrics import Metrics, Sum
from hybridrl.workers.sharding.control import ControlGroup, Failures, attempt
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.weight_stream import bucket_bytes_for, stream_weights
from hybridrl.workers.train.protocol import TrainEngine


class FusedEngines:
    """An ``EngineSet`` whose members live in the ranks of one worker group.

    ``tensor_parallel_size`` adjacent ranks share an engine and its first rank leads it. Ranks that
    lead
    none take part in every status exchange and every gather all the same.
    """

    def __init__(
        self,
        managed: ManagedEngine | None,
        *,
        tensor_parallel_size: int,
        bucket_mib: int,
        device: torch.device,
        control: ControlGroup,
    ) -> None:
        self.managed = managed
        self.num_engines = control.world_size // tensor_parallel_size
        self.trained_version = 0
        self._synced_version: int | None = None
        self._source: TrainEngine | None = None
        self._ranks_per_engine = tensor_parallel_size
        self._bucket_mib = bucket_mib
        self._device = device
        self._control = control
        self._metrics: Metrics = {}

    def attach(self, source: TrainEngine) -> None:
        """Make ``source`` the engine whose weights a sync sends."""
        self._source = source
        if self.managed is not None:
            self.managed.sent_names = frozenset(spec.name for spec in source.weight_specs())

    def run(
        self, stage: str, action: Callable[[ManagedEngine], None], *, members: Collection[int]
    ) -> Failures:
        """Do ``action`` on the engines ``members``.

        Every rank gets the failed ones with reasons.
        """
        managed, error = self.managed, None
        if managed is not None and self._control.rank // self._ranks_per_engine in members:
            _, error = attempt(lambda: action(managed))
        return self._of_engines(self._control.exchange(stage, error))

    def sync(self) -> Failures:
        """Stream the training weights into all engines, unless all hold this version already."""
        source = self._source
        if source is None:
            raise PhaseError(
                "no policy is attached to the sharding manager; call attach_policy first"
            )
        if not self._control.is_true_anywhere("sync needed", flag=self._is_stale()):
            return {}
        self._synced_version = None
        if self.managed is not None:
            self.managed.ledger.begin_sync([spec.name for spec in source.weight_specs()])
        report = stream_weights(
            source.full_weights(),
            None if self.managed is None else self.managed.receive,
            bucket_bytes=bucket_bytes_for(self._bucket_mib, self._device),
            control=self._control,
        )
        if report.failures:
            return self._of_engines(report.failures)
        failures = self.run("finish_sync", self._finish, members=range(self.num_engines))
        if not failures:
            self._synced_version = self.trained_version
            self._metrics = {"memory/synced_bytes": Sum(report.num_bytes)}
        return failures

    def take_metrics(self) -> Metrics:
        """Return what the syncs since the last call moved, and start anew."""
        metrics, self._metrics = self._metrics, {}
        if self.managed is not None:
            metrics |= self.managed.take_metrics()
        return metrics

    def _finish(self, managed: ManagedEngine) -> None:
        managed.finish_update(version=self.trained_version)

    def _is_stale(self) -> bool:
        covered = self.managed is None or self.managed.ledger.is_covered
        return self._synced_version != self.trained_version or not covered

    def _of_engines(self, failures: Failures) -> Failures:
        return {rank // self._ranks_per_engine: reason for rank, reason in failures.items()}
