"""Runs of mode=reward_model, and a trained reward model as the reward of another run."""

from __future__ import annotations

import json
from math import log
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.child import to_yaml
from hybridrl.run.export_checkpoint import export_checkpoint
from hybridrl.run.launch import run
from tests.end_to_end.small import read_metrics, small_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

TRAINING = (
    *("mode=reward_model", "trainer.num_prompts_per_step=8", "eval.every_num_steps=4"),
    *("reward_model.center_coefficient=0.01", "eval.num_prompts=7"),
    *("actor.optimizer.lr=1e-2", "checkpoint.every_num_steps=4"),
)
OF_PAIRS = ("preference/", "eval/", "loss/")
STEPS = ("trainer.num_steps=2", "eval.every_num_steps=2", "actor.optimizer.lr=1e-2")


def _run(folder: Path, *overrides: str) -> list[dict[str, float]]:
    config = small_config(folder, *overrides)
    run(config, resolved_yaml=to_yaml(config))
    return read_metrics(folder)


def _of_pairs(line: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name.startswith(OF_PAIRS)}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Pairs that are easily told apart, and the overrides that read them."""
    folder = tmp_path_factory.mktemp("pairs")
    for name, numbers in {"train": range(10, 74), "eval": range(80, 87)}.items():
        rows = [{"prompt": f"{n}=", "chosen": f"{n}", "rejected": "zz"} for n in numbers]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = [f"data.{name}_files=[{folder}/{name}.jsonl]" for name in ("train", "eval")]
    return ("data=preferences", "data.use_chat_template=false", *files)


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, pairs: tuple[str, ...], ray_cluster: None
) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    _run(folder, *TRAINING, *pairs, "trainer.num_steps=8")
    return folder


def test_it_learns_to_score_the_chosen_answers_higher(
    trained: Path, pairs: tuple[str, ...], tmp_path: Path
) -> None:
    whole = read_metrics(trained)
    before, first, last = whole[0], whole[1], whole[8]
    assert first["loss/preference"] == pytest.approx(log(2))  # the head begins as zeros
    assert (before["eval/accuracy"], first["preference/margin/mean"]) == (0.5, 0.0)
    assert last["eval/accuracy"] > 0.7
    assert last["eval/margin"] == pytest.approx(
        last["eval/chosen_reward"] - last["eval/rejected_reward"], rel=1e-4
    )
    for num_steps in (4, 8):  # in two parts
        steps = f"trainer.num_steps={num_steps}"
        parts = _run(tmp_path / "parts", *TRAINING, *pairs, steps)
    assert [_of_pairs(line) for line in parts] == [_of_pairs(line) for line in whole]
    ours, theirs = (load_file(of / "hf/model.safetensors") for of in (tmp_path / "parts", trained))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    export_checkpoint(tmp_path / "parts", output=tmp_path / "exported")
    for file in ("model.safetensors", "config.json"):
        exported, of_run = tmp_path / "exported" / file, trained / "hf" / file
        assert exported.read_bytes() == of_run.read_bytes()


@pytest.mark.parametrize("engine", ["fsdp2", "megatron"])
def test_a_trained_model_rewards_another_run(trained: Path, tmp_path: Path, engine: str) -> None:
    several = (
        f"+reward.functions={{length: {{function: length, weight: 0.5, args: {{tokens: 4}}}}, "
        f"nice: {{function: model, weight: 2, args: {{path: {trained}/hf, mean: 1, std: 4}}}}}}"
    )
    dynamic: tuple[str, ...] = (
        *("algorithm=dapo", "algorithm.max_sampling_rounds=2"),
        *(f"actor={engine}", "cluster.num_ranks_per_node=2", "rollout.sleep=true"),
    )
    hook = "cluster.worker_setup_hook=tests.megatron.stand_ins.install"
    dynamic += (hook,) if engine == "megatron" else ()
    lines = _run(tmp_path / "run", "reward.function=null", several, *dynamic, *STEPS)
    model = AutoModelForSequenceClassification.from_pretrained(trained / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(trained / "hf")
    samples = [
        json.loads(line)
        for line in (tmp_path / "run/samples.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert {sample["split"] for sample in samples} == {"train", "eval"}
    chats = [
        [
            {"role": "user", "content": sample["prompt"]},
            {"role": "assistant", "content": sample["response"]},
        ]
        for sample in samples
    ]
    rows = tokenizer.apply_chat_template(chats, padding=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        scores = model(**rows).logits[:, 0]
    assert scores.std() > 0.01
    for sample, score in zip(samples, scores.tolist(), strict=True):
        too_long = max(0, len(sample["tokens"]) - 4) * 0.001
        assert sample["reward"] == pytest.approx((score - 1) / 2 - too_long / 2, abs=1e-3)
    steps = [line for line in lines if line["step"] > 0]
    assert all(step["reward/nice/std"] > 0 for step in steps)
    assert steps[0]["reward/mean"] == pytest.approx(
        2 * steps[0]["reward/nice/mean"] + steps[0]["reward/length/mean"] / 2, rel=1e-4
    )
    assert all(step["time/offload_parameters_s"] > 0 for step in steps)
