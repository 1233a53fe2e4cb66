"""Batches of prompts with responses to them: those drawn now, or the oldest of several steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from hybridrl.batch import RolloutBatch
from hybridrl.data.source import PromptSource, PromptStep
from hybridrl.sampler import SamplingParams
from hybridrl.trainer.policy import Exchanges, Generates


@dataclass(frozen=True, slots=True)
class Sampled:
    """P prompts, and G responses to each, adjacent: B = P * G rows."""

    task: PromptStep
    rollouts: RolloutBatch


class Batches(Protocol):
    """Gives the algorithm prompts with responses."""

    def begin(self, step: int) -> None:
        """Begin with the batches of a step, counted from 1."""
        ...

    def __call__(self, sampling: SamplingParams) -> Sampled:
        """Return the batch of the step, or a further one of it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnBatches:
    """Draws prompts, and waits for the responses to them: a synchronous run."""

    draw: Callable[[], PromptStep]
    engines: Generates
    while_sampling: Callable[[PromptStep, SamplingParams], AbstractContextManager[SamplingParams]]
    """Scores responses that end in the block; see ``Reward``."""

    def begin(self, step: int) -> None:
        """Do nothing: all steps are alike."""

    def __call__(self, sampling: SamplingParams) -> Sampled:
        """Draw, and sample with the newest weights."""
        task = self.draw()
        with self.while_sampling(task, sampling) as reported:
            return Sampled(task, self.engines.generate(task.prompts, reported))


class AheadBatches:
    """Draws prompts ahead of the steps that learn from them; engines sample in the background.

    Before each batch as many prompts are open as ``num_ahead`` steps and this one need, and never
    more than the steps that are left. The engines choose which of them make the batch.
    """

    def __init__(
        self,
        source: PromptSource,
        engines: Exchanges,
        *,
        num_prompts: int,
        num_ahead: int,
        num_steps: int,
    ) -> None:
        """Draw nothing yet.

        Args:
            source: of the prompts; it knows those that are open.
            num_prompts: P, prompts of a batch.
            num_ahead: prompts that are open beside those of the batch, in steps, >= 1.
        """
        self._source = source
        self._engines = engines
        self._num_prompts = num_prompts
        self._num_ahead = num_ahead
        self._num_steps = num_steps
        self._step = 1

    def begin(self, step: int) -> None:
        """Begin a step: it says how many are left."""
        self._step = step

    def __call__(self, sampling: SamplingParams) -> Sampled:
        """Hand drawn prompts to the engines, and wait for a batch."""
        is_open = self._source.open
        num_left = self._num_steps - self._step
        wanted = (min(self._num_ahead, num_left) + 1) * self._num_prompts
        drawn = self._source.next(wanted - len(is_open)) if wanted > len(is_open) else None
        if drawn is not None:
            is_open.add(drawn)
        rollouts = self._engines.exchange(None if drawn is None else drawn.prompts, sampling)
        size = sampling.num_responses_per_prompt
        return Sampled(is_open.take(rollouts.prompt_index_B[::size].tolist()), rollouts)
