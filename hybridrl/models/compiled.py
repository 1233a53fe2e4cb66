"""``torch.compile`` for the blocks of a Hugging Face model."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hybridrl.models.packed_attention import keep_attention_eager


def compile_blocks(hf: PreTrainedModel, *, backend: str = "inductor") -> None:
    """Compile each block's forward pass, once for all micro-batch sizes; names do not change.

    Attention is not compiled: its layout differs between micro-batches, and each would need a new
    graph. The hooks of FSDP2 and checkpointing around a block are not compiled either.

    Args:
        hf: the model, with or without memory.
    """
    keep_attention_eager()
    for block in hf.model.layers:
        block.forward = torch.compile(block.forward, dynamic=True, backend=backend)
