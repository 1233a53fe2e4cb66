"""The policy as the driver sees it: remote calls on a worker group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

from hybridrl.batch import (
    CriticBatch,
    LogprobBatch,
    PreferenceBatch,
    PromptBatch,
    RolloutBatch,
    SupervisedBatch,
    TrainBatch,
    ValueBatch,
)
from hybridrl.metrics import Metrics
from hybridrl.sampler import SamplingParams

Result = TypeVar("Result", covariant=True)


class Generates(Protocol):
    """Gives responses to prompts."""

    def generate(self, prompts: PromptBatch, sampling: SamplingParams) -> RolloutBatch:
        """Sample with the newest weights; sleep, wake and sync happen inside."""


class Exchanges(Protocol):
    """Samples on while the trainer learns: takes prompts in, and gives those that are answered."""

    def exchange(self, prompts: PromptBatch | None, sampling: SamplingParams) -> RolloutBatch:
        """Send the newest weights, admit ``prompts``, if there are any, and wait for a batch.

        It has the responses to as many admitted prompts as a step has, those to one adjacent.
        """


class SamplesBeside(Protocol):
    """Samples held-out prompts beside a step."""

    def begin_evaluation(self, tasks: Sequence[tuple[PromptBatch, SamplingParams]]) -> None:
        """Let the next exchange begin to sample these prompts, with the weights that it sends."""

    def end_evaluation(self) -> list[RolloutBatch]:
        """Wait for the responses to each task; before the next exchange."""


class Exports(Protocol):
    """Writes the policy in the form of other libraries."""

    def export_hf(self, folder: Path) -> list[None]:
        """Write a Hugging Face folder."""

    def export_adapter(self, folder: Path) -> list[None]:
        """Write a peft folder; there must be an adapter."""


class Policy(Generates, Exchanges, Exports, Protocol):
    """A worker group of ``ActorRolloutWorker``; each method is one remote call to all ranks."""

    def take_agent_metrics(self) -> Metrics:
        """Return the metrics of conversations since the last update or call, and forget them."""

    def compute_logprobs(self, rollouts: RolloutBatch) -> LogprobBatch:
        """Score with the weights before the update, and with the reference."""

    def update(self, batch: TrainBatch, *, kl_coefficient: float) -> Metrics:
        """Take the optimizer steps of one rollout batch."""


class Critic(Protocol):
    """A worker group of ``CriticWorker``; its calls run in the background of the driver."""

    def compute_values(self, rollouts: RolloutBatch) -> Pending[ValueBatch]:
        """Value the state before each response token."""

    def update(self, batch: CriticBatch) -> Pending[Metrics]:
        """Take the critic's optimizer steps of one rollout batch."""


class Pending(Protocol[Result]):
    """A call in flight; see ``single_controller.Future``."""

    def get(self) -> Result:
        """Wait for all ranks and return the collected result."""


class Learner(Exports, Protocol):
    """A worker group of a mode that learns from a data set; see ``workers/offline.py``."""

    def update(self, batch: SupervisedBatch | PreferenceBatch) -> Metrics:
        """Take one optimizer step."""

    def evaluate(self, batch: SupervisedBatch | PreferenceBatch) -> Metrics:
        """Measure the loss on held-out rows."""

    def compute_reference(self, batch: PreferenceBatch) -> Tensor:
        """Return the reference's log-prob of each answer, float32 [B] nats."""
