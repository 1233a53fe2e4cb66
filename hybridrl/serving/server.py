"""A rollout server: one model in several groups of engines, led through one life cycle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hybridrl.config.rollout import RolloutConfig
from hybridrl.errors import DeadlineError, PhaseError
from hybridrl.metrics import Metrics
from hybridrl.serving.engine_handle import EngineHandle, Launch, SamplingEngine
from hybridrl.serving.engine_pool import EnginePool
from hybridrl.serving.group import Futures, ServerGroup
from hybridrl.serving.health import Losses
from hybridrl.serving.plan import ServerPlan
from hybridrl.workers.rollout.protocol import Receiver
from hybridrl.workers.sharding.control import Failures, StageError
from hybridrl.workers.sharding.lifecycle import Action, LifeCycle, SleepLevel
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.states import RESTART, SYNC, State
from hybridrl.workers.sharding.weight_files import Sent, WeightSource, load_weights
from hybridrl.workers.sharding.weight_stream import bucket_bytes_for

_START = "start"


def _unobserved(stage: str) -> AbstractContextManager[None]:
    return nullcontext()


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
    while the others serve: ``start_replacements``, then ``bring_up``. Thread-safe.
    """

    def __init__(
        self,
        plan: ServerPlan,
        launch: Launch,
        *,
        config: RolloutConfig,
        observe: Callable[[str], AbstractContextManager[None]] = _unobserved,
    ) -> None:
        """Start nothing yet.

        Args:
            observe: called with a stage's name; wraps the stage to time and trace it.
        """
        self.model = plan.model
        self.version = -1
        """Policy version of the engines that serve; -1 before the first update."""
        self._groups = [ServerGroup(group, launch) for group in plan.groups]
        self._slots = [
            (group, slot) for group in self._groups for slot in range(len(group.plan.engines))
        ]
        self._index_of = {
            (group.plan.name, slot): index for index, (group, slot) in enumerate(self._slots)
        }
        self.num_engines = len(self._slots)
        self._config = config
        self._observe = observe
        self._weights: WeightSource | Transfer | None = None
        self._wanted_version = -1
        self._life: LifeCycle | None = None
        self._lock = threading.RLock()
        """Held while engines change their states."""
        self._replaced: set[int] = set()
        """Engines with a new process that did not come up yet."""
        self._losses = Losses(plan.model)

    @property
    def states(self) -> tuple[State, ...]:
        """State of each engine."""
        return self._require_started().states

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all engines: encoders before the groups that need their addresses. Idempotent.

        Raises:
            StageError: engines did not start; started ones stay, and a second call starts others.
        """
        if self._life is not None:
            return
        with self._lock:
            for is_encoder in (True, False):
                groups = self._of_type("encoder", included=is_encoder)
                failures = self._start([(g, range(len(g.plan.engines))) for g in groups])
                if failures:
                    raise StageError(_START, failures, of="engine")
            life = LifeCycle(
                self,
                host=None,
                depth=SleepLevel.RELEASE_ALL,
                observe=self._observe,
                stays=True,
                may_miss=[
                    index
                    for index, (group, slot) in enumerate(self._slots)
                    if group.plan.engines[slot].url
                ],
            )
            life.start()
            self._life = life

    def needs_update(self, version: int) -> bool:
        """Return whether the engines have other weights; lost ones get those of the others."""
        self._require_started()
        return self.version != version

    def update(self, source: WeightSource | Transfer, *, version: int) -> None:
        """Bring every engine to READY with these weights; dead ones are replaced. Idempotent.

        Engines that serve pause and drain first, all before any loads; none continues before all
        have loaded. Lost servers that others run are not waited for while an engine is left: the
        recovery brings them back.

        Args:
            source: safetensors of a full model on a disk that all nodes share, which stay until the
                next update, for engines that replace others; or the broadcast of a rank.

        Raises:
            PhaseError: the server was not started, or a stage is open.
            StageError: a stage failed; names the engine. The next update begins with the recovery.
        """
        with self._lock:
            life = self._require_started()
            self._note_dead(life)
            if self.version == version and set(life.states) == {State.READY}:
                return
            self.version = -1
            self._weights, self._wanted_version = source, version
            life.sleep()  # after an update that broke off
            life.wake()
            self.version = version
            self._losses.note_ready(self.ready_engines())

    def serving_engines(self) -> Mapping[int, EngineHandle]:
        """Return the engines that answer requests, by index."""
        return {i: engine for i, engine in self.ready_engines().items() if self.answers(i)}

    def ready_engines(self) -> Mapping[int, EngineHandle]:
        """Return the engines that serve, by index; prefill engines, too, which others ask."""
        with self._lock:
            states = self.states
            return {
                index: group.engine(slot)
                for index, (group, slot) in enumerate(self._slots)
                if states[index] is State.READY
            }

    def answers(self, index: int) -> bool:
        """Whether requests for responses go to an engine when it serves."""
        group, _ = self._slots[index]
        return group.plan.answers

    def pool(self, *, max_context_tokens: int, vocab_size: int, version: int) -> EnginePool:
        """Return the sampler over the engines that answer now, for one program.

        Args:
            max_context_tokens: limit of context + response.
            version: of the weights that must sample.
        """
        return EnginePool(
            self.serving_engines(),
            num_slots=self._config.num_slots,
            max_context_tokens=max_context_tokens,
            vocab_size=vocab_size,
            version=version,
        )

    def shutdown(self) -> None:
        """End all engines. Idempotent."""
        with self._lock:
            for group in self._groups:
                group.clear(range(len(group.plan.engines)))

    # -- engines that are lost -------------------------------------------------------------------

    def lose(self, index: int, handle: SamplingEngine, reason: str) -> bool:
        """Note an engine that failed by its own fault; False if it is noted or replaced already."""
        with self._lock:
            life = self._require_started()
            group, slot = self._slots[index]
            if life.states[index] is not State.READY or group.engine(slot) is not handle:
                return False
            self._break(life, [index], reason)
            return True

    def start_replacements(self) -> Mapping[int, Future[None]]:
        """Start a process in place of each lost engine, without waiting; return the new futures.

        Nothing is started before the first update: no engine has weights that a new one could get.
        """
        with self._lock:
            life = self._require_started()
            self._note_dead(life)
            if self.version < 0:
                return {}
            lost = [
                index
                for index, state in enumerate(life.states)
                if state is State.BROKEN and index not in self._replaced
            ]
            self._replaced.update(lost)
            futures: dict[int, Future[None]] = {}
            for group, slots in self._by_group(lost):
                group.clear(slots)
                started = group.start(slots)
                futures |= {self._index_of[group.plan.name, slot]: started[slot] for slot in slots}
            return futures

    def drop_replacement(self, index: int) -> None:
        """Take a process that did not start in time for lost, too."""
        with self._lock:
            self._replaced.discard(index)

    def bring_up(self, index: int) -> bool:
        """Give a replacement the weights of the others, which serve on and are asked nothing.

        Returns:
            Whether it serves now.
        """
        with self._lock:
            life = self._require_started()
            if self.version >= 0:
                life.recover([index], load=self._loading())
            is_ready = life.states[index] is State.READY
            if is_ready:
                self._losses.note_ready([index])
            return is_ready

    def take_metrics(self) -> Metrics:
        """Return lost and replaced engines since the last call, and reset them."""
        with self._lock:
            return self._losses.take_metrics()

    # -- the set of engines that the life cycle moves --------------------------------------------

    def run(self, stage: str, action: Action, *, members: Collection[int]) -> Failures:
        """Run ``action`` on the engines ``members``; a restart replaces their processes."""
        if stage == RESTART.name:
            self._losses.note_lost(members, "it failed in a stage")
            for group, slots in self._by_group(set(members) - self._replaced):
                group.clear(slots)
            self._replaced.difference_update(members)
            return self._start(self._by_group(members))
        futures = [group.act(action, slots=slots) for group, slots in self._by_group(members)]
        limit_s = self._config.stage_timeout_s
        limit_s += self._config.start_timeout_s if stage == SYNC.name else 0  # as a load of files
        return _describe(self._wait(futures, self._by_group(members), limit_s=limit_s))

    def sync(self) -> Failures:
        """Load the weights of this update into every engine.

        Raises:
            StageError: a broadcast broke off by no fault of an engine; all keep their states.
        """
        present = [i for i, state in enumerate(self.states) if state is not State.BROKEN]
        has_joined = isinstance(self._weights, Transfer)
        if isinstance(self._weights, Transfer) and (failures := self._receive(present)):
            return failures
        return self.run(SYNC.name, self._loading(has_joined=has_joined), members=present)

    def _receive(self, present: Collection[int]) -> Failures:
        """Let the rank that gathers the weights send them to these engines."""
        if not isinstance(self._weights, Transfer):
            raise PhaseError("nobody sends weights: call update")
        everyone = self._by_group(present)
        futures = [group.act(ManagedEngine.join, slots=slots) for group, slots in everyone]
        if errors := self._wait(futures, everyone, limit_s=self._config.stage_timeout_s):
            return _describe(errors)
        ready = self._by_index(futures, everyone)
        self._weights.receivers.set_result({i: each.result() for i, each in ready.items()})
        sent = self._weights.sent.result()
        if sent.copy is None and not sent.failures:
            raise StageError(SYNC.name, dict.fromkeys(present, sent.reason), of="engine")
        self._weights = sent.copy
        return sent.failures

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

    def _start(self, members: Sequence[tuple[ServerGroup, Collection[int]]]) -> Failures:
        """Fill the empty slots among these, all at once; slots that failed are empty again."""
        futures = [group.start(slots) for group, slots in members]
        started = [
            (group, tuple(of_group)) for (group, _), of_group in zip(members, futures, strict=True)
        ]
        errors = self._wait(futures, started, limit_s=self._config.start_timeout_s)
        for index in errors:
            group, slot = self._slots[index]
            group.clear([slot])
        return _describe(errors)

    def _wait(
        self,
        futures: Sequence[Futures],
        members: Sequence[tuple[ServerGroup, Collection[int]]],
        *,
        limit_s: float,
    ) -> dict[int, BaseException]:
        """Wait for all calls; return the errors of those that failed or are late, by engine."""
        by_index = self._by_index(futures, members)
        wait(by_index.values(), timeout=limit_s)
        errors = {index: _error_of(future, limit_s) for index, future in by_index.items()}
        return {index: error for index, error in errors.items() if error is not None}

    # -- who is where ----------------------------------------------------------------------------

    def _by_index(
        self,
        futures: Sequence[Futures],
        members: Sequence[tuple[ServerGroup, Collection[int]]],
    ) -> dict[int, Future[Any]]:
        return {
            self._index_of[group.plan.name, slot]: of_group[slot]
            for (group, slots), of_group in zip(members, futures, strict=True)
            for slot in slots
        }

    def _by_group(self, members: Collection[int]) -> list[tuple[ServerGroup, list[int]]]:
        of_groups: dict[str, tuple[ServerGroup, list[int]]] = {}
        for group, slot in (self._slots[index] for index in members):
            of_groups.setdefault(group.plan.name, (group, []))[1].append(slot)
        return list(of_groups.values())

    def _of_type(self, worker_type: str, *, included: bool) -> list[ServerGroup]:
        return [g for g in self._groups if (g.plan.worker_type == worker_type) is included]

    def _note_dead(self, life: LifeCycle) -> None:
        gone = [
            self._index_of[group.plan.name, slot]
            for group in self._groups
            for slot in group.find_dead()
        ]
        dead = [index for index in gone if life.states[index] is not State.BROKEN]
        if dead:
            self._break(life, dead, "its process is gone")

    def _break(self, life: LifeCycle, members: Collection[int], reason: str) -> None:
        life.mark_broken(members)
        self._losses.note_lost(members, reason)

    def _require_started(self) -> LifeCycle:
        if self._life is None:
            raise PhaseError(f"server {self.model} was not started; call start")
        return self._life


def _error_of(future: Future[None], limit_s: float) -> BaseException | None:
    if not future.done():
        return DeadlineError(f"no answer within {limit_s:g} s")
    return future.exception()


def _describe(errors: Mapping[int, BaseException]) -> Failures:
    return {index: f"{type(error).__name__}: {error}" for index, error in errors.items()}
