"""Runs of mode=dpo: what they learn, how they resume, and with which reference."""

from __future__ import annotations

import json
from math import log
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.child import to_yaml
from hybridrl.run.launch import run
from tests.end_to_end.small import read_metrics, small_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

DPO = (
    *(
        "mode=dpo",
        "data=preferences",
        "data.use_chat_template=false",
        "trainer.num_prompts_per_step=8",
        "eval.every_num_steps=4",
        "eval.num_prompts=7",
    ),
    *("actor.optimizer.lr=1e-2", "checkpoint.every_num_steps=4"),
)
OF_PAIRS = ("preference/", "eval/", "loss/")


def _train(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Train on pairs whose chosen answer is 1, and evaluate on other prompts."""
    for name, numbers in (("train", range(10, 42)), ("eval", range(50, 57))):
        pairs = [{"prompt": f"{n}=", "chosen": "1", "rejected": f"{n % 7 + 2}"} for n in numbers]
        (folder.parent / f"{name}.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    files = [f"data.{name}_files=[{folder.parent / name}.jsonl]" for name in ("train", "eval")]
    config = small_config(folder, *DPO, *files, *overrides)
    run(config, resolved_yaml=to_yaml(config))
    return read_metrics(folder)


def _of_pairs(line: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name.startswith(OF_PAIRS)}


def test_a_model_learns_to_prefer_the_chosen_answers(tmp_path: Path) -> None:
    whole = _train(tmp_path / "whole", "trainer.num_steps=8")
    before, first, last = whole[0], whole[1], whole[8]
    # The policy is the reference, so all rewards are equal.
    assert first["loss/preference"] == pytest.approx(log(2))
    assert before["eval/accuracy"] == 0.5
    assert first["preference/margin/mean"] == pytest.approx(0.0, abs=1e-6)
    assert last["eval/accuracy"] > 0.7
    assert last["loss/preference"] < first["loss/preference"]
    assert last["eval/margin"] == pytest.approx(
        last["eval/chosen_reward"] - last["eval/rejected_reward"], rel=1e-4
    )
    for num_steps in (4, 8):  # in two parts
        parts = _train(tmp_path / "parts", f"trainer.num_steps={num_steps}")
    assert [_of_pairs(line) for line in parts] == [_of_pairs(line) for line in whole]
    ours, theirs = (
        load_file(tmp_path / name / "hf" / "model.safetensors") for name in ("parts", "whole")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_policy_with_an_adapter_is_its_own_reference(tmp_path: Path) -> None:
    lora = ("lora=default", "lora.rank=4", "trainer.num_steps=4")
    one = _train(tmp_path / "one", *lora)
    two = _train(tmp_path / "two", *lora, "cluster.num_ranks_per_node=2")
    assert one[1]["preference/chosen_reward/mean"] == pytest.approx(0.0, abs=1e-6)
    assert one[4]["eval/margin"] > 0.01
    for line, other in zip(one, two, strict=True):
        assert _of_pairs(line) == pytest.approx(_of_pairs(other), rel=1e-3, abs=1e-4)
    assert (tmp_path / "one" / "adapter" / "adapter_config.json").is_file()
