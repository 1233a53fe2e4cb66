"""A rollout server: one model in several groups of engines, led through one life cycle."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hybridrl.config.rollout import RolloutConfig
from hybridrl.errors import DeadlineError, EngineError, PhaseError
from hybridrl.metrics import Metrics
from hybridrl.serving.engine_handle import EngineHandle, Launch
from hybridrl.serving.engine_pool import EnginePool
from hybridrl.serving.health import Losses
from hybridrl.serving.plan import ModelPlan
from hybridrl.workers.rollout.protocol import Receiver
from hybridrl.workers.sharding.control import Failures, StageError
from hybridrl.workers.sharding.lifecycle import RESTART, SYNC, Action, LifeCycle, SleepLevel, State
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.weight_files import (
    AdaptedWeights,
    Sent,
    WeightSource,
    add_adapter,
    load_weights,
)
from hybridrl.workers.sharding.weight_stream import bucket_bytes_for

log = logging.getLogger(__name__)

_START = "start"


@dataclass(frozen=True, slots=True)
class Transfer:
    """A broadcast: the manager stops the engines, and the rank that gathers sends to them."""

    receivers: Future[Mapping[int, Receiver]] = field(default_factory=Future)
    """Engines that have stopped and join."""

    sent: Future[Sent] = field(default_factory=Future)

    def end(self, sent: Sent) -> None:
        """End the wait of the manager. Idempotent."""
        with suppress(InvalidStateError):
            self.sent.set_result(sent)


class RolloutServer:
    """Engines of all groups as one set, in the order of the plan.

    It owns the order between groups: all engines end a stage before any begins the next. They have
    devices of their own and serve while the trainer computes. An engine that is lost is replaced
    while the others serve: ``lose`` or ``claim_lost``, then ``replace``. Thread-safe.
    """

    def __init__(self, plan: ModelPlan, launch: Launch, *, config: RolloutConfig) -> None:
        self.model = plan.model
        self.version = -1
        """Policy version of the engines that serve; -1 before the first update."""
        self._launch = launch
        self._places = plan.engines
        self.num_engines = len(self._places)
        self._handles: list[EngineHandle | None] = [None] * self.num_engines
        """Of the processes; None: it died, or was not started yet."""
        self._starts: dict[int, Future[None]] = {}
        """Of the newest process of each engine."""
        self._coming: dict[int, EngineHandle | None] = {}
        """Lost engines that somebody replaces, and their new processes; None: not started yet."""
        self._config = config
        self._weights: WeightSource | Transfer | None = None
        self._wanted_version = -1
        self._life = LifeCycle(
            self,
            host=None,
            depth=SleepLevel.RELEASE_ALL,
            observe=lambda _: nullcontext(),
            stays=True,
            may_miss=[index for index, engine in enumerate(self._places) if engine.url],
        )
        self._lock = threading.RLock()
        """Held while engines change their states."""
        self._losses = Losses(plan.model)

    @property
    def states(self) -> tuple[State, ...]:
        """State of each engine."""
        return self._life.states

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all engines. Idempotent: after a StageError a second call starts those missing."""
        with self._lock:
            new = [index for index, state in enumerate(self.states) if state is State.BOOT]
            if failures := self._start(new):
                raise StageError(_START, failures, of="engine")
            self._life.start()

    def update(self, source: WeightSource | Transfer, *, version: int) -> None:
        """Bring every engine to READY with these weights; dead ones are replaced. Idempotent.

        Engines that serve pause and drain first, all before any loads; none continues before all
        have loaded. Lost servers that others run are waited for only if no engine is left. Files of
        weights stay until the next update, for engines that replace others. A StageError names the
        engines that failed; the next update begins with their recovery.
        """
        with self._lock:
            self._note_dead()
            if self.version == version and set(self.states) == {State.READY}:
                return
            self.version = -1
            self._weights, self._wanted_version = source, version
            self._life.sleep()  # after an update that broke off
            self._life.wake()
            self.version = version
            self._losses.note_ready(self.ready_engines())

    @contextmanager
    def adding_adapter(
        self, source: AdaptedWeights, *, version: int, kept: Collection[int]
    ) -> Iterator[Mapping[int, EngineHandle]]:
        """Let engines that serve load an adapter beside those of ``kept`` versions, without a stop.

        Yields those that have it, for requests to use it, before any engine changes its state. The
        others are lost: they are to be claimed, and get this adapter. A StageError if all are: then
        they get the one before.
        """
        with self._lock:
            self._note_dead()
            engines = self.ready_engines()
            action = partial(add_adapter, source=source, version=version, kept=kept)
            failures = self.run("add_adapter", action, members=engines)
            for index, reason in failures.items():
                self._losses.note_lost([index], reason)
            self._life.mark_broken(failures)
            if len(failures) == len(engines):
                raise StageError(SYNC.name, failures, of="engine")
            self._weights, self._wanted_version, self.version = source, version, version
            log.info("an adapter came beside others: version=%d kept=%s", version, sorted(kept))
            yield self.serving_engines()

    def serving_engines(self) -> Mapping[int, EngineHandle]:
        """Return the engines that answer requests, by index."""
        ready = self.ready_engines().items()
        return {i: engine for i, engine in ready if self._places[i].answers}

    def ready_engines(self) -> Mapping[int, EngineHandle]:
        """Return the engines that serve, by index; prefill engines, too, which others ask."""
        with self._lock:
            states = enumerate(self.states)
            return {i: self._handle(i) for i, state in states if state is State.READY}

    def pool(self, *, max_context_tokens: int, vocab_size: int, version: int) -> EnginePool:
        """Return the sampler over the engines that answer now, for one program."""
        return EnginePool(
            self.serving_engines(),
            num_slots=self._config.num_slots,
            max_context_tokens=max_context_tokens,
            vocab_size=vocab_size,
            version=version,
        )

    def shutdown(self) -> None:
        """End all engines; none is replaced from now on. Idempotent."""
        with self._lock:
            self.version = -1
            self._clear(range(self.num_engines))

    # -- engines that are lost -------------------------------------------------------------------

    def lose(self, index: int, handle: EngineHandle, reason: str) -> bool:
        """Note an engine that failed. True: nobody knew, and the caller is to ``replace`` it."""
        with self._lock:
            if self.states[index] is not State.READY or self._handles[index] is not handle:
                return False
            self._life.mark_broken([index])
            self._losses.note_lost([index], reason)
            if index in self._coming:
                return False
            self._coming[index] = None
            return True

    def claim_lost(self) -> list[int]:
        """Return lost engines for the caller to ``replace``; none before the first update."""
        with self._lock:
            self._note_dead()
            if self.version < 0:
                return []
            lost = [
                index
                for index, state in enumerate(self.states)
                if state is State.BROKEN and index not in self._coming
            ]
            self._losses.note_lost(lost, "it failed in a stage")  # those that an update left out
            self._coming |= dict.fromkeys(lost)
            return lost

    def coming(self) -> list[int]:
        """Return the engines that somebody replaces, and that will answer requests."""
        with self._lock:
            return [index for index in self._coming if self._places[index].answers]

    def replace(self, index: int) -> str:
        """Start a process in place of a lost engine, and give it the weights of the others.

        These serve on and are asked nothing. An update may bring up the process meanwhile. Returns
        why it does not serve (try again, or ``give_up``); empty if it does.
        """
        timeout_s = self._config.start_timeout_s
        with self._lock:
            if self.version < 0:
                return "no engine has weights that a new one could get"
            if self.states[index] is not State.BROKEN:
                self._coming.pop(index, None)
                return ""
            self._clear([index])
            start = self._begin([index])[index]
            handle = self._coming[index] = self._handles[index]
        wait([start], timeout=timeout_s)
        with self._lock:
            if self.states[index] is State.BROKEN and self._handles[index] is handle:
                if not start.done():
                    return f"it did not start within {timeout_s:g} s"
                if self.version >= 0:
                    self._life.recover([index], load=self._loading())
            if self.states[index] is State.READY:
                self._coming.pop(index, None)
                self._losses.note_ready([index])
                return ""
        if start.cancelled():
            return "its process ended while it started"
        failed = start.exception() if start.done() else None
        return str(failed or "it did not get the weights; see the log")

    def give_up(self, index: int) -> None:
        """Leave a lost engine to the next ``claim_lost``, or to an update."""
        with self._lock:
            self._coming.pop(index, None)

    def profile(self, stem: Path | None) -> None:
        """Let each engine that is there profile itself; of one that cannot the log says why."""
        with self._lock:
            handles = dict(enumerate(self._handles))
        futures = {
            i: handle.act(partial(ManagedEngine.profile, stem=stem and Path(f"{stem}.server-{i}")))
            for i, handle in handles.items()
            if handle is not None and handle.is_alive()
        }
        failures = _failures_of(futures, limit_s=self._config.start_timeout_s)
        for index, reason in failures.items():
            log.warning("engine %d of %s writes no profile: %s", index, self.model, reason)

    def take_metrics(self) -> Metrics:
        """Return lost and replaced engines since the last call, and reset them."""
        with self._lock:
            return self._losses.take_metrics()

    # -- the set of engines that the life cycle moves --------------------------------------------

    def run(self, stage: str, action: Action, *, members: Collection[int]) -> Failures:
        """Run ``action`` on the engines ``members``; a restart replaces their processes."""
        if stage == RESTART.name:
            self._losses.note_lost(members, "it failed in a stage")
            self._clear([index for index in members if self._coming.get(index) is None])
            self._coming |= dict.fromkeys(self._coming.keys() & set(members))
            return self._start(members)
        futures = {index: self._handle(index).act(action) for index in members}
        limit_s = self._config.stage_timeout_s
        limit_s += self._config.start_timeout_s if stage == SYNC.name else 0  # as a load of files
        return _failures_of(futures, limit_s=limit_s)

    def sync(self) -> Failures:
        """Load the weights of this update into every engine.

        A StageError if a broadcast broke off by no fault of an engine: all keep their states.
        """
        present = [i for i, state in enumerate(self.states) if state is not State.BROKEN]
        transfer = self._weights if isinstance(self._weights, Transfer) else None
        if transfer is not None:
            futures = {index: self._handle(index).act(ManagedEngine.join) for index in present}
            if failures := _failures_of(futures, limit_s=self._config.stage_timeout_s):
                return failures
            transfer.receivers.set_result({i: joined.result() for i, joined in futures.items()})
            sent = transfer.sent.result()
            if sent.copy is None and not sent.failures:
                raise StageError(SYNC.name, dict.fromkeys(present, sent.reason), of="engine")
            self._weights = sent.copy
            if sent.failures:
                return sent.failures
        action = self._loading(has_joined=transfer is not None)
        return self.run(SYNC.name, action, members=present)

    def _loading(self, *, has_joined: bool = False) -> Action:
        """Return the last edge of an update: an engine loads the weights, or has got them."""
        if self._weights is None or isinstance(self._weights, Transfer):
            raise PhaseError("there are no weights to load: call update")
        return partial(
            load_weights,
            source=self._weights,
            version=self._wanted_version,
            bucket_bytes=bucket_bytes_for(self._config.bucket_mib, torch.device("cpu")),
            has_joined=has_joined,
        )

    # -- processes -------------------------------------------------------------------------------

    def _start(self, members: Collection[int]) -> Failures:
        """Start engines that have no process: encoders, then all others, which ask these.

        Those that failed have none again.
        """
        encoders = [i for i in members if self._places[i].worker_type == "encoder"]
        failures: dict[int, str] = {}
        for phase in (encoders, [index for index in members if index not in encoders]):
            failures |= _failures_of(self._begin(phase), limit_s=self._config.start_timeout_s)
        self._clear(failures)
        return failures

    def _begin(self, members: Collection[int]) -> dict[int, Future[None]]:
        """Start the processes that are missing, without waiting; return the starts of all."""
        for index in members:
            if self._handles[index] is None:
                handle = self._handles[index] = self._launch(self._places[index])
                self._starts[index] = handle.build()
        return {index: self._starts[index] for index in members}

    def _clear(self, members: Collection[int]) -> None:
        for index in members:
            handle, self._handles[index] = self._handles[index], None
            if handle is not None:
                handle.end()

    def _handle(self, index: int) -> EngineHandle:
        handle = self._handles[index]
        if handle is None:
            raise EngineError(f"engine {index} of {self.model} is gone; recover it first")
        return handle

    def _note_dead(self) -> None:
        dead = [
            index
            for index, handle in enumerate(self._handles)
            if self.states[index] is not State.BROKEN and (handle is None or not handle.is_alive())
        ]
        if dead:
            self._life.mark_broken(dead)
            self._losses.note_lost(dead, "its process is gone")


def _failures_of(futures: Mapping[int, Future[Any]], *, limit_s: float) -> Failures:
    """Wait for all calls; return why some failed or are late, by engine."""
    wait(futures.values(), timeout=limit_s)
    failures = {}
    for index, future in futures.items():
        late = DeadlineError(f"no answer within {limit_s:g} s")
        error = future.exception() if future.done() else late
        if error is not None:
            failures[index] = f"{type(error).__name__}: {error}"
    return failures
