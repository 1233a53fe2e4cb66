"""What an SGLang server takes of a GPU besides weights and KV cache, as its sources say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.config.values import config_of
from tests.planning.models import QWEN3_8B, QWEN3_30B_A3B
from tests.planning.test_memory import SERVED, part, plan_of

MIB = 2**20
SIZES = ("cluster.device_memory_gib=80", "rollout.memory_fraction=0.5", "rollout.num_slots=256")
TP2 = ("cluster.num_ranks_per_node=2", "rollout.tensor_parallel_size=2")


@pytest.fixture
def given(tmp_path: Path) -> tuple[str, ...]:
    """A sleeping server of Qwen3-8B."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return (*SERVED, *SIZES, "model.starter=null", f"model.path={tmp_path}")


def test_the_logits_of_256_rows_of_qwen_are_156_mb(given: tuple[str, ...]) -> None:
    graphs = plan_of(*given)
    without = plan_of(*given, "rollout.cuda_graphs=false")
    pages = 256 * config_of(*given).max_row_tokens * 4
    more = part(graphs, "update", "SGLang itself") - part(without, "update", "SGLang itself")
    assert more - pages == 256 * 151_936 * 4 == 155_582_464


def test_what_a_server_holds_itself_is_there_from_start_to_end(given: tuple[str, ...]) -> None:
    plan = plan_of(*given)
    (resident,) = {part(plan, one.name, "SGLang itself") for one in plan.phases}
    assert resident > 1024 * MIB
    shared = plan_of(*given, *TP2)
    assert part(shared, "update", "SGLang itself") == resident + 256 * MIB


def test_a_servers_graphs_are_there_while_it_is_awake(given: tuple[str, ...]) -> None:
    asleep, awake = plan_of(*given), plan_of(*given, "rollout.sleep=false")
    name = "SGLang's graphs"
    assert part(asleep, "generate", name) == 512 * MIB
    assert part(asleep, "update", name) == part(asleep, "sync", name) == 0
    assert all(part(awake, one.name, name) == 512 * MIB for one in awake.phases)
    assert part(plan_of(*given, "rollout.cuda_graphs=false"), "generate", name) == 0


def test_ranks_that_share_a_server_divide_its_weights(given: tuple[str, ...]) -> None:
    one, two = (part(plan_of(*given, *more), "sync", "rollout weights") for more in ((), TP2))
    assert one == 2 * 8_190_735_360
    assert two == one // 2


def test_a_pass_of_a_server_is_cut_over_its_ranks(given: tuple[str, ...]) -> None:
    one, two = (part(plan_of(*given, *more), "generate", "sampling") for more in ((), TP2))
    hidden, cut = 3 * 4096, 3 * 12288 + 2 * 4096 + 2 * 1024
    assert one == 8192 * 2 * (hidden + cut)
    assert two == 8192 * 2 * (hidden + cut // 2)
    fewer = "rollout.engine_args={chunked_prefill_size: 2048}"
    assert part(plan_of(*given, fewer), "generate", "sampling") == 2 * 256 * 151_936 * 4


def test_a_server_keeps_the_experts_of_every_cached_token_on_the_host(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    moe = (*SERVED, *SIZES, "model.starter=null", f"model.path={tmp_path}", "actor=megatron")
    plan = plan_of(*moe, "actor.compute_dtype=bfloat16", "rollout.memory_fraction=0.9")
    assert part(plan, "update", "routed experts") == 0
    asked = ("actor.compute_dtype=bfloat16", "rollout.memory_fraction=0.9")
    plan = plan_of(*moe, *asked, "rollout.routed_experts=true")
    num_tokens = part(plan, "generate", "KV cache") // (2 * 48 * 4 * 128 * 2)
    assert num_tokens > 10_000
    assert part(plan, "update", "routed experts") == num_tokens * 48 * 8 * 4


def test_on_a_cpu_a_server_is_counted_as_processes_alone() -> None:
    plan = plan_of("rollout=sglang", "rollout.sleep=true")
    assert part(plan, "generate", "SGLang's processes") > 2**30
    for name in ("SGLang itself", "SGLang's graphs", "sampling"):
        assert part(plan, "generate", name) == 0
