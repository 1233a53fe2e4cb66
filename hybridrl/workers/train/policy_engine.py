"""What policies that learn have in common, whatever engine computes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from hybridrl.batch import SupervisedBatch, TrainBatch
from hybridrl.errors import ModelError
from hybridrl.metrics import Metrics
from hybridrl.workers.train.losses import SupervisedLoss
from hybridrl.workers.train.policy_rows import as_train_batch
from hybridrl.workers.train.protocol import TokenLoss


class LearningPolicy(ABC):
    """A policy that takes steps on rollouts, and so on examples; without an adapter."""

    @abstractmethod
    def update(
        self,
        batch: TrainBatch,
        *,
        loss: TokenLoss,
        aggregation: str,
        temperature: float,
        max_response_tokens: int,
    ) -> Metrics:
        """Take one optimizer step on the union of all ranks' rows; see ``TrainEngine.update``."""

    def fit(self, batch: SupervisedBatch) -> Metrics:
        """Take one optimizer step on the mean negative log-likelihood of the masked tokens."""
        return self.update(
            as_train_batch(batch),
            loss=SupervisedLoss(),
            aggregation="token_mean",
            temperature=1.0,
            max_response_tokens=1,
        )

    def export_adapter(self, folder: Path) -> None:
        """Refuse: the whole policy learned, so there is no adapter.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            f"cannot write {folder}: this policy has no adapter; export the whole of it, or train "
            "with lora.enabled=true"
        )
