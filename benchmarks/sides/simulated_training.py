"""Training with rollouts from simulated engines: who waits how long for whom.

One loop for all topologies. Step v trains with the weights that have taken v updates. It brings
them to the engines, lets prompts in, waits for a batch, and trains. A prompt that was let in at
step v is trained at step v + K at the latest, with K = ``max_staleness``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from benchmarks.sides.simulated_engines import (
    DecodeCost,
    OnUpdate,
    SimulatedEngines,
    SimulatedGroup,
)
from hybridrl.serving.background import SampleBuffer

DrawLengths = Callable[[random.Random], Sequence[int]]
"""Draws the tokens of the responses to one prompt."""


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
        """Draw the responses to one prompt."""
        of_prompt = math.sqrt(self.prompt_share) * source.gauss(0.0, 1.0)
        spread = math.sqrt(1.0 - self.prompt_share)
        logs = (of_prompt + spread * source.gauss(0.0, 1.0) for _ in range(self.num_responses))
        tokens = (round(self.median_tokens * math.exp(self.sigma * one)) for one in logs)
        return [min(max(one, 1), self.max_tokens) for one in tokens]


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
    """How many devices do what."""

    num_devices: int
    num_engines: int
    devices_per_engine: int = 1
    num_trainer_devices: int
    """With those of the engines more than ``num_devices``: both take turns."""

    max_staleness: int = 0
    """K."""

    num_ahead: int = 0
    """A, steps whose prompts are open beside those of the batch, at most K."""

    on_update: OnUpdate = "finish"


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


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Means over steps."""

    steps_per_hour: float
    trainer_idle: float
    """Share of the time in which the trainer does not train."""

    engines_idle: float
    """Share of the time in which an engine does not decode, mean over engines."""

    devices_idle: float
    """Share of all devices' time in which they neither train nor decode."""

    mean_staleness: float
    max_staleness: int


class _Groups:
    """Groups from their admission to the step that trains them, by the rules of hybridrl.

    At step v, (v + 1 + A) * P groups have been admitted in all.
    """

    def __init__(self, topology: Topology, *, num_prompts: int, num_steps: int) -> None:
        """Begin without groups; ``num_steps * num_prompts`` are admitted in all."""
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
    """Train for some steps.

    Args:
        topology: devices, and how far apart the two sides may be.
        costs: seconds.
        draw_lengths: called once for each prompt, in order: all topologies get the same lengths.
        num_prompts: P, of a step.
        num_steps: >= 1; the last ``max_staleness`` of them let no prompt in.
        seed: of the lengths.
    """
    source = random.Random(seed)
    waiting = _Groups(topology, num_prompts=num_prompts, num_steps=num_steps)
    engines = SimulatedEngines(
        topology.num_engines,
        decode=costs.decode,
        num_slots=costs.num_slots,
        recompute_s_per_token=costs.recompute_s_per_token,
        on_complete=waiting.complete,
    )
    steps = []
    for version in range(num_steps):
        began_s = engines.now_s
        engines.update(version, transfer_s=costs.transfer_s, on_update=topology.on_update)
        for index in waiting.admit(version):
            engines.ask(SimulatedGroup(index, draw_lengths(source)))
        batch = engines.run_until(partial(waiting.take, version))
        trains_s = engines.now_s
        num_tokens = sum(group.num_tokens for group in batch)
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


def summarize(steps: Sequence[SimulatedStep], topology: Topology, *, num_first: int) -> Summary:
    """Describe steps without the first ones and the last ``num_ahead``, which begin and end a run.

    Raises:
        ValueError: no step is left.
    """
    chosen = steps[num_first : len(steps) - topology.num_ahead]
    if not chosen:
        raise ValueError(f"{len(steps)} steps: none is left without the first {num_first}")
    begin_s = chosen[0].began_s
    busy_before_s = steps[num_first - 1].engines_busy_s if num_first else 0.0
    seconds = chosen[-1].ended_s - begin_s
    engines_s = chosen[-1].engines_busy_s - busy_before_s
    trainer_s = sum(step.ended_s - step.trains_s for step in chosen)
    devices_s = engines_s * topology.devices_per_engine + trainer_s * topology.num_trainer_devices
    staleness = [one for step in chosen for one in step.staleness]
    return Summary(
        steps_per_hour=3600 * len(chosen) / seconds,
        trainer_idle=1 - trainer_s / seconds,
        engines_idle=1 - engines_s / (seconds * topology.num_engines),
        devices_idle=1 - devices_s / (seconds * topology.num_devices),
        mean_staleness=fmean(staleness),
        max_staleness=max(staleness),
    )
