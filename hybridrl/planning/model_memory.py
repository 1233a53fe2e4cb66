"""What a rank asks about each of its models, whichever engine trains it."""

from __future__ import annotations

from typing import Protocol

from hybridrl.planning.roles import ModelPrecision, PlannedModel
from hybridrl.planning.workload import Microbatch


class ModelMemory(Protocol):
    """Bytes of one role on one rank. Sizes that depend on rows are of one micro-batch."""

    @property
    def role(self) -> PlannedModel:
        """The model, and whether it learns."""
        ...

    @property
    def numerics(self) -> ModelPrecision:
        """In what numbers it is kept and computed."""
        ...

    @property
    def weights(self) -> int:
        """What it computes with, as it stays on the device."""
        ...

    @property
    def mapped_files(self) -> int:
        """What of the model folder is in host memory while it is read."""
        ...

    @property
    def masters(self) -> int:
        """float32 weights beside the ones computed with; part of ``optimizer``."""
        ...

    @property
    def optimizer(self) -> int:
        """All that the optimizer keeps, once the first step was taken."""
        ...

    @property
    def host_optimizer(self) -> int:
        """What the optimizer keeps in host memory all the time, gradients for it included."""
        ...

    @property
    def buffers(self) -> int:
        """Gradient buffers, which have memory within an update alone, and once when made."""
        ...

    @property
    def snapshot(self) -> int:
        """What a checkpoint copies to the host."""
        ...

    @property
    def gathered(self) -> int:
        """Weights of other ranks that it holds while computing."""
        ...

    @property
    def gradients_on_host(self) -> int:
        """This rank's share of the gradients, where they lie in host memory."""
        ...

    def gradients_before_last(self, microbatch: Microbatch) -> int:
        """Gradients, beside ``buffers``, when the last backward pass of an update begins."""
        ...

    def gradients_at_end(self, microbatch: Microbatch) -> int:
        """Gradients, beside ``buffers``, when the last backward pass ends."""
        ...

    def embedding_gradient(self) -> int:
        """The output embedding's gradient, where it is held back for a second use."""
        ...

    def saved_by_block(self, microbatch: Microbatch) -> int:
        """What autograd keeps of one block's forward pass."""
        ...

    def activations(self, microbatch: Microbatch) -> int:
        """Everything that autograd keeps when it is most."""
        ...

    def passing(self, microbatch: Microbatch) -> int:
        """What exists only while one block computes."""
        ...

    def logits_forward(self, microbatch: Microbatch) -> int:
        """What a chunk of logits takes in a forward pass."""
        ...

    def logits_backward(self, microbatch: Microbatch) -> int:
        """What a chunk of logits takes in a backward pass."""
        ...
