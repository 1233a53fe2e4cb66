from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from torch import Tensor

from hybridrl.batch import RewardBatch, RolloutBatch, SupervisedBatch, row_lengths
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.functions.paths import with_absolute_files
from hybridrl.config.reward import RewardConfig, RewardPart
from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.rows import Message, Row
from hybridrl.data.source import PromptStep, build_prompt_step
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.errors import ModelError, RewardError
from hybridrl.metrics import Mean
from hybridrl.rewards.judge_reader import max_context_tokens
from hybridrl.rewards.report import reward_metrics
from hybridrl.rewards.runner import RewardInputs
from hybridrl.rewards.scorer import RewardScorer, Scores
from hybridrl.sampler import Reporter, RequestParams, Sample, SamplingParams
from hybridrl.trainer.reward import EarlyRewards, TextReward, reward_inputs
from hybridrl.trainer.reward_models import (
    JudgeAnswers,
    ModelScores,
    load_judges,
    load_reward_models,
)
from hybridrl.workers.engine_settings import frozen_config
from hybridrl.workers.rollout.assemble import assemble_rollouts
from tests.config.values import config_of
from tests.drawn import cases
from tests.rewards.rows import inputs
from tests.tiny_models import make_tiny_classifier, make_tiny_model
from tests.trainer import rollouts

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
STRICT = "{{ raise_exception('no systems') if messages[0].role == 'system' }}" + CHAT


@dataclass
class Ranks:
    """Scores a conversation by its length, and records what it was given."""

    batches: list[SupervisedBatch] = field(default_factory=list)
    score: Callable[[int], float] = float

    def compute_rewards(self, rows: SupervisedBatch, *, model: str) -> RewardBatch:
        assert model == "model"
        self.batches.append(rows)
        lengths = (row_lengths(rows.token_ids_BL) - 1).tolist()
        scores = torch.tensor([self.score(length) for length in lengths])
        return RewardBatch(rewards_B=scores, batch_size=[len(rows)])

    @property
    def conversations(self) -> list[list[int]]:
        """Every row without the token behind its end."""
        rows = [row.tolist() for batch in self.batches for row in batch.token_ids_BL.unbind()]
        return [row[:-1] for row in rows]


def with_tokenizer(folder: Path, chat_template: str | None) -> Path:
    tokenizer = build_starter_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return folder


def scorer_folder(tmp_path: Path, *, chat_template: str | None = None, **changes: Any) -> Path:
    sizes: dict[str, Any] = {"vocab_size": 260, **changes}
    return with_tokenizer(make_tiny_classifier(tmp_path / "scorer", **sizes), chat_template)


def reward_config(folder: Path, *, on_error: Any = "stop", **args: float) -> RewardConfig:
    given: dict[str, Any] = {"path": str(folder), **args}
    return replace(
        config_of().reward,
        function="model",
        args=given,
        num_processes=1,
        timeout_s=5.0,
        on_error=on_error,
    )


def row_of(prompt: str | tuple[Message, ...]) -> TokenizedRow:
    row = Row(prompt=prompt, answer="-", source="s", origin="file:1")
    return TokenizedRow(row, str(prompt), torch.tensor([1]))


def inputs_of(*responses: str) -> RewardInputs:
    size = len(responses)
    return inputs(*responses, answers=["a"] * size, prompts=["p"] * size)


def rewards_of(
    config: RewardConfig, ranks: Ranks, rows: list[TokenizedRow], responses: list[str]
) -> list[float]:
    models = ModelScores(models=load_reward_models(config), ranks=ranks, num_groups=2)
    with RewardScorer(config) as scorer:
        scores = scorer.score(inputs_of(*responses), model_scores=models(rows, responses))
    rewards: list[float] = scores.rewards_B.tolist()
    return rewards


@pytest.mark.parametrize(
    ("folder", "prompts", "responses", "texts"),
    [
        pytest.param(
            *({}, ["3 1=", "9="], ["13", ""], {"3 1=13<|end|>", "9=<|end|>"}),
            id="text follows the prompt and ends without a template",
        ),
        pytest.param(
            {"chat_template": CHAT},
            ["21", (Message("system", "sort"), Message("user", "31"))],
            ["12", ""],
            {"<user>21<assistant>12", "<system>sort<user>31<assistant>"},
            id="a chat is rendered by the template of the reward model",
        ),
        pytest.param(
            {"pad_token_id": build_starter_tokenizer().eos_token_id},
            *(["1=", "2="], ["1", "2"], {"1=1", "2=2"}),
            id="padding at the end does not count",
        ),
    ],
)
def test_a_reward_model_reads_prompt_and_response(
    tmp_path: Path,
    folder: dict[str, Any],
    prompts: list[str | tuple[Message, ...]],
    responses: list[str],
    texts: set[str],
) -> None:
    config, ranks = reward_config(scorer_folder(tmp_path, **folder)), Ranks()
    rewards_of(config, ranks, [row_of(prompt) for prompt in prompts], responses)
    decode = build_starter_tokenizer().decode
    assert {decode(row) for row in ranks.conversations} == texts


@pytest.mark.parametrize("num_rows", [1, 5, 6])
def test_scores_return_in_order_from_rows_balanced_over_ranks(
    tmp_path: Path, num_rows: int
) -> None:
    ranks = Ranks()
    config = reward_config(scorer_folder(tmp_path), mean=3.0, std=2.0)
    responses = ["x" * length for length in (9, 1, 30, 2, 4, 17)][:num_rows]
    rewards = rewards_of(config, ranks, [row_of("p")] * num_rows, responses)
    assert rewards == [(1 + len(text) + 1 - 3) / 2 for text in responses]
    [batch] = ranks.batches
    assert len(batch) == num_rows + num_rows % 2
    if num_rows == 6:
        halves = (row_lengths(batch.token_ids_BL) - 1).view(2, -1).sum(dim=1).tolist()
        assert abs(halves[0] - halves[1]) <= 10
    ends = batch.response_mask_BL.unbind()
    assert all(mask.nonzero().tolist() == [[len(mask) - 1]] for mask in ends)


@pytest.mark.parametrize(
    ("responses", "changes", "words"),
    [
        (["fine", "x" * 200], {}, "has 202 tokens, and the context of the reward model is 128"),
        (["fine", "\x7f"], {"vocab_size": 122}, "gives token 221, and the model knows 0 to 121"),
    ],
)
def test_a_conversation_that_cannot_be_read_fails_alone(
    tmp_path: Path, responses: list[str], changes: dict[str, int], words: str
) -> None:
    folder = scorer_folder(tmp_path, chat_template=CHAT.replace("<{{ m.role }}>", ""), **changes)
    rows = [row_of("p=")] * 2
    with pytest.raises(RewardError, match=words):
        rewards_of(reward_config(folder), Ranks(), rows, responses)
    zero = reward_config(folder, on_error="zero")
    assert rewards_of(zero, Ranks(), rows, responses) == [6.0, 0.0]


def test_a_chat_that_the_template_rejects_fails_alone(tmp_path: Path) -> None:
    folder = scorer_folder(tmp_path, chat_template=STRICT)
    rows = [row_of((Message("system", "s"), Message("user", "u"))), row_of("p")]
    config = reward_config(folder, on_error="zero")
    assert rewards_of(config, Ranks(), rows, ["a", "b"]) == [0.0, len("<user>p<assistant>b")]
    with pytest.raises(RewardError, match="no systems"):
        rewards_of(reward_config(folder), Ranks(), rows, ["a", "b"])


@pytest.mark.parametrize("score", [float("nan"), 1e30])
def test_a_score_that_training_cannot_use_follows_on_error(tmp_path: Path, score: float) -> None:
    folder = scorer_folder(tmp_path)
    ranks = Ranks(score=lambda length: score if length == 4 else 1.0)
    rows, responses = [row_of("p=")] * 2, ["1", "12"]
    with pytest.raises(RewardError, match=r"reward\.function=model: response 0 '1'"):
        rewards_of(reward_config(folder), ranks, rows, responses)
    assert rewards_of(reward_config(folder, on_error="zero"), ranks, rows, responses) == [0.0, 1.0]


def test_each_reward_model_is_a_model_of_its_own(tmp_path: Path) -> None:
    folders = [scorer_folder(tmp_path / name) for name in "ab"]
    parts = {
        name: RewardPart(function="model", weight=weight, args={"path": str(folder)})
        for name, weight, folder in zip("ab", (1.0, -1.0), folders, strict=True)
    }
    several = replace(reward_config(folders[0]), function=None, args={}, functions=parts)
    assert [model.name for model in load_reward_models(several)] == ["a", "b"]
    moved = with_absolute_files(several).model_paths
    assert moved == {name: str(folder) for name, folder in zip("ab", folders, strict=True)}


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_classifier(tmp_path / "scorer")
    with pytest.raises(ModelError, match="no tokenizer"):
        load_reward_models(reward_config(folder))


TOKENIZER = build_starter_tokenizer()
TEMPLATE = "{prompt}|{response}|{answer}|{source}{x}"


@dataclass
class Servers:
    """Answers as a test says; records the questions."""

    answers: Sequence[str | None]
    """None: there is none."""

    asked: list[str] = field(default_factory=list)
    params: list[RequestParams] = field(default_factory=list)

    def ask(
        self, model: str, contexts: Sequence[Tensor], params: RequestParams, *, timeout_s: float
    ) -> list[Sample | str]:
        assert (model, timeout_s) == ("big", 5.0)
        self.asked += [str(TOKENIZER.decode(context.tolist())) for context in contexts]
        self.params.append(params)
        return [sample_of(answer) for answer in self.answers]


def sample_of(text: str | None) -> Sample | str:
    if text is None:
        return "big is gone"
    tokens = torch.tensor(TOKENIZER(text, add_special_tokens=False)["input_ids"])
    return Sample(tokens, torch.zeros(len(tokens)), "stop", 0)


def judged(folder: Path, *overrides: str, chat_template: str | None = None) -> ExperimentConfig:
    with_tokenizer(make_tiny_model(folder, vocab_size=260), chat_template)
    return config_of(
        f"serving.models={{p: {{groups: {{m: {{num_devices: 1}}}}}}, "
        f"big: {{path: '{folder}', groups: {{m: {{num_devices: 1}}}}}}}}",
        "serving.num_devices_per_node=2",
        "reward.function=judge",
        f"reward.args={{model: big, template: '{TEMPLATE}', max_tokens: 9}}",
        *("reward.timeout_s=5", "reward.num_processes=1", "reward.on_error=zero"),
        *overrides,
    )


def scores_of(config: ExperimentConfig, servers: Servers, asked: RewardInputs) -> Scores:
    judges = JudgeAnswers(judges=load_judges(config), servers=servers, timeout_s=5.0)
    with RewardScorer(config.reward) as scorer:
        return scorer.score(asked, judge_answers=judges(asked))


@pytest.mark.shows("4.1")
def test_a_judge_is_asked_about_each_response_in_its_chat_template_and_scores_it(
    tmp_path: Path,
) -> None:
    config, servers = judged(tmp_path / "big"), Servers(["Score: 7", "score=2, no: Score: 3.5"])
    scores = scores_of(config, servers, inputs_of("{answer}", "b"))
    assert servers.asked == ["p|{answer}|a|s{x}", "p|b|a|s{x}"]
    (params,) = servers.params
    assert (params.max_new_tokens, params.temperature) == (9, 0.0)
    assert params.stop_token_ids == (TOKENIZER.eos_token_id,)
    assert scores.rewards_B.tolist() == [7.0, 3.5]
    assert reward_metrics(scores, num_responses=1)["reward/unreadable_fraction"] == Mean(0.0, 2)
    config, servers = judged(tmp_path / "chat", chat_template=CHAT), Servers(["Score: 1"])
    scores_of(config, servers, inputs_of("r"))
    assert servers.asked == ["<user>p|r|a|s{x}"]


@pytest.mark.parametrize("rubbish", ["", "Score: 99", "Score: -1"])
def test_an_answer_without_a_score_is_counted(tmp_path: Path, rubbish: str) -> None:
    config = judged(tmp_path / "big", "reward.args.missing_score=-2", "reward.on_error=stop")
    scores = scores_of(config, Servers([rubbish, "Score: 7"]), inputs_of("r", "s"))
    assert scores.rewards_B.tolist() == [-2.0, 7.0]
    assert not scores.is_failed_B.any()
    metrics = reward_metrics(scores.at(torch.tensor([0])), num_responses=1)
    assert metrics["reward/unreadable_fraction"] == Mean(1.0, 1)


def test_a_response_without_an_answer_fails_alone(tmp_path: Path) -> None:
    config = judged(tmp_path / "big")
    scores = scores_of(config, Servers([None, "Score: 7"]), inputs_of("r", "s"))
    assert scores.rewards_B.tolist() == [0.0, 7.0]
    assert scores.is_failed_B.tolist() == [True, False]
    stopping = judged(tmp_path / "other", "reward.on_error=stop")
    with pytest.raises(RewardError, match=r"function=judge: response 0 'r' .*: big is gone"):
        scores_of(stopping, Servers([None, "Score: 7"]), inputs_of("r", "s"))


def test_a_question_longer_than_the_context_fails_alone(tmp_path: Path) -> None:
    keys = "path: {}, max_context_tokens: 20, groups: {{m: {{num_devices: 1}}}}"
    short = "serving.models.big={" + keys.format(tmp_path / "big") + "}"
    config, servers = judged(tmp_path / "big", short), Servers(["Score: 7"])
    scores = scores_of(config, servers, inputs_of("long" * 4, "s"))
    assert servers.asked == ["p|s|a|s{x}"]
    assert scores.rewards_B.tolist() == [0.0, 7.0]
    assert scores.is_failed_B.tolist() == [True, False]
    stopping = judged(tmp_path / "big", short, "reward.on_error=stop")
    with pytest.raises(RewardError, match=r"set serving\.models\.big\.max_context_tokens=34"):
        scores_of(stopping, Servers(["Score: 7"]), inputs_of("long" * 4, "s"))


@pytest.mark.parametrize("key", ["rollout.max_response_tokens", "eval.max_response_tokens"])
def test_a_question_about_bytes_that_are_no_text_fits_by_default(tmp_path: Path, key: str) -> None:
    sizes = ("rollout.max_response_tokens=5", f"{key}=24")
    config, servers = judged(tmp_path / "big", *sizes), Servers(["Score: 7"])
    response = bytes([0xFF] * 24).decode(errors="replace")  # 72 tokens of the judge
    scores = scores_of(config, servers, inputs_of(response))
    assert scores.rewards_B.tolist() == [7.0]
    room = frozen_config(config, "big").max_context_tokens
    assert room > len(TOKENIZER(servers.asked[0])["input_ids"]) + 9  # with its answer
    assert room == max_context_tokens(config, "big")


def test_a_hostile_expression_costs_its_answer_alone(tmp_path: Path) -> None:
    config = judged(tmp_path / "big", r"reward.args.pattern='(a+)+(\d)'", "reward.timeout_s=1")
    scores = scores_of(config, Servers(["a" * 40, "a7"]), inputs_of("r", "s"))
    assert scores.is_failed_B.tolist() == [True, False]


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
    rows = [rollouts.row_of(n, answer=str(n), text=f"{n}=") for n in range(NUM_PROMPTS)]
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


@pytest.mark.usefixtures("ray_cluster")
@example(texts=["1", "12", "raise", "die", "77", ""], reported=[(row, None) for row in range(6)])
@cases(by_day=4, by_night=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(WORDS, min_size=6, max_size=6),
    reported=st.lists(st.tuples(st.integers(0, 8), st.none() | WORDS), max_size=12),
)
def test_scores_are_those_without_reports(
    open_reward: Callable[..., TextReward], texts: list[str], reported: list[tuple[int, str | None]]
) -> None:
    """Reports may be missing, repeated, of other texts and of rows that do not exist."""
    reward = open_reward()
    reports = [(row, texts[row % 6] if text is None else text) for row, text in reported]
    early = _score(reward, texts, reports)
    assert _same(early, _score(replace(reward, early=None), texts, []))


@pytest.mark.usefixtures("ray_cluster")
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


@pytest.mark.usefixtures("ray_cluster")
def test_errors_name_the_row_of_the_step(open_reward: Callable[..., TextReward]) -> None:
    reward = open_reward(on_error="stop")
    texts = ["1", "1", "1", "raise", "1", "1"]
    with pytest.raises(RewardError, match=r"response 3 'raise' to prompt '1='.*KeyError"):
        _score(reward, texts, [(3, "raise"), (0, "1")])


@pytest.mark.usefixtures("ray_cluster")
def test_what_broke_off_and_what_could_not_be_scored_is_left_out(
    open_reward: Callable[..., TextReward],
) -> None:
    reward, task = replace(open_reward(on_error="leave_out"), early=None), _task()
    rollouts = _rollouts(task, ["1", "raise", "12", "123", "77", ""])
    rollouts.is_failed_B = torch.arange(6) == 3
    scores = reward(rollouts, task)
    assert scores.is_left_out_B is not None
    assert scores.is_left_out_B.tolist() == [False, True, False, True, False, False]


@pytest.mark.usefixtures("ray_cluster")
def test_a_function_that_sees_several_rows_sees_its_siblings(
    open_reward: Callable[..., TextReward],
) -> None:
    reward, texts = open_reward(SLICE), ["1", "2", "1", "1", "2", "2"]
    with reward.while_sampling(_task(), SAMPLING) as sampling:
        assert sampling.reporter is None
    assert _same(_score(reward, texts, []), _score(replace(reward, early=None), texts, []))


@pytest.mark.usefixtures("ray_cluster")
def test_reports_of_an_earlier_call_are_not_used(open_reward: Callable[..., TextReward]) -> None:
    reward, task, texts = open_reward(), _task(), ["1", "12", "123", "77", "1", ""]
    with pytest.raises(RuntimeError), reward.while_sampling(task, SAMPLING) as interrupted:
        raise RuntimeError("the ranks are lost")
    with reward.while_sampling(task, SAMPLING) as sampling:
        for row, text in enumerate(texts):
            _report(interrupted.reporter, row, text)
        _report(sampling.reporter, 0, texts[0])
    rows = [row for row in task.rows for _ in range(NUM_RESPONSES)]
    scored = reward_inputs(_rollouts(task, texts), rows, TOKENIZER)
    assert reward.early is not None
    assert set(reward.early.take(scored) or ()) == {0}


@pytest.mark.usefixtures("ray_cluster")
def test_a_lost_channel_costs_no_score(
    open_reward: Callable[..., TextReward], caplog: pytest.LogCaptureFixture
) -> None:
    shared, texts = open_reward(), ["1", "12", "raise", "77", "1", ""]
    with EarlyRewards(shared.scorer, TOKENIZER) as early:
        reward = replace(shared, early=early)
        task = _task()
        with reward.while_sampling(task, SAMPLING) as sampling:
            _report(sampling.reporter, 0, texts[0])
            ray.kill(sampling.reporter.queue)  # type: ignore[union-attr]
            _report(sampling.reporter, 1, texts[1])
        lost = reward(_rollouts(task, texts), task)
        with reward.while_sampling(task, SAMPLING) as sampling:
            assert sampling.reporter is None
        again = reward(_rollouts(task, texts), task)
    assert "responses are scored after all are sampled" in caplog.text
    assert _same(lost, _score(replace(reward, early=None), texts, []))
    assert _same(again, lost)


@pytest.mark.usefixtures("ray_cluster")
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
