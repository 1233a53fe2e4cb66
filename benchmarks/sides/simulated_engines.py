"""Rollout engines that sample responses of known lengths, in simulated seconds.

All open responses of an engine advance together, by one token in each decode step. Groups wait in
the order of their requests, and go to the engine with the fewest responses, as in
``hybridrl/serving/engine_pool.py``. Prompts cost nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Literal, TypeVar

T = TypeVar("T")

OnUpdate = Literal["finish", "interrupt"]
"""Open responses end under the old weights, or stop at a token and continue under the new ones."""

_TOLERANCE = 1e-9
"""Of a decode step, in which responses count as ending together."""


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of a decode step with n open responses: ``fixed_s + n * per_response_s``."""

    fixed_s: float
    per_response_s: float

    def step_s(self, num_open: int) -> float:
        """Return the seconds of one step."""
        return self.fixed_s + num_open * self.per_response_s


@dataclass(eq=False, slots=True)
class SimulatedGroup:
    """The responses to one prompt."""

    index: int
    lengths: Sequence[int]
    """Tokens of each response, >= 1."""

    num_left: int = field(init=False)
    """Responses that have not ended."""

    first_versions: list[int] = field(default_factory=list)
    """Weights that sampled the first token, of each response that has begun."""

    def __post_init__(self) -> None:
        self.num_left = len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all responses."""
        return sum(self.lengths)


class SimulatedEngine:
    """One engine; its seconds are those of the simulation."""

    def __init__(self, decode: DecodeCost, num_slots: int) -> None:
        """Begin without responses."""
        self.num_assigned = 0
        """Responses of the groups that it was asked for and has not given back."""
        self.busy_s = 0.0
        """In which it decoded."""
        self.stamp = 0
        """Changes with each new time of the next end."""
        self._step_s = [decode.step_s(n) for n in range(num_slots + 1)]
        self._num_slots = num_slots
        self._ends: list[tuple[float, int, int, SimulatedGroup]] = []
        """Heap of the responses that decode: the decode step after which one ends, its number, its
        tokens, its group."""
        self._waiting: deque[tuple[int, SimulatedGroup]] = deque()
        self._number = count()
        self._num_steps = 0.0
        self._at_s = 0.0
        """Up to when decode steps are counted; in the future while it computes its cache."""

    @property
    def num_kept_tokens(self) -> float:
        """Tokens sampled by now of the responses that decode."""
        return sum(tokens - (end - self._num_steps) for end, _, tokens, _ in self._ends)

    def next_end_s(self) -> float:
        """Return when its next response ends; infinite without one."""
        if not self._ends:
            return math.inf
        return self._at_s + (self._ends[0][0] - self._num_steps) * self._step_s[len(self._ends)]

    def advance(self, now_s: float) -> None:
        """Decode up to a time at which at most the next response ends."""
        if now_s <= self._at_s:
            return
        if self._ends:
            self._num_steps += (now_s - self._at_s) / self._step_s[len(self._ends)]
            self.busy_s += now_s - self._at_s
        self._at_s = now_s

    def start(self, group: SimulatedGroup, version: int) -> None:
        """Begin with all responses to a prompt; those without a slot wait."""
        self.num_assigned += len(group.lengths)
        self._waiting.extend((tokens, group) for tokens in group.lengths)
        self._fill(version)

    def end_next(self, version: int) -> list[SimulatedGroup]:
        """End the response that is due, with those that end in the same step.

        Returns:
            groups that are complete now.
        """
        done = []
        self._num_steps = self._ends[0][0]  # the quotient of seconds was inexact
        while self._ends and self._ends[0][0] <= self._num_steps + _TOLERANCE:
            *_, group = heappop(self._ends)
            group.num_left -= 1
            if not group.num_left:
                self.num_assigned -= len(group.lengths)
                done.append(group)
        self._fill(version)
        return done

    def stand_still(self, until_s: float) -> None:
        """Decode nothing until then; the responses keep their tokens."""
        self._at_s = until_s

    def _fill(self, version: int) -> None:
        while self._waiting and len(self._ends) < self._num_slots:
            tokens, group = self._waiting.popleft()
            group.first_versions.append(version)
            heappush(self._ends, (self._num_steps + tokens, next(self._number), tokens, group))


class SimulatedEngines:
    """Equal engines with the same weights."""

    def __init__(
        self,
        num_engines: int,
        *,
        decode: DecodeCost,
        num_slots: int,
        recompute_s_per_token: float,
        on_complete: Callable[[SimulatedGroup], None],
    ) -> None:
        """Begin at second 0.

        Args:
            num_engines: >= 1.
            decode: cost of a decode step of one engine.
            num_slots: responses that decode at the same time on an engine.
            recompute_s_per_token: of an interrupted response, for its cache under new weights.
            on_complete: called with each group when its last response ends.
        """
        self.now_s = 0.0
        self._engines = [SimulatedEngine(decode, num_slots) for _ in range(num_engines)]
        self._num_slots = num_slots
        self._recompute_s_per_token = recompute_s_per_token
        self._on_complete = on_complete
        self._version = -1
        self._is_open = True
        self._queue: deque[SimulatedGroup] = deque()
        self._num_started = 0
        """Groups that engines have and that are not complete."""
        self._number = count()
        self._events: list[tuple[float, int, SimulatedEngine]] = []
        """Heap of the next end of each engine; entries with an earlier stamp are skipped."""
        self._by_load: list[tuple[int, int, SimulatedEngine]] = []
        """Heap of engines by responses; entries of earlier counts are skipped."""
        for engine in self._engines:
            self._note_load(engine)

    @property
    def busy_s(self) -> float:
        """Seconds in which engines decoded, up to now and added over them."""
        for engine in self._engines:
            engine.advance(self.now_s)
        return sum(engine.busy_s for engine in self._engines)

    def ask(self, group: SimulatedGroup) -> None:
        """Put a group at the end of the queue."""
        self._queue.append(group)
        self._hand_out()

    def run_to(self, until_s: float) -> None:
        """Decode until a time."""
        while self._end_next(until_s):
            pass
        self.now_s = max(self.now_s, until_s)

    def run_until(self, take: Callable[[], T | None]) -> T:
        """Decode until there is something to take, and return it; asks after each response.

        Raises:
            RuntimeError: no response is open, and there is nothing to take.
        """
        while (taken := take()) is None:
            if not self._end_next(math.inf):
                raise RuntimeError("no response is open, and there is nothing to take")
        return taken

    def update(self, version: int, *, transfer_s: float, on_update: OnUpdate) -> None:
        """Give new weights to all engines; no engine continues before all have them."""
        self._is_open = False
        if on_update == "finish":
            self.run_until(lambda: not self._num_started or None)
        for engine in self._engines:
            engine.advance(self.now_s)
        self.now_s += transfer_s
        self._version = version
        for engine in self._engines:
            recompute_s = engine.num_kept_tokens * self._recompute_s_per_token
            engine.stand_still(self.now_s + recompute_s)
            self._note_next_end(engine)
        self._is_open = True
        self._hand_out()

    def _hand_out(self) -> None:
        while self._is_open and self._queue and (engine := self._freest()) is not None:
            engine.advance(self.now_s)
            engine.start(self._queue.popleft(), self._version)
            self._num_started += 1
            self._note_load(engine)
            self._note_next_end(engine)

    def _freest(self) -> SimulatedEngine | None:
        while self._by_load:
            load, _, engine = self._by_load[0]
            if load == engine.num_assigned:
                return engine if load < self._num_slots else None
            heappop(self._by_load)
        return None

    def _note_load(self, engine: SimulatedEngine) -> None:
        heappush(self._by_load, (engine.num_assigned, next(self._number), engine))
        if len(self._by_load) > 8 * len(self._engines):
            self._by_load = [(one.num_assigned, next(self._number), one) for one in self._engines]
            heapify(self._by_load)

    def _note_next_end(self, engine: SimulatedEngine) -> None:
        engine.stamp = next(self._number)
        heappush(self._events, (engine.next_end_s(), engine.stamp, engine))

    def _end_next(self, until_s: float) -> bool:
        """End the next response; False: none ends by then."""
        event = self._next_event(until_s)
        if event is None:
            return False
        self.now_s, engine = event
        engine.advance(self.now_s)
        for group in engine.end_next(self._version):
            self._note_load(engine)
            self._num_started -= 1
            self._on_complete(group)
        self._note_next_end(engine)
        self._hand_out()
        return True

    def _next_event(self, until_s: float) -> tuple[float, SimulatedEngine] | None:
        while self._events:
            end_s, stamp, engine = self._events[0]
            if stamp != engine.stamp or math.isinf(end_s):
                heappop(self._events)
            elif end_s > until_s:
                return None
            else:
                heappop(self._events)
                return end_s, engine
        return None
