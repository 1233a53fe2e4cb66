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

from hybridrl.errors import DataError, ModelError, RemoteCallError, RewardError, TrainingError
from hybridrl.run.launch import run
from tests.end_to_end.runs import WEIGHTS, assert_same_weights, make_untrained, samples_of, train
from tests.end_to_end.small import VARIED, read_metrics, small_config
from tests.report.folders import page_of
from tests.trace_events import Event, check, names_of, spans_of

pytestmark = pytest.mark.usefixtures("ray_cluster")

LEARNING = (VARIED, "algorithm.old_logprobs=recompute", "actor.max_tokens_per_microbatch=64")
TWO_RANKS = (*LEARNING, "cluster.num_ranks_per_node=2")
EDGES = {
    *("offload_optimizer", "resume_weights", "sync", "offload_parameters", "resume_cache"),
    *("continue", "skew", "pause", "drain", "release", "onload_training"),
}
OWN_FILES = (
    *("data=files", "data.use_chat_template=false", "data.max_prompt_tokens=8"),
    "model.starter.num_warmup_steps=0",
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "run"
    run(small_config(folder, *LEARNING), resolved_yaml="mode: train\n")
    return folder


@pytest.fixture(scope="module")
def asleep(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Path:
    """The folder of a run of two ranks whose engines sleep."""
    folder = tmp_path_factory.mktemp("asleep") / "run"
    train(folder, *TWO_RANKS, "rollout.sleep=true")
    return folder


@pytest.fixture(scope="module")
def events(asleep: Path) -> list[Event]:
    """Of the trace, without the ranks that made the starter model."""
    events: list[Event] = json.loads((asleep / "trace.json").read_text())
    check(events)
    begin = max(e["ts"] for e in spans_of(events, "start workers"))
    rows = [row for row, name in names_of(events).items() if "SupervisedWorker" not in name]
    return [e for e in events if e["pid"] in rows and e.get("ts", begin) >= begin]


def test_a_run_leaves_configuration_log_metrics_events_samples_and_weights(plain: Path) -> None:
    metrics = read_metrics(plain)
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    assert {"eval/reward/mean", "time/eval_s"} <= metrics[0].keys()
    assert "eval/reward/mean" not in metrics[1]
    assert metrics[3]["policy/updates"] == 1
    assert [line.get("policy/version") for line in metrics] == [None, 1, 2, 3]
    assert [line.get("data/prompts") for line in metrics] == [None, 4, 8, 12]
    assert (plain / "config.yaml").read_text() == "mode: train\n"
    assert (plain / "log.txt").is_file()
    assert list((plain / "tensorboard").iterdir())
    assert samples_of(plain)[0]["prompt"].endswith("=")
    model = AutoModelForCausalLM.from_pretrained(plain / "hf")
    tokenizer = AutoTokenizer.from_pretrained(plain / "hf")
    assert tokenizer.decode(tokenizer("312=").input_ids) == "312="
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())


@pytest.mark.shows("1.5")
def test_sleeping_engines_on_two_ranks_train_what_waking_ones_and_nearly_what_one_rank_does(
    plain: Path, asleep: Path, tmp_path: Path
) -> None:
    train(tmp_path / "awake", *TWO_RANKS, "rollout.sleep=false")
    assert_same_weights(asleep, tmp_path / "awake")
    two, one = read_metrics(asleep), read_metrics(plain)
    assert two[-1]["memory/released_bytes"] > 0
    assert two[-1]["time/release_s"] > 0
    assert one[1]["reward/mean"] == two[1]["reward/mean"]
    assert 0 < one[1]["policy/grad_norm"] == pytest.approx(two[1]["policy/grad_norm"], rel=1e-4)


def test_two_ranks_that_share_the_tokens_of_their_rows_train_what_one_rank_does(
    plain: Path, tmp_path: Path
) -> None:
    one = read_metrics(plain)
    two = train(tmp_path, *TWO_RANKS, "actor.fsdp2.context_parallel_size=2")
    assert one[-1]["policy/grad_norm"] > 0
    for name in ("reward/mean", "data/train_tokens", "data/loss_tokens", "data/microbatches"):
        assert [line.get(name) for line in one] == [line.get(name) for line in two], name
    for name in ("policy/grad_norm", "loss/policy", "policy/sampler_mismatch_nats/mean"):
        for before, after in zip(one[1:], two[1:], strict=True):
            assert after[name] == pytest.approx(before[name], rel=1e-3, abs=1e-6), name
    first, second = (load_file(folder / WEIGHTS) for folder in (plain, tmp_path))
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight, atol=1e-5, rtol=0, msg=name)


def test_the_trace_has_every_phase_and_edge_of_the_life_cycle_on_every_rank_and_the_metrics(
    events: list[Event], asleep: Path
) -> None:
    names = names_of(events)
    assert names[1].startswith("driver on ")
    ranks = sorted(name.partition(" on ")[0] for name in names.values())[1:]
    assert ranks == ["rank 0 ActorRolloutWorker", "rank 1 ActorRolloutWorker"]
    driver = {e["name"] for e in spans_of(events) if e["pid"] == 1}
    assert {"start workers", "step", "eval", "generate", "reward", "logprobs", "update"} <= driver
    for row in set(names) - {1}:
        of_rank = {e["name"] for e in spans_of(events) if e["pid"] == row}
        assert of_rank >= EDGES | {"build", "generate", "sample", "compute_logprobs", "update"}
        assert of_rank >= {"microbatch", "export_hf"}
    assert [e["args"]["item"] for e in spans_of(events, "step")] == [1, 2, 3]
    for stage, bytes_name in (("sync", "synced_bytes"), ("release", "released_bytes")):
        assert max(e["args"].get(bytes_name, 0) for e in spans_of(events, stage)) > 1000
    assert all(e["args"]["host_bytes"] > 2**20 for e in spans_of(events, "update") if e["pid"] > 1)
    counted = {e["name"] for e in events if e["ph"] == "C"}
    assert counted >= {"host memory, MiB", "eval/reward/mean"}
    values = [e["args"]["value"] for e in events if e["name"] == "eval/reward/mean"]
    assert values[0] == read_metrics(asleep)[0]["eval/reward/mean"]


@pytest.mark.parametrize(
    ("call", "phases"),
    [
        ("generate", {"generate", "eval"}),
        ("compute_logprobs", {"logprobs"}),
        ("update", {"update"}),
    ],
)
def test_what_a_rank_does_in_a_call_lies_within_the_drivers_call(
    events: list[Event], call: str, phases: set[str]
) -> None:
    driver = [e for e in spans_of(events) if e["pid"] == 1 and e["name"] in phases]
    ranks = [e for e in spans_of(events, call) if e["pid"] != 1]
    assert len(ranks) == 2 * len(driver) > 0
    for span in ranks:
        begin, end = span["ts"], span["ts"] + span["dur"]
        around = [e for e in driver if e["ts"] <= begin and end <= e["ts"] + e["dur"]]
        assert len(around) == 1


def test_samples_of_steps_and_evaluations_carry_the_log_probs_of_their_tokens(asleep: Path) -> None:
    assert {s["step"] for s in samples_of(asleep, "train")} == {1, 2, 3}
    held_out = samples_of(asleep, "eval")
    assert {s["step"] for s in held_out} == {0, 2, 3}
    for sample in samples_of(asleep):
        assert 0 < len(sample["tokens"]) == len(sample["logprobs"])
        assert all(logprob <= 0 for logprob in sample["logprobs"])
        assert "".join(sample["tokens"]).startswith(sample["response"])
    by_step = [[s["prompt"] for s in held_out if s["step"] == step] for step in (0, 2, 3)]
    assert by_step[0] == by_step[1] == by_step[2]


def test_the_page_of_the_run_shows_all_of_it(asleep: Path) -> None:
    assert (asleep / "report.html").is_file()
    page = page_of(asleep)
    assert "finished\n: step 3 of 3" in page.text
    parts = ("Learning", "Policy", "Time", "What the model writes", "Configuration")
    assert {*parts, "machine of the driver"} <= set(page.texts)
    assert len(page.scripts) > 10  # the library, and a chart each
    assert page.text.count("answer: ") == 4


def test_a_reward_function_that_raises_ends_the_run_by_name_and_with_its_page(
    tmp_path: Path,
) -> None:
    folder, reward = tmp_path / "run", tmp_path / "reward.py"
    reward.write_text("def broken(responses, **_):\n    return [1 / 0 for _ in responses]\n")
    with pytest.raises(RewardError, match=r"reward\.py:broken(.|\n)*ZeroDivisionError"):
        train(folder, "eval.every_num_steps=0", f"reward.function={reward}:broken")
    assert "ZeroDivisionError" in (folder / "log.txt").read_text()
    assert (folder / "report.html").is_file()
    text = page_of(folder).text
    assert "failed\n: step 0" in text
    assert "ZeroDivisionError" in text


def test_supervised_fine_tuning_lowers_the_loss_on_held_out_rows(tmp_path: Path) -> None:
    lines = train(
        tmp_path / "run",
        *("mode=sft", "trainer.num_steps=8", "trainer.num_prompts_per_step=8"),
        *("eval.every_num_steps=4", "actor.optimizer.lr=1e-2"),
        *("cluster.num_ranks_per_node=2", "eval.num_prompts=7"),  # not a multiple of the ranks
    )
    losses = [line["eval/loss_nats"] for line in lines[::4]]
    assert losses[0] > losses[1] > losses[2]
    assert (tmp_path / "run" / "hf" / "config.json").is_file()


def test_equal_rewards_of_an_own_function_for_own_rows_leave_the_weights_as_they_are(
    tmp_path: Path,
) -> None:
    data, reward = tmp_path / "rows.jsonl", tmp_path / "reward.py"
    rows = [{"prompt": f"{n}=", "answer": str(n), "info": {"n": n}} for n in range(10, 18)]
    data.write_text("\n".join(json.dumps(row) for row in rows))
    reward.write_text(
        "def alike(responses, answers, info):\n"
        "    return [0.7 * (answers[n] == str(each['n'])) for n, each in enumerate(info)]\n"
    )
    files = (*OWN_FILES, f"data.train_files=[{data}]", f"data.eval_files=[{data}]")
    lines = train(tmp_path / "run", *files, f"reward.function={reward}:alike")
    assert [line["reward/mean"] for line in lines[1:]] == pytest.approx([0.7] * 3)
    assert lines[-1]["reward/zero_variance_group_fraction"] == 1
    assert lines[-1]["policy/grad_norm"] == 0


def test_a_reward_of_its_own_is_learnt_in_thirty_steps(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def digits(responses, **_):\n"
        "    return [sum(c.isdigit() for c in text) / 6 for text in responses]\n"
    )
    lines = train(
        tmp_path / "run",
        *(f"reward.function={reward}:digits", "actor.optimizer.lr=1e-2"),
        *("trainer.num_steps=30", "eval.every_num_steps=0"),
    )
    rewards = [line["reward/mean"] for line in lines]
    assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.2


@pytest.mark.parametrize(
    ("bad", "overrides"),
    [
        ("train", ()),
        ("eval", ()),
        ("held", ("mode=eval", "++eval.sets.own.files=[FOLDER/held.jsonl]")),
    ],
)
def test_a_bad_row_is_named_before_a_worker_starts(
    tmp_path: Path, bad: str, overrides: tuple[str, ...]
) -> None:
    for name in ("train", "eval", "held"):
        last = '{"prompt": "2="}' if name == bad else '{"prompt": "2=", "answer": "2"}'
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n' + last)
    files = [f"data.{name}_files=[{tmp_path}/{name}.jsonl]" for name in ("train", "eval")]
    own = [override.replace("FOLDER", str(tmp_path)) for override in overrides]
    with pytest.raises(DataError, match=rf"{bad}\.jsonl:2"):
        train(tmp_path / "run", *OWN_FILES, *files, *own)
    assert "start workers" not in (tmp_path / "run" / "trace.json").read_text()


def _spoil_stop_tokens(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [256, 999]}')


def _spoil_types(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("mode", "spoil", "words"),
    [
        ("sft", _spoil_types, r"model\.norm\.weight is I8"),
        ("train", _spoil_stop_tokens, "eos_token_id=999 is not in the vocabulary of 512"),
    ],
)
def test_a_broken_model_folder_is_named_before_a_worker_starts(
    tmp_path: Path, mode: str, spoil: Callable[[Path], None], words: str
) -> None:
    model = make_untrained(tmp_path / "model")
    spoil(model)
    config = small_config(tmp_path / "run", f"mode={mode}")  # its own checks would find it sooner
    config = replace(config, model=replace(config.model, path=str(model), starter=None))
    with pytest.raises(ModelError, match=words):
        run(config, resolved_yaml="")
    assert "start workers" not in (tmp_path / "run" / "trace.json").read_text()


def test_updates_without_a_finite_gradient_are_skipped_then_end_the_run(tmp_path: Path) -> None:
    a_millionfold_each_step = ("actor.optimizer.lr=1", "actor.optimizer.weight_decay=1e6")
    with pytest.raises((TrainingError, RemoteCallError), match="finite"):
        train(
            tmp_path / "run",
            *(*a_millionfold_each_step, "trainer.num_steps=20"),
            *("eval.every_num_steps=0", VARIED),
        )
