"""Parts of the interface of a training engine: losses, states to offload, and sets of weights.

Legend: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor

from hybridrl.algorithms.token_rows import TokenRows

NamedTensors = Iterator[tuple[str, Tensor]]  # weights by name, one at a time


class TrainState(Enum):
    """Memory of a training engine that is offloaded separately."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"


class WeightSet(Enum):
    """The weights of one pass of a weight sync. Frozen ones are sent until they arrived once."""

    BASE = "base"
    """Tensors under plain Hugging Face names. The only set, unless adapters are sent apart."""

    ADAPTER = "adapter"
    """A and B of LoRA, named as in ``adapter_model.safetensors``; loaded together."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One exported tensor, as the rollout engine gets it."""

    name: str  # of Hugging Face, or in an adapter's file
    shape: tuple[int, ...]  # full, not a shard's
    num_bytes: int  # of the full tensor


@dataclass(frozen=True, slots=True)
class TokenLossInputs:
    """The response tokens of one micro-batch, end to end, length T."""

    current_logprobs_T: Tensor  # float32 nats, with gradient
    entropy_T: Tensor  # float32 nats, with gradient only if the loss asks for it
    weights_T: Tensor  # float32, share in the global loss, see algorithms/aggregate.py
    advantages_T: Tensor  # float32
    sampler_logprobs_T: Tensor  # float32 nats
    old_logprobs_T: Tensor  # float32 nats, no gradient
    reference_logprobs_T: Tensor | None  # float32 nats
    rows: TokenRows  # the response that each token belongs to
    positions_T: Tensor  # int64, tokens of its row before each token, the prompt's too
    sampler_weights_T: Tensor | None = None  # float32, of a rollout correction
    weight_versions_T: Tensor | None = None  # int32, of the weights that sampled each token
    divergences_T: Tensor | None = None  # float32 nats, from the teacher, with gradient


class OffloadableModel(Protocol):
    """A model whose memory can leave the device. Every method is a collective."""

    def offload(self, state: TrainState) -> None:
        """Move a state to host memory and free its device memory. Twice is a no-op."""
        ...

    def restore(self, state: TrainState) -> None:
        """Move a state back to the device, bitwise identical. Twice is a no-op."""
        ...

    def resident_bytes(self, state: TrainState) -> int:
        """Measure the bytes of a state on this rank's device."""
        ...
