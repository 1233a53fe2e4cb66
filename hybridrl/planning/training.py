"""Memory of the models that are trained or scored with, on one rank.

The formulas follow the code: what autograd keeps for each line of transformers' decoder blocks,
``models/packed.py`` and ``models/logprobs.py``, and what FSDP2 gathers. ``docs/memory.md`` derives
them.

Legend: T packed tokens, S scored tokens, C of them in a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.planning.shapes import ModelShape
from hybridrl.planning.workload import Microbatch

BYTES = {"float32": 4, "bfloat16": 2}
"""Size of a number of the types that a configuration can name."""

_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """How a model is stored, computed and divided."""

    storage_bytes: int
    """Of a stored weight."""

    compute_bytes: int
    """Of a gathered weight and of an activation."""

    reduce_bytes: int
    """Of a gradient that travels between ranks."""

    num_shards: int
    """Ranks that a model's state is divided over."""

    is_sharded: bool
    """FSDP2 gathers blocks; else weights are plain tensors of one rank."""

    has_varlen_attention: bool
    checkpoints_blocks: bool
    needs_entropy_gradient: bool
    chunk_tokens: int

    @classmethod
    def of(cls, config: ExperimentConfig) -> Numerics:
        """Read them from the sections model, actor, algorithm and cluster."""
        actor, model = config.actor, config.model
        has_varlen = config.cluster.device == "cuda" and actor.compute_dtype == "bfloat16"
        return cls(
            storage_bytes=BYTES[model.dtype],
            compute_bytes=BYTES[actor.compute_dtype],
            reduce_bytes=BYTES[actor.reduce_dtype],
            num_shards=config.cluster.num_ranks,
            is_sharded=config.cluster.num_ranks > 1 or actor.compute_dtype != model.dtype,
            has_varlen_attention=has_varlen and model.attention != "padded",
            checkpoints_blocks=actor.gradient_checkpointing,
            needs_entropy_gradient=config.algorithm.entropy_coefficient > 0,
            chunk_tokens=actor.logprob_chunk_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """A model among the training engines: the actor, its reference, later a critic."""

    name: str
    shape: ModelShape
    num_trainable: int
    """Parameters with gradients and moments: all, none, or those of an adapter."""

    num_outputs: int
    """Columns of the last layer: the vocabulary, or 1 of a value head."""


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes of one role on one rank."""

    role: Role
    numerics: Numerics

    @property
    def weights(self) -> int:
        """This rank's share of the weights, as stored."""
        return self._share(self.role.shape.num_parameters)

    @property
    def optimizer(self) -> int:
        """AdamW's two moments, in the type of the weights, once the first step was taken."""
        return 2 * self._share(self.role.num_trainable)

    @property
    def gathered(self) -> int:
        """What FSDP2 holds in whole: the root, two blocks, and the buffer of a third's gather."""
        if not self.numerics.is_sharded:
            return 0
        shape = self.role.shape
        num_parameters = shape.num_root_parameters + 3 * shape.num_block_parameters
        return min(num_parameters, 2 * shape.num_parameters) * self.numerics.compute_bytes

    def gradients_before_last(self, microbatch: Microbatch) -> int:
        """Gradients that exist when the last backward pass of an update begins.

        FSDP2 sums them unsharded over micro-batches, in ``actor.reduce_dtype``.
        """
        if microbatch.is_only_one:
            return 0
        if self.numerics.is_sharded:
            return self.role.num_trainable * self.numerics.reduce_bytes
        return self._share(self.role.num_trainable)

    def gradients_at_end(self, microbatch: Microbatch) -> int:
        """Gradients when the last backward pass ends: this rank's share, and the last to leave."""
        if not self.numerics.is_sharded:
            return self._share(self.role.num_trainable)
        shape = self.role.shape
        leaving = max(shape.num_root_parameters, shape.num_block_parameters)
        leaving = min(leaving, self.role.num_trainable) * self.numerics.reduce_bytes
        return self._share(self.role.num_trainable) + 2 * leaving

    def saved_by_block(self, microbatch: Microbatch) -> int:
        """What autograd keeps of one block's forward pass."""
        shape, size = self.role.shape, self.numerics.compute_bytes
        num_tokens = microbatch.num_tokens
        # RMSNorm: its input and the quotient go through float32; the product feeds a linear layer.
        norm = _FLOAT32 + 2 * size
        per_token = 2 * norm * shape.hidden_size
        if shape.has_head_norms:
            per_token += (_FLOAT32 + size) * (shape.query_size + shape.key_size)
        per_token += 4 * size * shape.intermediate_size  # gate, its SiLU, up, and their product
        return num_tokens * per_token + self._saved_by_attention(microbatch)

    def _saved_by_attention(self, microbatch: Microbatch) -> int:
        """Queries, keys, values and output as the kernel saw them, and its row sums."""
        shape, size, num_tokens = (
            self.role.shape,
            self.numerics.compute_bytes,
            microbatch.num_tokens,
        )
        row_sums = num_tokens * shape.num_heads * _FLOAT32
        if self.numerics.has_varlen_attention:  # heads of keys and values are repeated
            return 4 * size * num_tokens * shape.query_size + row_sums
        queries = 3 * num_tokens * shape.query_size  # laid out in rows; output too; and laid back
        keys = 2 * microbatch.num_key_slots * shape.key_size
        return size * (queries + keys + microbatch.num_mask_elements) + row_sums

    def activations(self, microbatch: Microbatch) -> int:
        """Everything that autograd keeps when the forward pass of an update has ended."""
        shape, size = self.role.shape, self.numerics.compute_bytes
        block = self.saved_by_block(microbatch)
        stream = microbatch.num_tokens * shape.hidden_size * size
        if self.numerics.checkpoints_blocks:
            blocks = shape.num_layers * stream + block
        else:
            blocks = shape.num_layers * block
        last_norm = microbatch.num_tokens * shape.hidden_size * (_FLOAT32 + size)
        return blocks + last_norm + microbatch.num_scored * shape.hidden_size * size

    def passing(self, microbatch: Microbatch) -> int:
        """What exists only while one block computes, in either direction."""
        shape = self.role.shape
        widest = max(3 * shape.intermediate_size, 3 * shape.query_size + 2 * shape.key_size)
        per_token = (widest + 3 * shape.hidden_size) * self.numerics.compute_bytes
        return microbatch.num_tokens * per_token

    def logits_forward(self, microbatch: Microbatch) -> int:
        """One chunk's logits, probabilities and their product, in float32."""
        return 3 * _FLOAT32 * self._chunk(microbatch) * self.role.num_outputs

    def logits_backward(self, microbatch: Microbatch) -> int:
        """One chunk's logits again, their slopes, and the gradient of the output embedding."""
        size = self.numerics.compute_bytes
        copies = 3 * _FLOAT32 + (2 * _FLOAT32 if self.numerics.needs_entropy_gradient else 0)
        chunk = self._chunk(microbatch) * self.role.num_outputs * copies
        embedding = self.role.num_outputs * self.role.shape.hidden_size * (_FLOAT32 + size)
        return chunk + embedding + microbatch.num_scored * self.role.shape.hidden_size * size

    def embedding_gradient(self) -> int:
        """The output embedding's gradient, which a tied input embedding has autograd hold back."""
        is_trained = self.role.num_trainable >= self.role.shape.num_embedding_parameters
        size = self.numerics.compute_bytes if is_trained and self.role.shape.is_tied else 0
        return self.role.shape.num_embedding_parameters * size

    def _chunk(self, microbatch: Microbatch) -> int:
        return min(microbatch.num_scored, self.numerics.chunk_tokens)

    def _share(self, num_parameters: int) -> int:
        return -(-num_parameters // self.numerics.num_shards) * self.numerics.storage_bytes
