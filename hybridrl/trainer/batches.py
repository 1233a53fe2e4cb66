"""Batches of prompts with responses: those drawn now, the oldest, or those complete first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hybridrl.batch import RolloutBatch
from hybridrl.data.source import PromptSource, PromptStep
from hybridrl.rewards.scorer import Scores
from hybridrl.sampler import SamplingParams
from hybridrl.trainer.lessons import with_lessons
from hybridrl.trainer.policy import Exchanges, Generates

Sampled = tuple[PromptStep, RolloutBatch]
"""P prompts, and G responses to each, adjacent: B = P * G rows."""


@dataclass(frozen=True, slots=True)
class ScoredRollouts:
    """P prompts with G scored responses each, adjacent: B = P * G rows."""

    task: PromptStep
    rollouts: RolloutBatch
    scores: Scores

    @property
    def num_responses(self) -> int:
        """G, responses per prompt."""
        return len(self.rollouts) // len(self.task.rows)

    @property
    def source_B(self) -> tuple[str, ...]:
        """Name of the source of each row's prompt."""
        indices_P = self.task.prompts.prompt_index_P.tolist()
        sources = {i: each.row.source for i, each in zip(indices_P, self.task.rows, strict=True)}
        return tuple(sources[index] for index in self.rollouts.prompt_index_B.tolist())

    def rows_at(self, index_B: Tensor) -> ScoredRollouts:
        """Return some of the rows: of a prompt perhaps fewer than ``num_responses``."""
        return replace(
            self, rollouts=self.rollouts[index_B.tolist()], scores=self.scores.at(index_B)
        )

    def prompts_at(self, index_P: Tensor) -> ScoredRollouts:
        """Return the prompts at these positions, with their responses."""
        index_B = rows_of_prompts(index_P, self.num_responses)
        return ScoredRollouts(
            self.task.at(index_P.tolist()), self.rollouts[index_B.tolist()], self.scores.at(index_B)
        )


def rows_of_prompts(index_P: Tensor, num_responses: int) -> Tensor:
    """Return the rows of the responses to the prompts at these positions, int64 [B]."""
    return (index_P[:, None] * num_responses + torch.arange(num_responses)).view(-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnBatches:
    """Draws prompts, and waits for the responses to them: a synchronous run."""

    draw: Callable[[], PromptStep]
    engines: Generates
    # scores responses that end in the block; see `Reward`
    while_sampling: Callable[[PromptStep, SamplingParams], AbstractContextManager[SamplingParams]]

    def begin(self, step: int) -> None:
        """Do nothing: all steps are alike."""

    def __call__(self, sampling: SamplingParams) -> Sampled:
        """Draw, and sample with the newest weights."""
        task = self.draw()
        with self.while_sampling(task, sampling) as reported:
            rollouts = self.engines.generate(task.prompts, reported)
        return task, with_lessons(rollouts, task.prompts)


@dataclass(kw_only=True, slots=True)
class _OpenBatches:
    """Keeps prompts open, never more than the steps that are left will learn from."""

    source: PromptSource  # it knows the prompts that are open
    num_prompts: int  # P, prompts of a batch
    num_open: int  # prompts that are open before a batch, >= P
    num_steps: int
    step: int = 1

    def begin(self, step: int) -> None:
        """Begin a step: it says how many are left."""
        self.step = step

    def draw(self) -> PromptStep | None:
        """Open further prompts, as many as are missing."""
        is_open = self.source.open
        wanted = min(self.num_open, (self.num_steps - self.step + 1) * self.num_prompts)
        if wanted <= len(is_open):
            return None
        drawn = self.source.next(wanted - len(is_open))
        is_open.add(drawn)
        return drawn

    def take(self, rollouts: RolloutBatch, sampling: SamplingParams) -> Sampled:
        """Close the prompts of these responses."""
        first_B = rollouts.prompt_index_B[:: sampling.num_responses_per_prompt]
        task = self.source.open.take(first_B.tolist())
        return task, with_lessons(rollouts, task.prompts)


@dataclass(kw_only=True, slots=True)
class AheadBatches(_OpenBatches):
    """Draws prompts ahead of the steps that learn from them; engines sample in the background.

    The engines choose which of the open prompts make the batch.
    """

    engines: Exchanges

    def __call__(self, sampling: SamplingParams) -> Sampled:
        """Hand drawn prompts to the engines, and wait for a batch."""
        drawn = self.draw()
        rollouts = self.engines.exchange(None if drawn is None else drawn.prompts, sampling)
        return self.take(rollouts, sampling)


@dataclass(kw_only=True, slots=True)
class OversampledBatches(_OpenBatches):
    """Learns from the open prompts whose responses end first.

    An open prompt stays with the engine that began it, whose rank keeps the tokens of its
    responses. Each engine gets its prompts oldest first, and completes its share of the batch.
    """

    engines: Generates  # each gets an equal share of a call's prompts, in order
    num_engines: int  # it divides `num_prompts` and `num_open`
    # the engine of each open prompt, by the prompt's index
    engine_of: dict[int, int] = field(default_factory=dict)

    def __call__(self, sampling: SamplingParams) -> Sampled:
        """Let engines continue open prompts and begin drawn ones, until a batch is complete."""
        self.draw()
        enough = replace(sampling, num_complete=self.num_prompts // self.num_engines)
        prompts = self.source.open.of(self._deal()).prompts
        return self.take(self.engines.generate(prompts, enough), sampling)

    def _deal(self) -> list[int]:
        """Return the open prompts, engine by engine, oldest first; new ones fill the shares."""
        indices = self.source.open.indices
        self.engine_of = {i: self.engine_of[i] for i in indices if i in self.engine_of}
        loads = Counter(self.engine_of.values())
        for index in indices:
            if index not in self.engine_of:
                engine = min(range(self.num_engines), key=lambda engine: loads[engine])
                self.engine_of[index] = engine
                loads[engine] += 1
        return sorted(indices, key=lambda index: (self.engine_of[index], index))


Batches = DrawnBatches | AheadBatches | OversampledBatches
"""Gives a step prompts with responses: its batch, and further ones."""
