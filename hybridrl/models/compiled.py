"""``torch.compile`` for the blocks of a Hugging Face model."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hybridrl.models.packed_attention import keep_attention_eager


def compile_blocks(hf: PreTrainedModel, *, backend: str = "inductor") -> None:
    """Compile each block's forward pass, once for all lengths of packs; names stay as they are.

    Attention stays out of it: its layout differs from pack to pack, and a graph for each would be
    compiled anew. What FSDP2 and checkpointing do around a block stays out as well.

    Args:
        hf: the model; it need not have memory yet.
        backend: of ``torch.compile``.
    """
    keep_attention_eager()
    for block in hf.model.layers:
        block.forward = torch.compile(block.forward, dynamic=True, backend=backend)
