"""The memory of a run by executing it: sums that a hand can check, sizes that stand for more."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.models.architecture import Architecture, architecture_of
from hybridrl.planning.plan import MemoryPlan
from hybridrl.rehearsal.plan import execute, layers_to_execute, plan_by_execution
from tests.config.values import config_of
from tests.planning.models import QWEN3_8B, QWEN3_30B_A3B
from tests.ranks import FORKSERVER

MIB = 2**20
GPUS = (
    *("cluster=one_gpu", "model=hf_folder", "model.starter=null", "rollout=sglang"),
    *("cluster.num_ranks_per_node=8", "cluster.device_memory_gib=79", "rollout.sleep=true"),
    *("actor.compute_dtype=bfloat16", "rollout.dtype=bfloat16", "rollout.num_slots=128"),
    *("data.max_prompt_tokens=1024", "rollout.max_response_tokens=7168"),
    *("trainer.num_prompts_per_step=64", "rollout.num_responses_per_prompt=8"),
    *("actor.max_tokens_per_microbatch=8192", "actor.gradient_checkpointing=true"),
)


def of_model(folder: Path, settings: dict[str, object], *overrides: str) -> ExperimentConfig:
    (folder / "config.json").write_text(json.dumps(settings))
    return config_of(*GPUS, f"model.path={folder}", *overrides)


def parts(plan: MemoryPlan, phase: str) -> dict[str, int]:
    return {i.name: i.num_bytes for p in plan.phases if p.name == phase for i in p.items}


@pytest.mark.shows("R10.1", "6.8")
def test_the_state_of_qwen3_8b_on_8_ranks_is_what_a_hand_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else each process imports for 7 s, as in test_main.py.
    monkeypatch.setattr("hybridrl.rehearsal.plan.get_context", lambda _: FORKSERVER)
    plan = plan_by_execution(of_model(tmp_path, QWEN3_8B), is_quick=True)
    shard = 4 * 8_190_735_360 // 8  # float32
    update = parts(plan, "update")
    assert update["actor weights"] == pytest.approx(shard, rel=1e-3)
    assert update["gradients"] == pytest.approx(shard, rel=1e-3)
    assert update["optimizer"] == pytest.approx(2 * shard, rel=1e-3)
    assert update["checkpoint"] == pytest.approx(3 * shard, rel=1e-3)
    # A block's input a layer: 8,191 tokens (the last predicts nothing) in bfloat16, and one block.
    assert update["activations"] > 35 * 8_191 * 4096 * 2
    assert parts(plan, "generate")["KV cache"] > 20 * 2**30
    assert "optimizer" not in parts(plan, "generate")
    assert [phase.name for phase in plan.phases][-2:] == ["generate", "update"]


@pytest.mark.nightly
def test_two_small_sizes_stand_for_a_larger_one(tmp_path: Path) -> None:
    config = of_model(tmp_path, QWEN3_8B | {"num_hidden_layers": 12})
    assert layers_to_execute(config, architecture_of(config.model)) == (3, 4)
    plan = plan_by_execution(config)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        whole = pool.submit(execute, config, (0, 12, "steps")).result()
    for phase in plan.phases:
        peak = max(sum(uses.values()) for uses in whole.device[phase.name].values())
        assert plan.peak_bytes(phase) == pytest.approx(peak, rel=0.005), phase.name


@pytest.mark.nightly
def test_a_reward_model_has_the_longest_responses_of_an_evaluation_to_score(tmp_path: Path) -> None:
    small = QWEN3_8B | {"num_hidden_layers": 1, "hidden_size": 256, "vocab_size": 1024}
    scorer = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (tmp_path / "scorer").mkdir()
    (tmp_path / "scorer" / "config.json").write_text(json.dumps(small | scorer))
    scored = f"reward.functions={{a: {{function: model, args: {{path: {tmp_path}/scorer}}}}}}"
    given = ("mode=plan", "reward.function=null", scored)
    usual, longer = (
        plan_by_execution(of_model(tmp_path, small, *given, f"eval.max_response_tokens={limit}"))
        for limit in (7168, 30_000)
    )
    activations = [parts(plan, "reward")["activations"] for plan in (usual, longer)]
    assert activations[1] > 2 * activations[0]
    assert parts(longer, "update")["activations"] == parts(usual, "update")["activations"]


def _layers(folder: Path, settings: dict[str, object], *overrides: str) -> tuple[int, ...]:
    config = of_model(folder, settings, *overrides)
    model: Architecture = architecture_of(config.model)
    return layers_to_execute(config, model)


def test_layers_that_stand_for_a_model_have_all_its_kinds_in_each_stage(tmp_path: Path) -> None:
    assert _layers(tmp_path, QWEN3_8B) == (3, 4)
    assert _layers(tmp_path, QWEN3_8B | {"num_hidden_layers": 4}) == (4,)
    config = of_model(tmp_path, QWEN3_30B_A3B)
    model = architecture_of(config.model)
    assert model.experts is not None
    every_other = replace(model.experts, sparse_layers=tuple(range(1, 48, 2)))
    assert layers_to_execute(config, replace(model, experts=every_other)) == (6, 8)
    stages = ("actor=megatron", "megatron.pipeline_parallel_size=2")
    assert _layers(tmp_path, QWEN3_8B, *stages) == (6, 8)
    uneven = (*stages, "megatron.num_layers_in_first_stage=16")
    assert _layers(tmp_path, QWEN3_8B, *uneven) == (36,)
