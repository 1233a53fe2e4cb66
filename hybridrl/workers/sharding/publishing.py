"""The weights that engines which no rank owns get from rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import torch

from hybridrl.config.rollout import RolloutConfig
from hybridrl.metrics import Metrics, Sum
from hybridrl.models.dtypes import DTYPES
from hybridrl.workers.rollout.weight_folder import WeightFolder
from hybridrl.workers.sharding.control import (
    ControlGroup,
    Limit,
    StageError,
    attempt,
)
from hybridrl.workers.sharding.manager_client import ManagerClient
from hybridrl.workers.sharding.states import SYNC
from hybridrl.workers.sharding.weight_stream import (
    Load,
    StreamReport,
    common_bucket_bytes,
    stream_weights,
)
from hybridrl.workers.train.protocol import TrainEngine

log = logging.getLogger(__name__)

_NUM_UPDATES = 3
"""Tries of one update."""


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


class Publisher:
    """Brings weights to the rollout manager's engines, which stop only to take them.

    Rank 0 writes or sends the weights of all ranks.
    """

    def __init__(
        self,
        servers: ManagerClient,
        *,
        config: RolloutConfig,
        device: torch.device,
        control: ControlGroup,
    ) -> None:
        self._servers = servers
        self._config = config
        self._device = device
        self._control = control
        self._is_writer = control.rank == 0
        self._num_bytes = 0
        self._published: WeightFolder | None = None

    def bring(self, source: TrainEngine, *, version: int) -> None:
        """Bring the weights to all engines that lack them. A collective call.

        Raises:
            StageError: on all ranks, if the weights could not be written, sent or loaded.
        """
        need = partial(self._servers.need_weights, version=version)
        is_due, error = attempt(need) if self._is_writer else (False, None)
        self._require_success(error)
        if self._control.is_true_anywhere("sync of servers needed", flag=bool(is_due)):
            if self._servers.weights == "broadcast":
                update_with_tries(partial(self._broadcast, source, version))
            else:
                self._publish(source, version)

    def close(self) -> None:
        """Remove what was published, and leave the engines. Idempotent."""
        self._servers.leave()
        if self._published is not None:
            self._published.remove()
            self._published = None

    def take_metrics(self) -> Metrics:
        """Return the bytes sent since the last call, and reset them."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        return {"memory/synced_bytes": Sum(num_bytes)} if num_bytes else {}

    def _publish(self, source: TrainEngine, version: int) -> None:
        """Write all weights to a folder, and let the servers load it; the one before goes."""
        before = self._published
        _, error = attempt(self._make_folder if self._is_writer else lambda: None)
        self._require_success(error)
        folder = self._published if self._is_writer else None
        try:
            report = self._stream(source, None if folder is None else folder.write)
            if report.failures:
                raise StageError(SYNC.name, report.failures)
            error = None
            if folder is not None:
                update = partial(self._servers.update, folder.folder, version=version)
                _, error = attempt(partial(update_with_tries, update))
                self._num_bytes += report.num_bytes
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

    def _broadcast(self, source: TrainEngine, version: int) -> None:
        """Send all weights to the servers; in the next try a lost one has a successor."""
        begin = partial(self._servers.begin_update, version=version, device=self._device)
        _, error = attempt(begin if self._is_writer else lambda: None)
        self._require_success(error)
        report = self._stream(source, self._servers.send if self._is_writer else None)
        error = None
        if self._is_writer:
            reasons = "; ".join(f"rank {r}: {text}" for r, text in report.failures.items())
            _, error = attempt(partial(self._servers.end_update, reason=reasons))
        self._require_success(error)
        self._num_bytes += report.num_bytes if self._is_writer else 0

    def _stream(self, source: TrainEngine, load: Load | None) -> StreamReport:
        config, control = self._config, self._control
        return stream_weights(
            source.full_weights(source.weight_sets[0], dtype=DTYPES[config.dtype]),
            load,
            sender=None,
            bucket_bytes=common_bucket_bytes(config.bucket_mib, self._device, control=control),
            control=control,
        )

    def _require_success(self, error: Exception | None) -> None:
        limit = Limit(self._servers.timeout_s, "cluster.call_timeout_s")
        failures = self._control.exchange(SYNC.name, error, limit=limit)
        if failures:
            raise StageError(SYNC.name, failures) from error
