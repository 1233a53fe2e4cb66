"""Attention over a pack by TransformerEngine's kernels: rows end to end, its format ``thd``.

Legend: T packed tokens (of this rank), S keys taken, N query heads and J key-value heads of this
rank, D size of a head.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from torch import Tensor

from hybridrl.models.packed import PackLayout
from hybridrl.models.packed_share import SharedLayout, VarlenSpans
from hybridrl.models.varlen import VarlenCall, VarlenLayout
from hybridrl.workers.train.mcore.megatron_core import (
    MegatronModule,
    TEDotProductAttention,
    TransformerConfig,
)
from hybridrl.workers.train.mcore.packed_rows import PackedRows


class FusedAttention(MegatronModule):
    """The core of attention by TransformerEngine, unproved on a GPU.

    It takes packs whose rows lie end to end. Any other layout, such as one in which rows share a
    prompt, computes with its own kernel, as in ``layers.PackedAttention``. With context parallelism
    keys and values are gathered as there, and TransformerEngine attends from this rank's stretches
    of rows to what comes before them: its own exchange of keys in a ring wants each row cut in
    equal pieces.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(config=config)
        alone = copy(config)
        alone.context_parallel_size = 1
        self.kernel = TEDotProductAttention(alone, *args, **kwargs)

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
        return layout.attend(query_TND, key_TJD, value_TJD, scale=None)

    def _compute(
        self, states: tuple[Tensor, Tensor, Tensor], call: VarlenCall, *, mask: str
    ) -> Tensor:
        # Past megatron-core's own forward pass, whose masks lack the one aligned to the last key.
        attended: Tensor = super(TEDotProductAttention, self.kernel).forward(
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
