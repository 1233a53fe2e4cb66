"""Settings and ranks that all parts of an engine on megatron-core share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hybridrl.config.megatron import MegatronConfig
from hybridrl.config.model import ModelConfig

Duty = Literal["learns", "adapts", "adapts_experts", "scores"]
"""Whether a model's weights learn, adapters beside some layers or beside experts, or nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronContext:
    """The settings that all models of a process on megatron-core have in common."""

    megatron: MegatronConfig
    model: ModelConfig
    device: torch.device
    seed: int  # of megatron-core's generators
    timeout_s: float  # of one collective


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelRank:
    """A rank among those that share a layer; pipeline ranks differ in layer numbers."""

    tp_rank: int = 0  # among tensor-parallel ranks
    tp_size: int = 1
    ep_rank: int = 0  # among expert-parallel ranks
    ep_size: int = 1
    etp_rank: int = 0  # among the ranks that share the matrices of one expert
    etp_size: int = 1
