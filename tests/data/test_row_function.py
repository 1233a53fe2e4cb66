"""Rows of a user's function, listed among the files of a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.config.load import load_config
from hybridrl.data.rows import Row
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.errors import ConfigErrors, DataError
from hybridrl.main import compose
from hybridrl.run.rows import load_eval_rows, load_train_rows
from tests.config.values import config_of

SUMS = """
def sums():
    for n in range(3):
        yield {"prompt": f"{n}+1=", "answer": str(n + 1), "level": -n}
"""
FILES = ("data.task=null", "eval.every_num_steps=0")
BY_LEVEL = (*FILES, "data.difficulty_key=level", "data.curriculum=easy_first")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_function_gives_rows_wherever_files_do() -> None:
    Path("mine.py").write_text(SUMS)
    Path("b.jsonl").write_text('{"prompt": "b", "answer": "c", "level": 1}')
    tokenizer = build_starter_tokenizer()
    config = config_of(*BY_LEVEL, "data.train_files=[mine.py:sums, b.jsonl]")
    rows = load_train_rows(config, tokenizer)
    assert rows.rows[1].row == Row("1+1=", "2", "mine", "mine.py:sums:2", -1.0)
    drawn = [rows.rows[index].row.prompt for index in rows.sampler.draw(4)]
    assert drawn == ["2+1=", "1+1=", "0+1=", "b"]
    mixed = config_of(*FILES, "data.sources={a: {files: [mine.py:sums]}}")
    assert {row.row.source for row in load_train_rows(mixed, tokenizer).rows} == {"a"}
    files = ("data.train_files=[b.jsonl]", "data.eval_files=[mine.py:sums]")
    held_out = config_of("data.task=null", *files)
    assert len(load_eval_rows(held_out, held_out.eval.own_set(), tokenizer)) == 3


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return 3", "TypeError: it returned 3, must yield dictionaries"),
        ("return {'prompt': 'a'}", "must yield dictionaries"),
        ("yield 1; yield {'prompt': 'a', 'answer': 'b'}", "mine.py:sums:1: is of type int, must"),
        ("yield {'promt': 'a', 'answer': 'b'}", "mine.py:sums:1: has no 'prompt'; set data.prompt"),
        ("yield {'prompt': 'a', 'answer': 2.5}", "'answer' is 2.5, must be text"),
        ("yield from ()", "no rows in mine.py:sums"),
        ("yield {'prompt': 'a', 'answer': 'b'}; 1 / 0", "ZeroDivisionError: .*mine.py:1"),
    ],
)
def test_a_function_with_bad_rows_is_named(body: str, problem: str) -> None:
    Path("mine.py").write_text(f"def sums(): {body}\n")
    config = config_of(*FILES, "data.train_files=[mine.py:sums]")
    with pytest.raises(DataError, match=problem):
        load_train_rows(config, build_starter_tokenizer())


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("mine.py:sumz", "mine.py defines no 'sumz' at its top level. Fix: did you mean"),
        ("mine.py:scale", "is called without arguments, and needs factor"),
        ("mine.py:later", "it is asynchronous"),
        ("gone.py:sums", "gone.py does not exist"),
        ("bad.py:sums", "not a Python file"),
        ("mine.py", "name the function that yields rows, too: mine.py:NAME"),
    ],
)
def test_a_function_that_is_not_there_is_refused(entry: str, words: str) -> None:
    others = "def scale(factor): ...\nasync def later(): ...\nraise SystemExit('it was run')\n"
    Path("mine.py").write_text(SUMS + others)
    Path("bad.py").write_text("def (")
    overrides = ["data=files", f"data.train_files=['{entry}']", "eval.every_num_steps=0"]
    with pytest.raises(ConfigErrors) as raised:
        load_config(compose(overrides))
    (refused,) = [e for e in raised.value.violations if e.key == "data.train_files"]
    assert words in str(refused)
