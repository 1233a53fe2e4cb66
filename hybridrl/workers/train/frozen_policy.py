"""The reference of a policy with an adapter: the policy itself, the adapter switched off."""

from __future__ import annotations

from typing import Protocol

from hybridrl.batch import RolloutBatch, ScoreBatch, SupervisedBatch
from hybridrl.workers.train.protocol import TrainEngine, TrainState


class AdaptedPolicy(TrainEngine, Protocol):
    """A policy of which only an adapter learns."""

    def compute_frozen_logprobs(
        self, rows: RolloutBatch | SupervisedBatch, *, temperature: float
    ) -> ScoreBatch:
        """Score this rank's rows with the adapter switched off: the model as it was loaded."""
        ...


class BaseModelReference:
    """The policy without its adapter as a reference model; a ``ScoringEngine`` without memory."""

    def __init__(self, policy: AdaptedPolicy) -> None:
        self._policy = policy
        self.dp_rank, self.dp_size = policy.dp_rank, policy.dp_size
        self.leads = policy.leads

    def compute_logprobs(
        self, rows: RolloutBatch | SupervisedBatch, *, temperature: float
    ) -> ScoreBatch:
        """Score this rank's rows with the frozen model, no gradient."""
        return self._policy.compute_frozen_logprobs(rows, temperature=temperature)

    def offload(self, part: TrainState) -> None:
        """Do nothing: the policy's memory leaves with the policy."""

    def restore(self, part: TrainState) -> None:
        """Do nothing, as ``offload``."""

    def resident_bytes(self, part: TrainState) -> int:
        """Return 0: it has no memory of its own."""
        return 0
