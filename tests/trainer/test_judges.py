"""Judges on the driver: the questions, the scores in their answers, and answers without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.errors import RewardError
from hybridrl.metrics import Mean
from hybridrl.rewards.report import reward_metrics
from hybridrl.rewards.runner import RewardInputs
from hybridrl.rewards.scorer import RewardScorer, Scores
from hybridrl.sampler import RequestParams, Sample
from hybridrl.trainer.reward_models import JudgeAnswers, load_judges
from hybridrl.workers.engine_settings import frozen_config
from tests.config.values import config_of
from tests.tiny_models import make_tiny_model

TOKENIZER = build_starter_tokenizer()
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
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
    """A run whose reward is a judge."""
    make_tiny_model(folder, vocab_size=260)
    tokenizer = build_starter_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return config_of(
        f"serving.models={{p: {{groups: {{m: {{num_devices: 1}}}}}}, "
        f"big: {{path: '{folder}', groups: {{m: {{num_devices: 1}}}}}}}}",
        "serving.num_devices_per_node=2",
        "reward.function=judge",
        f"reward.args={{model: big, template: '{TEMPLATE}', max_tokens: 9}}",
        *("reward.timeout_s=5", "reward.num_processes=1", "reward.on_error=zero"),
        *overrides,
    )


def inputs_of(*responses: str) -> RewardInputs:
    return RewardInputs(
        responses=list(responses),
        answers=["a"] * len(responses),
        prompts=["p"] * len(responses),
        sources=["s"] * len(responses),
        lengths=[1] * len(responses),
    )


def scores_of(config: ExperimentConfig, servers: Servers, inputs: RewardInputs) -> Scores:
    judges = JudgeAnswers(judges=load_judges(config), servers=servers, timeout_s=5.0)
    with RewardScorer(config.reward) as scorer:
        return scorer.score(inputs, judge_answers=judges(inputs))


@pytest.mark.shows("4.1")
def test_a_judge_is_asked_about_each_response_and_scores_it(tmp_path: Path) -> None:
    config, servers = judged(tmp_path / "big"), Servers(["Score: 7", "score=2, no: Score: 3.5"])
    scores = scores_of(config, servers, inputs_of("{answer}", "b"))
    assert servers.asked == ["p|{answer}|a|s{x}", "p|b|a|s{x}"]
    (params,) = servers.params
    assert (params.max_new_tokens, params.temperature) == (9, 0.0)
    assert params.stop_token_ids == (TOKENIZER.eos_token_id,)
    assert scores.rewards_B.tolist() == [7.0, 3.5]
    assert reward_metrics(scores, num_responses=1)["reward/unreadable_fraction"] == Mean(0.0, 2)


def test_a_judge_with_a_chat_template_is_asked_by_a_user(tmp_path: Path) -> None:
    config, servers = judged(tmp_path / "big", chat_template=CHAT), Servers(["Score: 1"])
    scores_of(config, servers, inputs_of("r"))
    assert servers.asked == ["<user>p|r|a|s{x}"]


@pytest.mark.parametrize("rubbish", ["", "good!", "Score: 99", "Score: -1"])
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


def test_a_question_about_bytes_that_are_no_text_fits_by_default(tmp_path: Path) -> None:
    sizes = ("rollout.max_response_tokens=24", "data.max_prompt_tokens=32")
    config, servers = judged(tmp_path / "big", *sizes), Servers(["Score: 7"])
    response = bytes([0xFF] * 24).decode(errors="replace")  # 72 tokens of the judge
    scores = scores_of(config, servers, inputs_of(response))
    assert scores.rewards_B.tolist() == [7.0]
    room = frozen_config(config, "big").max_row_tokens
    assert room > len(TOKENIZER(servers.asked[0])["input_ids"]) + 9  # with its answer


def test_a_hostile_expression_costs_its_answer_alone(tmp_path: Path) -> None:
    config = judged(tmp_path / "big", r"reward.args.pattern='(a+)+(\d)'", "reward.timeout_s=1")
    judges = load_judges(config)
    servers = Servers(["a" * 40, "a7"])
    answers = {
        "judge": [
            judges[0].read(each) for each in servers.ask("big", [], judges[0].params, timeout_s=5.0)
        ]
    }
    with RewardScorer(config.reward) as scorer:
        scores = scorer.score(inputs_of("r", "s"), judge_answers=answers)
    assert scores.is_failed_B.tolist() == [True, False]
