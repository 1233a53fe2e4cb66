"""What engines on megatron-core are told, beside what any engine is told."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridrl.config.megatron import MegatronConfig
from hybridrl.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronContext:
    """What all engines of a process on megatron-core have in common."""

    megatron: MegatronConfig
    """The parallel sizes."""

    model: ModelConfig
    """Attention kernel."""

    device: torch.device
    """Where models compute."""

    seed: int
    """Of megatron-core's generators."""

    timeout_s: float
    """Seconds one collective may take."""
