"""Handles of engines that note their times, and of engines without a process."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from hybridrl.sampler import RequestParams, Sample
from hybridrl.serving.engine_handle import EngineHandle
from hybridrl.workers.sharding.lifecycle import Action

_TOKENS, _LOGPROBS = torch.tensor([1]), torch.zeros(1)


class TimedEngine:
    """What a handle did from here on. Times are of ``time.perf_counter``."""

    def __init__(self, handle: EngineHandle) -> None:
        self.handle = handle
        self.launched_s = time.perf_counter()
        self.built_s = 0.0
        self.answers: list[tuple[float, int]] = []
        """Time and tokens of each request that was answered."""
        self._build, self._sample_group = handle.build, handle.sample_group
        handle.build = self._build_timed  # type: ignore[method-assign]
        handle.sample_group = self._sample_timed  # type: ignore[method-assign]

    def _build_timed(self) -> Future[None]:
        future = self._build()
        future.add_done_callback(lambda _: setattr(self, "built_s", time.perf_counter()))
        return future

    def _sample_timed(
        self, token_ids: Sequence[int] | Tensor, params: RequestParams, *, keys: Sequence[int]
    ) -> Future[list[Sample]]:
        future = self._sample_group(token_ids, params, keys=keys)
        future.add_done_callback(self._note)
        return future

    def _note(self, future: Future[list[Sample]]) -> None:
        if not future.cancelled() and future.exception() is None:
            num_tokens = sum(len(sample.token_ids) for sample in future.result())
            self.answers.append((time.perf_counter(), num_tokens))


class Answers:
    """Gives answers in a thread of its own, as Ray does; within a ``with`` block."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Future[Any], object] | None] = SimpleQueue()

    def give(self, answer: object) -> Future[Any]:
        """Return a future that gets this answer soon."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self._waiting.put((future, answer))
        return future

    def __enter__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="answers")
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            future, answer = waiting
            future.set_result(answer)


class AnsweringEngine(EngineHandle):
    """Answers at once: what remains is the cost of who calls it."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._version = -1

    def act(self, action: Action) -> Future[Any]:
        """Note the version of weights."""
        if isinstance(action, partial):
            self._version = action.keywords["version"]
        return self._answers.give(None)

    def sample_group(
        self, token_ids: Sequence[int] | Tensor, params: RequestParams, *, keys: Sequence[int]
    ) -> Future[list[Sample]]:
        """Answer each key with the same token."""
        one = Sample(_TOKENS, _LOGPROBS, "stop", self._version)
        return self._answers.give([one] * len(keys))

    def probe(self) -> Future[object]:
        """Return nothing: nobody watches it."""
        return self._answers.give(None)

    def end(self) -> None:
        """Do nothing."""
