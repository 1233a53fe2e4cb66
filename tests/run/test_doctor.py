"""``mode=doctor``: a page about rows, and an exit status."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tokenizers import normalizers

from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.run.modes.doctor import examine
from tests.command_line import call_main
from tests.config.values import config_of

FILES = ("mode=doctor", "data.task=null", "data.train_files=[train.jsonl]", "eval.num_prompts=9")
GOOD = [{"prompt": f"{n}=", "answer": f"{n}"} for n in range(4)]
REWARD = """def score(responses, answers, **_):
    pairs = zip(responses, answers)
    return [float(r == a != "2") or 0.5 * (r == "" and a == "1") for r, a in pairs]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def page_of(
    rows: Sequence[Mapping[str, object]],
    *overrides: str,
    held_out: Sequence[Mapping[str, object]] = (),
) -> tuple[str, bool]:
    Path("train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("test.jsonl").write_text("\n".join(map(json.dumps, held_out)))
    files = ["data.eval_files=[test.jsonl]"] if held_out else ["eval.every_num_steps=0"]
    return examine(config_of(*FILES, *files, *overrides))


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
