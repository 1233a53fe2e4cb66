from __future__ import annotations

import json
from math import log
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hybridrl.run.export_checkpoint import export_checkpoint
from tests.end_to_end.runs import (
    STAND_INS,
    assert_same_run,
    assert_same_weights,
    go_back_to,
    samples_of,
    train,
)
from tests.end_to_end.small import read_metrics

pytestmark = pytest.mark.usefixtures("ray_cluster")

TRAINING = (
    *("trainer.num_prompts_per_step=8", "eval.every_num_steps=4", "eval.num_prompts=7"),
    *("actor.optimizer.lr=1e-2", "checkpoint.every_num_steps=4"),
)
MODES = {
    "dpo": ("mode=dpo",),
    "reward_model": ("mode=reward_model", "reward_model.center_coefficient=0.01"),
}
Pairs = tuple[str, ...]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """The overrides that read pairs which are easily told apart."""
    folder = tmp_path_factory.mktemp("pairs")
    for name, numbers in {"train": range(10, 74), "eval": range(80, 87)}.items():
        rows = [{"prompt": f"{n}=", "chosen": f"{n}", "rejected": "zz"} for n in numbers]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = [f"data.{name}_files=[{folder}/{name}.jsonl]" for name in ("train", "eval")]
    return ("data=preferences", "data.use_chat_template=false", *files)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pairs: Pairs, ray_cluster: None) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    for mode, overrides in MODES.items():
        train(folder / mode, *overrides, *TRAINING, *pairs, "trainer.num_steps=8")
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_that_share_tokens_learn_and_evaluate_as_one(
    trained: Path, pairs: Pairs, tmp_path: Path, mode: str
) -> None:
    shared = ("cluster.num_ranks_per_node=2", "actor.fsdp2.context_parallel_size=2")
    train(tmp_path / "run", *MODES[mode], *TRAINING, *pairs, *shared, "trainer.num_steps=8")
    one, two = read_metrics(trained / mode), read_metrics(tmp_path / "run")
    names = ("loss/preference", "eval/accuracy", "eval/margin", "policy/grad_norm")
    for before, after in zip(one, two, strict=True):
        for name in set(names) & before.keys():
            assert after[name] == pytest.approx(before[name], rel=1e-3, abs=1e-5), name
    export_checkpoint(tmp_path / "run", output=tmp_path / "exported")  # by one process
    written = [tmp_path / folder / "model.safetensors" for folder in ("exported", "run/hf")]
    assert written[0].read_bytes() == written[1].read_bytes()


@pytest.mark.parametrize("mode", MODES)
def test_the_chosen_answers_are_learned_in_two_parts_as_in_one(
    trained: Path, pairs: Pairs, tmp_path: Path, mode: str
) -> None:
    lines = read_metrics(trained / mode)
    before, first, last = lines[0], lines[1], lines[8]
    # The policy is its reference, or the head begins as zeros.
    assert first["loss/preference"] == pytest.approx(log(2))
    assert before["eval/accuracy"] == 0.5
    assert first["preference/margin/mean"] == pytest.approx(0.0, abs=1e-6)
    assert last["eval/accuracy"] > 0.7
    assert last["loss/preference"] < first["loss/preference"]
    assert last["eval/margin"] == pytest.approx(
        last["eval/chosen_reward"] - last["eval/rejected_reward"], rel=1e-4
    )
    parts = go_back_to(4, trained / mode, tmp_path / "parts")
    train(parts, *MODES[mode], *TRAINING, *pairs, "trainer.num_steps=8")
    assert_same_run(parts, trained / mode)
    assert_same_weights(parts, trained / mode)


def test_an_exported_reward_model_is_what_its_run_wrote(trained: Path, tmp_path: Path) -> None:
    export_checkpoint(trained / "reward_model", output=tmp_path / "exported")
    for file in ("model.safetensors", "config.json"):
        of_run = trained / "reward_model" / "hf" / file
        assert (tmp_path / "exported" / file).read_bytes() == of_run.read_bytes()


def test_a_policy_with_an_adapter_is_its_own_reference(pairs: Pairs, tmp_path: Path) -> None:
    lora = ("mode=dpo", *TRAINING, *pairs, "lora=default", "lora.rank=4", "trainer.num_steps=4")
    one = train(tmp_path / "one", *lora)
    two = train(tmp_path / "two", *lora, "cluster.num_ranks_per_node=2")
    assert one[1]["preference/chosen_reward/mean"] == pytest.approx(0.0, abs=1e-6)
    assert one[4]["eval/margin"] > 0.01
    for line, other in zip(one, two, strict=True):
        names = [name for name in line if name.startswith(("preference/", "eval/", "loss/"))]
        assert {n: line[n] for n in names} == pytest.approx(
            {n: other[n] for n in names}, rel=1e-3, abs=1e-4
        )
    assert (tmp_path / "one" / "adapter" / "adapter_config.json").is_file()


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("megatron", marks=pytest.mark.nightly)])
def test_a_trained_model_rewards_another_run(trained: Path, tmp_path: Path, engine: str) -> None:
    scorer = trained / "reward_model" / "hf"
    lines = train(
        tmp_path / "run",
        "reward.function=null",
        f"+reward.functions={{length: {{function: length, weight: 0.5, args: {{tokens: 4}}}}, "
        f"nice: {{function: model, weight: 2, args: {{path: {scorer}, mean: 1, std: 4}}}}}}",
        *("algorithm=dapo", "algorithm.max_sampling_rounds=2"),
        *(f"actor={engine}", "cluster.num_ranks_per_node=2", "rollout.sleep=true"),
        *((STAND_INS,) if engine == "megatron" else ()),
        *("trainer.num_steps=2", "eval.every_num_steps=2", "actor.optimizer.lr=1e-2"),
    )
    model = AutoModelForSequenceClassification.from_pretrained(scorer).eval()
    tokenizer = AutoTokenizer.from_pretrained(scorer)
    samples = samples_of(tmp_path / "run")
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
