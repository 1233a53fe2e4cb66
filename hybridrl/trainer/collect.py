"""The responses of a step: sampled and scored, and those that the policy learns from."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from hybridrl.algorithms.groups import Groups
from hybridrl.algorithms.load import Part
from hybridrl.batch import RolloutBatch
from hybridrl.data.source import PromptStep
from hybridrl.errors import TrainingError
from hybridrl.metrics import Mean, Metrics
from hybridrl.rewards.scorer import Scores
from hybridrl.sampler import SamplingParams
from hybridrl.single_controller.payload import concat_rows
from hybridrl.trainer.batches import Batches, ScoredRollouts
from hybridrl.trainer.policy import Generates
from hybridrl.trainer.step_metrics import Clock

log = logging.getLogger(__name__)


class Reward(Protocol):
    """Scores responses on the driver."""

    def __call__(self, rollouts: RolloutBatch, task: PromptStep) -> Scores:
        """Return one reward per row."""

    def while_sampling(
        self, task: PromptStep, sampling: SamplingParams
    ) -> AbstractContextManager[SamplingParams]:
        """Score responses that end in the block; they are sampled with the parameters it gives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """The responses of a step."""

    everything: ScoredRollouts  # all that was sampled: metrics describe it
    # as many prompts as the step has, kept ones before others: the update learns from it
    batch: ScoredRollouts
    # bool, rows of `batch` to learn from; statistics of groups and of the batch are of these
    is_kept_B: Tensor
    # float32, reward of the greedy response to each row's prompt; None: not asked for
    greedy_rewards_B: Tensor | None = None
    metrics: Metrics = field(default_factory=dict)

    @classmethod
    def of(cls, scored: ScoredRollouts) -> Self:
        """Return a step that learns from all that it sampled and could score."""
        return cls(everything=scored, batch=scored, is_kept_B=_kept_rows(scored, None))

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
    max_rounds: int = 1  # batches that a step samples, at most
    # whether to sample and score one greedy response to each prompt, too
    samples_greedily: bool = False

    def __call__(self, clock: Clock) -> Collected:
        """Sample and score the batch of a step, and replace the groups that were left out."""
        scored = self._sample(clock)
        collected = Collected.of(scored)
        if self.group_filter is not None:
            collected = self._filtered(scored, self.group_filter, clock)
        if not self.samples_greedily:
            return collected
        batch = collected.batch
        sampling = replace(
            self.sampling,
            num_responses_per_prompt=1,
            temperature=0.0,
            sampling_masks=False,
            teacher_top_k=None,
        )
        with clock("generate"), self.reward.while_sampling(batch.task, sampling) as reported:
            rollouts = self.policy.generate(batch.task.prompts, reported)
        greedy = self._score(batch.task, rollouts, clock)
        rewards_B = greedy.scores.rewards_B.repeat_interleave(batch.num_responses)
        is_sound_B = _kept_rows(greedy, None).repeat_interleave(batch.num_responses)
        is_kept_B = collected.is_kept_B & is_sound_B
        return replace(collected, greedy_rewards_B=rewards_B, is_kept_B=is_kept_B)

    def _filtered(self, first: ScoredRollouts, keep: Part, clock: Clock) -> Collected:
        num_prompts, num_responses = len(first.task.rows), first.num_responses
        rounds = [first]
        is_kept_PG = _kept_rows(first, keep).view(-1, num_responses)
        while len(rounds) < self.max_rounds and is_kept_PG.any(dim=1).sum() < num_prompts:
            rounds.append(self._sample(clock))
            further_PG = _kept_rows(rounds[-1], keep).view(-1, num_responses)
            is_kept_PG = torch.cat([is_kept_PG, further_PG])
        everything = ScoredRollouts(
            PromptStep.join([scored.task for scored in rounds]),
            concat_rows([scored.rollouts for scored in rounds]),
            Scores.join([scored.scores for scored in rounds]),
        )
        is_kept_P = is_kept_PG.any(dim=1)
        best_first = torch.argsort(is_kept_P.int(), descending=True, stable=True)
        chosen = best_first[:num_prompts].sort().values
        batch = everything.prompts_at(chosen)
        num_kept, num_learned = int(is_kept_P.sum()), int(is_kept_P[chosen].sum())
        if not num_kept:
            log.warning(
                "%s=%s kept none of %d groups, and the step learns nothing: see their rewards, or "
                "raise algorithm.max_sampling_rounds=%d",
                *(keep.key, keep.spelled, len(is_kept_P), self.max_rounds),
            )
        return Collected(
            everything=everything,
            batch=batch,
            is_kept_B=is_kept_PG[chosen].view(-1),
            metrics={
                "groups/sampled": Mean(len(is_kept_P)),
                "groups/kept_fraction": Mean(num_kept, len(is_kept_P)),
                "groups/learned": Mean(num_learned),
                "groups/surplus": Mean(num_kept - num_learned),
            },
        )

    def _sample(self, clock: Clock) -> ScoredRollouts:
        with clock("generate"):
            task, rollouts = self.batches(self.sampling)
        return self._score(task, rollouts, clock)

    def _score(self, task: PromptStep, rollouts: RolloutBatch, clock: Clock) -> ScoredRollouts:
        with clock("reward"):
            return ScoredRollouts(task, rollouts, self.reward(rollouts, task))


def _kept_rows(scored: ScoredRollouts, keep: Part | None) -> Tensor:
    """Return bool [B]: rows that are not left out, of the groups that a filter keeps.

    A group of which one row is left has nothing to compare it with, and is not kept.

    Raises:
        TrainingError: the filter raised, took too long, or did not return bool [B].
    """
    rewards_B, group_B = scored.scores.rewards_B, scored.rollouts.prompt_index_B
    is_kept_B = torch.ones(len(group_B), dtype=torch.bool)
    if scored.scores.is_left_out_B is not None:
        groups, is_kept_B = Groups.of(group_B), ~scored.scores.is_left_out_B
        is_kept_B &= (groups.sum(is_kept_B) > 1) | (groups.sizes_B == 1)
    rows = is_kept_B.nonzero()[:, 0]
    if keep is not None and len(rows):
        kept = keep(rewards_B=rewards_B[rows], group_B=group_B[rows])
        if not isinstance(kept, Tensor) or kept.dtype != torch.bool or kept.shape != rows.shape:
            raise TrainingError(
                f"{keep.key}={keep.spelled} returned {describe_result(kept)}, and a group filter "
                f"returns bool [{len(rows)}], True for each row to keep"
            )
        is_kept_B[rows] = kept
    return is_kept_B


def describe_result(value: object) -> str:
    """Return dtype and shape of what a function of the user returned, or its type."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    kind = str(value.dtype).removeprefix("torch.")
    if value.is_nested:
        return f"jagged {kind} with {value.values().numel()} tokens in {len(value)} rows"
    return f"{kind} {list(value.shape)}"
