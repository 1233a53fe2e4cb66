"""Published data sets as rows: small samples in the format of each."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from hybridrl.data.prepare import last_boxed, main, prepare
from hybridrl.errors import DataError
from tests.data.tokenized import read_rows
from tests.docs.blocks import blocks

GSM8K = [
    {"question": "How many? ", "answer": "6 x 7 = <<6*7=42>>42\n#### 42"},
    {"question": "How much?", "answer": "It is\n#### 1,234"},
]
MATH = [
    {
        "problem": "Solve.",
        "level": "Level 3",
        "type": "Algebra",
        "solution": r"so \boxed{\frac{1}{2}}.",
    },
    {
        "problem": "Again.",
        "level": "Level ?",
        "type": "Algebra",
        "solution": r"$\fbox{a}$, \boxed 5",
    },
]
MATH_500 = [{"problem": "Sum?", "solution": "...", "answer": "7", "level": 2, "unique_id": "x"}]
DAPO = [
    {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"Solve {n % 2}."}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(n % 2), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"id-{n % 2}"},
    }
    for n in range(6)
]


def write(path: Path, records: Sequence[Mapping[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records[0]))
    else:
        path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_gsm8k_has_the_number_as_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "gsm8k/main/train-00000-of-00001.parquet", GSM8K)
    write(tmp_path / "gsm8k/main/test-00000-of-00001.parquet", GSM8K[1:])
    target = tmp_path / "new" / "train.jsonl"
    source = f"--from={tmp_path / 'gsm8k'}"
    assert main(["gsm8k", source, f"--to={target}", "--instruction=Box it."]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"2 rows in {target}"
    assert lines[1:] == target.read_text().splitlines()
    rows = read_rows(target)
    assert [(row.prompt, row.answer, row.source) for row in rows] == [
        ("How many?\nBox it.", "42", "gsm8k"),
        ("How much?\nBox it.", "1234", "gsm8k"),
    ]
    assert main(["gsm8k", source, f"--to={tmp_path}/test.jsonl", "--split=test"]) == 0
    assert len((tmp_path / "test.jsonl").read_text().splitlines()) == 1


def test_math_has_the_boxed_answer_and_the_level(tmp_path: Path) -> None:
    for number, record in enumerate(MATH):
        write(tmp_path / f"MATH/train/algebra/{number}.json", [record])
    rows = prepare("math", tmp_path / "a.jsonl", source=tmp_path / "MATH")
    assert [(row["answer"], row.get("difficulty")) for row in rows] == [
        (r"\frac{1}{2}", 3),
        ("5", None),
    ]
    small = prepare(
        "math",
        tmp_path / "b.jsonl",
        source=write(tmp_path / "test.jsonl", MATH_500),
        instruction="",
    )
    assert small == [{"prompt": "Sum?", "answer": "7", "source": "math", "difficulty": 2}]


@pytest.mark.parametrize("name", ["dapo_math", "verl"])
def test_repeated_prompts_of_dapo_math_are_kept_once(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / "data/dapo-math-17k.parquet", DAPO).parents[1]
    prepare(name, tmp_path / "a.jsonl", source=source)
    rows = read_rows(tmp_path / "a.jsonl")
    assert [row.answer for row in rows] == ["0", "1"]
    assert {row.source for row in rows} == {"math_dapo"}
    assert rows[1].prompt[0].content == "Solve 1."  # type: ignore[union-attr]


def test_countdown_answers_use_each_number_once_and_are_right(tmp_path: Path) -> None:
    train, test = (
        prepare("countdown", tmp_path / f"{split}.jsonl", split=split, num_rows=300)
        for split in ("train", "test")
    )
    for row in [*train, *test]:
        asked = re.findall(r"\d+", str(row["prompt"]))
        expression = str(row["answer"])
        assert sorted(re.findall(r"\d+", expression)) == sorted(asked[:-1])
        exact = re.sub(r"(\d+)", r"Fraction(\1)", expression)
        assert eval(exact, {"Fraction": Fraction}) == int(asked[-1])
    prompts = [{str(row["prompt"]) for row in rows} for rows in (train, test)]
    assert len(prompts[0]) == len(prompts[1]) == 300
    for rows, is_test in ((train, False), (test, True)):  # so no prompt is in both, for any seeds
        numbers = [map(int, re.findall(r"\d+", str(row["answer"]))) for row in rows]
        assert {sum(of_row) % 8 == 0 for of_row in numbers} == {is_test}
    assert prepare("countdown", tmp_path / "again.jsonl", num_rows=300) == train


def test_the_reward_that_the_page_shows_scores_countdown(tmp_path: Path) -> None:
    (block,) = (one for one in blocks() if one.title == "countdown_reward.py")
    shown: dict[str, Any] = {}
    exec(compile(block.text, block.page, "exec"), shown)
    answers = [str(row["answer"]) for row in prepare("countdown", tmp_path / "a", num_rows=200)]
    assert shown["score"](answers, answers) == [1.0] * 200
    boxed = [rf"so \boxed{{{answer}}} is it" for answer in answers]
    assert shown["score"](boxed, answers) == [1.0] * 200
    wrong = ["", "9**9**9", "1+2", "(3*4", "3*4", "4*3+0", "__import__('os')", "12", "4/(3-3)"]
    assert shown["score"](wrong, ["(3*4)"] * len(wrong)) == [0.0] * 4 + [1.0] + [0.0] * 4


@pytest.mark.parametrize(
    ("name", "record", "problem"),
    [
        ("gsm8k", {"question": "q", "answer": "42"}, "does not end in '#### NUMBER'"),
        ("gsm8k", {"question": "q"}, "has no 'answer'"),
        ("math", {"problem": "p", "solution": "5"}, r"has no \boxed{}"),
        ("math", {"problem": "p", "solution": r"\boxed{5"}, "is not closed"),
        ("math", {"problem": 3, "solution": r"\boxed{5}"}, "'problem' is 3, must be text"),
        ("verl", {"prompt": "p", "reward_model": {}}, "prompt a list of messages"),
    ],
)
def test_a_row_of_another_format_is_named(
    tmp_path: Path, name: str, record: dict[str, object], problem: str
) -> None:
    source = write(tmp_path / "rows.jsonl", [record])
    with pytest.raises(DataError) as raised:
        prepare(name, tmp_path / "to.jsonl", source=source)
    assert f"rows.jsonl:1: {problem}" in str(raised.value).replace("its answer ", "").replace(
        "its solution ", ""
    ).replace(r"the last \boxed{ of ", "").replace("reward_model must be a record, and ", "")
    assert not (tmp_path / "to.jsonl").exists()


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    for text, problem in (("{", "is not JSON"), ("3", "is not an object")):
        (tmp_path / "rows.jsonl").write_text(text)
        with pytest.raises(DataError, match=rf"rows\.jsonl:1: {problem}"):
            prepare("gsm8k", tmp_path / "to.jsonl", source=tmp_path / "rows.jsonl")


def test_files_that_are_not_there_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    target = f"--to={tmp_path}/a.jsonl"
    for source, words in (("gone", "does not exist"), ("empty", "of the split 'train'")):
        assert main(["gsm8k", target, f"--from={tmp_path / source}"]) == 1
        assert words in capsys.readouterr().err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert main(["gsm8k", target]) == 1
    assert "hf download openai/gsm8k --repo-type dataset" in capsys.readouterr().err
    assert main(["verl", target]) == 1
    assert "name a file with --from" in capsys.readouterr().err
    (tmp_path / "a.jsonl").write_text("")
    assert main(["countdown", target]) == 1
    assert "a.jsonl exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("solution", "answer"),
    [(r"\boxed{1}, \boxed{ {2} }", "{2}"), (r"\boxed  x", "x"), (r"\fbox{3}", "3")],
)
def test_the_last_box_of_a_solution_is_read(solution: str, answer: str) -> None:
    assert last_boxed(solution) == answer
