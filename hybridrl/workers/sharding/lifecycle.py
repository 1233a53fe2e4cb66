"""The life cycle of rollout engines: states, edges, and the one order in which they are taken.

::

    BOOT ---------> ASLEEP          engines start before the trainer fills the device
    READY -> PAUSED -> DRAINED -> ASLEEP -> WEIGHTS_UP -> SYNCED -> CACHE_UP -> READY
    PAUSED | DRAINED -> READY       roll back: nothing was released yet
    DRAINED -> SYNCED               weights updated without sleeping
    DRAINED | SYNCED -> KV_ASLEEP   base weights stay (LoRA), only KV cache and graphs are released
    KV_ASLEEP -> SYNCED
    WEIGHTS_UP | SYNCED | CACHE_UP -> ASLEEP    unwind: a wake-up failed
    any -> BROKEN -> BOOT           an engine that failed after a release is restarted, never
    resumed

Every edge is done by all engines of a set before any starts the next. In a fused worker group each
rank
runs this same code and the set exchanges statuses, so all ranks see the same states.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from hybridrl.errors import PhaseError
from hybridrl.workers.sharding.control import Failures, StageError
from hybridrl.workers.sharding.managed_engine import ManagedEngine

log = logging.getLogger(__name__)


class State(Enum):
    """Where an engine is in its life."""

    BOOT = "boot"
    READY = "ready"
    PAUSED = "paused"
    DRAINED = "drained"
    ASLEEP = "asleep"
    KV_ASLEEP = "kv_asleep"
    WEIGHTS_UP = "weights_up"
    SYNCED = "synced"
    CACHE_UP = "cache_up"
    BROKEN = "broken"


class Depth(Enum):
    """How deep engines sleep while the trainer works."""

    NOTHING = "nothing"
    """They stop serving and keep their memory."""

    CACHE = "cache"
    """KV cache and graphs go, weights stay."""

    EVERYTHING = "everything"
    """Weights go too."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One legal move."""

    name: str
    sources: frozenset[State]
    target: State


def _edge(name: str, sources: Collection[State], target: State) -> Edge:
    return Edge(name, frozenset(sources), target)


START = _edge("start", {State.BOOT}, State.ASLEEP)
PAUSE = _edge("pause", {State.READY}, State.PAUSED)
DRAIN = _edge("drain", {State.PAUSED}, State.DRAINED)
ROLL_BACK = _edge("roll_back", {State.PAUSED, State.DRAINED}, State.READY)
RELEASE = _edge("release", {State.DRAINED}, State.ASLEEP)
RELEASE_CACHE = _edge("release_cache", {State.DRAINED, State.SYNCED}, State.KV_ASLEEP)
RESUME_WEIGHTS = _edge("resume_weights", {State.ASLEEP}, State.WEIGHTS_UP)
SYNC = _edge("sync", {State.WEIGHTS_UP, State.DRAINED, State.KV_ASLEEP}, State.SYNCED)
RESUME_CACHE = _edge("resume_cache", {State.SYNCED}, State.CACHE_UP)
CONTINUE = _edge("continue", {State.CACHE_UP}, State.READY)
UNWIND = _edge("unwind", {State.WEIGHTS_UP, State.SYNCED, State.CACHE_UP}, State.ASLEEP)
BREAK = _edge("break", set(State), State.BROKEN)
RESTART = _edge("restart", {State.BROKEN}, State.BOOT)
EDGES: tuple[Edge, ...] = (
    *(START, PAUSE, DRAIN, ROLL_BACK, RELEASE, RELEASE_CACHE),
    *(RESUME_WEIGHTS, SYNC, RESUME_CACHE, CONTINUE),
    *(UNWIND, BREAK, RESTART),
)

_HARMLESS = (PAUSE, DRAIN)
"""Edges whose failure loses nothing: the engine keeps its state and may be asked again."""

_RESTING = {State.ASLEEP, State.KV_ASLEEP, State.DRAINED, State.BROKEN}


class EngineSet(Protocol):
    """Engines that change state together: local ones under a control group, or remote servers."""

    num_engines: int

    def run(
        self, stage: str, action: Callable[[ManagedEngine], None], *, members: Collection[int]
    ) -> Failures:
        """Do ``action`` on the engines ``members``, wait for all; return the failed ones."""
        ...

    def sync(self) -> Failures:
        """Send the training weights to every engine, and return the failed ones with reasons."""
        ...


class Host(Protocol):
    """The training side of the device.

    Each method runs on all ranks and raises StageError on all alike.
    """

    def make_room(self) -> None:
        """Take optimizer state and gradients off the device."""
        ...

    def leave(self) -> None:
        """Take the parameters off the device; nothing of any tenant may be left on it."""
        ...

    def come_back(self) -> None:
        """Bring everything back that left. Does nothing if nothing did."""
        ...


class LifeCycle:
    """Drives one set of engines along the edges above. The only caller of an engine's edges."""

    def __init__(
        self,
        engines: EngineSet,
        *,
        host: Host,
        depth: Depth,
        observe: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """Take over engines that have just started.

        Args:
            engines: the set; all its engines are at BOOT.
            host: whoever shares the device with them.
            depth: how deep they sleep.
            observe: called with a stage's name; wraps the stage to time and trace it.
        """
        self._engines = engines
        self._host = host
        self._depth = depth
        self._observe = observe
        self._states = [State.BOOT] * engines.num_engines

    @property
    def states(self) -> tuple[State, ...]:
        """State of each engine of the set; they differ only while a failure is being handled."""
        return tuple(self._states)

    @property
    def is_at_rest(self) -> bool:
        """True if no engine serves or is on its way: training may use the device."""
        return set(self._states) <= _RESTING

    def describe(self) -> str:
        """Say which engine is where."""
        return ", ".join(f"{index}: {state.name}" for index, state in enumerate(self._states))

    def start(self) -> None:
        """BOOT -> ASLEEP, before the trainer fills the device."""
        self._take(START, ManagedEngine.release_all)

    def sleep(self) -> None:
        """Stop serving and give the device back. Idempotent.

        Raises:
            StageError: an engine did not pause or drain: nothing was released, all serve again
                where they
                can. Or a broken engine did not restart: the training state is back all the same.
        """
        if self.is_at_rest:
            return
        try:
            self._take(PAUSE, ManagedEngine.pause)
            self._take(DRAIN, ManagedEngine.drain)
        except StageError:
            self._roll_back()
            raise
        release_error = self._release_drained()
        self._host_stage("come_back", self._host.come_back)
        if release_error is not None:
            raise release_error

    def wake(self) -> None:
        """Lend the device to the engines, loaded with the newest training weights. Idempotent.

        Each stage ends on all ranks before the next begins, so that the KV cache never shares the
        device with training state:

        1. optimizer state and gradients leave
        2. engines resume their weights: both copies are resident now, the peak
        3. weights are streamed, bucket by bucket
        4. training parameters leave
        5. engines resume KV cache and graphs
        6. engines serve

        Raises:
            StageError: a stage failed. Completed stages were unwound: the training state is back,
                and
                engines are asleep or, if they did not restart, BROKEN.
        """
        if set(self._states) == {State.READY}:
            return
        self._require_at_rest()
        shares_device = self._depth is not Depth.NOTHING
        try:
            self._restart_broken()
            if shares_device:
                self._host_stage("make_room", self._host.make_room)
            self._take(
                RESUME_WEIGHTS, ManagedEngine.resume_weights, members=self._where(State.ASLEEP)
            )
            self._sync()
            if shares_device:
                self._host_stage("leave", self._host.leave)
            self._take(RESUME_CACHE, ManagedEngine.resume_cache)
            self._take(CONTINUE, ManagedEngine.continue_generation)
        except StageError:
            self._unwind()
            raise

    # -- what the verbs are made of -------------------------------------------------------------

    def _require_at_rest(self) -> None:
        if not self.is_at_rest:
            raise PhaseError(
                f"wake needs engines at rest, they are {self.describe()}; "
                "the last sleep failed: call sleep again"
            )

    def _take(
        self,
        edge: Edge,
        action: Callable[[ManagedEngine], None],
        *,
        members: Collection[int] | None = None,
    ) -> None:
        """Move ``members`` (default.

        All) along ``edge``; engines that fail after a release are BROKEN.
        """
        members = range(len(self._states)) if members is None else members
        self._require(edge, members)
        with self._observe(edge.name):
            failures = self._engines.run(edge.name, action, members=members)
        for index in members:
            if index not in failures:
                self._states[index] = edge.target
            elif edge not in _HARMLESS:
                self._states[index] = State.BROKEN
        if failures:
            raise StageError(edge.name, failures, of="engine")

    def _require(self, edge: Edge, members: Collection[int]) -> None:
        for index in members:
            state = self._states[index]
            if state not in edge.sources:
                legal = ", ".join(e.name for e in EDGES if state in e.sources)
                raise PhaseError(
                    f"engine {index} is {state.name}: {edge.name} is not legal there; "
                    f"legal are {legal}"
                )

    def _sync(self) -> None:
        everyone = range(len(self._states))
        self._require(SYNC, everyone)
        with self._observe(SYNC.name):
            failures = self._engines.sync()
        if failures:  # the sources stay: a half-sent engine is told from a whole one by its ledger
            raise StageError(SYNC.name, failures, of="engine")
        self._states = [State.SYNCED] * len(self._states)

    def _host_stage(self, name: str, action: Callable[[], None]) -> None:
        with self._observe(name):
            action()

    def _roll_back(self) -> None:
        """Before the first release: whoever can serve again does; the others are BROKEN."""
        stopped = self._where(State.PAUSED, State.DRAINED)
        if stopped:
            self._forgiving(ROLL_BACK, ManagedEngine.continue_generation, stopped)

    def _release_drained(self) -> StageError | None:
        """Release to the configured depth.

        Restart engines that fail. Returns what could not be mended.
        """
        try:
            if self._depth is Depth.EVERYTHING:
                self._take(RELEASE, ManagedEngine.release_all)
            elif self._depth is Depth.CACHE:
                self._take(RELEASE_CACHE, ManagedEngine.release_cache)
            return None
        except StageError as error:
            log.warning("an engine failed to release, restarting it: %s", error)
        try:
            self._restart_broken()
            return None
        except StageError as error:
            return error

    def _restart_broken(self) -> None:
        """BROKEN -> BOOT -> ASLEEP."""
        broken = self._where(State.BROKEN)
        if broken:
            self._take(RESTART, ManagedEngine.restart, members=broken)
            self._take(START, ManagedEngine.release_all, members=broken)

    def _unwind(self) -> None:
        """After a failed wake-up.

        Engines put down what they took up, then the training state returns.
        """
        serving = self._where(State.READY)
        if serving:
            self._forgiving(PAUSE, ManagedEngine.pause, serving)
            self._break(self._where(State.READY))
            self._forgiving(DRAIN, ManagedEngine.drain, self._where(State.PAUSED))
            self._break(self._where(State.PAUSED))
            if self._depth is not Depth.NOTHING:
                self._forgiving(RELEASE, ManagedEngine.release_all, self._where(State.DRAINED))
        risen = self._where(State.WEIGHTS_UP, State.SYNCED, State.CACHE_UP)
        if risen:
            self._forgiving(UNWIND, ManagedEngine.release_all, risen)
        try:
            self._restart_broken()
        except StageError:
            log.exception("an engine did not restart; the next wake-up tries again")
        self._host_stage("come_back", self._host.come_back)

    def _forgiving(
        self, edge: Edge, action: Callable[[ManagedEngine], None], members: Collection[int]
    ) -> None:
        """Take an edge while handling a failure.

        A second failure is logged, the first one is raised.
        """
        if not members:
            return
        try:
            self._take(edge, action, members=members)
        except StageError as error:
            log.warning("while unwinding: %s", error)

    def _break(self, members: Collection[int]) -> None:
        for index in members:
            self._states[index] = State.BROKEN

    def _where(self, *states: State) -> list[int]:
        return [index for index, state in enumerate(self._states) if state in states]
