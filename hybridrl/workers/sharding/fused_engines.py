"""The rollout engines of a fused worker group as one set: each rank drives its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch

from hybridrl.config.rollout import RolloutConfig
from hybridrl.diagnostics import trace
from hybridrl.errors import EngineError, PhaseError
from hybridrl.metrics import Metrics, Sum, merge
from hybridrl.models.dtypes import DTYPES
from hybridrl.workers.rollout.protocol import Bucket, StagedBucket, WeightSender
from hybridrl.workers.rollout.stage_time import stage_time
from hybridrl.workers.sharding.control import ControlGroup, Failures, Neighbours, attempt
from hybridrl.workers.sharding.engine_start import start_limit
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.states import RESTART
from hybridrl.workers.sharding.weight_pipeline import stream_offers
from hybridrl.workers.sharding.weight_proof import (
    WeightFolder,
    make_weight_folder,
    place_of_temporary_files,
)
from hybridrl.workers.sharding.weight_stream import (
    StreamReport,
    bucket_bytes_for,
    stream_weights,
)
from hybridrl.workers.train.protocol import TrainEngine, WeightSet

log = logging.getLogger(__name__)


class FusedEngines:
    """An ``EngineSet`` whose members live in the ranks of one worker group.

    ``tensor_parallel_size`` adjacent ranks share an engine and its first rank leads it. Ranks that
    lead none take part in every status exchange and every gather all the same.
    """

    def __init__(
        self,
        managed: ManagedEngine | None,
        *,
        config: RolloutConfig,
        device: torch.device,
        control: ControlGroup,
        port: WeightSender | None = None,
        resends_base: bool = True,
    ) -> None:
        """Put the set together.

        Args:
            managed: this rank's engine; None on a rank that leads none.
            config: how many ranks share an engine, how large a bucket is, and whether the first
                sync to an engine that has started is compared with the same weights from files.
            device: where the buckets lie.
            control: the control group of all ranks.
            port: this rank's end of the stream into an engine of another process; None, on all
                ranks, where engines lie in their leader's process.
            resends_base: weights that no step changes are sent again after they were released,
                instead of being kept on the host.

        Raises:
            EngineError: a leader has no engine, or another rank has one.
        """
        tensor_parallel_size = config.tensor_parallel_size
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
        self._resends_base = resends_base
        self._checks_first_sync = config.check_first_sync
        self._dtype = DTYPES[config.dtype]
        self._names: dict[WeightSet, frozenset[str]] = {}
        self._bucket_mib = config.bucket_mib
        self._device = device
        self._control = control
        self._start_limit = start_limit(config)
        self._port = port
        self._neighbours = Neighbours(control, size=1 if port is None else tensor_parallel_size)
        self._metrics: Metrics = {}

    def attach(self, source: TrainEngine) -> None:
        """Make ``source`` the engine whose weights a sync sends."""
        self._source = source
        self._names = {
            part: frozenset(spec.name for spec in source.weight_specs(part))
            for part in source.weight_sets
        }
        if self.managed is not None:
            resent = source.weight_sets if self._resends_base else source.weight_sets[-1:]
            self.managed.sent_names = frozenset().union(*(self._names[part] for part in resent))

    def run(
        self, stage: str, action: Callable[[ManagedEngine], None], *, members: Collection[int]
    ) -> Failures:
        """Do ``action`` on the engines ``members``; every rank gets the failed ones."""
        managed, error = self.managed, None
        limit = self._start_limit if stage == RESTART.name else None
        if managed is not None and self._control.rank // self._ranks_per_engine in members:
            with self._time_for(stage):
                _, error = attempt(lambda: action(managed))
        return self._of_engines(self._control.exchange(stage, error, limit=limit))

    def _time_for(self, stage: str) -> AbstractContextManager[None]:
        """Bound all that an engine is waited for in a stage; a start has its own limit."""
        return nullcontext() if stage == RESTART.name else stage_time(self._control.timeout_s)

    def require_source(self) -> TrainEngine:
        """Return the engine whose weights a sync sends.

        Raises:
            PhaseError: there is none yet.
        """
        if self._source is None:
            raise PhaseError("there are no weights to sample from: call attach_policy first")
        return self._source

    def sync(self) -> Failures:
        """Stream what the engines lack of the training weights; the first time with a proof."""
        unproved = self._unproved()
        if not unproved:
            return self._stream()
        failures = self._expect(self.require_source(), unproved) or self._stream()
        return failures or self.run("compare_weights", _compare, members=unproved)

    def _stream(self) -> Failures:
        """Stream part by part, base before adapter.

        The last part is what steps change: it is sent unless all engines hold this version. The one
        before it is sent where an engine has lost it or never had it.
        """
        source = self.require_source()
        due = [part for part in source.weight_sets if self._is_due(part, source.weight_sets[-1])]
        if not due:
            return {}
        self._synced_version = None
        num_bytes = 0
        for part in due:
            report = self._send(part, source)
            if report.failures:
                return self._of_engines(report.failures)
            num_bytes += 0 if self.managed is None else report.num_bytes
        if WeightSet.ADAPTER in due:
            failures = self.run("load_adapter", ManagedEngine.load_adapter, members=self._everyone)
            if failures:
                return failures
        failures = self.run("finish_sync", self._finish, members=self._everyone)
        if not failures:
            self._synced_version = self.trained_version
            self._metrics = merge([self._metrics, {"memory/synced_bytes": Sum(num_bytes)}])
            trace.note(synced_bytes=num_bytes)
        return failures

    def invalidate_weights(self) -> None:
        """The next sync sends everything, and proves it again where syncs are proved."""
        self._synced_version = None
        if self.managed is not None:
            self.managed.invalidate_weights()

    def take_metrics(self) -> Metrics:
        """Return what the syncs since the last call moved, and start anew."""
        metrics, self._metrics = self._metrics, {}
        if self.managed is not None:
            metrics |= self.managed.take_metrics()
        return metrics

    def _unproved(self) -> list[int]:
        """Return, alike on all ranks, the engines that were never compared since they started."""
        is_unproved = self.managed is not None and not self.managed.is_proved
        stage = "proof needed"
        if not self._checks_first_sync or not self._control.is_true_anywhere(
            stage, flag=is_unproved
        ):
            return []
        flags = self._control.gather(stage, is_unproved)
        return [rank // self._ranks_per_engine for rank, flag in enumerate(flags) if flag]

    def _expect(self, source: TrainEngine, unproved: Sequence[int]) -> Failures:
        """Write what is about to be sent to files, and let engines note what it is to them.

        Once on each node: the first rank there that leads an unproved engine writes, the others
        read.
        """
        control, place = self._control, place_of_temporary_files()
        places = control.gather("places of proofs", place)
        leaders = [engine * self._ranks_per_engine for engine in unproved]
        writer = next((rank for rank in leaders if places[rank] == place), None)
        weights = control.everywhere("folders of proofs", partial(self._folder_of, writer))
        try:
            folders = control.gather(
                "folders of proofs", None if weights is None else weights.folder
            )
            report = stream_weights(
                source.full_weights(source.weight_sets[0]),
                None if weights is None else weights.write,
                bucket_bytes=self._bucket_bytes(),
                control=control,
            )
            if report.failures:
                return self._of_engines(report.failures)
            return self.run("load_reference_weights", _expecting(folders, writer), members=unproved)
        finally:
            if weights is not None:
                weights.remove()

    def _folder_of(self, writer: int | None) -> WeightFolder | None:
        return make_weight_folder(dtype=self._dtype) if writer == self._control.rank else None

    def _send(self, part: WeightSet, source: TrainEngine) -> StreamReport:
        if self.managed is not None:
            self.managed.begin_part(self._names[part])
        weights, bucket_bytes = source.full_weights(part), self._bucket_bytes()
        if self._port is None or part is WeightSet.ADAPTER:
            return stream_weights(
                weights, self._receiver(part), bucket_bytes=bucket_bytes, control=self._control
            )
        return stream_offers(
            weights,
            self._port,
            deliver=None if self.managed is None else partial(self._deliver, self.managed),
            bucket_bytes=bucket_bytes,
            control=self._control,
            neighbours=self._neighbours,
        )

    def _deliver(self, managed: ManagedEngine, offer: StagedBucket, handles: Sequence[str]) -> None:
        """Hand over one bucket, in a thread of its own."""
        if self._port is not None:
            with stage_time(self._control.timeout_s):
                managed.receive_offer(self._port, offer, handles)

    def _receiver(self, part: WeightSet) -> Callable[[Bucket], None] | None:
        if self.managed is None:
            return None
        is_adapter = part is WeightSet.ADAPTER
        return self.managed.receive_adapter if is_adapter else self.managed.receive

    @property
    def _everyone(self) -> range:
        return range(self.num_engines)

    def _finish(self, managed: ManagedEngine) -> None:
        managed.finish_update(version=self.trained_version)

    def _bucket_bytes(self) -> int:
        """The size for which all ranks have the memory: they must cut the stream alike."""
        own_bytes = bucket_bytes_for(self._bucket_mib, self._device)
        return -self._control.largest("bucket size", -own_bytes)

    def _is_due(self, part: WeightSet, trained: WeightSet) -> bool:
        """Return, alike on all ranks, whether an engine of any rank lacks the part."""
        ledger = None if self.managed is None else self.managed.ledger
        is_due = ledger is not None and not ledger.covers(self._names[part])
        if part is trained:
            is_due |= self._synced_version != self.trained_version
            is_due |= ledger is not None and not ledger.is_covered  # finish_sync will say what
        return self._control.is_true_anywhere(f"sync of {part.value} needed", flag=is_due)

    def _of_engines(self, failures: Failures) -> Failures:
        """Name engines instead of ranks; of several failed ranks of one engine the first speaks."""
        return {
            rank // self._ranks_per_engine: failures[rank]
            for rank in sorted(failures, reverse=True)
        }


def _expecting(
    folders: Sequence[Path | None], writer: int | None
) -> Callable[[ManagedEngine], None]:
    """Return what lets an engine note the weights that ``writer`` wrote on its node."""
    folder = None if writer is None else folders[writer]

    def expect(managed: ManagedEngine) -> None:
        if folder is not None:
            managed.load_reference_weights(folder)

    return expect


def _compare(managed: ManagedEngine) -> None:
    begin = time.perf_counter()
    managed.verify_weights()
    log.info("first sync proved: engine == trainer, compare_s=%.2f", time.perf_counter() - begin)
