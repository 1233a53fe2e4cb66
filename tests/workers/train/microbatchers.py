"""Micro-batchers of one process for tests."""

from __future__ import annotations

from typing import Any

import torch

from hybridrl.models.packed import AttentionKernel
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.microbatcher import MicroBatcher

CPU = torch.device("cpu")


def make_batcher(
    kernel: AttentionKernel = "padded", *, max_tokens: int = 100, **options: Any
) -> MicroBatcher:
    return MicroBatcher(
        kernel=kernel, max_tokens=max_tokens, ranks=Ranks(CPU), device=CPU, **options
    )
