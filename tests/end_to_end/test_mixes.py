from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.data import row_table
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.errors import CheckpointError, DataError, ModelError, RunFolderError
from hybridrl.run.launch import run
from hybridrl.workers.build import build_train_engine
from tests.end_to_end.runs import STAND_INS, go_back_to, make_untrained, samples_of, train
from tests.end_to_end.small import VARIED, read_metrics, small_config

pytestmark = pytest.mark.usefixtures("ray_cluster")


def _write_rows(folder: Path) -> None:
    for name, size in (("a", 6), ("b", 3)):
        rows = [{"prompt": f"{n}{size}=", "answer": str(n)} for n in range(size)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.shows("R2.7")
@pytest.mark.parametrize(
    "curriculum", [pytest.param("none", marks=pytest.mark.nightly), "solve_rate"]
)
def test_a_mix_resumes_with_the_rows_of_an_unbroken_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, curriculum: str
) -> None:
    monkeypatch.setattr(row_table, "ROWS_IN_MEMORY", 4)  # one source in a file, one in memory
    monkeypatch.setenv("HYBRIDRL_CACHE", str(tmp_path / "cache"))
    mixed = (
        *("data=files", "data.use_chat_template=false", "data.max_prompt_tokens=8"),
        *("model.starter.num_warmup_steps=0", "eval.every_num_steps=0", VARIED),
        f"++data.sources.a.files=[{tmp_path}/a.jsonl]",
        f"++data.sources.b={{files: [{tmp_path}/b.jsonl], weight: 2}}",
        *("checkpoint.every_num_steps=2", "checkpoint.keep_last=9", "trainer.num_epochs=2"),
        *(f"data.curriculum={curriculum}", "trainer.num_steps=50"),
        "algorithm.by_source.b={advantage: grpo, advantage_args: {scale: none}}",
    )
    _write_rows(tmp_path)
    lines = train(tmp_path / "unbroken", *mixed)
    assert len(lines) == 5  # 2 epochs of 9 rows, 4 rows a step
    assert {"reward/by_source/a", "reward/by_source/b"} <= lines[0].keys()
    folder = go_back_to(2, tmp_path / "unbroken", tmp_path / "resumed")
    _write_rows(tmp_path)
    resumed = train(folder, *mixed)
    # The files are written again for the second run: read again, with the same fingerprint.
    assert len(list((tmp_path / "cache/rows").iterdir())) == 2
    for name in ("reward/mean", "policy/grad_norm", "data/epoch"):
        assert [line[name] for line in lines] == [line[name] for line in resumed]
    (tmp_path / "b.jsonl").write_text('{"prompt": "9=", "answer": "9"}')
    told = r"the data has changed \(b: \w{12} there, \w{12} here\).*accept_changes=true"
    with pytest.raises(DataError, match=told):
        train(folder, *mixed, "trainer.num_epochs=9")


def test_all_turns_of_conversations_are_learned(tmp_path: Path) -> None:
    turns = [("user", "a"), ("assistant", "bb"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}))
    make_untrained(tmp_path / "model")
    tokenizer = build_starter_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    (line,) = train(
        tmp_path / "run",
        *("mode=sft", "sft.turns=all", "trainer.num_steps=1"),
        *("trainer.num_prompts_per_step=1", "eval.every_num_steps=0"),
        *("model.starter=null", f"model.path={tmp_path}/model"),
        *("data=files", f"data.train_files=[{tmp_path}/chats.jsonl]", "data.answer_key=null"),
        *("data.prompt_key=messages", "data.max_prompt_tokens=16"),
    )
    assert line["data/loss_tokens"] == 5  # 2 of the last turn


NUM_STEPS, NUM_PROMPTS = 6, 4
OVERSAMPLED = (
    *("cluster.num_ranks_per_node=2", "actor.max_tokens_per_microbatch=64"),
    *(f"trainer.num_steps={NUM_STEPS}", "eval.every_num_steps=3", "eval.num_prompts=4"),
    *("rollout.oversample=2", "algorithm.rollout_correction=importance"),
    *("rollout.canary_max_drift_nats=0.1", "rollout.num_slots=6", "rollout.max_response_tokens=12"),
    *("checkpoint.every_num_steps=1", "checkpoint.keep_last=10", VARIED),
    *("tracking.num_samples_per_step=1000", "actor.optimizer.lr=1e-3"),
    # Without these steps hardly a response ends before its limit, and where all end at once none is
    # interrupted.
    "model.starter.num_warmup_steps=40",
)


def learned_by_step(folder: Path) -> list[set[int]]:
    """The indices of the prompts that were learned from, up to each step."""
    store, learned = CheckpointStore(folder / "checkpoints"), []
    for step in range(1, NUM_STEPS + 1):
        manifest = json.loads((store.folder_of(step) / "manifest.json").read_text())
        sampler = manifest["run"]["sampler"]
        learned.append(set(range(sampler["num_drawn"])) - set(sampler["open_prompts"]))
    return learned


def learned_once(folder: Path) -> list[str]:
    """The texts of all prompts, sorted; each index was learned from in one step alone."""
    learned = learned_by_step(folder)
    assert [len(indices) for indices in learned] == [
        NUM_PROMPTS * step for step in range(1, NUM_STEPS + 1)
    ]
    assert all(before < after for before, after in pairwise(learned))
    prompts = [sample["prompt"] for sample in samples_of(folder, "train")]
    assert len(prompts) == NUM_STEPS * NUM_PROMPTS
    return sorted(prompts)


def test_open_prompts_continue_and_are_learned_from_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, *OVERSAMPLED)
    prompts = learned_once(folder)
    steps = {int(line["step"]): line for line in read_metrics(folder)}
    is_open = [steps[step]["rollout/open_prompts"] for step in range(1, NUM_STEPS + 1)]
    assert is_open == [NUM_PROMPTS] * (NUM_STEPS - 1) + [0]
    assert steps[1]["rollout/staleness_steps/max"] == 0
    assert max(line.get("rollout/staleness_steps/max", 0) for line in steps.values()) >= 1
    assert sum(line.get("rollout/interrupted_tokens", 0) for line in steps.values()) > 0
    died = go_back_to(3, folder, tmp_path / "died")
    newest = CheckpointStore(died / "checkpoints").newest()
    assert newest is not None
    assert len(newest.manifest.run.sampler.open_prompts) == NUM_PROMPTS
    train(died, *OVERSAMPLED)
    assert learned_once(died) == prompts


MEGATRON = (
    *("actor=megatron", "megatron.tensor_parallel_size=2", "cluster.num_ranks_per_node=2"),
    STAND_INS,
)
SETS = (
    "++eval.sets.sampled={num_responses_per_prompt: 4, temperature: 1.0, pass_at_k: [1, 4]}",
    "++eval.sets.greedy={num_prompts: 3, pass_at_k: [1], max_response_tokens: 16}",
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


def test_sets_are_measured_before_during_and_after_and_one_chooses_checkpoints(
    trained: Path,
) -> None:
    metrics = read_metrics(trained)
    assert len(metrics) == 4
    for line in metrics:
        means = [line[f"eval/{name}/reward/mean"] for name in ("sampled", "greedy")]
        assert line["eval/reward/mean"] == pytest.approx(sum(means) / 2)
        low, high = (line[f"eval/sampled/reward/mean/{end}"] for end in ("low", "high"))
        assert low <= means[0] <= high
        assert line["eval/sampled/pass_at_1"] <= line["eval/sampled/pass_at_4"]
        assert "eval/greedy/pass_at_1" in line
        assert line["eval/greedy/length/response_tokens/max"] == 16
        assert line["eval/sampled/length/response_tokens/max"] <= 6
        assert line.get("length/response_tokens/max", 0) <= 6
    samples = samples_of(trained)
    assert {sample.get("eval_set") for sample in samples} == {None, "sampled", "greedy"}
    scores = {line["step"]: line["eval/sampled/reward/mean"] for line in metrics[1:]}
    others = {step: score for step, score in scores.items() if step != 3}
    best = {max(scores, key=lambda step: scores[step])}
    kept = {int(p.name[-9:]) for p in (trained / "checkpoints").glob("step-*")}
    assert kept == {3} | best, others


def test_a_checkpoint_is_evaluated_as_the_run_did_and_one_that_is_not_there_is_named(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "eval"
    config = small_config(
        folder, "mode=eval", f"eval.checkpoint={trained}", *SETS, VARIED, "eval.every_num_steps=0"
    )
    run(config, resolved_yaml="mode: eval\n")
    columns = capsys.readouterr().out.partition("\n")[0].split()
    assert columns[:4] == ["set", "prompts", "responses", "reward"]
    assert not [name for name in columns if "length" in name or "repetition" in name]
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
    step = trained / "checkpoints" / "step-000000077"
    config = small_config(tmp_path / "none", "mode=eval", f"eval.checkpoint={step}")
    with pytest.raises(CheckpointError, match="no checkpoint of step 77"):
        run(config, resolved_yaml="")


def test_megatron_ranks_evaluate_as_one_fsdp2_rank_does(trained: Path, tmp_path: Path) -> None:
    of_run = read_metrics(trained)[-1]
    checkpoint = ("mode=eval", f"eval.checkpoint={trained}", *SETS, VARIED)
    (line,) = train(tmp_path / "eval", *checkpoint, *MEGATRON)
    for name in ("eval/sampled/reward/mean", "eval/greedy/reward/mean"):
        assert line[name] == pytest.approx(of_run[name])


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
    for name, given in (("adapter", adapter), ("merged", merged)):
        (line,) = train(tmp_path / name, *given)
        assert line["eval/reward/mean"] == pytest.approx(after["eval/reward/mean"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["set", "eval"] * 2


def test_no_optimizer_is_built_for_an_evaluation(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", "mode=eval", "algorithm.kl.placement=loss")
    engine = build_train_engine(config, make_untrained(tmp_path / "model"), torch.device("cpu"))
    with pytest.raises(ModelError, match="built without an optimizer"):
        _ = engine.num_updates
