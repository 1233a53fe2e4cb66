"""Rollout engines outside of the ranks: rank 0 writes or sends the weights of all ranks to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import torch

from hybridrl.batch import PromptBatch
from hybridrl.config.rollout import RolloutConfig
from hybridrl.config.serving import WeightRoute
from hybridrl.errors import PhaseError
from hybridrl.metrics import Metrics, Sum, merge
from hybridrl.models.dtypes import DTYPES
from hybridrl.network import LOOPBACK
from hybridrl.sampler import Sample, SamplingParams
from hybridrl.workers.rollout.assemble import Answered
from hybridrl.workers.rollout.buckets import StagedBucket
from hybridrl.workers.rollout.protocol import RolloutEngine
from hybridrl.workers.rollout.weight_folder import WeightFolder
from hybridrl.workers.sharding.control import (
    ControlGroup,
    Failures,
    Limit,
    Neighbours,
    StageError,
    attempt,
)
from hybridrl.workers.sharding.fused_engines import FusedEngines
from hybridrl.workers.sharding.lifecycle import Action
from hybridrl.workers.sharding.states import SYNC
from hybridrl.workers.sharding.weight_stream import (
    Load,
    StreamReport,
    bucket_bytes_for,
    stream_weights,
)
from hybridrl.workers.train.protocol import TrainEngine

log = logging.getLogger(__name__)

_NUM_UPDATES = 3
"""Tries of one update."""

_NO_ENGINES = "a run with rollout.replay has no rollout engines, and nothing samples"


class Servers:
    """The rollout servers of a run, as rank 0 calls them. These refuse all that is asked.

    Methods raise ServerDiedError if the servers, or all engines, are gone, and DeadlineError if no
    answer comes in time.
    """

    timeout_s: float
    """Seconds that one call may take (``cluster.call_timeout_s``)."""

    weights: WeightRoute = "files"
    """How weights reach them (``serving.weights``, as far as their engines can)."""

    folder: Path | None = None
    """For files of weights; it is removed at the end of the run. None: ``$TMPDIR``."""

    key: str = ""
    """That engines of the ranks require of the manager; empty if ranks lend none."""

    @property
    def host(self) -> str:
        """Address at which all engines reach this process."""
        return LOOPBACK

    def need_weights(self, *, version: int) -> bool:
        """Return whether an engine of the policy does not serve with this version."""
        raise PhaseError(_NO_ENGINES)

    def update(self, source: Path, *, version: int) -> None:
        """Bring all engines of the policy to these weights; see ``RolloutServer.update``.

        Raises:
            StageError: names the engines that could not.
        """
        raise PhaseError(_NO_ENGINES)

    def begin_update(self, *, version: int, device: torch.device) -> None:
        """Stop all engines, and form a group with their servers; ``end_update`` ends that.

        Args:
            device: from which ``send`` sends.

        Raises:
            StageError: names the engines that could not.
        """
        raise PhaseError(_NO_ENGINES)

    def send(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        """Send one bucket, staged by reference, to all servers.

        Raises:
            EngineError: it did not reach all of them.
        """
        raise PhaseError(_NO_ENGINES)

    def end_update(self, *, reason: str = "") -> None:
        """Let all engines serve the weights that were sent.

        Args:
            reason: why not all were sent; empty: they were.

        Raises:
            StageError: names the engines that lack weights; always with a ``reason``.
        """
        raise PhaseError(_NO_ENGINES)

    def leave(self) -> None:
        """End the group with the servers. Idempotent."""

    def sample(
        self,
        prompts: PromptBatch,
        sampling: SamplingParams,
        *,
        version: int,
        fused: Sequence[str] = (),
    ) -> tuple[list[Sample], Metrics]:
        """Sample G responses to each of P prompts.

        Args:
            version: of the policy that must sample them.
            fused: addresses of engines of the ranks, lent for this call; they serve this version.

        Returns:
            P * G samples in prompt order, those to the same prompt adjacent; and metrics.

        Raises:
            DriftError: an engine sampled with other weights.
        """
        raise PhaseError(_NO_ENGINES)

    def lost_engines(self) -> Collection[int]:
        """Return which of the engines that were lent to the last call did not work."""
        return ()

    def exchange(
        self, prompts: PromptBatch | None, sampling: SamplingParams, *, version: int
    ) -> tuple[Answered, Metrics]:
        """Admit prompts, which are sampled while the trainer learns, and wait for a batch.

        Args:
            prompts: to admit; None: no more.

        Returns:
            P prompts that were admitted now or before, with P * G samples; and metrics.

        Raises:
            PhaseError: the servers sample for the present step alone.
            DriftError: an engine sampled with weights that it does not have.
        """
        raise PhaseError("these servers do not sample ahead; set trainer.max_staleness above 0")


def update_with_tries(update: Callable[[], None]) -> None:
    """Update servers; an engine that dies in one try is replaced in the next.

    Raises:
        StageError: of the last try.
    """
    for number in range(1, _NUM_UPDATES + 1):
        try:
            update()
        except StageError as error:
            if number == _NUM_UPDATES:
                raise
            log.warning("an update of rollout engines is tried again: %s", error)
        else:
            return


@dataclass(frozen=True, slots=True)
class MixedRollout:
    """The engine of a rank, and servers that have engines beside those of the ranks."""

    engine: RolloutEngine | None
    """Of this rank; None on a rank without one."""

    servers: Servers
    """Whose own engines get the weights, too."""


class ServedEngines:
    """An ``EngineSet`` whose sync brings the weights to servers: beside engines of the ranks, or
    without any.

    The servers' engines belong to the rollout manager, and stop only to take weights.
    """

    def __init__(
        self,
        servers: Servers,
        *,
        config: RolloutConfig,
        device: torch.device,
        control: ControlGroup,
        fused: FusedEngines | None = None,
    ) -> None:
        """Assemble the set.

        Args:
            fused: engines of the ranks; None if no rank has one.
        """
        self.managed = None if fused is None else fused.managed
        self.num_engines = 0 if fused is None else fused.num_engines
        self._fused = fused
        self._trained_version = 0
        self._servers = servers
        self._source: TrainEngine | None = None
        self._config = config
        self._device = device
        self._control = control
        self._neighbours = Neighbours(control, size=1)
        self._metrics: Metrics = {}
        self._published: WeightFolder | None = None

    @property
    def trained_version(self) -> int:
        """Policy version of the weights that a sync sends."""
        return self._trained_version

    @trained_version.setter
    def trained_version(self, version: int) -> None:
        self._trained_version = version
        if self._fused is not None:
            self._fused.trained_version = version

    def attach(self, source: TrainEngine) -> None:
        """Make ``source`` the training engine whose weights a sync sends."""
        self._source = source
        if self._fused is not None:
            self._fused.attach(source)

    def require_source(self) -> TrainEngine:
        """Return the training engine; see ``FusedEngines``."""
        if self._source is None:
            raise PhaseError("there are no weights to sample from: call attach_policy first")
        return self._source

    def run(self, stage: str, action: Action, *, members: Collection[int]) -> Failures:
        """Run ``action`` on engines of the ranks."""
        return {} if self._fused is None else self._fused.run(stage, action, members=members)

    def sync(self) -> Failures:
        """Bring the weights to the ranks' engines, then to the servers. A collective call.

        Nothing is sent if all engines serve with these weights.

        Raises:
            StageError: on all ranks, if the weights could not be written, sent or loaded.
        """
        if self._fused is not None and (failures := self._fused.sync()):
            return failures
        need = partial(self._servers.need_weights, version=self.trained_version)
        is_due, error = attempt(need) if self._is_writer else (False, None)
        self._require_success(error)
        if self._control.is_true_anywhere("sync of servers needed", flag=bool(is_due)):
            if self._servers.weights == "broadcast":
                update_with_tries(self._broadcast)
            else:
                self._publish()
        return {}

    def close(self) -> None:
        """Remove the published weights, and leave the servers. Idempotent."""
        self._servers.leave()
        if self._published is not None:
            self._published.remove()
            self._published = None

    @property
    def _is_writer(self) -> bool:
        return self._control.rank == 0

    def _publish(self) -> None:
        """Write all weights to a folder, and let the servers load it; the one before goes."""
        before = self._published
        _, error = attempt(self._make_folder if self._is_writer else lambda: None)
        self._require_success(error)
        folder = self._published if self._is_writer else None
        try:
            report = self._stream(None if folder is None else folder.write)
            if report.failures:
                raise StageError(SYNC.name, report.failures)
            error = None
            if folder is not None:
                update = partial(self._servers.update, folder.folder, version=self.trained_version)
                _, error = attempt(partial(update_with_tries, update))
                self._count(report)
            self._require_success(error)
        finally:
            if before is not None:
                before.remove()

    def _make_folder(self) -> None:
        self._published = WeightFolder(
            Path(mkdtemp(prefix="hybridrl-weights-", dir=self._servers.folder)),
            dtype=DTYPES[self._config.dtype],
            if_full=", or serving.weights=broadcast",
        )

    def _broadcast(self) -> None:
        """Send all weights to the servers; in the next try a lost one has a successor."""
        begin = partial(
            self._servers.begin_update, version=self.trained_version, device=self._device
        )
        _, error = attempt(begin if self._is_writer else lambda: None)
        self._require_success(error)
        report = self._stream(self._servers.send if self._is_writer else None)
        error = None
        if self._is_writer:
            reasons = "; ".join(f"rank {r}: {text}" for r, text in report.failures.items())
            _, error = attempt(partial(self._servers.end_update, reason=reasons))
        self._require_success(error)
        self._count(report)

    def _stream(self, load: Load | None) -> StreamReport:
        """Gather all weights on all ranks; one of them passes them on."""
        source = self.require_source()
        return stream_weights(
            source.full_weights(source.weight_sets[0], dtype=DTYPES[self._config.dtype]),
            load,
            sender=None,
            bucket_bytes=self._bucket_bytes(),
            control=self._control,
            neighbours=self._neighbours,
        )

    def _count(self, report: StreamReport) -> None:
        if self._is_writer:
            self._metrics = merge([self._metrics, {"memory/synced_bytes": Sum(report.num_bytes)}])

    def take_metrics(self) -> Metrics:
        """Return the metrics of the syncs since the last call, and reset them."""
        metrics, self._metrics = self._metrics, {}
        return metrics if self._fused is None else merge([self._fused.take_metrics(), metrics])

    def _require_success(self, error: Exception | None) -> None:
        limit = Limit(self._servers.timeout_s, "cluster.call_timeout_s")
        failures = self._control.exchange(SYNC.name, error, limit=limit)
        if failures:
            raise StageError(SYNC.name, failures) from error

    def _bucket_bytes(self) -> int:
        """The size for which all ranks have the memory: all must divide the stream alike."""
        own_bytes = bucket_bytes_for(self._config.bucket_mib, self._device)
        return -self._control.largest("bucket size", -own_bytes)


class NoEngines(Servers):
    """Refuses all that needs an engine, as a run that replays needs none."""

    timeout_s = 1.0
