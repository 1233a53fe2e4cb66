"""Small LoRA engines for tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hybridrl.config.actor import ActorConfig
from hybridrl.config.model import LoraConfig
from hybridrl.models.adapter import Adapter
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import WeightSet
from tests.workers.train.engines import ACTOR, CPU, MODEL, fsdp2_of

LORA = LoraConfig(
    enabled=True,
    rank=4,
    alpha=8.0,
    use_rslora=False,
    target_modules=("all-linear",),
    sync="adapter",
    base="resident",
    init_from=None,
)


def with_lora(**changes: object) -> LoraConfig:
    return replace(LORA, **changes)  # type: ignore[arg-type]


def build_lora(
    folder: Path,
    *,
    lora: LoraConfig = LORA,
    config: ActorConfig = ACTOR,
    seed: int = 0,
    dtype: str = "float32",
    freezes: bool = True,
) -> PolicyEngine:
    backend = FSDP2Backend(
        folder,
        config=config,
        model_config=replace(
            MODEL,
            dtype="bfloat16" if dtype == "bfloat16" else "float32",
            freeze_vision=freezes,
        ),
        num_total_steps=10,
        device=CPU,
        adapter=Adapter(lora, seed=seed, adapts_tower=not freezes),
    )
    return PolicyEngine(backend)


def adapter_of(engine: PolicyEngine) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in engine.full_weights(WeightSet.ADAPTER)}


def randomize(engine: PolicyEngine, *, scale: float = 0.1) -> None:
    """Give B values, as training does: while it is 0 an adapter does nothing."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in fsdp2_of(engine).model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
