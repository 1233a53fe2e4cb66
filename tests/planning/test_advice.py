from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.config.checks.violations import find_violations
from hybridrl.planning.fit import find_fits
from hybridrl.planning.memory import plan_memory
from hybridrl.planning.page import memory_lines, plan_page
from hybridrl.planning.plan import MemoryKind, capacity_bytes
from hybridrl.planning.suggestions import (
    find_misfits,
    suggest_override,
    suggestions,
)
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
    misfit, *_ = find_fits(config)
    assert misfit.num_bytes == peak_of(*big) > capacity
    found = suggest_override(config, misfit)
    assert found is not None
    suggestion, fit = found
    assert find_violations(suggestion.config) == []
    assert peak_of(*big, suggestion.override) == fit.num_bytes <= capacity
    (error,) = find_misfits(config)
    assert error.key == "cluster.device_memory_gib"
    assert f"{misfit.need}, " in error.rule
    assert error.remedies == ((suggestion.override,),)
    assert str(misfit) in plan_page(config)
    for other in suggestions(config):  # nothing cheaper would have done
        if other.price < suggestion.price:
            plan = plan_memory(other.config)
            assert plan.peak_bytes(plan.fullest) > capacity or find_violations(other.config)


def peak_of(*overrides: str) -> int:
    plan = plan_memory(config_of(*overrides))
    return plan.peak_bytes(plan.fullest)


def test_a_model_that_megatron_trains_is_cut_further(big: tuple[str, ...]) -> None:
    given = (*big, "actor=megatron", "actor.compute_dtype=bfloat16", "rollout=sglang")
    given += ("rollout.dtype=bfloat16", "rollout.sleep=true", "rollout.memory_fraction=0.5")
    config = config_of(*given)
    found = {suggestion.override: suggestion for suggestion in suggestions(config)}
    assert "megatron.tensor_parallel_size=8" in found
    assert "megatron.tensor_parallel_size=16" not in found  # would leave the node
    assert "megatron.pipeline_parallel_size=2" in found
    peaks = [
        peak_of(*given, f"megatron.{name}_parallel_size={size}")
        for name in ("tensor", "pipeline")
        for size in (2, 4)
    ]
    assert peaks[1] < peaks[0] < peak_of(*given)
    assert peaks[3] < peaks[2] < peak_of(*given)


def test_without_one_that_suffices_the_error_names_the_largest_saving() -> None:
    config = config_of("cluster.device_memory_gib=0.1")
    (misfit,) = find_fits(config)
    best = suggest_override(config, misfit)
    assert best is not None
    assert best[1].excess > 0
    for suggestion in suggestions(config):
        (fit,) = find_fits(suggestion.config)
        assert best[1].excess <= fit.excess
    (error,) = find_misfits(config)
    assert f"change several keys: {best[0].override} saves most" in str(error)
    assert error.remedies == ()


SERVED = (
    *("rollout=sglang", "rollout.dtype=bfloat16", "rollout.memory_fraction=0.5"),
    *("rollout.max_response_tokens=1024", "rollout.sleep=true", "rollout.num_slots=64"),
    "actor.max_tokens_per_microbatch=2048",
)


def test_a_server_that_leaves_too_little_gets_a_smaller_share(big: tuple[str, ...]) -> None:
    assert find_misfits(config_of(*big, *SERVED)) == []
    given = (*big, *SERVED, "rollout.memory_fraction=0.97")
    (error,) = find_misfits(config_of(*given))
    assert error.remedies == (("rollout.memory_fraction=0.9",),)
    assert find_misfits(config_of(*given, "rollout.memory_fraction=0.9")) == []


def test_a_share_without_room_for_weights_and_a_row_does_not_fit(big: tuple[str, ...]) -> None:
    (error,) = find_misfits(config_of(*big, *SERVED, "rollout.memory_fraction=0.19"))
    assert str(error) == (
        "rollout.memory_fraction=0.19: a rank's engine 15.54 GiB of weights and one row's KV "
        "cache, 735 MiB more than there is. "
        "Fix: set rollout.memory_fraction=0.2, which leaves 64 MiB."
    )


def test_the_host_memory_of_a_machine_is_that_of_its_ranks(big: tuple[str, ...]) -> None:
    bare = (*big, "rollout.sleep=false", "checkpoint.every_num_steps=0")  # so most of all is mapped
    fits = {fit.key: fit for fit in find_fits(config_of(*bare))}
    assert "Not compared: set cluster.host_memory_gib" in str(fits["cluster.host_memory_gib"])
    plan = plan_memory(config_of(*bare))
    held = [
        sum(i.num_bytes for i in phase.items if i.kind is MemoryKind.HOST)
        for phase in plan.phases
        if phase.name != "build"  # which maps the files that all ranks read
    ]
    assert fits["cluster.host_memory_gib"].num_bytes == 8 * max(held)
    given = (*big, *SERVED, "actor.fsdp2.cpu_offload=true", "cluster.host_memory_gib=150")
    (error,) = find_misfits(config_of(*given))
    assert error.key == "cluster.host_memory_gib"
    ((override,),) = error.remedies
    assert find_misfits(config_of(*given, override)) == []


def test_the_critics_own_ranks_are_compared(big: tuple[str, ...]) -> None:
    pool = ("algorithm=ppo", "critic.placement=own_pool", "critic.num_ranks_per_node=1")
    (error,) = find_misfits(config_of(*big, *SERVED, *pool))
    assert error.rule.startswith("peak of a rank of the critic's own ")


def test_a_run_that_fits_says_how_much_is_left() -> None:
    config = config_of("cluster.device_memory_gib=100")
    assert "Fits: " in plan_page(config)
    assert "of 100.00 GiB are left" in plan_page(config)
    assert "malloc keeps memory" in plan_page(config)


def test_a_gpu_of_unknown_size_is_not_judged() -> None:
    config = config_of("cluster=one_gpu")
    assert capacity_bytes(config.cluster) is None
    assert "Not compared: set cluster.device_memory_gib" in plan_page(config)
    assert "Fits" not in plan_page(config)
    assert "(host)" in plan_page(config)
    assert "malloc" not in plan_page(config)


def test_without_the_devices_size_a_servers_cache_is_said_to_be_unknown(
    big: tuple[str, ...],
) -> None:
    given = (*big, *SERVED, "cluster.device_memory_gib=null")
    least, *_ = find_fits(config_of(*given))
    assert "at least " in str(least)
    assert "rollout.memory_fraction=0.5 of the device less the weights. Not compared" in str(least)
    plan = plan_memory(config_of(*given))
    assert "KV cache" not in plan.item_names  # none is made up
    assert least.num_bytes == plan.peak_bytes(plan.fullest)


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
    (line,) = memory_lines(config)
    assert "unknown" in line
    assert "mamba" in line
