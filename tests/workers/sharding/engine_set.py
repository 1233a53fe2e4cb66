"""The real ``FusedEngines`` of several ranks in one process: each rank's sync runs in a thread.

Nothing of a sync is done here but what gloo does between processes: ranks meet, and each learns
what all of them said.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from hybridrl.config.rollout import RolloutConfig
from hybridrl.config.topology import Fused
from hybridrl.errors import PhaseError
from hybridrl.workers.sharding.control import ControlGroup, Failures, attempt
from hybridrl.workers.sharding.fused_engines import FusedEngines
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.train.policy_engine import PolicyEngine

T = TypeVar("T")
CPU = torch.device("cpu")
_BUCKET_BYTES = 32
_THREADS = ThreadPoolExecutor(max_workers=8, thread_name_prefix="rank")
"""One a rank; a test has one set of at most so many engines at a time."""


class Meeting:
    """Where the ranks of one process hand each other what they say."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._barrier = threading.Barrier(num_ranks)
        self._said: list[tuple[str, object]] = [("", None)] * num_ranks

    def hear(self, rank: int, stage: str, value: T) -> list[T]:
        self._said[rank] = (stage, value)
        self._barrier.wait(timeout=60.0)
        said = list(self._said)
        self._barrier.wait(timeout=60.0)  # before anybody speaks again
        if {spoken for spoken, _ in said} != {stage}:
            raise PhaseError(f"rank {rank} is at stage {stage!r} and another rank is not")
        return [value for _, value in said]  # type: ignore[misc]

    def abort(self) -> None:
        """Let nobody wait for a rank that has raised."""
        self._barrier.abort()


class ThreadControl(ControlGroup):
    """A control group whose ranks are threads; they cut the stream of a tiny model in buckets."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(timeout_s=5.0)
        self.rank = rank
        self.world_size = meeting.num_ranks
        self._meeting = meeting

    def largest(self, stage: str, value: int) -> int:
        largest = max(self._meeting.hear(self.rank, stage, value))
        return -_BUCKET_BYTES if stage == "bucket size" else largest

    def _gather(self, stage: str, value: T) -> list[T]:
        return self._meeting.hear(self.rank, stage, value)


class LocalSet:
    """k engines of one process, each driven by the real code of its rank."""

    def __init__(
        self,
        engines: Sequence[ManagedEngine],
        sources: Sequence[PolicyEngine],
        *,
        config: RolloutConfig,
        resends_base: bool,
    ) -> None:
        self.engines = list(engines)
        self.num_engines = len(self.engines)
        self._meeting = Meeting(self.num_engines)
        self.ranks = [
            FusedEngines(
                managed,
                engines=Fused(self.num_engines, 1).engines,
                config=config,
                device=CPU,
                control=ThreadControl(index, self._meeting),
            )
            for index, managed in enumerate(self.engines)
        ]
        for rank, source in zip(self.ranks, sources, strict=True):
            rank.attach(source, resends_base=resends_base)

    @property
    def trained_version(self) -> int:
        return self.ranks[0].trained_version

    @trained_version.setter
    def trained_version(self, version: int) -> None:
        for rank in self.ranks:
            rank.trained_version = version

    def run(
        self, stage: str, action: Callable[[ManagedEngine], object], *, members: Collection[int]
    ) -> Failures:
        errors = {index: attempt(lambda: action(self.engines[index]))[1] for index in members}  # noqa: B023
        return {index: str(error) for index, error in errors.items() if error is not None}

    def sync(self) -> Failures:
        """Sync on all ranks at once, as a worker group does, and return what all found."""
        futures = [_THREADS.submit(self._sync, rank) for rank in self.ranks]
        errors = [error for error in (future.exception() for future in futures) if error]
        named = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        for error in named + errors:
            raise error
        answers = [future.result() for future in futures]
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]

    def _sync(self, rank: FusedEngines) -> Failures:
        try:
            return rank.sync()
        except BaseException:
            self._meeting.abort()
            raise
