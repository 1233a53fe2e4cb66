"""Tasks of reasoning-gym as rows, and its scorers as rewards."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hybridrl.data.files import RowFiles
from hybridrl.data.parsing import Columns
from hybridrl.data.rows import Message, Row, own_columns
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.errors import ConfigErrors, DataError
from hybridrl.run.rows import load_eval_rows, load_train_rows
from tests.config.test_checks import violations_of
from tests.config.values import config_of
from tests.rewards.rows import inputs, scorer_of

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
