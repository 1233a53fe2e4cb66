"""What a training engine offers to a worker: the contract that fsdp2 and megatron share.

Legend: B rows, L tokens of a row, T packed tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from torch import Tensor

from hybridrl.batch import (
    CriticBatch,
    RolloutBatch,
    ScoreBatch,
    SupervisedBatch,
    TrainBatch,
    ValueBatch,
)
from hybridrl.metrics import Metrics
from hybridrl.workers.train.places import CheckpointTensor

NamedTensors = Iterator[tuple[str, Tensor]]
"""Weights by name, one at a time."""


class TrainState(Enum):
    """Parts of a training engine that leave the device separately."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"


class WeightSet(Enum):
    """One pass of a weight sync. A part that no step changes is sent until it has arrived, once."""

    BASE = "base"
    """Tensors under plain Hugging Face names. All there is, unless adapters are sent apart."""

    ADAPTER = "adapter"
    """A and B of LoRA, named as in ``adapter_model.safetensors``; loaded as a whole."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One exported tensor, as the rollout engine will see it."""

    name: str
    """Hugging Face name, or that of an adapter's file."""

    shape: tuple[int, ...]
    """Full shape, not a shard's."""

    num_bytes: int
    """Bytes of the full tensor."""


@dataclass(frozen=True, slots=True)
class TokenLossInputs:
    """One packed micro-batch as the loss sees it: response tokens only, end to end, length T."""

    current_logprobs_T: Tensor  # float32 nats, with gradient
    entropy_T: Tensor  # float32 nats, with gradient only if the loss asks for it
    weights_T: Tensor  # float32, share in the global loss, see algorithms/aggregate.py
    advantages_T: Tensor  # float32
    sampler_logprobs_T: Tensor  # float32 nats
    old_logprobs_T: Tensor  # float32 nats, no gradient
    reference_logprobs_T: Tensor | None  # float32 nats


class TokenLoss(Protocol):
    """Turns log-probs into a loss. Stateless; the engine calls it once per micro-batch."""

    @property
    def needs_entropy_gradient(self) -> bool:
        """True if the entropy stands in the loss, and not only among the metrics."""
        ...

    def __call__(self, inputs: TokenLossInputs) -> tuple[Tensor, Metrics]:
        """Return this micro-batch's share of the global loss, to be *summed*, and metrics.

        No tokens give a 0 that carries a gradient, and no metrics.
        """
        ...


class ShardedEngine(Protocol):
    """A model in shards over the ranks of the ``train`` mesh, which can leave the device.

    Every method is a collective: all ranks call it, in the same order.
    """

    dp_rank: int
    dp_size: int

    leads: bool
    """Whether this rank answers for its data-parallel rank, as one of those that share a model."""

    def offload(self, part: TrainState) -> None:
        """Move a part to host memory and free its device memory. Twice is a no-op."""
        ...

    def restore(self, part: TrainState) -> None:
        """Bring a part back. Twice is a no-op."""
        ...

    def resident_bytes(self, part: TrainState) -> int:
        """Return the bytes that this part holds on the device of this rank."""
        ...


class LearningEngine(ShardedEngine, Protocol):
    """A model with its optimizer, which a run saves and loads."""

    @property
    def num_updates(self) -> int:
        """Optimizer steps taken, skipped ones not counted: all that the schedule remembers."""
        ...

    def checkpoint_tensors(self) -> Mapping[str, CheckpointTensor]:
        """Name this rank's live tensors (shards, if sharded) that a resumed run needs.

        Names are those of FSDP2's parameters and moments, and every rank gives all names, with
        ``ShardedPieces`` of nothing for what others hold: so any engine resumes any other's run.

        They are the parameters that learn and, once a step was taken, the optimizer's moments.
        Whoever fills them with others puts the engine where these were taken.
        """
        ...

    def begin_restore(self, *, num_updates: int) -> None:
        """Go to ``num_updates``; ``checkpoint_tensors`` then names all that is to be filled."""
        ...

    def end_restore(self) -> None:
        """Take up what was filled."""
        ...

    def export_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder (weights, configuration, tokenizer), atomically.

        An adapter is merged into the weights written; the training weights stay apart.
        """
        ...


class ScoringEngine(ShardedEngine, Protocol):
    """A model that scores tokens: the reference."""

    def compute_logprobs(
        self, rows: RolloutBatch | SupervisedBatch, *, temperature: float
    ) -> ScoreBatch:
        """Score this rank's rows with the present weights, no gradient."""
        ...


class TrainEngine(ScoringEngine, LearningEngine, Protocol):
    """The policy with its optimizer."""

    weight_parts: tuple[WeightSet, ...]
    """What rollout engines need, in the order in which they need it; steps change the last alone.

    ``(BASE,)`` for full fine-tuning and for LoRA that is merged on its way, ``(BASE, ADAPTER)``
    where rollout engines apply the adapter.
    """

    def update(
        self,
        batch: TrainBatch,
        *,
        loss: TokenLoss,
        aggregation: str,
        temperature: float,
        max_response_tokens: int,
    ) -> Metrics:
        """Take one optimizer step on the union of all ranks' rows.

        A step whose loss or gradient norm is not finite is skipped and counted. How tokens weigh is
        said by ``algorithms/aggregate.py``, where ``max_response_tokens`` is the fixed length.
        """
        ...

    def fit(self, batch: SupervisedBatch) -> Metrics:
        """Take one optimizer step on the mean negative log-likelihood of the masked tokens."""
        ...

    def weight_specs(self, part: WeightSet = WeightSet.BASE) -> tuple[WeightSpec, ...]:
        """Name what ``full_weights`` will yield, in its order."""
        ...

    def full_weights(self, part: WeightSet = WeightSet.BASE) -> NamedTensors:
        """Yield each weight of a part whole, one at a time. Every rank must exhaust it."""
        ...

    def export_adapter(self, folder: Path) -> None:
        """Write a peft folder, atomically.

        Raises:
            ModelError: the policy has no adapter.
        """
        ...


class CriticEngine(LearningEngine, Protocol):
    """The critic with its optimizer."""

    def compute_values(self, rows: RolloutBatch) -> ValueBatch:
        """Value the state before each response token of this rank's rows, no gradient."""
        ...

    def update(self, batch: CriticBatch) -> Metrics:
        """Take one optimizer step on the union of all ranks' rows, or skip it as a policy would."""
        ...
