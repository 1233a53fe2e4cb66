"""Whole runs on real Ray workers: what a user gets from a configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.errors import (
    ConfigErrors,
    DataError,
    ModelError,
    RemoteCallError,
    TrainingError,
)
from hybridrl.run.launch import run
from hybridrl.run.starter import write_random_model
from tests.end_to_end.small import VARIED, read_metrics, small_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

TWO_RANKS = ("cluster.num_ranks_per_node=2", "actor.max_tokens_per_microbatch=64")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Path:
    """The folder of a run of one rank."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    run(small_config(folder), resolved_yaml="mode: train\n")
    return folder


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Path:
    """The folder of a run of two ranks whose engines stay awake."""
    folder = tmp_path_factory.mktemp("two-ranks") / "run"
    run(small_config(folder, *TWO_RANKS, "rollout.sleep=false"), resolved_yaml="")
    return folder


@pytest.fixture(scope="module")
def rewarded_alike(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Path:
    """The folder of a run on files of its own, with a reward function of its own."""
    folder = tmp_path_factory.mktemp("alike")
    data, reward = folder / "rows.jsonl", folder / "reward.py"
    rows = [{"prompt": f"{n}=", "answer": str(n), "info": {"n": n}} for n in range(10, 18)]
    data.write_text("\n".join(json.dumps(row) for row in rows))
    reward.write_text(
        "def alike(responses, answers, info):\n"
        "    return [0.7 * (answers[n] == str(each['n'])) for n, each in enumerate(info)]\n"
    )
    config = small_config(
        folder / "run",
        "data=files",
        f"data.train_files=[{data}]",
        f"data.eval_files=[{data}]",
        "data.use_chat_template=false",
        "data.max_prompt_tokens=8",
        "model.starter.num_warmup_steps=0",
        f"reward.function={reward}:alike",
    )
    run(config, resolved_yaml="")
    return folder / "run"


def test_a_run_leaves_configuration_log_metrics_events_samples_and_weights(plain: Path) -> None:
    folder = plain
    metrics = read_metrics(folder)
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    assert {"eval/reward/mean", "time/eval_s"} <= metrics[0].keys()
    assert "eval/reward/mean" not in metrics[1]
    assert metrics[3]["policy/updates"] == 1
    assert [line.get("policy/version") for line in metrics] == [None, 1, 2, 3]
    assert [line.get("data/prompts") for line in metrics] == [None, 4, 8, 12]
    assert (folder / "config.yaml").read_text() == "mode: train\n"
    assert (folder / "log.txt").is_file()
    assert list((folder / "tensorboard").iterdir())
    sample = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    assert sample["prompt"].endswith("=")
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    assert tokenizer.decode(tokenizer("312=").input_ids) == "312="
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())


def test_the_same_seed_trains_the_same_weights_bit_by_bit(plain: Path, tmp_path: Path) -> None:
    run(small_config(tmp_path / "run"), resolved_yaml="")
    first, second = _weights(plain), _weights(tmp_path / "run")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.shows("1.5")
def test_sleeping_engines_on_two_ranks_train_what_waking_ones_train(
    two_ranks: Path, tmp_path: Path
) -> None:
    config = small_config(tmp_path / "asleep", *TWO_RANKS, "rollout.sleep=true")
    run(config, resolved_yaml="")
    awake, asleep = _weights(two_ranks), _weights(tmp_path / "asleep")
    assert all(torch.equal(awake[name], asleep[name]) for name in awake)
    last = read_metrics(tmp_path / "asleep")[-1]
    assert last["memory/released_bytes"] > 0
    assert last["time/release_s"] > 0


def test_engines_of_their_own_train_what_those_of_the_ranks_train(
    plain: Path, tmp_path: Path
) -> None:
    config = small_config(tmp_path / "own", "serving=own", "serving.weights=broadcast")
    run(config, resolved_yaml="")
    ranks, own = _weights(plain), _weights(tmp_path / "own")
    assert all(torch.equal(ranks[name], own[name]) for name in ranks)
    metrics = read_metrics(tmp_path / "own")
    assert [line.get("policy/version") for line in metrics] == [None, 1, 2, 3]
    assert [line["memory/synced_bytes"] > 0 for line in metrics[1:]] == [True] * 3
    assert metrics[1]["rollout/lost_engines"] == 0


def test_two_ranks_take_nearly_the_steps_of_one(plain: Path, two_ranks: Path) -> None:
    one, two = (read_metrics(folder)[1] for folder in (plain, two_ranks))
    assert one["reward/mean"] == two["reward/mean"]
    assert one["policy/grad_norm"] == pytest.approx(two["policy/grad_norm"], rel=1e-4)


@pytest.mark.parametrize("placement", ["loss", pytest.param("reward", marks=pytest.mark.nightly)])
def test_kl_is_measured_against_the_model_that_the_run_started_from(
    tmp_path: Path, placement: str
) -> None:
    config = small_config(
        tmp_path / "run",
        "algorithm.old_logprobs=recompute",
        f"algorithm.kl.placement={placement}",
        "algorithm.kl.coefficient=0.1",
        "algorithm.num_minibatches=2",
        "actor.optimizer.lr=1e-2",
        VARIED,
    )
    run(config, resolved_yaml="")
    metrics = read_metrics(tmp_path / "run")
    assert metrics[1]["policy/updates"] == 2
    first, last = (metrics[n]["policy/kl_to_reference_nats/mean"] for n in (1, 3))
    assert first < last


def test_supervised_fine_tuning_lowers_the_loss_on_held_out_rows(tmp_path: Path) -> None:
    config = small_config(
        tmp_path / "run",
        "mode=sft",
        "trainer.num_steps=8",
        "trainer.num_prompts_per_step=8",
        "eval.every_num_steps=4",
        "actor.optimizer.lr=1e-2",
        *("cluster.num_ranks_per_node=2", "eval.num_prompts=7"),  # not a multiple of the ranks
    )
    run(config, resolved_yaml="")
    losses = [line["eval/loss_nats"] for line in read_metrics(tmp_path / "run")[::4]]
    assert losses[0] > losses[1] > losses[2]
    assert (tmp_path / "run" / "hf" / "config.json").is_file()


def test_own_data_and_an_own_reward_function_need_no_code_of_ours(rewarded_alike: Path) -> None:
    rewards = [line["reward/mean"] for line in read_metrics(rewarded_alike)[1:]]
    assert rewards == pytest.approx([0.7] * 3)


def test_a_reward_of_its_own_is_learnt_in_thirty_steps(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def digits(responses, **_):\n"
        "    return [sum(c.isdigit() for c in text) / 6 for text in responses]\n"
    )
    config = small_config(
        tmp_path / "run",
        f"reward.function={reward}:digits",
        "actor.optimizer.lr=1e-2",
        "trainer.num_steps=30",
        "eval.every_num_steps=0",
    )
    run(config, resolved_yaml="")
    rewards = [line["reward/mean"] for line in read_metrics(tmp_path / "run")]
    assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.2


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_bad_row_is_named_before_a_worker_starts(tmp_path: Path, split: str) -> None:
    good, bad = '{"prompt": "1=", "answer": "1"}\n', '{"prompt": "2="}\n'
    (tmp_path / "train.jsonl").write_text(good + (bad if split == "train" else good))
    (tmp_path / "eval.jsonl").write_text(good + (bad if split == "eval" else good))
    folder = tmp_path / "run"
    config = small_config(
        folder,
        "data=files",
        f"data.train_files=[{tmp_path}/train.jsonl]",
        f"data.eval_files=[{tmp_path}/eval.jsonl]",
        "data.use_chat_template=false",
        "model.starter.num_warmup_steps=0",
    )
    with pytest.raises(DataError, match=rf"{split}\.jsonl:2"):
        run(config, resolved_yaml="")
    assert "start workers" not in (folder / "trace.json").read_text()


def _spoil_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')


def _spoil_stop_tokens(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [256, 999]}')


def _spoil_types(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    save_file(weights, folder / "model.safetensors")


def _spoil_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("mode", "spoil", "words"),
    [
        ("train", _spoil_index, "weight_map is"),
        ("sft", _spoil_types, r"model\.norm\.weight is I8"),
        ("train", _spoil_head, "contain another lm_head"),
        ("train", _spoil_stop_tokens, "eos_token_id=999 is not in the vocabulary of 512"),
    ],
)
def test_a_broken_model_folder_is_named_before_a_worker_starts(
    tmp_path: Path, mode: str, spoil: Callable[[Path], None], words: str
) -> None:
    config = small_config(tmp_path / "run", f"mode={mode}")
    assert config.model.starter is not None
    model = tmp_path / "model"
    write_random_model(config.model.starter, model, seed=0)
    spoil(model)
    config = replace(config, model=replace(config.model, path=str(model), starter=None))
    with pytest.raises(ModelError, match=words):
        run(config, resolved_yaml="")
    assert "start workers" not in (tmp_path / "run" / "trace.json").read_text()


def test_updates_without_a_finite_gradient_are_skipped_then_end_the_run(tmp_path: Path) -> None:
    config = small_config(
        tmp_path / "run",
        *("actor.optimizer.lr=1", "actor.optimizer.weight_decay=1e6"),  # a millionfold each step
        "trainer.num_steps=20",
        "trainer.max_skipped_updates=1",
        "eval.every_num_steps=0",
        VARIED,
    )
    with pytest.raises((TrainingError, RemoteCallError), match="finite"):
        run(config, resolved_yaml="")


def test_equal_rewards_leave_the_weights_as_they_are(rewarded_alike: Path) -> None:
    last = read_metrics(rewarded_alike)[-1]
    assert last["reward/zero_variance_group_fraction"] == 1
    assert last["policy/grad_norm"] == 0


@pytest.mark.shows("4.16")
def test_rows_that_do_not_divide_over_ranks_are_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigErrors, match=r"num_prompts_per_step"):
        small_config(
            tmp_path / "run", "cluster.num_ranks_per_node=2", "trainer.num_prompts_per_step=3"
        )


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder / "hf").state_dict())
