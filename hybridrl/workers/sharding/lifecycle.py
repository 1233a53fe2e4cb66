"""The life cycle of rollout engines: its states, the legal edges, and the order of taking them.

A test compares the drawing in docs/rollout-engines.md with this file. All engines of a set complete
an edge before any of them starts the next. In a fused worker group each rank runs this same code
and the set exchanges statuses, so all ranks see the same states.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from hybridrl.errors import PhaseError
from hybridrl.workers.sharding.control import Failures, StageError
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.offloadable_models import OffloadableModels

log = logging.getLogger(__name__)


class State(Enum):
    """State of an engine in its life cycle."""

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


RESTING = frozenset({State.ASLEEP, State.KV_ASLEEP, State.DRAINED, State.BROKEN})
"""States of an engine that neither serves nor is about to."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One legal move."""

    name: str
    sources: tuple[State, ...]
    target: State

    if_failed: State = State.BROKEN
    """State of an engine whose move failed: only as much as can be trusted."""


START = Edge("start", (State.BOOT,), State.ASLEEP)
PAUSE = Edge("pause", (State.READY,), State.PAUSED, if_failed=State.PAUSED)
DRAIN = Edge("drain", (State.PAUSED,), State.DRAINED, if_failed=State.PAUSED)
ROLL_BACK = Edge("roll_back", (State.PAUSED, State.DRAINED), State.READY)
RELEASE = Edge("release", (State.DRAINED,), State.ASLEEP)
RELEASE_CACHE = Edge(
    "release_cache",
    (State.DRAINED, State.WEIGHTS_UP, State.SYNCED, State.CACHE_UP),
    State.KV_ASLEEP,
)
RESUME_WEIGHTS = Edge("resume_weights", (State.ASLEEP,), State.WEIGHTS_UP)
SYNC = Edge("sync", (State.WEIGHTS_UP, State.DRAINED, State.KV_ASLEEP), State.SYNCED)
RESUME_CACHE = Edge("resume_cache", (State.SYNCED,), State.CACHE_UP)
CONTINUE = Edge("continue", (State.CACHE_UP,), State.READY)
UNWIND = Edge("unwind", (State.WEIGHTS_UP, State.SYNCED, State.CACHE_UP), State.ASLEEP)
BREAK = Edge("break", tuple(State), State.BROKEN)
RESTART = Edge("restart", (State.BROKEN,), State.BOOT)

EDGES = (
    *(START, PAUSE, DRAIN, ROLL_BACK, RELEASE, RELEASE_CACHE),
    *(RESUME_WEIGHTS, SYNC, RESUME_CACHE, CONTINUE),
    *(UNWIND, BREAK, RESTART),
)
"""Every edge there is; all others raise PhaseError."""


Action = Callable[[ManagedEngine], object]


class LifeCycleMembers(Protocol):
    """Engines that change state together: local ones under a control group, or remote servers."""

    num_engines: int

    def run(self, stage: str, action: Action, *, members: Collection[int]) -> Failures:
        """Run ``action`` on the engines ``members``, wait for all; return the failed ones."""

    def sync(self) -> Failures:
        """Send the training weights to every engine, and return the failed ones."""


class SleepLevel(Enum):
    """Memory that engines release while the trainer works."""

    KEEP_ALL = "keep_all"  # engines stop serving and keep their memory

    RELEASE_CACHE = "release_cache"  # release KV cache and graphs; keep the weights

    RELEASE_ALL = "release_all"  # release the weights, too


class LifeCycle:
    """Moves one set of engines along the edges. The only caller of an engine's edges.

    What moves them raises PhaseError if a stage did not end, or ended in another error than a
    StageError.
    """

    def __init__(
        self,
        engines: LifeCycleMembers,
        *,
        host: OffloadableModels | None,
        depth: SleepLevel,
        observe: Callable[[str], AbstractContextManager[None]],
        stays: bool = False,
        may_miss: Collection[int] = (),
    ) -> None:
        """Take over engines that have just started: all are at BOOT.

        Args:
            host: the training engines that share the device with them; None if others move them.
            observe: called with a stage's name; wraps the stage to time and trace it.
            stays: whether the engines have devices of their own. They serve on while training
                computes, and stop only to take weights.
            may_miss: engines that the others do not wait for while they are BROKEN: other people
                start them. They are restarted by ``recover``, or when no other engine is left.
        """
        self._engines = engines
        self._host = host
        self._depth = depth
        self._observe = observe
        self._stays = stays
        self._may_miss = frozenset(may_miss)
        self._states = [State.BOOT] * engines.num_engines
        self._is_host_home = True
        self._open_stage: str | None = None

    @property
    def states(self) -> tuple[State, ...]:
        """State of each engine of the set; they differ only after a failure."""
        return tuple(self._states)

    @property
    def may_train(self) -> bool:
        """Whether all engines sleep, but those that stay, and the training state is resident."""
        return self._open_stage is None and self._is_host_home and not self._awake()

    def describe(self) -> str:
        """Describe the state of each engine, and of the training state."""
        engines = ", ".join(f"{index}: {state.name}" for index, state in enumerate(self._states))
        broken_off = "" if self._open_stage is None else f"; {self._open_stage} did not end"
        home = "in" if self._is_host_home else "out"
        return f"engines are {engines}; training state is {home}{broken_off}"

    def start(self) -> None:
        """BOOT -> ASLEEP, before the trainer fills the device."""
        self._transition(START, ManagedEngine.start, members=self._where(State.BOOT))

    def sleep(self) -> None:
        """Stop serving and return the device to training; engines that stay serve on. Idempotent.

        Raises:
            StageError: an engine did not pause or drain: nothing was released, and all engines that
                can serve again do. Or a broken engine did not restart: the training state is
                resident nevertheless. Or the training state did not return. Call again to retry.
        """
        self._require_whole()
        if self.may_train:
            return
        awake = self._awake()
        self._stop(awake)
        try:
            self._release(awake)
            self._restart_broken()
        finally:
            self._come_back()

    def wake(self) -> None:
        """Lend the device to the engines, loaded with the newest training weights. Idempotent.

        Engines that stay pause and drain first; call it only if there are new weights for them.
        Each stage ends on all ranks before the next begins, so that the KV cache never shares the
        device with training state:

        1. offload optimizer state and gradients
        2. engines resume their weights: both copies are resident now, the peak
        3. stream the weights, bucket by bucket
        4. offload training parameters
        5. engines resume KV cache and graphs
        6. engines serve

        Raises:
            PhaseError: an engine still serves or is between states, after a sleep that failed.
            StageError: a stage failed. Completed stages were undone: the training state is
                resident, and engines are asleep or, if they did not restart, BROKEN.
        """
        self._require_whole()
        serving = self._where(State.READY)
        if set(self._states) == {State.READY} and not self._stays:
            return
        if self._awake():
            raise PhaseError(f"wake needs engines at rest, but {self.describe()}; sleep first")
        try:
            self._restart_broken()  # while those that stay still serve
        finally:
            self._come_back()
        self._stop(serving)
        try:
            self._make_room()
            asleep = self._where(State.ASLEEP)
            self._transition(RESUME_WEIGHTS, ManagedEngine.resume_weights, members=asleep)
            self._sync()
            self._leave()
            self._transition(RESUME_CACHE, ManagedEngine.resume_cache, members=self._present)
            self._transition(CONTINUE, ManagedEngine.continue_generation, members=self._present)
        except StageError:
            self._unwind()
            raise

    def recover(self, members: Collection[int], *, load: Action) -> list[int]:
        """Bring restarted engines to READY, while the others serve and are asked nothing.

        For engines that share no device with training state. Those that are not BROKEN are left
        alone. ``load`` loads the weights with which the others serve. Returns the engines that
        serve now; others are BROKEN again.
        """
        self._require_whole()
        broken = set(self._where(State.BROKEN))
        arrived = [index for index in members if index in broken]
        for edge, action in (
            (RESTART, ManagedEngine.restart),
            (START, ManagedEngine.start),
            (RESUME_WEIGHTS, ManagedEngine.resume_weights),
            (SYNC, load),
            (RESUME_CACHE, ManagedEngine.resume_cache),
            (CONTINUE, ManagedEngine.continue_generation),
        ):
            arrived = self._try_transition(edge, action, members=arrived)
        return arrived

    def mark_broken(self, members: Collection[int]) -> None:
        """Note engines whose process is gone: they are asked nothing, and restarted next."""
        self._require_whole()
        self._break(members)

    # -- one stage -------------------------------------------------------------------------------

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Run a stage that succeeds, or ends in a StageError, which all ranks raise and handle."""
        # After any other error (a deadline, ranks at different stages) ranks do not know each
        # other's state: the stage stays open for good, so no rank serves or trains.
        self._open_stage = name
        try:
            with self._observe(name):
                yield
        except StageError:
            self._open_stage = None
            raise
        self._open_stage = None

    def _require_whole(self) -> None:
        if self._open_stage is not None:
            raise PhaseError(
                f"stage {self._open_stage} did not end, so no rank knows where the engines of the "
                f"others are ({self.describe()}); end the worker group and start a new one"
            )

    # -- engines: one edge each ------------------------------------------------------------------

    def _transition(self, edge: Edge, action: Action, *, members: Collection[int]) -> None:
        """Move ``members`` along ``edge``; those that fail take the edge's failure state."""
        if not members:
            return
        self._require(edge, members)
        with self._stage(edge.name):
            failures = self._engines.run(edge.name, action, members=members)
        for index in members:
            self._states[index] = edge.if_failed if index in failures else edge.target
        if failures:
            raise StageError(edge.name, failures, of="engine")

    def _try_transition(self, edge: Edge, action: Action, *, members: Collection[int]) -> list[int]:
        """Move ``members`` while a failure is handled; a second is logged. Returns the arrivals."""
        try:
            self._transition(edge, action, members=members)
        except StageError as error:
            log.warning("while handling a failure: %s", error)
            return [index for index in members if index not in error.failures]
        return list(members)

    def _sync(self) -> None:
        present = self._present
        self._require(SYNC, present)
        with self._stage(SYNC.name):
            failures = self._engines.sync()
        if failures:  # the others may be half-sent, so they keep their state: none is SYNCED
            self._break(failures)
            raise StageError(SYNC.name, failures, of="engine")
        for index in present:
            self._states[index] = SYNC.target

    def _require(self, edge: Edge, members: Collection[int]) -> None:
        for index in members:
            state = self._states[index]
            if state not in edge.sources:
                legal = ", ".join(e.name for e in EDGES if state in e.sources)
                raise PhaseError(
                    f"engine {index} is {state.name}: {edge.name} is not legal there; "
                    f"legal are {legal}"
                )

    def _stop(self, members: Collection[int]) -> None:
        """READY -> DRAINED; if an engine does not stop, those that can serve again do."""
        try:
            self._transition(PAUSE, ManagedEngine.pause, members=members)
            self._transition(DRAIN, ManagedEngine.drain, members=members)
        except StageError:
            stopped = self._where(State.PAUSED, State.DRAINED)
            self._try_transition(ROLL_BACK, ManagedEngine.continue_generation, members=stopped)
            raise

    def _release(self, members: Collection[int]) -> None:
        """Release to the configured depth. An engine that fails is BROKEN: it must restart."""
        if self._depth is SleepLevel.RELEASE_ALL:
            self._try_transition(RELEASE, ManagedEngine.release_all, members=members)
        elif self._depth is SleepLevel.RELEASE_CACHE:
            self._try_transition(RELEASE_CACHE, ManagedEngine.release_cache, members=members)

    def _restart_broken(self) -> None:
        """BROKEN -> BOOT -> ASLEEP, on a device as empty as at the start of the run."""
        broken = self._where(State.BROKEN)
        if len(broken) < len(self._states):
            broken = [index for index in broken if index not in self._may_miss]
        if broken:
            self._make_room()
            self._leave()
            try:
                self._restart(broken)
            finally:  # engines that did boot must not keep admitting requests
                self._transition(START, ManagedEngine.start, members=self._where(State.BOOT))

    def _restart(self, members: Collection[int]) -> None:
        """BROKEN -> BOOT; engines that may miss do, if another one boots."""
        try:
            self._transition(RESTART, ManagedEngine.restart, members=members)
        except StageError as error:
            is_enough = len(self._where(State.BROKEN)) < len(self._states)
            if not is_enough or not self._may_miss.issuperset(error.failures):
                raise
            log.warning("engines stay away: %s", error)

    def _break(self, members: Collection[int]) -> None:
        for index in members:
            self._states[index] = State.BROKEN

    # -- the training side -----------------------------------------------------------------------

    def _make_room(self) -> None:
        if self._host is not None and self._depth is not SleepLevel.KEEP_ALL:
            self._is_host_home = False
            with self._stage("offload_optimizer"):
                self._host.offload_optimizer()

    def _leave(self) -> None:
        if self._host is not None and self._depth is not SleepLevel.KEEP_ALL:
            with self._stage("offload_parameters"):
                self._host.offload_parameters()

    def _come_back(self) -> None:
        if self._host is not None and not self._is_host_home and self._open_stage is None:
            with self._stage("onload_training"):
                self._host.onload_training()
            self._is_host_home = True

    # -- after a failure -------------------------------------------------------------------------

    def _unwind(self) -> None:
        """After a failed wake-up: engines release what they resumed, then training returns."""
        serving = self._where(State.READY)
        for edge, action in ((PAUSE, ManagedEngine.pause), (DRAIN, ManagedEngine.drain)):
            stopped = self._try_transition(edge, action, members=serving)
            self._break(set(serving) - set(stopped))
            serving = stopped
        self._release(serving)
        risen = self._where(State.WEIGHTS_UP, State.SYNCED, State.CACHE_UP)
        if self._depth is SleepLevel.RELEASE_CACHE:
            self._release(risen)  # weights that stay resident have no copy to be restored from
        else:
            self._try_transition(UNWIND, ManagedEngine.release_all, members=risen)
        for recover in (self._restart_broken, self._come_back):
            try:
                recover()
            except StageError as error:  # raise the first failure
                log.warning("the next rollout phase will try again: %s", error)

    # -- who is where ----------------------------------------------------------------------------

    @property
    def _present(self) -> list[int]:
        """Return all engines but those that may miss, and do."""
        away = self._may_miss.intersection(self._where(State.BROKEN))
        return [index for index in range(len(self._states)) if index not in away]

    def _awake(self) -> list[int]:
        """Return the engines that must sleep before training, and do not."""
        may_stay = (*RESTING, State.READY) if self._stays else RESTING
        return [index for index, state in enumerate(self._states) if state not in may_stay]

    def _where(self, *states: State) -> list[int]:
        return [index for index, state in enumerate(self._states) if state in states]
