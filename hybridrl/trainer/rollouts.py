"""Responses of a run and their scores: sampled, perhaps written to files, or read from those."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridrl.batch import PromptBatch, RolloutBatch, objects
from hybridrl.checkpoint.fingerprint import differences
from hybridrl.data.source import PromptStep
from hybridrl.errors import ReplayError
from hybridrl.rewards.scorer import Scores
from hybridrl.sampler import SamplingParams
from hybridrl.trainer.batches import rows_of_prompts
from hybridrl.trainer.collect import Reward
from hybridrl.trainer.policy import Generates
from hybridrl.trainer.rollout_files import (
    Facts,
    NamedCalls,
    RolloutFiles,
    Split,
    row_digests,
    sampling_facts,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Origin:
    """The facts of a run on which its rollouts depend."""

    rollouts: Facts  # besides prompts and sampling
    scores: Facts  # besides responses and rows


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Responses of a run and their scores, step by step."""

    engines: Generates
    reward: Reward
    # begins with the responses of a step, or of the evaluation after it
    begin: Callable[[int, Split], None] = lambda step, split: None


@dataclass(slots=True)
class DumpedRollouts(NamedCalls):
    """Samples and scores, and writes both to files.

    Responses are written before anything else sees them: a step that fails leaves them. It raises
    RunFolderError if the disk is full or gone.
    """

    engines: Generates
    reward: Reward
    files: RolloutFiles
    origin: Origin

    def generate(self, prompts: PromptBatch, sampling: SamplingParams) -> RolloutBatch:
        """Sample, and write."""
        rollouts = self.engines.generate(prompts, sampling)
        name, origin = self.next_name(), self.origin.rollouts
        self.files.write(name, prompts, rollouts, sampling=sampling, origin=origin)
        return rollouts

    def while_sampling(
        self, task: PromptStep, sampling: SamplingParams
    ) -> AbstractContextManager[SamplingParams]:
        """Score responses that end in the block."""
        return self.reward.while_sampling(task, sampling)

    def __call__(self, rollouts: RolloutBatch, task: PromptStep) -> Scores:
        """Score, and write."""
        scores = self.reward(rollouts, task)
        self.files.write_scores(self.name, scores, rows=task.rows, origin=self.origin.scores)
        return scores


@dataclass(slots=True)
class ReplayedRollouts(NamedCalls):
    """Returns the recorded responses to the prompts of a call, and their scores."""

    reward: Reward  # scores again if its functions or the answers have changed
    files: RolloutFiles
    origin: Origin
    # positions of the last prompts among the recorded ones
    index_P: list[int] = field(default_factory=list)
    has_scored: bool = False

    def generate(self, prompts: PromptBatch, sampling: SamplingParams) -> RolloutBatch:
        """Read the responses to ``prompts``, which are all or some of the recorded ones.

        Raises:
            ReplayError: there are none, or those to other prompts, or of another sampling.
        """
        name = self.next_name()
        where = f"{name} of {self.files.folder}"
        facts = self.files.facts(name)
        if facts is None:
            raise ReplayError(
                f"{self.files.folder} has no {name}: this run samples more often in a step than "
                "the recorded one; set the keys of algorithm and eval as that run had them"
            )
        require_same_origin(facts.origin, self.origin.rollouts, where=where)
        changes = [*differences(facts.sampling, sampling_facts(sampling))]
        if changes:
            raise ReplayError(
                f"{where} was sampled in another way: {'; '.join(changes)}; set the keys of "
                "rollout or eval as that run had them"
            )
        recorded, rollouts = self.files.read(name, facts)
        self.index_P = _positions(prompts, recorded, where=where)
        num_responses = len(rollouts) // facts.num_prompts
        if self.index_P != list(range(facts.num_prompts)):
            rollouts = rollouts[self._rows(num_responses).tolist()]
        if prompts.images_P is not None:
            of_rows = [images for images in prompts.images_P for _ in range(num_responses)]
            rollouts.images_B = objects(of_rows)
        return rollouts

    def while_sampling(
        self, task: PromptStep, sampling: SamplingParams
    ) -> AbstractContextManager[SamplingParams]:
        """Score nothing early: nothing is sampled in the block."""
        return nullcontext(sampling)

    def __call__(self, rollouts: RolloutBatch, task: PromptStep) -> Scores:
        """Return the scores of the responses that were read last."""
        recorded = self.files.read_scores(self.name)
        if recorded is None:
            return self.reward(rollouts, task)
        changes = [*differences(recorded.origin, self.origin.scores)]
        if [recorded.rows[p] for p in self.index_P] != row_digests(task.rows):
            changes.append("answers of the rows")
        if not changes:
            return recorded.scores.at(self._rows(len(rollouts) // len(task.rows)))
        if not self.has_scored:
            self.has_scored = True
            log.warning("responses are scored again, since these changed: %s", "; ".join(changes))
        return self.reward(rollouts, task)

    def _rows(self, num_responses: int) -> Tensor:
        """Return the rows of the last prompts among the recorded rows, int64 [B]."""
        return rows_of_prompts(torch.tensor(self.index_P), num_responses)


def head_and_tail(task: PromptStep, num_prompts: int) -> PromptStep:
    """Return the first and the last prompts, half of ``num_prompts`` each; the head has the odd."""
    num_tail = num_prompts // 2
    num_all = len(task.rows)
    if num_prompts == num_all:
        return task
    return task.at([*range(num_prompts - num_tail), *range(num_all - num_tail, num_all)])


def require_same_origin(recorded: Facts, now: Facts, *, where: str) -> None:
    """Compare model, tokenizer and agent with those of a recorded run; raises ReplayError."""
    changes = [*differences(recorded, now)]
    if changes:
        raise ReplayError(
            f"{where} was sampled by another model or agent: {'; '.join(changes)}; set "
            "rollout.replay to a run with the same ones, or bring theirs back"
        )


def _positions(prompts: PromptBatch, recorded: PromptBatch, *, where: str) -> list[int]:
    """Return the positions of these prompts among the recorded ones."""
    by_index = {index: p for p, index in enumerate(recorded.prompt_index_P.tolist())}
    recorded_rows = recorded.token_ids_PL.unbind()
    positions = []
    rows = zip(
        prompts.prompt_index_P.tolist(),
        prompts.seed_P.tolist(),
        prompts.token_ids_PL.unbind(),
        strict=True,
    )
    for index, seed, token_ids in rows:
        p = by_index.get(index)
        if p is None or not torch.equal(recorded_rows[p], token_ids):
            raise ReplayError(
                f"{where} has {'no prompt' if p is None else 'other tokens of prompt'} {index}; "
                "bring rows, data keys and seed of the recorded run back, and with "
                "data.curriculum=solve_rate its rewards and trainer.num_prompts_per_step"
            )
        if int(recorded.seed_P[p]) != seed:
            raise ReplayError(f"{where} was sampled with another seed; set seed as that run had it")
        positions.append(p)
    return positions
