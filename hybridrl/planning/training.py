"""Memory of the models that are trained or scored with, on one rank.

The formulas follow the code: what autograd keeps for each line of transformers' decoder blocks,
``models/packed.py`` and ``models/logprobs.py``, and what FSDP2 gathers. ``docs/memory.md`` derives
them.

Legend: T packed tokens, S scored tokens, C of them in a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.planning.roles import ModelPrecision, PlannedModel
from hybridrl.planning.workload import Microbatch

_FLOAT32 = 4
_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes of one role on one rank."""

    role: PlannedModel
    numerics: ModelPrecision

    @property
    def weights(self) -> int:
        """This rank's share of the weights, as stored, and of an adapter's in float32."""
        base = self._share(self.role.num_parameters) * self.numerics.storage_bytes
        return base + self._share(self.role.num_adapter_parameters) * _FLOAT32

    @property
    def mapped_files(self) -> int:
        """The files that it is read from: a rank maps all of them."""
        return self.role.shape.num_parameters * self.numerics.storage_bytes

    @property
    def masters(self) -> int:
        """None: the optimizer works on the weights themselves."""
        return 0

    @property
    def host_optimizer(self) -> int:
        """Nothing."""
        return 0

    @property
    def buffers(self) -> int:
        """None: gradients come and go."""
        return 0

    @property
    def optimizer(self) -> int:
        """AdamW's two moments, in the type of the weights, once the first step was taken."""
        return 2 * self.trained

    @property
    def trained(self) -> int:
        """This rank's share of the weights that learn; their gradients are as large."""
        size = _FLOAT32 if self.role.adapter else self.numerics.storage_bytes
        return self._share(self.role.num_trained) * size

    @property
    def snapshot(self) -> int:
        """What a checkpoint copies to the host: weights that learn, and their moments."""
        return self.trained + self.optimizer

    @property
    def gathered(self) -> int:
        """What FSDP2 holds in whole: the root, the block that computes, those asked for ahead of
        it, and the buffer that one more arrives in; or all blocks and that buffer."""
        if not self.numerics.is_sharded:
            return 0
        role, numerics = self.role, self.numerics
        adapter = role.adapter.num_block_parameters if role.adapter else 0
        block = role.shape.num_block_parameters + adapter
        num_numbers = role.num_parameters + role.num_adapter_parameters
        if numerics.keeps_gathered:
            num_parameters = num_numbers + block
        else:
            num_blocks = 2 + max(1, numerics.num_prefetched_blocks)
            num_parameters = role.num_root_parameters + num_blocks * block
        return min(num_parameters, 2 * num_numbers) * numerics.compute_bytes

    @property
    def gradients_on_host(self) -> int:
        """This rank's share of the gradients, where they lie in host memory."""
        return self.numerics.lies_on_host * self.trained

    @property
    def _gradients_here(self) -> int:
        """This rank's share of the gradients, where they lie on the device."""
        return self.trained - self.gradients_on_host

    def gradients_before_last(self, microbatch: Microbatch) -> int:
        """Gradients on the device when the last backward pass of an update begins.

        FSDP2 sums this rank's share of them over micro-batches, in the type of the weights; with
        ``reduce_gradients=last_microbatch`` all of them, in ``reduce_dtype``.
        """
        if microbatch.is_only_one:
            return 0
        if self.numerics.is_sharded and self.numerics.sums_whole_gradients:
            return self.role.num_trained * self.numerics.reduce_bytes
        return self._gradients_here

    def gradients_at_end(self, microbatch: Microbatch) -> int:
        """Gradients on the device when the last backward pass ends: this rank's share, and the last
        to leave."""
        if not self.numerics.is_sharded:
            return self.trained
        role = self.role
        if role.adapter:
            leaving = role.adapter.num_block_parameters
        else:
            leaving = max(role.num_root_parameters, role.shape.num_block_parameters)
        leaving_bytes = 2 * min(leaving, role.num_trained) * self.numerics.reduce_bytes
        return self._gradients_here + leaving_bytes

    def saved_by_block(self, microbatch: Microbatch) -> int:
        """What autograd keeps of one block's forward pass.

        The input of a product is kept for the gradient of the weight: not where it is frozen, but
        an adapter beside it needs the same input.
        """
        per_token = self.stream_per_token + self.head_norms_per_token + self.mlp_per_token
        per_token += self.adapter_per_token
        return microbatch.num_tokens * per_token + self.saved_by_attention(microbatch)

    @property
    def stream_per_token(self) -> int:
        """Of the residual stream: both norms, and their results as linear layers take them.

        RMSNorm: its input and the quotient go through float32; the product feeds linear layers.
        """
        per_number = 2 * self._kept_by_norm + self._feeds(*_QKV) + self._feeds(*_GATE_UP)
        return per_number * self.role.shape.hidden_size

    @property
    def head_norms_per_token(self) -> int:
        """Of the norms of queries and keys, where there are any."""
        shape = self.role.shape
        return shape.has_head_norms * self._kept_by_norm * (shape.query_size + shape.key_size)

    @property
    def mlp_per_token(self) -> int:
        """Inside a dense MLP: gate, its SiLU, up; and their product."""
        per_number = 3 * self.numerics.compute_bytes + self._feeds("down_proj")
        return per_number * self.role.shape.intermediate_size

    @property
    def adapter_per_token(self) -> int:
        """Between A and B of each adapted layer."""
        adapter = self.role.adapter
        if adapter is None:
            return 0
        return len(adapter.modules) * adapter.rank * self.numerics.compute_bytes

    def saved_by_attention(self, microbatch: Microbatch) -> int:
        """Queries, keys, values and output as the kernel saw them, and its row sums."""
        shape, size, num_tokens = (
            self.role.shape,
            self.numerics.compute_bytes,
            microbatch.num_tokens,
        )
        row_sums = num_tokens * shape.num_heads * _FLOAT32
        if self.numerics.has_varlen_attention:
            return 2 * size * num_tokens * (shape.query_size + shape.key_size) + row_sums
        laid_back = num_tokens * shape.query_size * self._feeds("o_proj")
        queries = 2 * num_tokens * shape.query_size  # laid out in rows; the output too
        key_size = shape.query_size if self.numerics.repeats_key_heads else shape.key_size
        keys = 2 * microbatch.num_key_slots * key_size
        return size * (queries + keys + microbatch.num_mask_elements) + laid_back + row_sums

    @property
    def _kept_by_norm(self) -> int:
        return _FLOAT32 + self._kept_for_weights

    @property
    def _kept_for_weights(self) -> int:
        """Bytes of a number that only the gradient of a weight needs."""
        return 0 if self.role.adapter else self.numerics.compute_bytes

    def _feeds(self, *modules: str) -> int:
        """Bytes kept of a number that goes into these layers, all of them into the same."""
        adapter = self.role.adapter
        is_kept = adapter is None or not adapter.modules.isdisjoint(modules)
        return self.numerics.compute_bytes * is_kept

    def activations(self, microbatch: Microbatch) -> int:
        """Everything that autograd keeps when the forward pass of an update has ended."""
        shape, size = self.role.shape, self.numerics.compute_bytes
        block = self.saved_by_block(microbatch)
        stream = microbatch.num_tokens * shape.hidden_size * size
        blocks = shape.num_layers * block
        if self.numerics.checkpoints_blocks:
            blocks = shape.num_layers * stream + block
        elif self.role.adapter:  # nothing before the first adapter has a gradient
            blocks -= microbatch.num_tokens * shape.hidden_size * _FLOAT32
        last_norm = microbatch.num_tokens * shape.hidden_size * (_FLOAT32 + self._kept_for_weights)
        scored = _FLOAT32 if self.role.has_value_head else size  # as the value head takes it
        return blocks + last_norm + microbatch.num_scored * shape.hidden_size * scored

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
        """One chunk's logits again, their slopes, and the gradient of the output embedding.

        A frozen output embedding has none.
        """
        role, size = self.role, self.numerics.compute_bytes
        copies = 3 * _FLOAT32 + (2 * _FLOAT32 if self.numerics.needs_entropy_gradient else 0)
        chunk = self._chunk(microbatch) * role.num_outputs * copies
        embedding = role.num_outputs * role.shape.hidden_size * (_FLOAT32 + size)
        slopes = microbatch.num_scored * role.shape.hidden_size * size
        return chunk + role.trains_weights * embedding + slopes

    def embedding_gradient(self) -> int:
        """The output embedding's gradient, which a tied input embedding has autograd hold back."""
        has_two_uses = self.role.shape.is_tied and not self.role.has_value_head
        if not (self.role.trains_weights and has_two_uses):
            return 0
        return self.role.shape.num_embedding_parameters * self.numerics.compute_bytes

    def _chunk(self, microbatch: Microbatch) -> int:
        return min(microbatch.num_scored, self.numerics.chunk_tokens)

    def _share(self, num_parameters: int) -> int:
        return -(-num_parameters // self.numerics.num_shards)
