"""Training with rollouts from simulated engines, in simulated seconds: who waits how long for whom.

One loop for all topologies. Step v trains with the weights that have taken v updates. It brings
them to the engines, lets prompts in, waits for a batch, and trains. A prompt that was let in at
step v is trained at step v + K at the latest, with K = ``max_staleness``.

All open responses of an engine advance together, by one token in each decode step. Groups wait in
the order of their requests, and go to the engine with the fewest responses, as in
``hybridrl/serving/engine_pool.py``. Prompts cost nothing.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from operator import attrgetter
from statistics import fmean
from typing import Literal, TypeVar

from hybridrl.serving.background import SampleBuffer

T = TypeVar("T")

OnUpdate = Literal["finish", "interrupt"]
"""Open responses end under the old weights, or stop at a token and continue under the new ones."""

DrawLengths = Callable[[random.Random], Sequence[int]]
"""Draws the tokens of the responses to one prompt."""

_TOLERANCE = 1e-9
"""Of a decode step, in which responses count as ending together."""


@dataclass(frozen=True, kw_only=True)
class HeavyTail:
    """Lognormal lengths of the responses to one prompt, cut off at a limit."""

    median_tokens: float
    sigma: float
    """Of the logarithm; 1.0: the 99th of 100 has ten times the median."""

    max_tokens: int
    num_responses: int
    prompt_share: float = 0.5
    """Share of the variance that is between prompts; 0: responses to one prompt are independent."""

    def __call__(self, source: random.Random) -> list[int]:
        of_prompt = math.sqrt(self.prompt_share) * source.gauss(0.0, 1.0)
        spread = math.sqrt(1.0 - self.prompt_share)
        logs = (of_prompt + spread * source.gauss(0.0, 1.0) for _ in range(self.num_responses))
        tokens = (round(self.median_tokens * math.exp(self.sigma * one)) for one in logs)
        return [min(max(one, 1), self.max_tokens) for one in tokens]


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of a decode step with n open responses: ``fixed_s + n * per_response_s``."""

    fixed_s: float
    per_response_s: float

    def step_s(self, num_open: int) -> float:
        return self.fixed_s + num_open * self.per_response_s


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of one engine and one device of the trainer."""

    decode: DecodeCost
    num_slots: int
    """Responses that decode at the same time on an engine."""

    train_s_per_token: float
    """Of one device; log-probs and update of a sampled token."""

    train_fixed_s: float
    """Of a step, with any number of devices."""

    transfer_s: float
    """Of an update, in which neither side computes."""

    recompute_s_per_token: float
    """Of an engine, for each token that an interrupted response keeps."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """How many devices do what; an engine has one."""

    num_engines: int
    num_trainer_devices: int
    max_staleness: int = 0
    """K."""

    num_ahead: int = 0
    """A, steps whose prompts are open beside those of the batch, at most K."""

    on_update: OnUpdate = "finish"


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


class SimulatedEngine:
    """One engine; its seconds are those of the simulation."""

    def __init__(self, costs: Costs) -> None:
        self.num_assigned = 0
        """Responses of the groups that it was asked for and has not given back."""
        self.busy_s = 0.0
        """In which it decoded."""
        self.stamp = 0
        """Changes with each new time of the next end."""
        self._step_s = [costs.decode.step_s(n) for n in range(costs.num_slots + 1)]
        self._num_slots = costs.num_slots
        self._ends: list[tuple[float, int, int, SimulatedGroup]] = []
        """Heap of the responses that decode: the decode step after which one ends, its number, its
        tokens, its group."""
        self._waiting: deque[tuple[int, SimulatedGroup]] = deque()
        self._number = count()
        self._num_steps = 0.0
        self._at_s = 0.0
        """Up to when decode steps are counted; in the future while it computes its cache."""

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
        self.num_assigned += len(group.lengths)
        self._waiting.extend((tokens, group) for tokens in group.lengths)
        self._fill(version)

    def end_next(self, version: int) -> list[SimulatedGroup]:
        """End the responses that end next, in the same step; returns groups that are complete."""
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

    def stand_still(self, until_s: float, *, recompute_s_per_token: float) -> None:
        """Decode nothing until then, and while the cache of kept tokens is computed."""
        kept = sum(tokens - (end - self._num_steps) for end, _, tokens, _ in self._ends)
        self._at_s = until_s + kept * recompute_s_per_token

    def _fill(self, version: int) -> None:
        while self._waiting and len(self._ends) < self._num_slots:
            tokens, group = self._waiting.popleft()
            group.first_versions.append(version)
            heappush(self._ends, (self._num_steps + tokens, next(self._number), tokens, group))


class SimulatedEngines:
    """Equal engines with the same weights, from second 0 on."""

    def __init__(
        self, num_engines: int, costs: Costs, on_complete: Callable[[SimulatedGroup], None]
    ) -> None:
        """``on_complete`` is called with each group when its last response ends."""
        self.now_s = 0.0
        self._costs = costs
        self._engines = [SimulatedEngine(costs) for _ in range(num_engines)]
        self._on_complete = on_complete
        self._version = -1
        self._is_open = True
        self._queue: deque[SimulatedGroup] = deque()
        self._num_started = 0
        """Groups that engines have and that are not complete."""
        self._number = count()
        self._events: list[tuple[float, int, SimulatedEngine]] = []
        """Heap of the next end of each engine; entries with an earlier stamp are skipped."""

    @property
    def busy_s(self) -> float:
        """Seconds in which engines decoded, up to now and added over them."""
        for engine in self._engines:
            engine.advance(self.now_s)
        return sum(engine.busy_s for engine in self._engines)

    def ask(self, group: SimulatedGroup) -> None:
        self._queue.append(group)
        self._hand_out()

    def run_to(self, until_s: float) -> None:
        while self._end_next(until_s):
            pass
        self.now_s = max(self.now_s, until_s)

    def run_until(self, take: Callable[[], T | None]) -> T:
        """Decode until there is something to take, and return it; asks after each response."""
        while (taken := take()) is None:
            if not self._end_next(math.inf):
                raise RuntimeError("no response is open, and there is nothing to take")
        return taken

    def update(self, version: int, *, on_update: OnUpdate) -> None:
        """Give new weights to all engines; no engine continues before all have them."""
        self._is_open = False
        if on_update == "finish":
            self.run_until(lambda: not self._num_started or None)
        for engine in self._engines:
            engine.advance(self.now_s)
        self.now_s += self._costs.transfer_s
        self._version = version
        for engine in self._engines:
            per_token = self._costs.recompute_s_per_token
            engine.stand_still(self.now_s, recompute_s_per_token=per_token)
            self._note_next_end(engine)
        self._is_open = True
        self._hand_out()

    def _hand_out(self) -> None:
        while self._is_open and self._queue:
            engine = min(self._engines, key=attrgetter("num_assigned"))
            if engine.num_assigned >= self._costs.num_slots:
                return
            engine.advance(self.now_s)
            engine.start(self._queue.popleft(), self._version)
            self._num_started += 1
            self._note_next_end(engine)

    def _note_next_end(self, engine: SimulatedEngine) -> None:
        engine.stamp = next(self._number)
        heappush(self._events, (engine.next_end_s(), engine.stamp, engine))

    def _end_next(self, until_s: float) -> bool:
        """End the next response; False: none ends by then."""
        while self._events and self._events[0][1] != self._events[0][2].stamp:
            heappop(self._events)
        if not self._events or self._events[0][0] > until_s or math.isinf(self._events[0][0]):
            return False
        self.now_s, _, engine = heappop(self._events)
        engine.advance(self.now_s)
        done = engine.end_next(self._version)
        for group in done:
            self._num_started -= 1
            self._on_complete(group)
        self._note_next_end(engine)
        if done:
            self._hand_out()
        return True


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """One step. Times are seconds since the begin."""

    began_s: float
    trains_s: float
    """When its batch was complete."""

    ended_s: float
    engines_busy_s: float
    """Seconds of decoding up to its end, added over engines."""

    groups: Sequence[int]
    """Prompts that it trained."""

    staleness: Sequence[int]
    """Of each response: updates between its first token and its training."""


class _Groups:
    """Groups from their admission to the step that trains them, by the rules of hybridrl.

    At step v, (v + 1 + A) * P groups have been admitted in all.
    """

    def __init__(self, topology: Topology, *, num_prompts: int, num_steps: int) -> None:
        self._buffer = SampleBuffer(num_prompts=num_prompts, max_staleness=topology.max_staleness)
        self._num_ahead = topology.num_ahead
        self._num_prompts = num_prompts
        self._num_groups = num_steps * num_prompts
        self._num_admitted = 0
        self._complete: dict[int, SimulatedGroup] = {}
        self._has_changed = False

    def admit(self, step: int) -> range:
        """Return the groups that may begin at this step."""
        first, ahead = self._num_admitted, step + 1 + self._num_ahead
        self._num_admitted = min(ahead * self._num_prompts, self._num_groups)
        admitted = range(first, self._num_admitted)
        self._buffer.admit(admitted, step=step)
        self._has_changed = True
        return admitted

    def complete(self, group: SimulatedGroup) -> None:
        """Note a group whose responses have all ended."""
        self._complete[group.index] = group
        self._buffer.complete(group.index, ())
        self._has_changed = True

    def take(self, step: int) -> list[SimulatedGroup] | None:
        """Return the groups that a step trains, oldest first; None: not yet."""
        if not self._has_changed or len(self._complete) < self._num_prompts:
            return None  # to ask the buffer after each response is most of a large simulation
        self._has_changed = False
        taken = self._buffer.take(step=step)
        return None if taken is None else [self._complete.pop(index) for index in taken]


def simulate(
    topology: Topology,
    costs: Costs,
    draw_lengths: DrawLengths,
    *,
    num_prompts: int,
    num_steps: int,
    seed: int = 0,
) -> list[SimulatedStep]:
    """Train for some steps of ``num_prompts``; the last ``max_staleness`` let no prompt in.

    Lengths are drawn once for each prompt, in order: all topologies get the same.
    """
    source = random.Random(seed)
    waiting = _Groups(topology, num_prompts=num_prompts, num_steps=num_steps)
    engines = SimulatedEngines(topology.num_engines, costs, waiting.complete)
    steps = []
    for version in range(num_steps):
        began_s = engines.now_s
        engines.update(version, on_update=topology.on_update)
        for index in waiting.admit(version):
            engines.ask(SimulatedGroup(index, draw_lengths(source)))
        batch = engines.run_until(partial(waiting.take, version))
        trains_s = engines.now_s
        num_tokens = sum(sum(group.lengths) for group in batch)
        train_s = num_tokens * costs.train_s_per_token / topology.num_trainer_devices
        engines.run_to(trains_s + costs.train_fixed_s + train_s)
        steps.append(
            SimulatedStep(
                began_s=began_s,
                trains_s=trains_s,
                ended_s=engines.now_s,
                engines_busy_s=engines.busy_s,
                groups=[group.index for group in batch],
                staleness=[version - first for group in batch for first in group.first_versions],
            )
        )
    return steps


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Means over steps."""

    steps_per_hour: float
    trainer_idle: float
    """Share of the time in which the trainer does not train."""

    engines_idle: float
    """Share of the time in which an engine does not decode, mean over engines."""

    mean_staleness: float
    max_staleness: int


def summarize(steps: Sequence[SimulatedStep], topology: Topology, *, num_first: int) -> Summary:
    """Describe steps without the first ones and the last ``num_ahead``, which begin and end a run.

    Raises:
        ValueError: no step is left.
    """
    chosen = steps[num_first : len(steps) - topology.num_ahead]
    if not chosen:
        raise ValueError(f"{len(steps)} steps: none is left without the first {num_first}")
    busy_before_s = steps[num_first - 1].engines_busy_s if num_first else 0.0
    seconds = chosen[-1].ended_s - chosen[0].began_s
    engines_s = chosen[-1].engines_busy_s - busy_before_s
    staleness = [one for step in chosen for one in step.staleness]
    return Summary(
        steps_per_hour=3600 * len(chosen) / seconds,
        trainer_idle=1 - sum(step.ended_s - step.trains_s for step in chosen) / seconds,
        engines_idle=1 - engines_s / (seconds * topology.num_engines),
        mean_staleness=fmean(staleness),
        max_staleness=max(staleness),
    )
