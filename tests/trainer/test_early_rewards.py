"""Rewards while others are sampled: the same as afterwards, whatever is reported, and sooner."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from hybridrl.batch import RolloutBatch
from hybridrl.data.source import PromptStep, build_prompt_step
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.errors import RewardError
from hybridrl.rewards.scorer import RewardScorer, Scores
from hybridrl.sampler import Reporter, Sample, SamplingParams
from hybridrl.trainer.reward import EarlyRewards, TextReward, reward_inputs
from hybridrl.workers.rollout.assemble import assemble_rollouts
from tests.config.values import config_of
from tests.drawn import cases
from tests.trainer.rollouts import row_of

pytestmark = pytest.mark.usefixtures("ray_cluster")

TOKENIZER = build_starter_tokenizer()
NUM_PROMPTS, NUM_RESPONSES, FIRST_INDEX = 3, 2, 5
SAMPLING = SamplingParams(NUM_RESPONSES, max_response_tokens=9, temperature=1.0)
ROW = """
import os

def reward(response, answer, prompt, length):
    open({notes!r}, "a").write(f"{{response}}\\n")
    if response == "raise":
        raise KeyError("x")
    if response == "die":
        os._exit(3)
    return float(len(set(response + answer + prompt)) + length)
"""
SLOW = """
import time

def reward(response):
    time.sleep(0.5)
    return float(len(response))
"""
SLICE = """
def reward(responses, prompts):
    return [float(len(set(responses))) for _ in responses]
"""


@pytest.fixture(scope="module")
def open_reward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., TextReward]]:
    folder = tmp_path_factory.mktemp("early")
    opened: dict[tuple[str, str], TextReward] = {}

    def open_one(source: str = ROW, on_error: Any = "zero") -> TextReward:
        if (source, on_error) not in opened:
            path = folder / f"{len(opened)}.py"
            path.write_text(textwrap.dedent(source.format(notes=str(folder / "notes"))))
            config = replace(
                config_of().reward,
                function=f"{path}:reward",
                num_processes=2,
                timeout_s=20.0,
                on_error=on_error,
            )
            scorer = RewardScorer(config)
            early = EarlyRewards(scorer, TOKENIZER)
            opened[source, on_error] = TextReward(scorer, TOKENIZER, early=early)
        return opened[source, on_error]

    yield open_one
    for reward in opened.values():
        assert reward.early is not None
        reward.early.close()
        reward.scorer.close()


def _task() -> PromptStep:
    rows = [row_of(n, answer=str(n), text=f"{n}=") for n in range(NUM_PROMPTS)]
    return build_prompt_step(rows, range(FIRST_INDEX, FIRST_INDEX + len(rows)), seed=0)


def _sample(text: str) -> Sample:
    token_ids = torch.tensor(TOKENIZER(text).input_ids, dtype=torch.int64)
    return Sample(token_ids, torch.zeros(len(token_ids)), "stop", weight_version=0)


def _rollouts(task: PromptStep, texts: Sequence[str]) -> RolloutBatch:
    return assemble_rollouts(task.prompts, [_sample(text) for text in texts], policy_version=0)


def _report(reporter: Reporter | None, row: int, text: str) -> None:
    assert reporter is not None
    prompt, response = divmod(row, NUM_RESPONSES)
    reporter.report(FIRST_INDEX + prompt, response, _sample(text))


def _score(reward: TextReward, texts: Sequence[str], reported: Sequence[tuple[int, str]]) -> Scores:
    task = _task()
    with reward.while_sampling(task, SAMPLING) as sampling:
        for row, text in reported:
            _report(sampling.reporter, row, text)
    return reward(_rollouts(task, texts), task)


def _same(first: Scores, second: Scores) -> bool:
    return first.names == second.names and all(
        torch.equal(getattr(first, name), getattr(second, name))
        for name in ("reward_parts_BK", "is_failed_BK", "reward_weights_K")
    )


WORDS = st.sampled_from(["", "1", "12", "123", "raise", "die", "77"])


@example(texts=["1", "12", "raise", "die", "77", ""], reported=[(row, None) for row in range(6)])
@cases(by_day=4, by_night=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(WORDS, min_size=6, max_size=6),
    reported=st.lists(st.tuples(st.integers(0, 8), st.none() | WORDS), max_size=12),
)
def test_scores_are_those_without_reports(
    open_reward: Callable[..., TextReward],
    texts: list[str],
    reported: list[tuple[int, str | None]],
) -> None:
    """Reports may be missing, repeated, of other texts and of rows that do not exist."""
    reward = open_reward()
    reports = [(row, texts[row % 6] if text is None else text) for row, text in reported]

    early = _score(reward, texts, reports)

    assert _same(early, _score(replace(reward, early=None), texts, []))


def test_a_reported_row_is_scored_once_and_in_the_block(
    open_reward: Callable[..., TextReward],
) -> None:
    reward, task = open_reward(), _task()
    texts = ["401", "402", "403", "404", "405", "406"]
    notes = Path(str(reward.scorer._config.function).rpartition(":")[0]).with_name("notes")
    notes.write_text("")
    with reward.while_sampling(task, SAMPLING) as sampling:
        for row in (3, 0):
            _report(sampling.reporter, row, texts[row])
        deadline = time.monotonic() + 60
        while len(notes.read_text().split()) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sorted(notes.read_text().split()) == ["401", "404"]
    reward(_rollouts(task, texts), task)

    assert sorted(notes.read_text().split()) == texts


def test_errors_name_the_row_of_the_step(open_reward: Callable[..., TextReward]) -> None:
    reward = open_reward(on_error="stop")
    texts = ["1", "1", "1", "raise", "1", "1"]

    with pytest.raises(RewardError, match=r"response 3 'raise' to prompt '1='.*KeyError"):
        _score(reward, texts, [(3, "raise"), (0, "1")])


def test_a_function_that_sees_several_rows_sees_its_siblings(
    open_reward: Callable[..., TextReward],
) -> None:
    reward, texts = open_reward(SLICE), ["1", "2", "1", "1", "2", "2"]
    with reward.while_sampling(_task(), SAMPLING) as sampling:
        assert sampling.reporter is None

    assert _same(_score(reward, texts, []), _score(replace(reward, early=None), texts, []))


def test_reports_of_an_earlier_call_are_not_used(open_reward: Callable[..., TextReward]) -> None:
    reward, task, texts = open_reward(), _task(), ["1", "12", "123", "77", "1", ""]
    with pytest.raises(RuntimeError), reward.while_sampling(task, SAMPLING) as interrupted:
        raise RuntimeError("the ranks are lost")
    with reward.while_sampling(task, SAMPLING) as sampling:
        for row, text in enumerate(texts):
            _report(interrupted.reporter, row, text)
        _report(sampling.reporter, 0, texts[0])
    rows = [row for row in task.rows for _ in range(NUM_RESPONSES)]
    inputs = reward_inputs(_rollouts(task, texts), rows, TOKENIZER)

    assert reward.early is not None
    assert set(reward.early.take(inputs) or ()) == {0}


def test_a_lost_channel_costs_no_score(
    open_reward: Callable[..., TextReward], caplog: pytest.LogCaptureFixture
) -> None:
    shared, texts = open_reward(), ["1", "12", "raise", "77", "1", ""]
    with EarlyRewards(shared.scorer, TOKENIZER) as early:
        reward = replace(shared, early=early)
        task = _task()
        with reward.while_sampling(task, SAMPLING) as sampling:
            _report(sampling.reporter, 0, texts[0])
            ray.kill(sampling.reporter.sender.queue)  # type: ignore[union-attr]
            _report(sampling.reporter, 1, texts[1])
        lost = reward(_rollouts(task, texts), task)
        with reward.while_sampling(task, SAMPLING) as sampling:
            assert sampling.reporter is None
        again = reward(_rollouts(task, texts), task)

    assert "responses are scored after all are sampled" in caplog.text
    assert _same(lost, _score(replace(reward, early=None), texts, []))
    assert _same(again, lost)


@pytest.mark.timeout(100)
def test_rows_that_wait_when_the_channel_is_lost_end_no_step(
    open_reward: Callable[..., TextReward],
) -> None:
    shared, texts = open_reward(SLOW), ["1", "12", "123", "77", "1", ""]
    with EarlyRewards(shared.scorer, TOKENIZER) as early:
        reward, task = replace(shared, early=early), _task()
        with reward.while_sampling(task, SAMPLING) as sampling:
            for row, text in enumerate(texts):
                _report(sampling.reporter, row, text)
            while early._threads._work_queue.qsize() < 2:
                time.sleep(0.01)
            early._lose("a test")
        lost = reward(_rollouts(task, texts), task)

    assert _same(lost, _score(replace(reward, early=None), texts, []))
