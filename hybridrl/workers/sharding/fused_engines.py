"""The rollout engines of a fused worker group as one set: each rank drives its own."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from hybridrl import trace
from hybridrl.errors import EngineError, PhaseError
from hybridrl.metrics import Metrics, Sum, merge
from hybridrl.workers.sharding.control import ControlGroup, Failures, attempt
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.weight_stream import bucket_bytes_for, stream_weights
from hybridrl.workers.train.protocol import TrainEngine


class FusedEngines:
    """An ``EngineSet`` whose members live in the ranks of one worker group.

    ``tensor_parallel_size`` adjacent ranks share an engine and its first rank leads it. Ranks that
    lead none take part in every status exchange and every gather all the same.
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
        """Put the set together.

        Raises:
            EngineError: a leader has no engine, or another rank has one.
        """
        is_leader = control.rank % tensor_parallel_size == 0
        if is_leader != (managed is not None):
            raise EngineError(
                f"rank {control.rank} was given {'no' if managed is None else 'a'} rollout engine; "
                f"with rollout.tensor_parallel_size={tensor_parallel_size} the first of every "
                f"{tensor_parallel_size} ranks has one, and no other"
            )
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
        """Do ``action`` on the engines ``members``; every rank gets the failed ones."""
        managed, error = self.managed, None
        if managed is not None and self._control.rank // self._ranks_per_engine in members:
            _, error = attempt(lambda: action(managed))
        return self._of_engines(self._control.exchange(stage, error))

    def require_source(self) -> TrainEngine:
        """Return the engine whose weights a sync sends.

        Raises:
            PhaseError: there is none yet.
        """
        if self._source is None:
            raise PhaseError("there are no weights to sample from: call attach_policy first")
        return self._source

    def sync(self) -> Failures:
        """Stream the training weights into all engines, unless all hold this version already."""
        source = self.require_source()
        if not self._control.is_true_anywhere("sync needed", flag=self._is_stale()):
            return {}
        self._synced_version = None
        if self.managed is not None:
            self.managed.ledger.begin_sync(self.managed.sent_names)
        report = stream_weights(
            source.full_weights(),
            None if self.managed is None else self.managed.receive,
            bucket_bytes=self._bucket_bytes(),
            control=self._control,
        )
        if report.failures:
            return self._of_engines(report.failures)
        failures = self.run("finish_sync", self._finish, members=range(self.num_engines))
        if not failures:
            self._synced_version = self.trained_version
            num_bytes = 0 if self.managed is None else report.num_bytes
            self._metrics = merge([self._metrics, {"memory/synced_bytes": Sum(num_bytes)}])
            trace.note(synced_bytes=num_bytes)
        return failures

    def take_metrics(self) -> Metrics:
        """Return what the syncs since the last call moved, and start anew."""
        metrics, self._metrics = self._metrics, {}
        if self.managed is not None:
            metrics |= self.managed.take_metrics()
        return metrics

    def _finish(self, managed: ManagedEngine) -> None:
        managed.finish_update(version=self.trained_version)

    def _bucket_bytes(self) -> int:
        """The size for which all ranks have the memory: they must cut the stream alike."""
        mine = bucket_bytes_for(self._bucket_mib, self._device)
        return -self._control.largest("bucket size", -mine)

    def _is_stale(self) -> bool:
        covered = self.managed is None or self.managed.ledger.is_covered
        return self._synced_version != self.trained_version or not covered

    def _of_engines(self, failures: Failures) -> Failures:
        """Name engines instead of ranks; of several failed ranks of one engine the first speaks."""
        return {
            rank // self._ranks_per_engine: failures[rank]
            for rank in sorted(failures, reverse=True)
        }
