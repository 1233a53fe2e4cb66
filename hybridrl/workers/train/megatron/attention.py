"""Attention over a micro-batch within megatron-core's layers.

Legend: T packed tokens (of this rank), S keys taken, N query heads and J key-value heads of this
rank, D size of a head.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from torch import Tensor

from hybridrl.models.packed import PackLayout
from hybridrl.models.packed_share import SharedLayout
from hybridrl.models.varlen import VarlenCall, VarlenLayout, VarlenSpans
from hybridrl.workers.train.megatron.megatron_core import (
    MegatronModule,
    TEDotProductAttention,
    TransformerConfig,
)
from hybridrl.workers.train.megatron.routing import PackedRows


class PackedAttention(MegatronModule):
    """The core of attention over a micro-batch, with the same kernels as models on FSDP2."""

    def __init__(self, config: TransformerConfig, *_: object, **__: object) -> None:
        # Megatron-core passes more: layer, mask, dropout. A row is causal, and has no dropout.
        super().__init__(config=config)

    def forward(
        self,
        query_T1ND: Tensor,
        key_T1JD: Tensor,
        value_T1JD: Tensor,
        _attention_mask: None,
        *,
        packed_seq_params: PackedRows,
        **_: object,
    ) -> Tensor:
        """Attend causally within each row; returns [T, 1, N D]."""
        layout = packed_seq_params.layout
        if layout is None:
            raise TypeError("PackedRows came without a layout")
        query, key, value = query_T1ND.squeeze(1), key_T1JD.squeeze(1), value_T1JD.squeeze(1)
        return self._attend(layout, query, key, value).flatten(1)[:, None]

    def _attend(
        self, layout: PackLayout, query_TND: Tensor, key_TJD: Tensor, value_TJD: Tensor
    ) -> Tensor:
        """Attend causally within each row; returns [T, N, D], or [T, N D]."""
        return layout.attend(query_TND, key_TJD, value_TJD, scale=None)


class FusedAttention(PackedAttention):
    """The core of attention by TransformerEngine, in its format ``thd``; unproved on a GPU.

    It computes micro-batches whose rows lie end to end. Any other layout, such as one with shared
    prompts, uses the kernel of the base class. With context parallelism keys and values are
    gathered as there, and TransformerEngine attends from this rank's spans to all tokens before
    them. Its own exchange of keys in a ring would need rows in equal pieces.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(config)
        alone = copy(config)
        alone.context_parallel_size = 1
        self.kernel = TEDotProductAttention(alone, *args, **kwargs)

    def _attend(
        self, layout: PackLayout, query_TND: Tensor, key_TJD: Tensor, value_TJD: Tensor
    ) -> Tensor:
        if isinstance(layout, VarlenLayout) and layout.prompts is None:
            states = (query_TND, key_TJD, value_TJD)
            return self._compute(states, layout.own, mask="padding_causal")
        if isinstance(layout, SharedLayout) and isinstance(layout.attention, VarlenSpans):
            spans = layout.attention
            key_SJD, value_SJD = (
                states.index_select(0, spans.key_token)
                for states in layout.gathered(key_TJD, value_TJD)
            )
            return self._compute(
                (query_TND, key_SJD, value_SJD),
                spans.call,
                mask="padding_causal_bottom_right",
            )
        return super()._attend(layout, query_TND, key_TJD, value_TJD)

    def _compute(
        self, states: tuple[Tensor, Tensor, Tensor], call: VarlenCall, *, mask: str
    ) -> Tensor:
        # Past megatron-core's own forward pass, whose masks lack the one aligned to the last key.
        parent: Any = super(TEDotProductAttention, self.kernel)
        attended: Tensor = parent.forward(
            *states,
            None,
            qkv_format="thd",
            cu_seqlens_q=call.query_offsets,
            cu_seqlens_kv=call.key_offsets,
            max_seqlen_q=call.longest[0],
            max_seqlen_kv=call.longest[1],
            attn_mask_type=mask,
        )
        return attended
