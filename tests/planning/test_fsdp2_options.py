"""What the keys of ``actor.fsdp2`` and checkpoints change in the memory plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.config.architecture import architecture_of
from hybridrl.planning.activations import Activations
from hybridrl.planning.fit import find_fits
from hybridrl.planning.memory import plan_memory
from hybridrl.planning.model_memory import ModelMemory
from hybridrl.planning.plan import MemoryKind, MemoryPlan
from hybridrl.planning.suggestions import suggestions
from hybridrl.planning.workload import Workload
from tests.config.values import config_of
from tests.planning.test_memory import part, phase, plan_of

QWEN3_32B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}
EIGHT = (
    *("cluster=one_gpu", "cluster.num_ranks_per_node=8", "actor.compute_dtype=bfloat16"),
    *("trainer.num_prompts_per_step=512", "actor.max_tokens_per_microbatch=512"),
)
GIB = 2**30


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(QWEN3_32B))
    nodes = ("cluster.num_nodes=8", "cluster.ray_address=head:6379")
    return ("model.starter=null", f"model.path={folder}", *nodes)


def gradients(plan: MemoryPlan) -> int:
    return part(plan, "update", "gradients")


def test_between_microbatches_a_rank_of_64_keeps_2_gib_of_gradients_or_122(
    large: tuple[str, ...],
) -> None:
    every = plan_of(*EIGHT, *large)
    once = plan_of(*EIGHT, *large, "actor.fsdp2.reduce_gradients=last_microbatch")
    assert gradients(once) == pytest.approx(122 * GIB, rel=0.02)
    # Its share, and what leaves: the root or a block, twice.
    assert gradients(every) < 20 * GIB
    assert once.peak_bytes(phase(once, "update")) - every.peak_bytes(phase(every, "update")) > (
        100 * GIB
    )


def test_last_gradients_are_a_share_and_the_root_twice(
    large: tuple[str, ...],
) -> None:
    config = config_of(*EIGHT, *large)
    model = architecture_of(config.model)
    memory = ModelMemory(config, "actor", model, 0)
    root = 2 * 151936 * 5120 + 5120
    # A 64th of 32,762,123,264 numbers, and the root before and after its reduction, in float32.
    assert memory.gradients_at_end == 4 * 511_908_176 + 2 * 4 * root
    assert memory.embedding_gradient == 0
    tied = ModelMemory(config, "actor", replace(model, is_tied=True), 0)
    assert tied.embedding_gradient == 2 * 151936 * 5120


def test_what_keeps_more_than_need_be_is_the_first_thing_to_change(
    large: tuple[str, ...],
) -> None:
    overrides = ("reduce_gradients=last_microbatch", "reshard_after_forward=false")
    config = config_of(*EIGHT, *large, *(f"actor.fsdp2.{override}" for override in overrides))
    offered = {s.override: s for s in suggestions(config)}
    peak, *_ = find_fits(config)
    for name in ("reduce_gradients=every_microbatch", "reshard_after_forward=true"):
        less, *_ = find_fits(offered[f"actor.fsdp2.{name}"].config)
        assert peak.num_bytes - less.num_bytes > 40 * GIB, name


def test_replicas_each_hold_the_model_over_fewer_ranks() -> None:
    whole, halves = plan_of(*EIGHT), plan_of(*EIGHT, "actor.fsdp2.num_replicas=2")
    for name in ("actor weights", "optimizer"):
        twice = 2 * part(whole, "update", name)
        assert part(halves, "update", name) == pytest.approx(twice, rel=1e-3)


def test_attention_is_planned_as_the_kernel_of_the_device_takes_it() -> None:
    def one_pass(*overrides: str) -> Activations:
        config = config_of(*overrides)
        model = ModelMemory(config, "actor", architecture_of(config.model))
        workload = Workload.longest(config)
        return Activations(model, workload.microbatch(shares_prompts=model.shares_prompts))

    varlen = one_pass("cluster=one_gpu", "actor.compute_dtype=bfloat16")
    model, microbatch = varlen.model.architecture, varlen.microbatch
    per_token = 4 * (model.query_size + model.key_size) + 4 * model.num_heads
    # Heads as they are, a shared prompt once.
    assert varlen.saved_by_attention == microbatch.num_tokens * per_token
    assert microbatch.num_key_slots > microbatch.num_tokens
    padded = one_pass("cluster=one_gpu", "actor.compute_dtype=float32")
    microbatch = padded.microbatch
    assert not padded.model.has_varlen_attention
    # Keys and values once for each query head, and the masks: what torch's kernel is given.
    num_keys = 2 * microbatch.num_key_slots
    assert padded.saved_by_attention > 4 * (
        num_keys * model.query_size + microbatch.num_mask_elements
    )
    fewer = padded.saved_by_attention - one_pass().saved_by_attention  # on a CPU
    assert fewer == 4 * num_keys * (model.query_size - model.key_size) > 0


def test_with_cpu_offload_the_state_lies_on_the_host_in_every_phase() -> None:
    usual, offloaded = plan_of(*EIGHT), plan_of(*EIGHT, "actor.fsdp2.cpu_offload=true")
    state = part(usual, "update", "actor weights") + part(usual, "update", "optimizer")
    for name in ("sync", "generate", "update", "export"):
        one, other = phase(usual, name), phase(offloaded, name)
        saved = usual.peak_bytes(one) - offloaded.peak_bytes(other)
        assert saved >= state, name
        assert other.bytes_on(MemoryKind.HOST) >= one.bytes_on(MemoryKind.HOST) + state, name


def test_weights_that_stay_gathered_or_come_early_are_counted() -> None:
    def gathered(*overrides: str) -> int:
        starter = ("model.starter.num_layers=12",)
        return part(plan_of(*EIGHT, *starter, *overrides), "update", "gathered weights")

    block = gathered("actor.fsdp2.num_prefetched_blocks=2") - gathered()
    assert block > 0
    assert gathered("actor.fsdp2.num_prefetched_blocks=1") == gathered()
    assert gathered("actor.fsdp2.num_prefetched_blocks=4") == gathered() + 3 * block
    # The root, twelve blocks, and the buffer of one more; usually the root and three.
    assert gathered("actor.fsdp2.reshard_after_forward=false") == gathered() + 10 * block


def test_a_snapshot_is_still_being_written_while_the_next_step_goes_on() -> None:
    saves = plan_memory(config_of("checkpoint.every_num_steps=1", "rollout.sleep=true"))
    copied = part(saves, "export", "checkpoint")
    assert copied > 0
    names = [one.name for one in saves.phases]
    assert {n: part(saves, n, "checkpoint") for n in names} == {
        name: copied * (name != "build") for name in names
    }
    # Whether the meter of a run sees it depends on the disk: nothing is compared with it.
    never = plan_memory(config_of("checkpoint.every_num_steps=0", "rollout.sleep=true"))
    for name in ("sync", "generate", "update"):
        assert saves.measured_bytes(phase(saves, name)) == never.measured_bytes(phase(never, name))
