"""What an SGLang server takes of a GPU besides weights and KV cache, as its sources say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.models.architecture import architecture_of
from hybridrl.planning.rollout import RolloutMemory
from tests.config.values import config_of
from tests.planning.models import QWEN2_5_VL_3B, QWEN3_8B, QWEN3_30B_A3B

GIB = 2**30
MIB = 2**20
SERVED = (
    *("rollout=sglang", "rollout.dtype=bfloat16", "cluster=one_gpu", "rollout.sleep=true"),
    *("actor.compute_dtype=bfloat16", "cluster.device_memory_gib=80", "model.starter=null"),
    *("rollout.memory_fraction=0.5", "rollout.num_slots=256"),
)
TP2 = ("cluster.num_ranks_per_node=2", "rollout.tensor_parallel_size=2")


def memory_of(*overrides: str) -> RolloutMemory:
    config = config_of(*overrides)
    return RolloutMemory(config, architecture_of(config.model))


@pytest.fixture
def given(tmp_path: Path) -> tuple[str, ...]:
    """A server of Qwen3-8B."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return (*SERVED, f"model.path={tmp_path}")


def test_weights_and_cache_are_the_share_of_the_device(given: tuple[str, ...]) -> None:
    memory = memory_of(*given)
    assert memory.weights + memory.kv_cache == 40 * GIB
    assert memory.weights == 2 * 8_190_735_360
    assert memory.smallest_share > memory.weights


def test_the_logits_of_256_rows_of_qwen_are_156_mb(given: tuple[str, ...]) -> None:
    graphs, without = (
        memory_of(*given),
        memory_of(*given, "rollout.engine_args={disable_cuda_graph: true}"),
    )
    pages = 256 * config_of(*given).max_context_tokens * 4
    more = graphs.server_resident - without.server_resident
    assert more - pages == 256 * 151_936 * 4 == 155_582_464
    assert (graphs.server_graphs, without.server_graphs) == (512 * MIB, 0)


def test_engines_have_room_for_the_responses_of_an_evaluation(given: tuple[str, ...]) -> None:
    usual, longer = (memory_of(*given, *more) for more in ((), ("eval.max_response_tokens=300",)))
    row = usual.config.max_row_tokens
    assert longer.config.max_row_tokens == row
    assert longer.config.max_context_tokens == usual.config.data.max_prompt_tokens + 300
    more = longer.config.max_context_tokens - row
    assert longer.smallest_share - usual.smallest_share == 2 * 2 * 36 * 8 * 128 * more
    assert longer.server_resident - usual.server_resident == 256 * 4 * more
    own = ("rollout.engine=hf", "rollout.memory_fraction=0.85")
    embedded = [memory_of(*given, *own, f"eval.max_response_tokens={n}") for n in (24, 300)]
    assert embedded[1].kv_cache * row == embedded[0].kv_cache * longer.config.max_context_tokens
    never = memory_of(*given, "eval.max_response_tokens=300", "eval.every_num_steps=0")
    assert never.smallest_share == usual.smallest_share


def test_ranks_that_share_a_server_divide_it_and_talk_to_each_other(
    given: tuple[str, ...],
) -> None:
    one, two = memory_of(*given), memory_of(*given, *TP2)
    assert two.weights == one.weights // 2
    assert two.server_resident == one.server_resident + 256 * MIB
    hidden, cut = 3 * 4096, 3 * 12288 + 2 * 4096 + 2 * 1024
    assert one.computing == 8192 * 2 * (hidden + cut)
    assert two.computing == 8192 * 2 * (hidden + cut // 2)
    fewer = memory_of(*given, "rollout.engine_args={chunked_prefill_size: 2048}")
    assert fewer.computing == 2 * 256 * 151_936 * 4


def test_a_server_keeps_the_experts_of_every_cached_token_on_the_host(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    moe = (*SERVED, f"model.path={tmp_path}", "actor=megatron", "rollout.memory_fraction=0.9")
    assert memory_of(*moe).server_routes == 0
    memory = memory_of(*moe, "actor.replay_routing=true")
    num_tokens = memory.kv_cache // (2 * 48 * 4 * 128 * 2)
    assert num_tokens > 10_000
    assert memory.server_routes == num_tokens * 48 * 8 * 4


def test_a_server_that_sees_has_a_tower_and_a_process_that_cuts_images(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5_VL_3B))
    seeing = (*SERVED, f"model.path={tmp_path}", "data.max_prompt_tokens=1024")
    memory = memory_of(*seeing)
    blind = RolloutMemory(memory.config, replace(memory.model, tower=None))
    assert memory.weights - blind.weights == 2 * 668_684_288  # numbers of its tower
    assert memory.server_resident - blind.server_resident == 512 * MIB
    uncut, cut = 3 * 2 * 14 * 14 + 3 * 1280, 3 * 3420 + 4 * 1280
    num_patches = 4 * (8192 + 1024)
    assert memory.computing == num_patches * 2 * (uncut + cut) > blind.computing
    two = memory_of(*seeing, *TP2)
    assert two.computing == num_patches * 2 * (uncut + cut // 2)


def test_a_server_on_a_cpu_has_no_memory_of_a_gpu() -> None:
    memory = memory_of("rollout=sglang", "rollout.sleep=true")
    assert memory.server_resident == memory.server_graphs == memory.computing == 0
