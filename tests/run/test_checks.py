from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import normalizers

from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.run.modes.check import missing_here
from hybridrl.run.modes.doctor import examine, find_bad_rows, find_bad_weights
from hybridrl.run.rows import load_eval_rows, load_train_rows, within_epochs
from tests.command_line import call_main
from tests.config.values import config_of
from tests.tiny_models import SPARSE, make_tiny_model


def set_sizes(folder: Path, **sizes: int | None) -> None:
    """Let config.json say something else than the folder's weights."""
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | sizes))


EIGHT = ("cluster=one_gpu", "cluster.num_ranks_per_node=8")


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "note"),
    [
        ((), 0, None),
        (EIGHT, 0, "this machine has no GPU, and the run needs 8"),
        (EIGHT, 2, "this machine has 2 GPUs, and the run needs 8"),
        (EIGHT, 8, None),
        ((*EIGHT, "cluster.ray_address=auto"), 0, None),
    ],
)
def test_missing_gpus_are_a_note(
    overrides: tuple[str, ...], num_gpus: int, note: str | None, tmp_path: Path
) -> None:
    for name in ["nvidiactl", "null", *(f"nvidia{number}" for number in range(num_gpus))]:
        (tmp_path / name).touch()
    notes = list(missing_here(config_of(*overrides), devices=tmp_path))
    assert len(notes) == (note is not None)
    assert all(str(note) in each for each in notes)


@pytest.mark.parametrize("key", ["rollout.top_p=0.9", "rollout.top_k=20"])
def test_a_cut_distribution_is_a_note_while_training_alone(key: str) -> None:
    [note] = missing_here(config_of(key))
    assert f"{key} " in note
    assert "gradients are biased" in note
    assert "set rollout.sampling_masks=true" in note
    assert "or rollout.top_p=1.0 rollout.top_k=0" in note
    assert not list(missing_here(config_of(key, "mode=sft")))


SGLANG = ("rollout.engine=sglang", "rollout.dtype=bfloat16")

LONG = (
    *("cluster=one_gpu", "cluster.ray_address=auto", "rollout.max_response_tokens=32768"),
    *("rollout.num_slots=4", "trainer.num_prompts_per_step=4"),
    *("rollout.num_responses_per_prompt=8", "cluster.num_ranks_per_node=2"),
)


@pytest.mark.parametrize(
    ("overrides", "seconds"),
    [
        ((), 4 * 32768 / 20),  # 32 rows on two engines of four slots are four waves
        (("rollout.num_slots=8",), None),
        ((*SGLANG, "rollout.tensor_parallel_size=2", "rollout.num_slots=8"), 4 * 32768 / 20),
        (("rollout.max_response_tokens=8192",), None),
        (("cluster=cpu",), None),
    ],
)
def test_a_rollout_phase_that_may_exceed_its_call_is_a_note(
    overrides: tuple[str, ...], seconds: float | None
) -> None:
    notes = list(missing_here(config_of(*LONG, *overrides)))
    assert len(notes) == (seconds is not None)
    for note in notes:
        assert f"set cluster.call_timeout_s={seconds:.0f}" in note
        fixed = f"cluster.call_timeout_s={math.ceil(seconds or 0)}"
        assert list(missing_here(config_of(*LONG, *overrides, fixed))) == []


@pytest.mark.parametrize(
    ("overrides", "has_note"),
    [
        (("rollout.verify_weights=first",), True),
        (("rollout=sglang", "rollout.verify_weights=never", "rollout.transport=disk"), True),
        ((), False),
    ],
)
def test_a_disk_without_room_for_the_weights_is_a_note(
    overrides: tuple[str, ...], *, has_note: bool, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "model")
    set_sizes(folder, vocab_size=2**24, hidden_size=2**24)  # a petabyte
    config = config_of(*overrides)
    config = replace(config, model=replace(config.model, path=str(folder)))
    notes = [note for note in missing_here(config) if "set TMPDIR to a larger disk" in note]
    assert len(notes) == has_note


@pytest.mark.parametrize(
    ("package", "version", "overrides", "has_note"),
    [
        ("transformers", "5.99.0", (), True),
        ("transformers", "5.19.0", (), False),
        ("torch", "2.14.0.dev20261101+cu130", (), False),
        ("megatron-core", "0.99.0", (), False),
        ("megatron-core", "0.99.0", ("actor=megatron",), True),
        ("sglang", "0.9.0", (), False),
        ("sglang", "0.9.0", ("rollout=sglang",), True),
    ],
)
def test_an_untested_version_of_a_package_that_the_run_needs_is_a_note(
    package: str,
    version: str,
    overrides: tuple[str, ...],
    *,
    has_note: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / f"{package.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    notes = [note for note in missing_here(config_of(*overrides)) if version in note]
    assert bool(notes) == has_note
    assert all(f"pip install '{package}" in note for note in notes)


def test_a_whole_folder_is_accepted_and_a_tensor_of_another_shape_named_with_both(
    tmp_path: Path,
) -> None:
    assert find_bad_weights(make_tiny_model(tmp_path / "dense")) == []
    for family in SPARSE:
        assert find_bad_weights(make_tiny_model(tmp_path / family, family)) == []
    folder = tmp_path / "dense"
    set_sizes(folder, intermediate_size=72)
    (error,) = find_bad_weights(folder)
    assert "mlp" in error.rule
    assert "by config.json it must be [72, " in error.rule


def test_check_refuses_a_folder_that_lacks_a_layer(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    set_sizes(folder, num_hidden_layers=3, layer_types=None)
    (folder / "tokenizer.json").write_text("{}")
    model = ("model=hf_folder", f"model.path={folder}")
    done = call_main("mode=check", *model, folder=tmp_path)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith("ConfigError: model.path=")
    assert "the safetensors are not those of a Qwen3ForCausalLM: " in done.stderr
    assert "Fix: download the folder again." in done.stderr


TOKENIZER = build_starter_tokenizer()
ROW = '{"prompt": "1=", "answer": "1"}\n'
FILES = ("data.task=null", "eval.every_num_steps=0")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where all tests of rows are, with files of rows."""
    monkeypatch.chdir(tmp_path)
    for name, size, prompt in (("a", 3, "prompt"), ("b", 6, "question")):
        rows = [{prompt: f"{name}{n}", "answer": str(n), "level": -n} for n in range(size)]
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name in ("train", "test"):
        Path(f"{name}.jsonl").write_text(ROW)
    Path("unanswered.jsonl").write_text('{"prompt": "1="}')
    Path("long.jsonl").write_text('{"prompt": "123=", "answer": "1"}\n')
    return tmp_path


def drawn(num_rows: int, *overrides: str) -> list[str]:
    rows = load_train_rows(config_of(*FILES, *overrides), TOKENIZER)
    return [str(rows.rows[index].row.prompt) for index in rows.sampler.draw(num_rows)]


def test_rows_are_mixed_counted_and_ordered_by_difficulty() -> None:
    b = "b: {files: [b.jsonl], prompt_key: question, weight: 3}"
    prompts = drawn(1000, f"data.sources={{a: {{files: [a.jsonl]}}, {b}}}")
    assert sum(prompt.startswith("a") for prompt in prompts) == 250
    notes: list[str] = []
    config = config_of(*FILES, "data.train_files=[a.jsonl]")
    load_train_rows(config, TOKENIZER, on_progress=notes.append)
    assert notes == ["3 rows"]
    level = ("data.train_files=[a.jsonl]", "data.difficulty_key=level")
    assert drawn(4, *level, "data.curriculum=easy_first") == ["a2", "a1", "a0", "a2"]
    assert drawn(3, *level, "data.curriculum=hard_first") == ["a0", "a1", "a2"]


@pytest.mark.parametrize(
    ("overrides", "num_steps"),
    [
        (("trainer.num_epochs=2.1", "trainer.num_prompts_per_step=4"), 6),
        (("trainer.num_epochs=0.01",), 1),
        (("trainer.num_epochs=1000", "trainer.num_steps=7"), 7),
        (("mode=sft", "trainer.num_epochs=3", "trainer.num_prompts_per_step=5"), 6),
        ((), 100),
    ],
)
def test_epochs_bound_the_steps(overrides: tuple[str, ...], num_steps: int) -> None:
    assert within_epochs(config_of(*overrides), 10).num_steps == num_steps


@pytest.mark.parametrize(("name", "is_told"), [("./train.jsonl", True), ("test.jsonl", False)])
def test_evaluating_on_what_is_learnt_from_is_told(
    name: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    files = ("data.task=null", "data.train_files=[train.jsonl]", f"data.eval_files=[{name}]")
    config = config_of(*files)
    with caplog.at_level(logging.WARNING):
        load_eval_rows(config, config.eval.own_set(), build_starter_tokenizer())
    assert (f"evaluating on files that are also learnt from: {name}" in caplog.text) == is_told


@pytest.mark.parametrize(
    ("override", "key", "column"),
    [
        (
            "data.sources={a: {files: [unanswered.jsonl], answer_key: gold}}",
            "data.sources.a",
            "gold",
        ),
        ("eval.sets={a: {files: [unanswered.jsonl]}}", "eval.sets.a", "answer"),
    ],
)
def test_a_check_reads_the_rows_of_every_source_and_set(
    override: str, key: str, column: str
) -> None:
    files = ["data.eval_files=[train.jsonl]", "data.task=null"]
    files += [] if "sources" in override else ["data.train_files=[train.jsonl]"]
    (error,) = find_bad_rows(config_of(*files, override))
    assert error.key == f"{key}.files"
    assert re.search(rf"unanswered.jsonl:1: has no '{column}'; set data.*answer_key", str(error))


def test_a_check_refuses_prompts_that_are_all_too_long() -> None:
    files = (*FILES, "data.train_files=[long.jsonl]", "data.max_prompt_tokens=3")
    config = config_of(*files)
    (error,) = find_bad_rows(config)
    assert re.search(r"data\.max_prompt_tokens=3.*set.*=4", str(error))
    (error,) = find_bad_rows(config_of(*files, "data.overlong_prompts=drop"))
    assert re.search(r"all 1 prompts are longer .* set it to 4 tokens", str(error))


DOCTOR = ("mode=doctor", "data.task=null", "data.train_files=[train.jsonl]", "eval.num_prompts=9")
GOOD = [{"prompt": f"{n}=", "answer": f"{n}"} for n in range(4)]
REWARD = """def score(responses, answers, **_):
    pairs = zip(responses, answers)
    return [float(r == a != "2") or 0.5 * (r == "" and a == "1") for r, a in pairs]
"""


def page_of(
    rows: Sequence[Mapping[str, object]],
    *overrides: str,
    held_out: Sequence[Mapping[str, object]] = (),
) -> tuple[str, bool]:
    Path("train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("test.jsonl").write_text("\n".join(map(json.dumps, held_out)))
    files = ["data.eval_files=[test.jsonl]"] if held_out else ["eval.every_num_steps=0"]
    return examine(config_of(*DOCTOR, *files, *overrides))


def test_good_rows_are_shown_with_their_loss_and_lengths() -> None:
    page, is_bad = page_of(GOOD, held_out=[{"prompt": "9=", "answer": "9"}])
    assert not is_bad
    assert (
        "train.jsonl:1 (train), 4 tokens, 2 with loss\n  no loss 0|=\n  loss    0|<|end|>" in page
    )
    assert "train.jsonl:3 (train)" in page
    assert "train.jsonl:4 (train)" not in page
    assert "prompts: 2 to 2 tokens, median 2, 95 % at most 2, limit 24" in page
    assert f"2 - 2      {'#' * 40} 4" in page
    assert "!" not in page


@pytest.mark.parametrize(
    ("row", "overrides", "line"),
    [
        ({"prompt": "0=", "answer": "7"}, (), "! prompts with two different answers: 1 of 5"),
        (
            {"prompt": "5=", "answer": "5" * 24},
            (),
            "! answers longer than rollout.max_response_tokens=24: 1 of 5",
        ),
        (
            {"prompt": "5" * 25, "answer": "5"},
            ("data.overlong_prompts=error",),
            "! prompts longer than data.max_prompt_tokens=24: 1 of 5",
        ),
        (
            {"prompt": "5=", "answer": "5"},
            ("reward.function=reward.py:score",),
            "scores below eval.correct_reward=1: 1 of 5\n    train.jsonl:3: '2' scores 0",
        ),
        (
            {"prompt": "5=", "answer": "5"},
            ("reward.function=reward.py:score",),
            "does not score 0: 1 of 5\n    train.jsonl:2: scores 0.5",
        ),
    ],
)
def test_each_fault_of_a_row_is_a_problem(
    row: Mapping[str, object], overrides: tuple[str, ...], line: str
) -> None:
    Path("reward.py").write_text(REWARD)
    page, is_bad = page_of([*GOOD, row], *overrides)
    assert line in page
    assert is_bad
    assert page.endswith("problems: correct the rows marked with !\n")


def test_answers_of_a_set_are_held_to_its_own_limit() -> None:
    row = {"prompt": "9=", "answer": "9" * 30}
    page, is_bad = page_of(GOOD, "eval.max_response_tokens=31", held_out=[row])
    assert not is_bad
    assert "answers longer than rollout.max_response_tokens=24: 0 of 4" in page
    assert "answers longer than eval.max_response_tokens=31: 0 of 1" in page
    page, is_bad = page_of(GOOD, "eval.sets={a: {max_response_tokens: 30}}", held_out=[row])
    assert is_bad
    assert "! answers longer than eval.sets.a.max_response_tokens=30: 1 of 1" in page


def test_faults_that_may_be_wanted_are_notes() -> None:
    page, is_bad = page_of(
        [*GOOD, GOOD[1], {"prompt": "5" * 25, "answer": "5"}], "data.overlong_prompts=drop"
    )
    assert "- prompts that stand twice: 1 of 6\n    train.jsonl:2 and train.jsonl:5: '1='" in page
    assert "- prompts longer than data.max_prompt_tokens=24: 1 of 6" in page
    assert not is_bad


def test_held_out_prompts_that_are_learned_from_are_found() -> None:
    held_out = [{"prompt": " 3= ", "answer": "3"}, {"prompt": "x", "answer": "y"}]
    page, is_bad = page_of(GOOD, held_out=held_out)
    assert is_bad
    assert "that are also learned from: 1 of 2\n    test.jsonl:1 is train.jsonl:4: ' 3= '" in page


def test_tokens_that_decode_differently_are_found(folder: Path) -> None:
    tokenizer = build_starter_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save_pretrained(folder / "model")
    settings = {"model_type": "qwen3", "max_position_embeddings": 64}
    (folder / "model" / "config.json").write_text(json.dumps(settings))
    model = ("model.starter=null", "model.path=model")
    page, is_bad = page_of([*GOOD, {"prompt": "abC=", "answer": "5"}], *model)
    assert is_bad
    assert "decode to another text: 1 of 5\n    train.jsonl:5: 'C=5' becomes 'c=5'" in page


def test_the_command_has_an_exit_status_and_writes_nothing(folder: Path) -> None:
    good = ("mode=doctor", "data.num_task_rows=20", "eval.num_prompts=5")
    answer = call_main(*good, folder=folder)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "learned from 20 rows (sort_digits 20)" in answer.stdout
    bad = call_main(*good, "eval.correct_reward=2", folder=folder)
    assert bad.returncode == 1
    assert "! reference answers that" in bad.stdout
    refused = call_main("mode=doctor", "reward.function=nowhere", folder=folder)
    assert refused.returncode == 2
    assert not list(folder.glob("runs*"))


def test_preference_pairs_are_shown_with_both_answers() -> None:
    pairs = [
        {"prompt": f"{n}=", "chosen": f"{n}", "rejected": f"{n}{n}", "source": "p"}
        for n in range(4)
    ]
    columns = ("data.answer_key=chosen", "data.rejected_key=rejected")
    page, is_bad = page_of(pairs, *columns)
    assert not is_bad
    assert page.count("train.jsonl:1 (p), ") == 2
    assert "loss    0|<|end|>" in page
    assert "loss    0|0|<|end|>" in page
    assert "answers: 2 to 3 tokens" in page
    assert "reward.function" not in page
    turned = {"prompt": "0=", "chosen": "00", "rejected": "0"}
    page, is_bad = page_of([*pairs, turned], *columns)
    assert is_bad
    assert "! pairs that stand twice, the other way round: 1 of 5" in page


def test_the_scores_of_a_reward_model_are_not_examined() -> None:
    page, is_bad = page_of(GOOD, "reward.function=model", "reward.args.path=somewhere")
    assert not is_bad
    assert "rewards      not examined: reward models and judges score in a run alone" in page
