"""Sends weights to engines of their own (``serving=own``): by broadcast, as files, or as deltas."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import TypeVar

import torch
from torch import Tensor

from hybridrl.config.rollout import RolloutConfig
from hybridrl.metrics import Metrics, Sum
from hybridrl.models.load import DTYPES
from hybridrl.workers.rollout.buckets import StagedBucket, as_sent, stage_by_reference
from hybridrl.workers.rollout.weight_folder import WeightFolder
from hybridrl.workers.sharding.control import ControlGroup, Limit, StageError
from hybridrl.workers.sharding.lifecycle import SYNC
from hybridrl.workers.sharding.manager_client import ManagerClient
from hybridrl.workers.sharding.weight_changes import SentWeights
from hybridrl.workers.sharding.weight_files import WeightChain, WeightCopy, WeightSource
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


def update_with_tries(update: Callable[[], object]) -> None:
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
        self._folders: list[WeightFolder] = []
        """Published files that engines may need."""
        self._sent: SentWeights | None = None
        """A copy of what the engines have, if changes may follow."""
        self._chain = WeightChain()
        """All parts that lead there, for engines that come later."""
        self._base: WeightFolder | None = None
        """On rank 0, all weights below the adapter, once they are there."""

    def bring(self, source: PolicyEngine, *, version: int) -> None:
        """Bring the weights to all engines that lack them, or StageError. A collective call."""
        is_due = self._on_writer(partial(self._servers.need_weights, version=version))
        if not self._control.is_true_anywhere("sync of servers needed", flag=bool(is_due)):
            return
        try:
            if WeightSet.ADAPTER in source.weight_sets:
                self._send_adapter(source, version)
            elif self._changes_follow():
                self._publish(source, version)
            elif self._servers.weights == "broadcast":
                update_with_tries(partial(self._broadcast, source, version))
            else:
                self._publish(source, version)
        except BaseException:
            self._sent = None  # engines may have these weights or those before
            raise

    def close(self) -> None:
        """Remove what was published, and leave the engines. Idempotent."""
        self._servers.leave()
        self._remove(self._folders)

    def _changes_follow(self) -> bool:
        """Whether changes are enough; if not, a chain of them begins with all weights."""
        if not self._servers.weight_deltas:
            return False
        is_enough = self._sent is not None and self._sent.is_worth_it
        if self._control.is_true_anywhere("changes of weights", flag=is_enough):
            return True
        self._sent = SentWeights(DTYPES[self._config.dtype]) if self._is_writer else None
        self._chain = WeightChain()
        return False

    def take_metrics(self) -> Metrics:
        """Return the bytes sent since the last call, and reset them."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        return {"memory/synced_bytes": Sum(num_bytes)} if num_bytes else {}

    def _publish(self, source: PolicyEngine, version: int) -> None:
        """Write all weights, or changes, for the servers to load; all make those before useless."""
        before = [] if self._chain.parts else self._folders.copy()
        make: Callable[[], WeightFolder | WeightCopy] = self._make_folder
        if self._servers.weights == "broadcast":
            make = WeightCopy
        part = self._on_writer(make)
        try:
            self._gather(source, None if part is None else partial(self._write, part))
            newest = part.folder if isinstance(part, WeightFolder) else part
            weights: WeightSource | None = newest
            if newest is not None and self._sent is not None:  # with the parts before it
                weights = self._chain = replace(self._chain, parts=(*self._chain.parts, newest))

            def update() -> None:
                if weights is not None:
                    self._servers.update(weights, version=version)

            self._on_writer(partial(update_with_tries, update))
        finally:
            self._remove(before)

    def _send_adapter(self, source: PolicyEngine, version: int) -> None:
        """Send the adapter; before the first one all other weights, to a folder that stays."""
        is_due = self._is_writer and self._base is None
        if self._control.is_true_anywhere("weights below the adapter", flag=is_due):
            self._remove(self._folders)
            folder = self._on_writer(self._make_folder)
            self._gather(source, None if folder is None else partial(self._write, folder))
            self._base = folder
        adapter: list[tuple[str, Tensor]] = []

        def keep(staged: StagedBucket, _handles: Sequence[str]) -> None:
            adapter.extend((n, t.detach().to("cpu", copy=True)) for n, t in staged.tensors)
            self._num_bytes += staged.spans[-1].end

        self._gather(source, keep if self._is_writer else None, WeightSet.ADAPTER)

        def update() -> None:
            if self._base is not None:
                self._servers.update_adapter(self._base.folder, adapter, version=version)

        self._on_writer(partial(update_with_tries, update))

    def _make_folder(self) -> WeightFolder:
        folder = WeightFolder(
            Path(mkdtemp(prefix="hybridrl-weights-", dir=self._servers.folder)),
            dtype=DTYPES[self._config.dtype],
            if_full=", or serving.weights=broadcast",
        )
        self._folders.append(folder)
        return folder

    def _remove(self, folders: Sequence[WeightFolder]) -> None:
        for folder in list(folders):
            folder.remove()
            self._folders.remove(folder)

    def _write(
        self, part: WeightFolder | WeightCopy, staged: StagedBucket, handles: Sequence[str]
    ) -> None:
        if self._sent is not None:
            staged = stage_by_reference(self._sent.changes(staged.tensors))
        if staged.spans:
            part.write(staged, handles)
            self._num_bytes += staged.spans[-1].end

    def _broadcast(self, source: PolicyEngine, version: int) -> None:
        """Send all weights to the servers; in the next try a lost one has a successor."""
        begin = partial(self._servers.begin_update, version=version, device=self._device)
        self._on_writer(begin)
        report = self._stream(source, self._send if self._is_writer else None)
        reasons = "; ".join(f"rank {r}: {text}" for r, text in report.failures.items())
        copy = self._on_writer(partial(self._servers.end_update, reason=reasons))
        self._num_bytes += report.num_bytes if self._is_writer else 0
        if copy is not None and self._sent is not None:
            self._chain = replace(self._chain, parts=(copy,))

    def _send(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        if self._sent is not None:
            # The copy in Ray's store must have the bits on which changes fit.
            dtype = DTYPES[self._config.dtype]
            bucket = [(name, as_sent(tensor, dtype)) for name, tensor in staged.tensors]
            staged = stage_by_reference(bucket)
            self._sent.changes(bucket)
        self._servers.send(staged, handles)

    def _gather(
        self, source: PolicyEngine, load: Load | None, part: WeightSet = WeightSet.BASE
    ) -> None:
        report = self._stream(source, load, part)
        if report.failures:
            raise StageError(SYNC.name, report.failures)

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
