"""The weights that engines which no rank owns get from rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import TypeVar

import torch
from torch import Tensor

from hybridrl.config.rollout import RolloutConfig
from hybridrl.metrics import Metrics, Sum
from hybridrl.models.load import DTYPES
from hybridrl.workers.rollout.buckets import StagedBucket
from hybridrl.workers.rollout.weight_folder import WeightFolder
from hybridrl.workers.sharding.control import ControlGroup, Limit, StageError
from hybridrl.workers.sharding.lifecycle import SYNC
from hybridrl.workers.sharding.manager_client import ManagerClient
from hybridrl.workers.sharding.weight_stream import (
    Load,
    StreamReport,
    common_bucket_bytes,
    stream_weights,
)
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import WeightSet

log = logging.getLogger(__name__)
T = TypeVar("T")

_NUM_UPDATES = 3
"""Tries of one update."""


def update_with_tries(update: Callable[[], None]) -> None:
    """Update servers; an engine that dies in one try is replaced in the next."""
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
    """Brings weights from rank 0 to the manager's engines, which stop only to take them."""

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
        self._has_base = False
        """Whether that has all weights below the adapter."""

    def bring(self, source: PolicyEngine, *, version: int) -> None:
        """Bring the weights to all engines that lack them, or StageError. A collective call."""
        is_due = self._on_writer(partial(self._servers.need_weights, version=version))
        if self._control.is_true_anywhere("sync of servers needed", flag=bool(is_due)):
            if WeightSet.ADAPTER in source.weight_sets:
                self._send_adapter(source, version)
            elif self._servers.weights == "broadcast":
                update_with_tries(partial(self._broadcast, source, version))
            else:
                self._publish(source, version)

    def close(self) -> None:
        """Remove what was published, and leave the engines. Idempotent."""
        self._servers.leave()
        self._unpublish()

    def take_metrics(self) -> Metrics:
        """Return the bytes sent since the last call, and reset them."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        return {"memory/synced_bytes": Sum(num_bytes)} if num_bytes else {}

    def _publish(self, source: PolicyEngine, version: int) -> None:
        """Write all weights to a folder, and let the servers load it; the one before goes."""
        before = self._published
        folder = self._on_writer(self._make_folder)
        try:
            self._send(source, None if folder is None else folder.write)

            def update() -> None:
                if folder is not None:
                    self._servers.update(folder.folder, version=version)

            self._on_writer(partial(update_with_tries, update))
        finally:
            if before is not None:
                before.remove()

    def _unpublish(self) -> None:
        if self._published is not None:
            self._published.remove()
            self._published = None

    def _make_folder(self) -> WeightFolder:
        self._published = WeightFolder(
            Path(mkdtemp(prefix="hybridrl-weights-", dir=self._servers.folder)),
            dtype=DTYPES[self._config.dtype],
            if_full=", or serving.weights=broadcast",
        )
        return self._published

    def _broadcast(self, source: PolicyEngine, version: int) -> None:
        """Send all weights to the servers; in the next try a lost one has a successor."""
        begin = partial(self._servers.begin_update, version=version, device=self._device)
        self._on_writer(begin)
        report = self._stream(source, self._servers.send if self._is_writer else None)
        reasons = "; ".join(f"rank {r}: {text}" for r, text in report.failures.items())
        self._on_writer(partial(self._servers.end_update, reason=reasons))
        self._num_bytes += report.num_bytes if self._is_writer else 0

    def _send_adapter(self, source: PolicyEngine, version: int) -> None:
        """Send the adapter; before the first one all other weights, to a folder that stays."""
        if not self._has_base:
            self._unpublish()
            folder = self._on_writer(self._make_folder)
            self._send(source, None if folder is None else folder.write)
            self._has_base = True
        adapter: list[tuple[str, Tensor]] = []

        def keep(staged: StagedBucket, handles: Sequence[str]) -> None:
            adapter.extend((n, t.detach().to("cpu", copy=True)) for n, t in staged.tensors)

        self._send(source, keep if self._is_writer else None, WeightSet.ADAPTER)

        def update() -> None:
            if self._published is not None:
                self._servers.update_adapter(self._published.folder, adapter, version=version)

        self._on_writer(partial(update_with_tries, update))

    def _send(
        self, source: PolicyEngine, load: Load | None, part: WeightSet = WeightSet.BASE
    ) -> None:
        report = self._stream(source, load, part)
        if report.failures:
            raise StageError(SYNC.name, report.failures)
        self._num_bytes += report.num_bytes if self._is_writer else 0

    def _stream(
        self, source: PolicyEngine, load: Load | None, part: WeightSet = WeightSet.BASE
    ) -> StreamReport:
        config, control = self._config, self._control
        dtype = None if part is WeightSet.ADAPTER else DTYPES[config.dtype]
        return stream_weights(
            source.full_weights(part, dtype=dtype),
            load,
            sender=None,
            bucket_bytes=common_bucket_bytes(config.bucket_mib, self._device, control=control),
            control=control,
        )

    def _on_writer(self, action: Callable[[], T]) -> T | None:
        """Run ``action`` on rank 0; StageError on all ranks if it failed."""
        limit = Limit(self._servers.timeout_s, "cluster.call_timeout_s")
        own: Callable[[], T | None] = action if self._is_writer else lambda: None
        return self._control.everywhere(SYNC.name, own, limit=limit)
