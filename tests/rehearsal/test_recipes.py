"""Every recipe for GPUs, rehearsed at the real shapes of its model with few layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.env import ROOT
from tests.planning.models import QWEN3_8B, QWEN3_30B_A3B
from tests.rehearsal.cases import Case, Shown
from tests.rehearsal.checks import assert_sound, assert_woken_in_order, largest
from tests.rehearsal.conftest import Rehearse

QWEN2_5_0_5B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
PACKAGES = Path(__file__).parents[1] / "megatron" / "packages"
RECIPES = sorted(
    file.stem for file in (ROOT / "recipes").glob("grpo_*.yaml") if not file.stem.endswith("_cpu")
)
BLOCK = 512
"""Bytes of which torch's allocator hands out multiples."""


def case_of(name: str, *, num_layers: int | None = None, rank: int = 0) -> Case:
    models = {"0_5b": QWEN2_5_0_5B, "8b": QWEN3_8B, "30b": QWEN3_30B_A3B}
    return Case(
        (f"recipes={name}", "model.path=FOLDER/model"),
        {"model": next(model for size, model in models.items() if f"_{size}_" in name)},
        num_layers,
        rank=rank,
        num_steps=2,
        packages=str(PACKAGES) if name == NEEDS_TRANSFORMER_ENGINE else None,
    )


NEEDS_TRANSFORMER_ENGINE = "grpo_qwen3_30b_a3b_1x8_megatron"
WHOLE = "grpo_gsm8k_qwen2_5_0_5b_1gpu"
SLOW = "grpo_qwen3_30b_a3b_4x8_megatron"
"""Its experts are computed one after another where TransformerEngine is missing."""


@pytest.fixture(scope="module")
def shown_of(rehearse: Rehearse) -> dict[str, Shown]:
    """What recipes showed, each rehearsed once."""
    known: dict[str, Shown] = {}
    return known
