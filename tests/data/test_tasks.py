"""Rows that are made: tasks of ours and of reasoning-gym, and functions of the user."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from hybridrl.config.load import load_config
from hybridrl.data.files import RowFiles
from hybridrl.data.parsing import Columns
from hybridrl.data.rows import Message, Row, own_columns
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.data.tasks import Split, build_calculator_rows, build_sort_digits_rows
from hybridrl.errors import ConfigErrors, DataError
from hybridrl.main import compose
from hybridrl.run.rows import load_eval_rows, load_train_rows
from tests.config.test_checks import violations_of
from tests.config.values import config_of
from tests.rewards.rows import inputs, scorer_of


def build(num_rows: int, split: Split = "train", *, seed: int = 0) -> list[Row]:
    return build_sort_digits_rows(num_rows, split=split, seed=seed, min_digits=2, max_digits=20)


def test_the_answer_is_the_sorted_digits() -> None:
    for row in build(200):
        assert isinstance(row.prompt, str)
        assert row.prompt[-1] == "="
        assert row.answer == "".join(sorted(row.prompt[:-1]))
        assert 2 <= len(row.answer) <= 20


def calculate(num_rows: int, split: Split, *, seed: int) -> list[Row]:
    return build_calculator_rows(num_rows, split=split, seed=seed)


@pytest.mark.parametrize(("build", "num_short"), [(build, 5), (calculate, -1)])
def test_training_and_evaluation_never_meet_whatever_the_seeds(
    build: Callable[..., list[Row]], num_short: int
) -> None:
    train = {row.prompt for seed in range(3) for row in build(3000, "train", seed=seed)}
    held_out = {row.prompt for seed in range(3) for row in build(1000, "eval", seed=seed)}
    assert not train & held_out
    # Also not among the few short ones.
    assert sum(len(str(prompt)) == 3 for prompt in held_out) > num_short


def test_the_same_arguments_make_the_same_rows() -> None:
    assert build(50) == build(50) == build(80)[:50]
    assert build(50) != build(50, seed=1)


def test_lengths_are_uniform() -> None:
    counts = Counter(len(row.answer) for row in build(9500))
    assert set(counts) == set(range(2, 21))
    assert min(counts.values()) > 400  # 500 expected, standard deviation 22
    assert max(counts.values()) < 600


def test_a_length_without_numbers_for_a_split_is_an_error() -> None:
    with pytest.raises(DataError, match=r"no number of 1 digits for eval"):
        build_sort_digits_rows(1, split="eval", seed=0, min_digits=1, max_digits=1)


def test_the_answer_is_the_value_of_the_expression() -> None:
    for row in build_calculator_rows(200, split="train", seed=0):
        message = row.prompt[0]
        assert isinstance(message, Message)
        assert sum(message.content.count(operator) for operator in "+-*") in (2, 3)
        assert row.answer == str(eval(message.content))


def test_worked_conversations_call_the_tool_or_answer_at_once() -> None:
    rows = build_calculator_rows(400, split="train", seed=0, has_conversations=True)

    worked = [row for row in rows if len(row.prompt) > 1]
    for row in worked:
        question = row.prompt[0]
        assert isinstance(question, Message)
        assert row.prompt[1:] == (
            Message("assistant", f"[calculator(expression='{question.content}')]"),
            Message("tool", row.answer),
        )
    assert 100 < len(worked) < 180


SUMS = "reasoning_gym:chain_sum?size=20&max_terms=2"

installed = pytest.mark.skipif(
    find_spec("reasoning_gym") is None, reason="the extra reasoning-gym is not installed"
)


def rows_of(spelled: str) -> list[Row]:
    columns = Columns(own={"entry": "the reward"})
    return list(RowFiles(files=[Path(spelled)], columns=columns, key="data.train_files").parsed())


def rewards_of(row: Row, *responses: str) -> list[float]:
    num = len(responses)
    columns = {"answers": [row.answer] * num, "sources": [row.source] * num}
    with scorer_of("reasoning_gym", num_processes=1) as scorer:
        batch = inputs(*responses, **columns, own=own_columns([row] * num))
        rewards: list[float] = scorer.score(batch).rewards_B.tolist()
        return rewards


@installed
def test_a_row_asks_for_tags_and_is_scored_by_its_task() -> None:
    row = rows_of(SUMS)[0]
    assert not isinstance(row.prompt, str)
    system, question = row.prompt
    assert isinstance(system, Message)
    assert system.role == "system"
    assert "<answer>" in system.content
    assert isinstance(question, Message)
    assert row.source == "chain_sum"
    number = row.answer.removeprefix("<answer>").removesuffix("</answer>")
    thought = f"<answer>1</answer> no, <answer> {number} </answer>"
    assert rewards_of(row, row.answer, thought, number, "<answer>x</answer>") == [1, 1, 0, 0]


@installed
def test_a_question_without_a_system_prompt_is_answered_without_tags() -> None:
    row = rows_of(f"{SUMS}&system=none")[0]
    assert isinstance(row.prompt, str)
    assert rewards_of(row, f" {row.answer}\n", "x") == [1, 0]


@installed
@pytest.mark.parametrize("task", ["rearc?size=1", "knights_knaves?size=1", "countdown?size=1"])
def test_a_scorer_gets_the_entry_as_the_task_made_it(task: str) -> None:
    # JSON would make lists of the first one's tuples; the second one has numpy's text.
    row = rows_of(f"reasoning_gym:{task}")[0]
    assert rewards_of(row, row.answer) == [1]


@installed
def test_one_spelling_makes_the_same_rows_again_and_another_seed_makes_none_of_them() -> None:
    hard = "reasoning_gym:chain_sum?size=50&min_terms=6&max_terms=6"
    rows = rows_of(hard)
    assert rows_of(hard) == rows
    others = {row.prompt for row in rows_of(f"{hard}&seed=1")}
    assert (len(rows), len(others)) == (50, 50)
    assert not {row.prompt for row in rows} & others


@installed
def test_tasks_are_mixed_as_sources_and_held_out() -> None:
    sums = f"{SUMS}&system=none"
    sources = {
        "a": {"files": [sums], "weight": 3},
        "b": {"files": ["reasoning_gym:gcd?size=5&max_numbers=2&max_value=9&system=none"]},
    }
    config = config_of(
        *("data.task=null", "reward.function=reasoning_gym", "data.max_prompt_tokens=104"),
        f"data.sources={json.dumps(sources)}",
        f"data.eval_files={json.dumps([f'{sums}&seed=1'])}",
    )
    loaded = load_train_rows(config, build_starter_tokenizer())
    drawn = [loaded.rows[index].row.source for index in loaded.sampler.draw(1000)]
    assert (drawn.count("chain_sum"), drawn.count("gcd")) == (750, 250)
    held_out = load_eval_rows(config, config.eval.own_set(), build_starter_tokenizer())
    assert [row.row for row in held_out] == rows_of(f"{sums}&seed=1")


@installed
@pytest.mark.parametrize(
    ("spelled", "problem"),
    [
        ("chain_sun", "no task 'chain_sun'; did you mean 'chain_sum'"),
        ("chain_sum?max_terms=0", r"data\.train_files: .*correct its options"),
        ("chain_sum?terms=2", "unexpected keyword argument 'terms'"),
        ("chain_sum?system=defaults", "no system prompt 'defaults'; did you mean 'default'"),
        ("chain_sum?size=0", "size is a number from 1 to 1000000"),
        ("rubiks_cube?size=2", "has no reference answer, as all rows of rubiks_cube"),
    ],
)
def test_a_bad_task_is_named(spelled: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        rows_of(f"reasoning_gym:{spelled}")


def test_a_run_without_the_package_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    files = f"data.train_files={json.dumps([SUMS])}"
    common = ("eval.every_num_steps=0", "data.use_chat_template=false", "data.max_prompt_tokens=99")
    reward = "reward.function=reasoning_gym"
    of_rows, of_reward = violations_of("data=files", files, *common, reward)
    assert (of_rows.key, of_reward.key) == ("data.train_files", "reward.function")
    for violation in (of_rows, of_reward):
        assert "pip install 'hybridrl[reasoning-gym]'" in str(violation)


@installed
def test_the_reward_is_refused_for_rows_that_lack_the_entry() -> None:
    with pytest.raises(ConfigErrors, match="lack: entry"):
        config_of("data=sort_digits", "reward.function=reasoning_gym")


CODE = """
def sums():
    for n in range(3):
        yield {"prompt": f"{n}+1=", "answer": str(n + 1), "level": -n}
"""
NO_TASK = ("data.task=null", "eval.every_num_steps=0")
BY_LEVEL = (*NO_TASK, "data.difficulty_key=level", "data.curriculum=easy_first")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_function_gives_rows_wherever_files_do() -> None:
    Path("mine.py").write_text(CODE)
    Path("b.jsonl").write_text('{"prompt": "b", "answer": "c", "level": 1}')
    tokenizer = build_starter_tokenizer()
    config = config_of(*BY_LEVEL, "data.train_files=[mine.py:sums, b.jsonl]")
    rows = load_train_rows(config, tokenizer)
    assert rows.rows[1].row == Row("1+1=", "2", "mine", "mine.py:sums:2", -1.0)
    drawn = [rows.rows[index].row.prompt for index in rows.sampler.draw(4)]
    assert drawn == ["2+1=", "1+1=", "0+1=", "b"]
    mixed = config_of(*NO_TASK, "data.sources={a: {files: [mine.py:sums]}}")
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
    config = config_of(*NO_TASK, "data.train_files=[mine.py:sums]")
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
    Path("mine.py").write_text(CODE + others)
    Path("bad.py").write_text("def (")
    overrides = ["data=files", f"data.train_files=['{entry}']", "eval.every_num_steps=0"]
    with pytest.raises(ConfigErrors) as raised:
        load_config(compose(overrides))
    (refused,) = [e for e in raised.value.violations if e.key == "data.train_files"]
    assert words in str(refused)
