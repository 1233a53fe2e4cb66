"""Engines that decode in a thread: tokens follow from key and position, versions from the weights.

They admit requests while they serve, can be interrupted at any token, and die when a test says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridrl.errors import EngineError, PhaseError, RequestError
from hybridrl.images import Images
from hybridrl.sampler import FinishReason, RequestParams, Sample
from hybridrl.serving.engine_handle import answered
from hybridrl.workers.sharding.lifecycle import Action
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from tests.serving.recording_handle import RecordingHandle
from tests.workers.sharding.recording import Journal

MOST_TOKENS = 40


def length_of(key: int) -> int:
    """Tokens of the response with this key: a long tail."""
    return 1 + key % 5 if key % 7 else MOST_TOKENS - key % 3


def token_of(key: int, position: int) -> int:
    return (key * 31 + position) % 97


@dataclass
class _Open:
    context: list[int]
    keys: Sequence[int]
    answer: Future[list[Sample]]
    tokens: list[list[int]] = field(default_factory=list)
    num_sampled: int = 0


class DecodingHandle(RecordingHandle):
    """Samples a token of each open response in a step of its thread."""

    def __init__(self, index: int, journal: Journal) -> None:
        super().__init__(index, journal)
        self.version = -1
        self.refusal: RequestError | None = None
        """Of all requests."""
        self.is_frozen, self.has_requests = threading.Event(), threading.Event()
        self.takes_weights = True
        """False: it never answers a load, and lives."""
        self.step_s = 0.0
        """Seconds of a step, besides its work."""
        self.dies_after: int | None = None
        """Steps that it has left; None: it lives."""
        self._open: list[_Open] = []
        self._changed = threading.Condition()
        self._is_serving = self._is_interrupted = False
        self.num_requests = 0
        threading.Thread(target=self._decode, daemon=True).start()

    def act(self, action: Action) -> Future[Any]:
        is_load = isinstance(action, partial)
        if is_load and not self.takes_weights:
            return Future()
        with self._changed:
            if action is ManagedEngine.pause:
                self._is_serving = False
            elif action is ManagedEngine.continue_generation:
                self._is_serving, self._is_interrupted = True, False
            elif action is ManagedEngine.interrupt:
                self._is_interrupted = True
                self._changed.notify()
                return answered(None)
            elif action is ManagedEngine.take_metrics:
                return answered({})
            elif isinstance(action, partial):
                assert not self._open, "weights changed under an open response"
                self.version = action.keywords["version"]
        return super().act(action)

    def sample_group(
        self,
        token_ids: Sequence[int] | Tensor,
        params: RequestParams,
        *,
        keys: Sequence[int],
        images: Images = (),
    ) -> Future[list[Sample]]:
        future: Future[list[Sample]] = Future()
        future.set_running_or_notify_cancel()  # as a call of Ray, it cannot be taken back
        context = [int(token) for token in token_ids]
        with self._changed:
            if not self.is_alive():
                future.set_exception(EngineError("it is gone"))
            elif self.refusal is not None:
                future.set_exception(self.refusal)
            elif not self._is_serving:
                future.set_exception(PhaseError("it is paused"))
            else:
                self.num_requests += 1
                self._open.append(_Open(context, keys, future, [[] for _ in keys]))
                self.has_requests.set()
                self._changed.notify()
        return future

    def probe(self) -> Future[object]:
        return answered(object())  # two answers differ: it gets on

    def kill(self) -> None:
        super().kill()
        with self._changed:
            self._changed.notify()

    def _decode(self) -> None:
        while self.is_alive():
            with self._changed:
                while (not self._open or self.is_frozen.is_set()) and self.is_alive():
                    self._changed.wait()
                self._step()
            time.sleep(self.step_s)
        with self._changed:
            while self._open:
                self._open.pop().answer.set_exception(EngineError("it is gone"))

    def _step(self) -> None:
        if self.dies_after is not None:
            self.dies_after -= 1
            if self.dies_after < 0:
                super().kill()
                return
        for request in list(self._open):
            begin = len(request.context) - 1  # of a prompt with one token
            if not self._is_interrupted:
                for tokens, key in zip(request.tokens, request.keys, strict=True):
                    if begin + len(tokens) < length_of(key):
                        tokens.append(token_of(key, begin + len(tokens)))
            samples = [
                self._sample(tokens, key, begin)
                for tokens, key in zip(request.tokens, request.keys, strict=True)
            ]
            if self._is_interrupted or not any(sample.is_interrupted for sample in samples):
                self._open.remove(request)
                request.answer.set_result(samples)

    def _sample(self, tokens: list[int], key: int, begin: int) -> Sample:
        is_complete = begin + len(tokens) == length_of(key)
        reason: FinishReason = "stop" if is_complete else "interrupted"
        return Sample(
            torch.tensor(tokens, dtype=torch.int64), torch.zeros(len(tokens)), reason, self.version
        )
