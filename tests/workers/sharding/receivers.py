"""Engines of this process that get weights as those of a manager do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from hybridrl.config.rollout import RolloutConfig
from hybridrl.config.serving import WeightRoute
from hybridrl.models.load import DTYPES
from hybridrl.workers.rollout.buckets import Bucket, StagedBucket, stage_by_reference
from hybridrl.workers.rollout.protocol import RolloutEngine
from hybridrl.workers.rollout.weight_folder import WeightFolder
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.manager_client import ManagerClient
from hybridrl.workers.sharding.publishing import Publisher
from hybridrl.workers.sharding.weight_files import (
    WeightChain,
    WeightCopy,
    WeightSource,
    load_weights,
)
from hybridrl.workers.train.policy_engine import PolicyEngine
from tests.workers.sharding.recording import CPU

BUCKET_BYTES = 2**12


class Receivers(ManagerClient):
    timeout_s = 20.0
    weight_deltas = True

    def __init__(
        self,
        build: Callable[[], RolloutEngine],
        config: RolloutConfig,
        *,
        num_engines: int,
        weights: WeightRoute = "files",
    ) -> None:
        self._build = build
        self.weights = weights
        self.config = config
        self.engines = [self.start_engine() for _ in range(num_engines)]
        self.sources: list[WeightSource] = []
        self.errors: list[Exception] = []

    def start_engine(self) -> ManagedEngine:
        managed = ManagedEngine(self._build(), config=self.config, device=CPU)
        managed.pause()
        managed.drain()
        return managed

    def publisher(self) -> Publisher:
        control = ControlGroup(timeout_s=60.0)
        return Publisher(self, config=self.config, device=CPU, control=control)

    def need_weights(self, *, version: int) -> bool:
        return True

    def update(self, source: WeightSource, *, version: int) -> None:
        self.sources.append(source)
        for managed in self.engines:
            load_weights(managed, source=source, version=version, bucket_bytes=BUCKET_BYTES)
        if self.errors:
            raise self.errors.pop(0)

    def begin_update(self, *, version: int, device: torch.device) -> None:
        self._version, self._buckets = version, list[Bucket]()

    def send(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        self._buckets.append([(name, tensor.clone()) for name, tensor in staged.tensors])

    def end_update(self, *, reason: str = "") -> WeightCopy:
        names = {name for bucket in self._buckets for name, _ in bucket}
        copy = WeightCopy(names, [partial(list, bucket) for bucket in self._buckets])
        self.update(copy, version=self._version)
        return copy

    def leave(self) -> None:
        pass

    def lengths(self) -> list[int]:
        """How many parts the weights had, in each update."""
        return [len(each.parts) if isinstance(each, WeightChain) else 1 for each in self.sources]


def write_all(source: PolicyEngine, folder: Path, *, dtype: str) -> Path:
    """Write the weights as a full update does."""
    folder.mkdir()
    files = WeightFolder(folder, dtype=DTYPES[dtype])
    files.write(stage_by_reference(list(source.full_weights(dtype=DTYPES[dtype]))), [])
    return folder
