"""What fits, what does not, and which key is named: by what fills the memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridrl.planning.fit import find_fits, find_misfits, memory_lines, plan_page
from hybridrl.planning.plan import MemoryItem, MemoryKind, MemoryPlan, Phase
from tests.config.values import config_of
from tests.planning.models import QWEN3_8B

GIB = 2**30


@pytest.fixture
def big(tmp_path: Path) -> tuple[str, ...]:
    """Qwen3-8B on GPUs, from its config.json alone."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return (
        *("model=hf_folder", f"model.path={tmp_path}", "model.starter=null", "cluster=one_gpu"),
        *("cluster.num_ranks_per_node=8", "rollout=sglang", "rollout.memory_fraction=0.5"),
        *("actor.compute_dtype=bfloat16", "rollout.dtype=bfloat16", "rollout.sleep=true"),
        *("trainer.num_prompts_per_step=64", "data.max_prompt_tokens=1024"),
        *("rollout.max_response_tokens=4096", "actor.max_tokens_per_microbatch=16384"),
    )


def plan_of(use: str, gib: float, *, kind: MemoryKind = MemoryKind.DEVICE) -> MemoryPlan:
    """A rank whose update needs 10 GiB and this."""
    items = (MemoryItem("actor weights", 10 * GIB), MemoryItem(use, int(gib * GIB), kind))
    return MemoryPlan("cuda", (Phase("build", items[:1]), Phase("update", items)))


@pytest.mark.shows("R10.2")
@pytest.mark.parametrize(
    ("use", "override"),
    [
        ("activations", "actor.gradient_checkpointing=true"),
        ("logits", "actor.logprob_chunk_tokens="),
        ("optimizer", "actor.fsdp2.cpu_offload=true"),
        ("KV cache", "rollout.memory_fraction=0.36"),
    ],
)
def test_the_key_that_makes_the_fullest_item_smaller_is_named(
    use: str, override: str, big: tuple[str, ...]
) -> None:
    config = config_of(*big, "cluster.device_memory_gib=79")
    (error,) = find_misfits(config, find_fits(config, plan_of(use, 80)))
    assert error.key == "cluster.device_memory_gib"
    assert "peak of a rank 90.00 GiB in update, 11.00 GiB more than there is" in str(error)
    assert f"set {override}" in str(error)
    assert f"{use} of 80.00 GiB fill most" in str(error)


def test_frozen_weights_of_a_sleeping_engine_may_wait_on_the_host(big: tuple[str, ...]) -> None:
    given = (*big, "cluster.device_memory_gib=79", "lora=default")
    for base in ("resident", "resend"):
        config = config_of(*given, f"lora.base={base}")
        (error,) = find_misfits(config, find_fits(config, plan_of("rollout weights", 80)))
        assert ("set lora.base=backup" in str(error)) == (base == "resident")


def test_a_row_too_long_for_a_rank_is_shared_by_several(big: tuple[str, ...]) -> None:
    smallest = ("actor.gradient_checkpointing=true", "actor.max_tokens_per_microbatch=5120")
    for size, remedy in ((1, "context_parallel_size=2"), (4, "context_parallel_size=8")):
        shared = f"actor.fsdp2.context_parallel_size={size}"
        config = config_of(*big, *smallest, shared, "cluster.device_memory_gib=79")
        (error,) = find_misfits(config, find_fits(config, plan_of("activations", 80)))
        assert f"set actor.fsdp2.{remedy}" in str(error)
    shared = "actor.fsdp2.context_parallel_size=8"
    config = config_of(*big, *smallest, shared, "cluster.device_memory_gib=79")
    (error,) = find_misfits(config, find_fits(config, plan_of("activations", 80)))
    assert "context_parallel_size" not in str(error)  # all eight share tokens


def test_what_cannot_be_less_needs_more_devices(big: tuple[str, ...]) -> None:
    config = config_of(*big, "cluster.device_memory_gib=79", "actor=megatron")
    (error,) = find_misfits(config, find_fits(config, plan_of("CUDA", 80)))
    assert "raise cluster.num_ranks_per_node or cluster.num_nodes" in str(error)


def test_the_host_memory_of_a_machine_is_that_of_its_ranks(big: tuple[str, ...]) -> None:
    config = config_of(*big, "cluster.device_memory_gib=79", "cluster.host_memory_gib=500")
    plan = plan_of("checkpoint", 80, kind=MemoryKind.HOST)
    (error,) = find_misfits(config, find_fits(config, plan))
    assert error.key == "cluster.host_memory_gib"
    assert "640.00 GiB of 8 ranks in update" in str(error)
    assert "checkpoint.every_num_steps=0" in str(error)


def test_changes_of_weights_cost_a_copy_at_rank_0_and_at_each_own_engine(
    big: tuple[str, ...],
) -> None:
    own = ("serving=own", "rollout.sleep=false", "serving.num_devices_per_node=4")
    of_two = "m: {num_devices: 2, devices_per_engine: 2}"
    groups = f"serving.models.policy.groups={{{of_two}, n: {{num_devices: 2}}}}"
    deltas = ("serving.weight_deltas=true", "cluster.host_memory_gib=500")
    plan = plan_of("checkpoint", 8, kind=MemoryKind.HOST)
    *_, before = find_fits(config_of(*big, *own, groups), plan)
    *_, fit = find_fits(config_of(*big, *own, groups, *deltas), plan)
    copy = 2 * 8_190_735_360  # bytes of bfloat16
    assert fit.num_bytes - before.num_bytes == 4 * copy  # rank 0, m, and two of n
    assert "4 copies of the weights (serving.weight_deltas)" in fit.need


@pytest.mark.parametrize(
    ("fraction", "override"),
    [("0.15", "rollout.memory_fraction=0.2"), ("0.5", None)],
)
def test_an_engine_whose_share_has_no_room_is_refused(
    fraction: str, override: str | None, big: tuple[str, ...]
) -> None:
    config = config_of(*big, "cluster.device_memory_gib=79", f"rollout.memory_fraction={fraction}")
    errors = find_misfits(config, find_fits(config, plan_of("logits", 1)))
    assert [error.key for error in errors] == ["rollout.memory_fraction"] * (override is not None)
    assert all(f"set {override}" in str(error) for error in errors)


def test_a_memory_of_unknown_size_is_not_called_compared(big: tuple[str, ...]) -> None:
    config, plan = config_of(*big), plan_of("activations", 1000)
    fits = list(find_fits(config, plan))
    page = plan_page(config, plan, fits)
    assert "Not compared: set cluster.device_memory_gib" in page
    assert "Not compared: set cluster.host_memory_gib" in page
    assert "Fits" not in page
    assert "at least" in page  # the KV cache follows from the device's size
    assert find_misfits(config, fits) == []


def test_the_page_has_items_phases_and_what_is_left(big: tuple[str, ...]) -> None:
    config = config_of(*big, "cluster.device_memory_gib=100")
    plan = plan_of("activations", 20)
    page = plan_page(config, plan, fits := list(find_fits(config, plan)))
    assert "8,190.7 M parameters" in page
    assert "update *" in page
    (row,) = [line for line in page.splitlines() if line.startswith("activations")]
    assert row.split()[1:] == [".", "20,480"]
    assert "peak of a rank 30.00 GiB in update. Fits: 70.00 GiB of 100.00 GiB are left" in page
    assert [line in page for line in memory_lines(fits)] == [True, True]
    assert "malloc" not in page


def test_the_stage_of_a_pipeline_is_named() -> None:
    config = config_of(
        "actor=megatron", "megatron.pipeline_parallel_size=2", "cluster.num_ranks_per_node=2"
    )
    plan = MemoryPlan("cpu", plan_of("logits", 1).phases, stage=1)
    page = plan_page(config, plan, [])
    assert "stage 2 of 2: the fullest" in page
    assert "malloc keeps memory" in page
