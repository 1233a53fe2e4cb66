"""The responses of a step: sampled and scored, and those that the policy learns from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from hybridrl.algorithms.load import Part
from hybridrl.batch import RolloutBatch
from hybridrl.data.prompt_step import PromptStep
from hybridrl.metrics import Mean, Metrics
from hybridrl.rewards.scorer import Scores
from hybridrl.sampler import SamplingParams
from hybridrl.single_controller.payload import concat_rows
from hybridrl.trainer.batches import Batches, Sampled
from hybridrl.trainer.clock import Clock
from hybridrl.trainer.policy import Generates


class Reward(Protocol):
    """Scores responses on the driver."""

    def __call__(self, rollouts: RolloutBatch, task: PromptStep) -> Scores:
        """Return one reward per row."""
        ...

    def while_sampling(
        self, task: PromptStep, sampling: SamplingParams
    ) -> AbstractContextManager[SamplingParams]:
        """Score responses that end in the block; they are sampled with the parameters it gives."""
        ...


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

    def prompts_at(self, index_P: Tensor) -> ScoredRollouts:
        """Return the prompts at these positions, with their responses."""
        prompts = index_P.tolist()
        responses = torch.arange(self.num_responses)
        index_B = (index_P[:, None] * self.num_responses + responses).view(-1)
        return ScoredRollouts(
            PromptStep(self.task.prompts[prompts], tuple(self.task.rows[p] for p in prompts)),
            self.rollouts[index_B.tolist()],
            self.scores.at(index_B),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """The responses of a step."""

    everything: ScoredRollouts
    """All that was sampled: metrics describe it."""

    batch: ScoredRollouts
    """As many prompts as the step has, kept ones before others: the update learns from it."""

    is_kept_B: Tensor | None = None
    """bool, rows of ``batch`` to learn from; None: all."""

    greedy_rewards_B: Tensor | None = None
    """float32, reward of the greedy response to each row's prompt; None: not asked for."""

    metrics: Metrics = field(default_factory=dict)

    @classmethod
    def of(cls, scored: ScoredRollouts) -> Self:
        """Return a step that learns from all that it sampled."""
        return cls(everything=scored, batch=scored)

    @property
    def rollouts(self) -> RolloutBatch:
        """The rows to learn from."""
        return self.batch.rollouts


@dataclass(frozen=True, kw_only=True, slots=True)
class Collector:
    """Samples and scores. A group filter may leave groups out; further prompts replace them."""

    batches: Batches
    policy: Generates
    sampling: SamplingParams
    reward: Reward
    group_filter: Part | None = None
    max_rounds: int = 1
    """Batches that a step samples, at most."""

    samples_greedily: bool = False
    """Whether to sample and score one greedy response to each prompt, too."""

    def __call__(self, clock: Clock) -> Collected:
        """Sample and score the batch of a step, and replace the groups that were left out."""
        scored = self._sample(clock)
        collected = Collected.of(scored)
        if self.group_filter is not None:
            collected = self._filtered(scored, self.group_filter, clock)
        if not self.samples_greedily:
            return collected
        batch = collected.batch
        rewards_P = self._greedy(batch.task, clock).scores.rewards_B
        rewards_B = rewards_P.repeat_interleave(batch.num_responses)
        return replace(collected, greedy_rewards_B=rewards_B)

    def _filtered(self, first: ScoredRollouts, keep: Part, clock: Clock) -> Collected:
        num_prompts = len(first.task.rows)
        rounds, is_kept_P = [first], _kept_groups(first, keep)
        while len(rounds) < self.max_rounds and int(is_kept_P.sum()) < num_prompts:
            rounds.append(self._sample(clock))
            is_kept_P = torch.cat([is_kept_P, _kept_groups(rounds[-1], keep)])
        everything = _join(rounds)
        best_first = torch.argsort(is_kept_P.int(), descending=True, stable=True)
        chosen = best_first[:num_prompts].sort().values
        batch = everything.prompts_at(chosen)
        num_kept, num_learned = int(is_kept_P.sum()), int(is_kept_P[chosen].sum())
        return Collected(
            everything=everything,
            batch=batch,
            is_kept_B=is_kept_P[chosen].repeat_interleave(batch.num_responses),
            metrics={
                "groups/sampled": Mean(len(is_kept_P)),
                "groups/kept_fraction": Mean(num_kept, len(is_kept_P)),
                "groups/learned": Mean(num_learned),
                "groups/surplus": Mean(num_kept - num_learned),
            },
        )

    def _sample(self, clock: Clock) -> ScoredRollouts:
        with clock("generate"):
            sampled = self.batches(self.sampling)
        return self._score(sampled, clock)

    def _greedy(self, task: PromptStep, clock: Clock) -> ScoredRollouts:
        greedy = replace(self.sampling, num_responses_per_prompt=1, temperature=0.0)
        with clock("generate"), self.reward.while_sampling(task, greedy) as reported:
            sampled = Sampled(task, self.policy.generate(task.prompts, reported))
        return self._score(sampled, clock)

    def _score(self, sampled: Sampled, clock: Clock) -> ScoredRollouts:
        with clock("reward"):
            scores = self.reward(sampled.rollouts, sampled.task)
        return ScoredRollouts(sampled.task, sampled.rollouts, scores)


def _kept_groups(scored: ScoredRollouts, keep: Part) -> Tensor:
    """Return bool [P], True for the prompts whose group is kept."""
    is_kept_B: Tensor = keep(
        rewards_B=scored.scores.rewards_B, group_B=scored.rollouts.prompt_index_B
    )
    return is_kept_B.view(-1, scored.num_responses)[:, 0]


def _join(rounds: Sequence[ScoredRollouts]) -> ScoredRollouts:
    if len(rounds) == 1:
        return rounds[0]
    return ScoredRollouts(
        PromptStep.join([scored.task for scored in rounds]),
        concat_rows([scored.rollouts for scored in rounds]),
        Scores.join([scored.scores for scored in rounds]),
    )
