"""Models that see, rehearsed: their tower's state, what it keeps of images, and what waits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.models.image_settings import read_image_settings
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.offload import resident_bytes
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import TrainState
from tests.planning.models import QWEN2_5_VL_3B
from tests.ranks import run_ranks
from tests.rehearsal.cases import Case
from tests.rehearsal.checks import assert_sound, assert_woken_in_order
from tests.rehearsal.conftest import Rehearse
from tests.rehearsal.test_recipes import case_of
from tests.rehearsal.tiny import tiny_case
from tests.seeing import Kind, make_seeing_folder
from tests.workers.seeing_rows import draw_rows
from tests.workers.train.engines import ACTOR, CPU, MODEL, update

RECIPE = "grpo_qwen2_5_vl_3b_geo3k_1x8"
BY_NIGHT = pytest.mark.nightly
STATES = (TrainState.PARAMETERS, TrainState.OPTIMIZER)


def seeing_case(folder: Path, *overrides: str) -> Case:
    """Two ranks with all layers of a made model; a prompt holds an image of 4 x 4 tokens."""
    settings = json.loads((folder / "config.json").read_text())
    given = ("cluster.num_ranks_per_node=2", "data.max_prompt_tokens=20", *overrides)
    return replace(tiny_case(*given, num_layers=3), folders={"model": settings})


def _state_of_a_rank(_rank: int, folder: Path, freezes: bool) -> dict[str, int]:
    settings = read_image_settings(folder)
    assert settings is not None
    backend = FSDP2Backend(
        folder,
        config=ACTOR,
        model_config=replace(MODEL, freeze_vision=freezes),
        num_total_steps=10,
        device=CPU,
    )
    update(PolicyEngine(backend), draw_rows(settings)[0])
    return {state.value: resident_bytes(backend.tensors(state)) for state in STATES}


@pytest.mark.parametrize(
    ("kind", "freezes"),
    [
        ("qwen2_5_vl", False),
        ("qwen3_vl", True),
        pytest.param("qwen2_5_vl", True, marks=BY_NIGHT),
        pytest.param("qwen3_vl", False, marks=BY_NIGHT),
    ],
)
def test_a_model_that_sees_has_the_state_of_real_ranks_and_its_tower_waits_for_nothing(
    rehearse: Rehearse, kind: Kind, freezes: bool, tmp_path: Path
) -> None:
    folder = make_seeing_folder(tmp_path / "model", kind)
    shown = rehearse(seeing_case(folder, f"model.freeze_vision={str(freezes).lower()}"))
    assert_sound(shown)
    assert_woken_in_order(shown, num_steps=1)
    for real in run_ranks(2, _state_of_a_rank, folder, freezes):
        assert real == {state.value: shown.sums[state.value] for state in STATES}
    seen = [event for event in shown.executed.events if " at models/seeing.py:" in event]
    assert seen
    assert all(event.startswith("copy cpu -> cuda") for event in seen), seen


def kept_by(rehearse: Rehearse, depth: int) -> tuple[int, int]:
    """Bytes of activations under the logits, and of parameters, with so many blocks of a tower."""
    case = case_of(RECIPE, num_layers=1)
    tower = QWEN2_5_VL_3B["vision_config"] | {"depth": depth}  # type: ignore[operator]
    part = ("model.freeze_vision=false", "rollout.max_response_tokens=4096")
    shown = rehearse(
        replace(
            case,
            overrides=(*case.overrides, *part),
            folders={"model": QWEN2_5_VL_3B | {"vision_config": tower}},
            num_steps=1,
        )
    )
    assert_sound(shown)
    kept = shown.executed.device["update"]["logits"]["activations"]
    return kept, shown.sums["parameters"]


@BY_NIGHT
def test_a_tower_that_learns_keeps_the_input_of_each_block_of_patches(rehearse: Rehearse) -> None:
    (few, small), (more, large) = (kept_by(rehearse, depth) for depth in (2, 6))
    num_patches = 4 * 27**2  # of the largest image: 768 tokens are not square
    assert more - few == pytest.approx(4 * num_patches * 1280 * 2, rel=0.01)  # in bfloat16
    block = 4 * 1280 * 1281 + 3 * 1280 * 3420 + 2 * 3420 + 3 * 1280
    assert large - small == pytest.approx(4 * block * 4 // 8, rel=1e-3)  # float32, over 8 ranks
