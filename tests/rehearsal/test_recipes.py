"""Every recipe for GPUs, rehearsed at the real shapes of its model with few layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridrl.env import ROOT
from tests.planning.models import (
    GLM4_5_AIR,
    GPT_OSS_20B,
    QWEN2_5_0_5B,
    QWEN2_5_VL_3B,
    QWEN3_4B,
    QWEN3_5_9B,
    QWEN3_8B,
    QWEN3_30B_A3B,
    QWEN3_32B,
)
from tests.rehearsal.cases import Case, Shown
from tests.rehearsal.checks import assert_sound, assert_woken_in_order, largest
from tests.rehearsal.conftest import Rehearse

PACKAGES = Path(__file__).parents[1] / "megatron" / "packages"
RECIPES = sorted(file.stem for file in (ROOT / "recipes" / "gpu").glob("*.yaml"))
NEEDS_TRANSFORMER_ENGINE = "grpo_qwen3_30b_a3b_1x8_megatron"
ON_FSDP2 = "grpo_qwen3_8b_engine_of_two_nodes_2x8"
ON_MEGATRON = "grpo_qwen3_8b_2x8_megatron"
BY_DAY = {
    NEEDS_TRANSFORMER_ENGINE: 1,
    "grpo_glm4_5_air_6x8": 2,
    "grpo_gpt_oss_20b_1x8": 2,
    "grpo_gsm8k_qwen2_5_0_5b_1gpu": 1,
    "grpo_qwen3_8b_mixed_1x8": 1,
}
"""Recipes with as many layers as they have kinds. The others take ways that these, those of which
the bytes are calculated, or made models take, too (`test_cycles.py`, `test_seeing.py`)."""

BLOCK = 512
"""Bytes of which torch's allocator hands out multiples."""


def case_of(name: str, *, num_layers: int | None = None, rank: int = 0) -> Case:
    models = {"0_5b": QWEN2_5_0_5B, "8b": QWEN3_8B, "32b": QWEN3_32B, "30b": QWEN3_30B_A3B}
    models |= {"air": GLM4_5_AIR, "20b": GPT_OSS_20B, "9b": QWEN3_5_9B, "vl_3b": QWEN2_5_VL_3B}
    models |= {"4b": QWEN3_4B}
    return Case(
        (f"recipes=gpu/{name}", "model.path=FOLDER/model"),
        {"model": next(model for size, model in models.items() if f"_{size}_" in name)},
        num_layers,
        rank=rank,
        num_steps=2,
        packages=str(PACKAGES) if name == NEEDS_TRANSFORMER_ENGINE else None,
    )


def assert_woken_twice(shown: Shown) -> None:
    assert_sound(shown)
    if shown.asked:  # else its engines have devices of their own
        assert_woken_in_order(shown, num_steps=2)


@pytest.mark.parametrize("name", BY_DAY)
def test_recipe_takes_two_steps(rehearse: Rehearse, name: str) -> None:
    assert_woken_twice(rehearse(case_of(name, num_layers=BY_DAY[name])))


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RECIPES)
def test_recipe_takes_two_steps_with_all_its_layers(rehearse: Rehearse, name: str) -> None:
    [model] = case_of(name).folders.values()
    settings: Any = model.get("text_config", model)
    num_layers = settings["num_hidden_layers"]
    assert isinstance(num_layers, int)
    assert_woken_twice(rehearse(case_of(name, num_layers=num_layers)))


def test_fsdp2_has_the_bytes_that_are_calculated_by_hand(rehearse: Rehearse) -> None:
    shown = rehearse(case_of(ON_FSDP2, num_layers=2))
    assert_woken_twice(shown)
    mlp, query, key = 3 * 4096 * 12288, 4096 * 4096, 4096 * 1024
    layer, norms = mlp + 2 * query + 2 * key, 2 * 4096 + 2 * 128
    num_parameters = 2 * 151936 * 4096 + 2 * (layer + norms) + 4096
    num_tensors = 2 * 11 + 3
    num_ranks, masters = 8, 4
    weights = num_parameters * masters // num_ranks
    assert shown.sums["parameters"] == weights
    assert shown.sums["optimizer"] == 2 * weights + 4 * num_tensors  # two moments, and steps
    assert shown.sums["gradients"] == 0  # between steps
    gradients = largest(shown, "update", "gradients")
    assert weights <= gradients <= weights + num_tensors * BLOCK


def test_megatron_has_the_bytes_that_are_calculated_by_hand(rehearse: Rehearse) -> None:
    shown = rehearse(case_of(ON_MEGATRON, num_layers=2))
    assert_woken_twice(shown)
    mlp, query, key = 3 * 4096 * 12288, 4096 * 4096, 4096 * 1024
    cut = 2 * 151936 * 4096 + 2 * (mlp + 2 * query + 2 * key)
    norms = 2 * (2 * 4096 + 2 * 128) + 4096
    num_ranks, num_parameters = 8, cut // 2 + norms  # of a data-parallel group; tensor-parallel: 2
    assert shown.sums["parameters"] == 2 * num_parameters
    assert shown.sums["optimizer"] == 12 * num_parameters // num_ranks  # masters, two moments
    gradients = largest(shown, "update", "gradients")
    assert 4 * num_parameters <= gradients <= 4 * num_parameters + 16 * BLOCK
