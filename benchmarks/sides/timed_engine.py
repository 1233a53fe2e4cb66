"""An engine that notes when it started, and when it gave which answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hybridrl.sampler import RequestParams, Sample
from hybridrl.serving.engine_handle import EngineHandle
from hybridrl.workers.sharding.lifecycle import Action


@dataclass(eq=False)
class TimedEngine(EngineHandle):
    """A handle around another. Times are of ``time.perf_counter``."""

    engine: EngineHandle
    launched_s: float = field(default_factory=time.perf_counter)
    built_s: float = 0.0
    answers: list[tuple[float, int]] = field(default_factory=list)
    """Time and tokens of each request that was answered."""

    def build(self) -> Future[None]:
        """Build the engine, and note when it is ready."""
        future = self.engine.build()
        future.add_done_callback(lambda _: setattr(self, "built_s", time.perf_counter()))
        return future

    def address(self) -> Future[str | None]:
        """Return the address of the engine's server."""
        return self.engine.address()

    def act(self, action: Action) -> Future[Any]:
        """Run one edge of the life cycle."""
        return self.engine.act(action)

    def sample_group(
        self, token_ids: Sequence[int] | Tensor, params: RequestParams, *, keys: Sequence[int]
    ) -> Future[list[Sample]]:
        """Sample, and note when the answer came."""
        future = self.engine.sample_group(token_ids, params, keys=keys)
        future.add_done_callback(self._note)
        return future

    def _note(self, future: Future[list[Sample]]) -> None:
        if not future.cancelled() and future.exception() is None:
            num_tokens = sum(len(sample.token_ids) for sample in future.result())
            self.answers.append((time.perf_counter(), num_tokens))

    def probe(self) -> Future[object]:
        """Return how far the engine is."""
        return self.engine.probe()

    def is_alive(self) -> bool:
        """Whether the process is there."""
        return self.engine.is_alive()

    def end(self) -> None:
        """End the process."""
        self.engine.end()
