"""The calculator task made small: conversations learn, are evaluated, and go on bit by bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.child import to_yaml
from hybridrl.run.launch import run
from tests.end_to_end.small import read_metrics, small_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

CALCULATOR = (
    *("agent=tool_calls", "agent.tool_format=pythonic", "data=calculator"),
    *("data.max_prompt_tokens=32", "rollout.max_response_tokens=64"),
)
LEARNING = (
    *("model.starter.hidden_size=64", "model.starter.num_layers=2"),
    *("model.starter.intermediate_size=128", "model.starter.num_warmup_steps=400"),
    *("model.starter.warmup_batch_size=64", "model.starter.warmup_lr=5e-3"),
    *("data.num_task_rows=2000", "actor.optimizer.lr=1e-3", "rollout.num_slots=128"),
    *("trainer.num_prompts_per_step=16", "rollout.num_responses_per_prompt=8"),
    *("trainer.num_steps=10", "eval.num_prompts=128", "eval.every_num_steps=10"),
    "eval.temperature=1.0",
)


def _run(folder: Path, *overrides: str) -> Path:
    config = small_config(folder, *CALCULATOR, *overrides)
    run(config, resolved_yaml=to_yaml(config))
    return folder


def _samples(folder: Path, *, split: str) -> list[Mapping[str, Any]]:
    lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return [sample for sample in map(json.loads, lines) if sample["split"] == split]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Path:
    """The folder of a run in which a model of two layers learned to call the calculator."""
    return _run(tmp_path_factory.mktemp("learned") / "run", *LEARNING)


@pytest.mark.nightly
def test_a_small_model_learns_to_call_its_tool(learned: Path) -> None:
    before, *steps = read_metrics(learned)

    assert steps[-1]["eval/reward/mean"] > before["eval/reward/mean"] + 0.25
    assert steps[-1]["agent/tool_calls/mean"] > steps[0]["agent/tool_calls/mean"] + 0.25
    assert max(step["policy/sampler_mismatch_nats/max"] for step in steps) < 1e-4


@pytest.mark.nightly
def test_evaluation_holds_conversations_with_tools(learned: Path, tmp_path: Path) -> None:
    source = f"eval.checkpoint={learned}"
    with_tool = _run(tmp_path / "with", *LEARNING, "mode=eval", source)
    alone = ("agent=single_turn", "agent.tools=[]")
    without = _run(tmp_path / "without", *LEARNING, "mode=eval", source, *alone)

    accuracy, accuracy_without = (
        read_metrics(folder)[0]["eval/reward/mean"] for folder in (with_tool, without)
    )
    assert accuracy == read_metrics(learned)[-1]["eval/reward/mean"]
    (of_run, of_model, none) = (
        read_metrics(f)[-1] for f in (learned, with_tool, tmp_path / "without")
    )
    names = {"eval/agent/turns/mean", "eval/agent/tool_calls/mean", "eval/agent/sequences/mean"}
    assert {name: of_run[name] for name in names} == {name: of_model[name] for name in names}
    assert of_run["eval/agent/tool_calls/mean"] > 0.5
    assert not any(name.startswith("eval/agent/") for name in none)
    assert accuracy_without < 0.1
    for folder in (learned, with_tool):
        samples = _samples(folder, split="eval")
        turns = [turn for sample in samples for turn in sample.get("turns", ())]
        assert any(turn["role"] == "tool" for turn in turns)
