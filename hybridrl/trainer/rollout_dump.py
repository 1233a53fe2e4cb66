"""A run that writes its rollouts: each call of ``generate``, and the scores of its responses."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from hybridrl.batch import PromptBatch, RolloutBatch
from hybridrl.data.source import PromptStep
from hybridrl.errors import RunFolderError
from hybridrl.rewards.scorer import Scores
from hybridrl.sampler import SamplingParams
from hybridrl.trainer.collect import Reward
from hybridrl.trainer.policy import Generates
from hybridrl.trainer.rollout_files import CallNames, Facts, RolloutFiles, Split


@dataclass(frozen=True, slots=True)
class Origin:
    """The facts of a run on which its rollouts depend."""

    rollouts: Facts
    """Besides prompts and sampling."""

    scores: Facts
    """Besides responses and rows."""


class Rollouts(Generates, Reward, Protocol):
    """Responses and their scores, step by step."""

    def begin(self, step: int, split: Split) -> None:
        """Begin with the responses of a step, or of the evaluation after it."""
        ...


@dataclass(frozen=True, slots=True)
class SampledRollouts:
    """Keeps no file."""

    engines: Generates
    reward: Reward

    def begin(self, step: int, split: Split) -> None:
        """Do nothing."""

    def generate(self, prompts: PromptBatch, sampling: SamplingParams) -> RolloutBatch:
        """Sample."""
        return self.engines.generate(prompts, sampling)

    def while_sampling(
        self, task: PromptStep, sampling: SamplingParams
    ) -> AbstractContextManager[SamplingParams]:
        """Score responses that end in the block."""
        return self.reward.while_sampling(task, sampling)

    def __call__(self, rollouts: RolloutBatch, task: PromptStep) -> Scores:
        """Score."""
        return self.reward(rollouts, task)


@dataclass(frozen=True, slots=True)
class DumpedRollouts:
    """Writes responses before anything else sees them: a step that fails leaves them."""

    engines: Generates
    reward: Reward
    files: RolloutFiles
    origin: Origin
    names: CallNames = field(default_factory=CallNames)

    def begin(self, step: int, split: Split) -> None:
        """Begin a step."""
        self.names.begin(step, split)

    def generate(self, prompts: PromptBatch, sampling: SamplingParams) -> RolloutBatch:
        """Sample, and write.

        Raises:
            RunFolderError: the disk is full or gone.
        """
        rollouts = self.engines.generate(prompts, sampling)
        try:
            self.files.write(
                self.names.next(), prompts, rollouts, sampling=sampling, origin=self.origin.rollouts
            )
        except OSError as error:
            raise self._cannot_write(error) from error
        return rollouts

    def while_sampling(
        self, task: PromptStep, sampling: SamplingParams
    ) -> AbstractContextManager[SamplingParams]:
        """Score responses that end in the block."""
        return self.reward.while_sampling(task, sampling)

    def __call__(self, rollouts: RolloutBatch, task: PromptStep) -> Scores:
        """Score, and write; raises as ``generate``."""
        scores = self.reward(rollouts, task)
        try:
            self.files.write_scores(
                self.names.current, scores, rows=task.rows, origin=self.origin.scores
            )
        except OSError as error:
            raise self._cannot_write(error) from error
        return scores

    def _cannot_write(self, error: OSError) -> RunFolderError:
        return RunFolderError(
            f"cannot write rollouts to {self.files.folder}: {error}; free space there, or set "
            "rollout.dump=false"
        )
