"""Memory of one micro-batch's pass through a model on one rank, in bytes.

It follows the code: the tensors that autograd keeps for each line of transformers' decoder blocks,
``models/packed.py`` and ``models/logprobs.py``. ``docs/memory.md`` derives the sizes.

Legend: T packed tokens of this rank, S scored tokens, C of them in a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from hybridrl.config.architecture import MoEConfig
from hybridrl.planning.model_memory import ModelMemory
from hybridrl.planning.workload import Microbatch

_FLOAT32 = 4
_ROUTER_COPIES = 3  # logits, probabilities and the ids of the chosen experts, in float32
_ORDER_BYTES = 37  # of a (token, expert) pair in transformers: three indices, weights, a mask


@dataclass(frozen=True)  # without slots: sizes are computed once
class Activations:
    """Bytes of one micro-batch, forward and backward."""

    model: ModelMemory
    microbatch: Microbatch

    @cached_property
    def _local(self) -> Microbatch:
        """The tokens of this rank where context-parallel ranks share a row.

        Keys and values are gathered, so a rank keeps those of all tokens.
        """
        size = self.model.split.context
        return replace(
            self.microbatch,
            num_tokens=-(-self.microbatch.num_tokens // size),
            num_scored=-(-self.microbatch.num_scored // size),
        )

    @property
    def _size(self) -> int:
        return self.model.compute_bytes

    @property
    def _for_weights(self) -> int:
        """Bytes of a number that is kept only for the gradient of a weight."""
        return 0 if self.model.adapter else self._size

    @property
    def _by_norm(self) -> int:
        """Bytes of a number that a norm reads: its input, and the quotient in float32."""
        return _FLOAT32 + self._for_weights

    def _feeds(self, *modules: str) -> int:
        """Bytes kept of a number that all of these layers read.

        The input of a product is kept for the gradient of the weight. A frozen weight needs none,
        but an adapter beside it needs the same input.
        """
        adapter = self.model.adapter
        is_kept = adapter is None or not set(adapter.modules).isdisjoint(modules)
        return self._size * is_kept

    @property
    def residual_stream(self) -> int:
        """The residual stream between two blocks."""
        numbers = self._local.num_tokens * self.model.architecture.hidden_size
        return numbers * self._size // self.model.split.sequence

    @property
    def whole_stream(self) -> int:
        """The residual stream of all tokens, as a pass without gradients holds it."""
        return self.microbatch.num_tokens * self.model.architecture.hidden_size * self._size

    # -- kept for the backward pass --------------------------------------------------------------

    @cached_property
    def saved(self) -> int:
        """Everything that autograd keeps at the end of the last forward pass of an update."""
        model, stream = self.model, self.residual_stream
        recomputes = model.engine.gradient_checkpointing
        if model.is_megatron and model.config.megatron.recompute_modules:
            recomputes = False  # upper bound: recomputed tensors are not subtracted
        if recomputes:
            blocks = sum(self._kinds.values()) * stream
        else:
            blocks = sum(number * self._block(kind) for kind, number in self._kinds.items())
            if model.adapter and not model.is_megatron:  # no gradient before the first one
                blocks -= self._local.num_tokens * model.architecture.hidden_size * _FLOAT32
        # A stage's input is kept beside the tensors of its blocks.
        in_flight = model.split.in_flight(self.microbatch.num_microbatches)
        kept = int(in_flight * (blocks + stream * (model.split.pipeline > 1)))
        kept += recomputes * self.saved_by_block
        return kept + model.split.is_last * self._saved_by_head

    @cached_property
    def saved_by_block(self) -> int:
        """The tensors that autograd keeps of the forward pass of the largest block."""
        return max(self._block(has_experts) for has_experts in self._kinds)

    @cached_property
    def _kinds(self) -> dict[bool, int]:
        """Number of this stage's blocks with and without experts, each if there are any."""
        split, model = self.model.split, self.model.architecture
        num_sparse = split.num_sparse(model)
        numbers = {True: num_sparse, False: len(split.layers_of(model)) - num_sparse}
        return {kind: number for kind, number in numbers.items() if number}

    def _block(self, has_experts: bool) -> int:  # noqa: FBT001 - one of two kinds of blocks
        narrow, num_tokens = self.model.narrow, self._local.num_tokens
        # The norms, and their results as linear layers take them.
        stream = narrow.num_norms * self._by_norm
        stream += self._feeds("q_proj", "k_proj", "v_proj", "qkv_proj")
        stream += self._feeds("gate_proj", "up_proj", "gate_up_proj")
        stream *= narrow.hidden_size
        heads = narrow.query_size + narrow.key_size
        per_token = (narrow.has_head_norms or narrow.norms_all_heads) * self._by_norm * heads
        if adapter := self.model.adapter:  # between A and B of each adapted layer
            per_token += len(adapter.modules) * adapter.rank * self._size
        if self.model.is_megatron:
            per_token += self._by_fused_layers * self._size
        total = num_tokens * stream // self.model.split.sequence + num_tokens * per_token
        total += self.saved_by_attention
        if has_experts:
            return total + self._saved_by_experts
        # Gate, its SiLU and up; and their product, of which megatron-core keeps another copy.
        copies = 4 if self.model.is_megatron else 3
        per_number = copies * self._size + self._feeds("down_proj")
        return total + num_tokens * per_number * narrow.intermediate_size

    @property
    def _by_fused_layers(self) -> int:
        """Count numbers per token that megatron-core keeps beside those of a Hugging Face layer.

        Cosine and sine of the rotation, for queries and keys. With norms of heads, the result of a
        fused projection. And gathered heads, if a rank has less than one key-value head.
        """
        narrow, model = self.model.narrow, self.model.architecture
        numbers = 4 * narrow.head_size
        numbers += narrow.has_head_norms * (narrow.query_size + narrow.key_size)
        if self.model.split.tensor > model.num_key_value_heads:
            numbers += model.query_size + 2 * model.key_size
        return numbers

    @property
    def saved_by_attention(self) -> int:
        """Queries, keys, values and output as the kernel sees them, and its row sums."""
        narrow, size, local = self.model.narrow, self._size, self._local
        row_sums = local.num_tokens * narrow.num_heads * _FLOAT32
        if self.model.has_varlen_attention:
            heads = 2 * (narrow.query_size + narrow.key_size)
            return size * local.num_tokens * heads + row_sums
        laid_back = local.num_tokens * narrow.query_size * self._feeds("o_proj")
        queries = 2 * local.num_tokens * narrow.query_size  # laid out in rows; the output too
        # On CUDA the padded kernel lays out keys and values once for each query head.
        key_size = narrow.query_size if self.model.is_cuda else narrow.key_size
        keys = 2 * local.num_key_slots * key_size
        return size * (queries + keys + local.num_mask_elements) + laid_back + row_sums

    @property
    def _saved_by_experts(self) -> int:
        """Tokens as sent to experts and as they return, and the tensors inside the experts.

        Every expert is assumed to get the same number of tokens.
        """
        experts = self.model.architecture.experts
        if experts is None:
            return 0
        if self.model.is_megatron:
            numbers = self._expert_numbers(of_width=5, of_hidden=2)
        else:  # gate, its SiLU and up; inputs of both products, if their weights learn
            is_trained = self.model.adapter is None
            numbers = self._expert_numbers(of_width=3 + is_trained, of_hidden=1 + is_trained)
        numbers += self._local.num_tokens * self._numbers_of_shared_expert(experts)
        router = experts.num_experts * _ROUTER_COPIES * _FLOAT32
        if not self.model.is_megatron:
            router = experts.num_experts * _FLOAT32 + experts.num_per_token * _ORDER_BYTES
        return numbers * self._size + self._local.num_tokens // self.model.split.sequence * router

    def _numbers_of_shared_expert(self, experts: MoEConfig) -> int:
        """Count numbers per token of the expert for all tokens: inside it, and its result."""
        if not experts.shared_size:
            return 0
        width = (3 + (self.model.adapter is None)) * experts.shared_size // self.model.split.tensor
        return width + self.model.architecture.hidden_size

    def _expert_numbers(self, *, of_width: int, of_hidden: int) -> int:
        """Count numbers per (token, expert) pair: inside the expert, and outside of it.

        Ranks that split an expert's matrices hold each other's tokens, and a slice of each inside.
        """
        experts, split = self.model.architecture.experts, self.model.split
        if experts is None or True not in self._kinds:
            return 0
        pairs = self._local.num_tokens * experts.num_per_token // split.sequence
        outside = of_hidden * split.expert_tensor * self.model.architecture.hidden_size
        return pairs * (of_width * experts.intermediate_size + outside)

    @property
    def _saved_by_head(self) -> int:
        hidden = self.model.architecture.hidden_size
        numbers = self._local.num_tokens * hidden
        last_norm = numbers * self._by_norm // self.model.split.sequence
        scored = _FLOAT32 if self.model.has_value_head else self._size  # as the value head reads it
        return last_norm + self._local.num_scored * hidden * scored

    # -- while computing -------------------------------------------------------------------------

    @property
    def passing(self) -> int:
        """Tensors that exist only while one block computes, forward or backward."""
        narrow = self.model.narrow
        widest = max(3 * narrow.intermediate_size, 3 * narrow.query_size + 2 * narrow.key_size)
        dense = self._local.num_tokens * (widest + 3 * narrow.hidden_size)
        if self.model.is_megatron:
            sparse = self._expert_numbers(of_width=3, of_hidden=2)
        else:  # of the backward pass: slopes inside the experts, or of what they return
            inside = self._expert_numbers(of_width=5, of_hidden=1)
            sparse = max(inside, self._expert_numbers(of_width=1, of_hidden=3))
        return max(dense, sparse) * self._size

    @property
    def logits_forward(self) -> int:
        """One chunk's logits, probabilities and their product, in float32."""
        return 3 * _FLOAT32 * self._chunk * self._num_outputs

    @property
    def logits_backward(self) -> int:
        """One chunk's logits again, their gradients, and the gradient of the output embedding.

        A frozen output embedding has no gradient.
        """
        model, hidden = self.model, self.model.architecture.hidden_size
        is_regularised = model.config.algorithm.entropy_coefficient > 0
        chunk = self._chunk * self._num_outputs * (5 if is_regularised else 3) * _FLOAT32
        embedding = self._num_outputs * hidden * (_FLOAT32 + self._size)
        slopes = self._local.num_scored * hidden * self._size
        return model.split.is_last * (chunk + model.trains_weights * embedding + slopes)

    @property
    def _chunk(self) -> int:
        return min(self._local.num_scored, self.model.config.actor.logprob_chunk_tokens)

    @property
    def _num_outputs(self) -> int:
        """Columns of the logits on this rank; 0 for a critic."""
        has_logits = self.model.split.is_last and not self.model.has_value_head
        return has_logits * self.model.narrow.vocab_size
