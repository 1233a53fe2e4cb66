from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.config.checks.violations import find_violations
from hybridrl.planning.memory import plan_memory
from hybridrl.planning.page import peak_line, plan_page, verdict
from hybridrl.planning.plan import capacity_bytes
from hybridrl.planning.suggestions import largest_saving, suggest_override, suggestions
from tests.config.values import config_of
from tests.planning.models import QWEN3_8B

GIB = 2**30


@pytest.fixture
def big(tmp_path: Path) -> tuple[str, ...]:
    """Qwen3-8B on GPUs, from its config.json alone."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return (
        "model=hf_folder",
        f"model.path={tmp_path}",
        "model.starter=null",
        "cluster=one_gpu",
        "cluster.num_ranks_per_node=8",
        "cluster.device_memory_gib=78",
        "actor.compute_dtype=bfloat16",
        "rollout.dtype=bfloat16",
        "rollout.sleep=true",
        "trainer.num_prompts_per_step=64",
        "data.max_prompt_tokens=1024",
        "rollout.max_response_tokens=4096",
        "rollout.num_slots=64",
        "actor.max_tokens_per_microbatch=16384",
    )


@pytest.mark.shows("R10.2")
def test_a_suggestion_makes_the_run_fit_and_breaks_no_rule(big: tuple[str, ...]) -> None:
    config = config_of(*big)
    capacity = capacity_bytes(config.cluster)
    assert capacity == 78 * GIB
    plan = plan_memory(config)
    assert plan.peak_bytes(plan.fullest) > capacity
    suggestion = suggest_override(config, capacity_bytes=capacity)
    assert suggestion is not None
    assert find_violations(suggestion.config) == []
    turned = plan_memory(config_of(*big, suggestion.override))
    assert turned == plan_memory(suggestion.config)
    assert turned.peak_bytes(turned.fullest) == suggestion.peak_bytes <= capacity
    assert "Does not fit: " in verdict(config, plan)
    assert f"Set {suggestion.override}" in verdict(config, plan)
    for other in suggestions(config):  # nothing cheaper would have done
        if other.price < suggestion.price:
            assert other.peak_bytes > capacity or find_violations(other.config)


def test_a_model_that_megatron_trains_is_cut_further(big: tuple[str, ...]) -> None:
    given = (*big, "actor=megatron", "actor.compute_dtype=bfloat16", "rollout=sglang")
    given += ("rollout.dtype=bfloat16", "rollout.sleep=true", "rollout.memory_fraction=0.5")
    config = config_of(*given)
    found = {suggestion.override: suggestion for suggestion in suggestions(config)}
    assert "megatron.tensor_parallel_size=8" in found
    assert "megatron.tensor_parallel_size=16" not in found  # would leave the node
    assert "megatron.pipeline_parallel_size=2" in found
    peaks = [
        found[f"megatron.{name}_parallel_size={size}"].peak_bytes
        for name in ("tensor", "pipeline")
        for size in (2, 4)
    ]
    plan = plan_memory(config)
    whole = plan.peak_bytes(plan.fullest)
    assert peaks[1] < peaks[0] < whole
    assert peaks[3] < peaks[2] < whole
    suggestion = suggest_override(config, capacity_bytes=peaks[1])
    assert suggestion is not None
    assert find_violations(suggestion.config) == []


def test_without_one_that_suffices_the_page_names_the_largest() -> None:
    config = config_of("cluster.device_memory_gib=0.1")
    assert suggest_override(config, capacity_bytes=int(0.1 * GIB)) is None
    best = largest_saving(config)
    assert best is not None
    assert all(best.peak_bytes <= suggestion.peak_bytes for suggestion in suggestions(config))
    assert f"No single key makes it fit; most saves {best.override}" in plan_page(config)


def test_a_run_that_fits_says_how_much_is_left() -> None:
    config = config_of("cluster.device_memory_gib=100")
    assert "Fits: " in plan_page(config)
    assert "of 100.00 GiB are left" in plan_page(config)
    assert "malloc keeps memory" in plan_page(config)


def test_a_gpu_of_unknown_size_is_not_judged() -> None:
    config = config_of("cluster=one_gpu")
    assert capacity_bytes(config.cluster) is None
    assert "Set cluster.device_memory_gib" in plan_page(config)
    assert "(host)" in plan_page(config)
    assert "malloc" not in plan_page(config)


def test_ranks_of_a_cpu_share_its_memory() -> None:
    one = capacity_bytes(config_of().cluster)
    two = capacity_bytes(config_of("cluster.num_ranks_per_node=2").cluster)
    assert one is not None
    assert two == one // 2


def test_the_page_shows_every_part_and_marks_the_peak(big: tuple[str, ...]) -> None:
    page, plan = plan_page(config_of(*big)), plan_memory(config_of(*big))
    for name in plan.item_names:
        assert name in page
    assert f"{plan.fullest.name} *" in page
    assert "8,190.7 M parameters" in page


def test_check_says_so_when_a_model_cannot_be_planned_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    model = replace(config_of().model, path=str(tmp_path), starter=None)
    config = replace(config_of(), model=model)  # a rule refuses it before it is planned for
    assert "unknown" in peak_line(config)
    assert "mamba" in peak_line(config)
