"""Evaluation sets of a run, and ``mode=eval``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hybridrl.errors import CheckpointError, ModelError, RunFolderError
from hybridrl.run.launch import run
from hybridrl.run.starter import write_random_model
from hybridrl.workers.build import build_train_engine
from tests.end_to_end.runs import STAND_INS, samples_of, train
from tests.end_to_end.small import VARIED, read_metrics, small_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

MEGATRON = (
    *("actor=megatron", "megatron.tensor_parallel_size=2", "cluster.num_ranks_per_node=2"),
    STAND_INS,
)
SETS = (
    "++eval.sets.sampled={num_responses_per_prompt: 4, temperature: 1.0, pass_at_k: [1, 4]}",
    "++eval.sets.greedy={num_prompts: 3, majority_at_k: [1]}",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Path:
    """The folder of a run with two evaluation sets, and a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(
        folder,
        *(*SETS, VARIED, "actor.optimizer.lr=1e-2", "eval.every_num_steps=1"),
        *("checkpoint.every_num_steps=1", "checkpoint.keep_last=1", "checkpoint.keep_best=1"),
        "checkpoint.best_metric=eval/sampled/reward/mean",
    )
    return folder


def test_sets_of_a_run_are_measured_before_during_and_after(trained: Path) -> None:
    metrics = read_metrics(trained)
    assert len(metrics) == 4
    for line in metrics:
        means = [line[f"eval/{name}/reward/mean"] for name in ("sampled", "greedy")]
        assert line["eval/reward/mean"] == pytest.approx(sum(means) / 2)
        low, high = (line[f"eval/sampled/reward/mean/{end}"] for end in ("low", "high"))
        assert low <= means[0] <= high
        assert line["eval/sampled/pass_at_1"] <= line["eval/sampled/pass_at_4"]
        assert "eval/greedy/majority_at_1" in line
    samples = samples_of(trained)
    assert {sample.get("eval_set") for sample in samples} == {None, "sampled", "greedy"}


def test_checkpoints_are_kept_by_the_metric_of_a_set(trained: Path) -> None:
    scores = {line["step"]: line["eval/sampled/reward/mean"] for line in read_metrics(trained)[1:]}
    others = {step: score for step, score in scores.items() if step != 3}
    best = {max(scores, key=lambda step: scores[step])}
    kept = {int(p.name[-9:]) for p in (trained / "checkpoints").glob("step-*")}
    assert kept == {3} | best, others


def test_a_checkpoint_is_evaluated_as_the_run_did(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "eval"
    config = small_config(
        folder, "mode=eval", f"eval.checkpoint={trained}", *SETS, VARIED, "eval.every_num_steps=0"
    )
    run(config, resolved_yaml="mode: eval\n")
    results = json.loads((folder / "eval.json").read_text())
    assert results["model"] == str(trained)
    last = read_metrics(trained)[-1]
    for name in ("sampled", "greedy"):
        of_set = results["sets"][name]["metrics"]
        assert of_set["eval/reward/mean"] == last[f"eval/{name}/reward/mean"]
    assert results["sets"]["greedy"]["num_prompts"] == 3
    assert read_metrics(folder)[0]["eval/reward/mean"] == pytest.approx(last["eval/reward/mean"])
    assert (folder / "samples.jsonl").stat().st_size
    assert not (folder / "exported").exists()
    with pytest.raises(RunFolderError, match="exists"):
        run(config, resolved_yaml="")


def test_megatron_ranks_evaluate_as_one_fsdp2_rank_does(trained: Path, tmp_path: Path) -> None:
    of_run = read_metrics(trained)[-1]
    checkpoint = ("mode=eval", f"eval.checkpoint={trained}", *SETS, VARIED)
    (line,) = train(tmp_path / "eval", *checkpoint, *MEGATRON)
    for name in ("eval/sampled/reward/mean", "eval/greedy/reward/mean"):
        assert line[name] == pytest.approx(of_run[name])


def test_a_checkpoint_of_megatron_ranks_is_evaluated(tmp_path: Path) -> None:
    learning = (VARIED, "actor.optimizer.lr=1e-2", "trainer.num_steps=1")
    *_, of_run = train(tmp_path / "run", *MEGATRON, *learning)
    checkpoint = ("mode=eval", f"eval.checkpoint={tmp_path / 'run'}", VARIED)
    (line,) = train(tmp_path / "eval", *checkpoint)
    assert line["eval/reward/mean"] == pytest.approx(of_run["eval/reward/mean"])


def test_a_checkpoint_that_is_not_there_is_named(trained: Path, tmp_path: Path) -> None:
    step = trained / "checkpoints" / "step-000000077"
    config = small_config(tmp_path / "eval", "mode=eval", f"eval.checkpoint={step}")
    with pytest.raises(CheckpointError, match="no checkpoint of step 77"):
        run(config, resolved_yaml="")


def test_a_model_with_an_adapter_is_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = ("model.starter.num_warmup_steps=0", VARIED)
    lora = ("lora=default", "lora.rank=2", "actor.optimizer.lr=1e-1", *plain)
    trained = tmp_path / "lora"
    before, *_, after = train(trained, *lora, "eval.every_num_steps=3")
    assert before["eval/reward/mean"] != pytest.approx(after["eval/reward/mean"])
    adapter = ("mode=eval", *lora, f"lora.init_from={trained / 'adapter'}")
    merged = ("mode=eval", f"eval.checkpoint={trained}", *plain)
    for name, given in (("adapter", adapter), ("merged", merged), ("sharded", adapter + MEGATRON)):
        (line,) = train(tmp_path / name, *given)
        assert line["eval/reward/mean"] == pytest.approx(after["eval/reward/mean"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["set", "eval"] * 3


def test_no_optimizer_is_built_for_an_evaluation(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", "mode=eval", "algorithm.kl.placement=loss")
    assert config.model.starter is not None
    write_random_model(config.model.starter, tmp_path / "model", seed=0)
    engine = build_train_engine(config, tmp_path / "model", torch.device("cpu"))
    with pytest.raises(ModelError, match="built without an optimizer"):
        _ = engine.num_updates
