"""Engines of the tests of sharding, behind the handle by which a group calls them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hybridrl.config.serving import FaultKind
from hybridrl.errors import ServerDiedError
from hybridrl.images import Images
from hybridrl.sampler import RequestParams, Sample
from hybridrl.serving.engine_handle import EngineHandle
from hybridrl.workers.sharding.lifecycle import Action
from hybridrl.workers.sharding.weight_files import WeightSource, load_weights
from tests.workers.sharding.recording import (
    WEIGHTS,
    Journal,
    Policy,
    RecordingEngine,
    managed_engine,
)


def weights_in(folder: Path, version: int) -> Path:
    """Write the weights of a version into a folder."""
    folder.mkdir(exist_ok=True)
    weights = {name: torch.tensor(Policy.WHOLE.truth(name, version)) for name in WEIGHTS}
    save_file(weights, folder / "model.safetensors")
    return folder


_THREADS = ThreadPoolExecutor(max_workers=16, thread_name_prefix="engine")


class RecordingHandle(EngineHandle):
    """An engine whose calls run in a thread; it dies when a test says so."""

    def __init__(self, index: int, journal: Journal) -> None:
        self.index = index
        self.journal = journal
        self.engine = RecordingEngine(index, journal)
        self._managed = managed_engine(self.engine, sleep=False)
        self._is_dead = threading.Event()
        self.is_silent = False
        self.harms: list[FaultKind] = []
        self.probes: list[Future[object]] = []
        self.loads: list[tuple[WeightSource, int]] = []
        """Folders of weights that it was given, with versions."""

    def build(self) -> Future[None]:
        def build() -> None:
            with self.journal.entry(self.index, "restart"):  # which a dead one survives
                pass

        return self._submit(build)

    def act(self, action: Action) -> Future[Any]:
        if isinstance(action, partial) and action.func is load_weights:
            self.loads.append((action.keywords["source"], action.keywords["version"]))
            action = partial(action, bucket_bytes=40)
        return self._submit(lambda: action(self._managed))

    def sample_group(
        self,
        token_ids: Sequence[int] | Tensor,
        params: RequestParams,
        *,
        keys: Sequence[int],
        images: Images = (),
    ) -> Future[list[Sample]]:
        raise NotImplementedError

    def probe(self) -> Future[object]:
        self.probes.append(Future())
        return self.probes[-1]

    def is_alive(self) -> bool:
        return not self._is_dead.is_set()

    def kill(self) -> None:
        """End the process, as a loss of power does."""
        self._is_dead.set()

    def end(self) -> None:
        self.kill()

    def harm(self, kind: FaultKind) -> None:
        self.harms.append(kind)
        self.is_silent |= kind == "cut"
        if kind == "kill":
            self.kill()

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        def unless_dead() -> Any:
            if self._is_dead.is_set():
                raise ServerDiedError(f"engine {self.index} is gone")
            return work()

        return Future() if self.is_silent else _THREADS.submit(unless_dead)
