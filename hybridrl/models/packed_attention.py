"""The attention that Transformers calls while a Hugging Face model computes a micro-batch.

It is registered under ``PACKED_ATTENTION``; the caller of the model passes the layout of the rows
as the keyword ``pack_layout``. Transformers builds no mask for registered attention functions, and
none is needed.

Legend: T packed tokens, N heads, D size of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from hybridrl.errors import ModelError
from hybridrl.models.packed import PackLayout

PACKED_ATTENTION = "hybridrl_packed"


def _packed_attention(  # noqa: PLR0913 - transformers chooses these
    module: nn.Module,
    query_1NTD: Tensor,
    key_1NTD: Tensor,
    value_1NTD: Tensor,
    attention_mask: Tensor | None,
    *,
    pack_layout: PackLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_unused: object,  # dropout among them: a policy gradient is taken at the sampled policy
) -> tuple[Tensor, None]:
    if attention_mask is not None:
        raise ModelError(
            f"packed attention got a mask of shape {tuple(attention_mask.shape)}; call the model "
            "with attention_mask=None, because the layout separates rows"
        )
    is_cut = sliding_window is not None and pack_layout.longest_row > sliding_window
    output_TND = pack_layout.attend(
        query_1NTD[0].transpose(0, 1),
        key_1NTD[0].transpose(0, 1),
        value_1NTD[0].transpose(0, 1),
        scale=scaling,
        window=sliding_window if is_cut else None,
        sink_N=s_aux,
    )
    return output_TND[None], None


AttentionInterface.register(PACKED_ATTENTION, _packed_attention)


def keep_attention_eager() -> None:
    """Exclude attention from ``torch.compile``, in this process."""
    # Not a decorator: it imports torch._dynamo, which takes a second.
    eager = torch.compiler.disable(_packed_attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register(PACKED_ATTENTION, eager)
