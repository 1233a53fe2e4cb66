from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import fmean
from typing import Any

import pytest
import torch

from hybridrl.batch import PromptBatch, RolloutBatch
from hybridrl.data.source import PromptStep, build_prompt_step
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.data.tokenizer import decode_responses
from hybridrl.metrics import Mean, Metrics, check_declared
from hybridrl.rewards.scorer import Scores
from hybridrl.sampler import Sample, SamplingParams
from hybridrl.trainer.evaluate import (
    EvalTask,
    Evaluator,
    bootstrap_intervals,
    extract_answer,
    majority_at_k,
    pass_at_k,
)
from hybridrl.workers.rollout.assemble import assemble_rollouts
from tests.config.values import config_of
from tests.trainer.rollouts import ScoredAfterwards, row_of, scores_of

TOKENIZER = build_starter_tokenizer()


class Speaker:
    def __init__(self, *texts: str) -> None:
        self._texts = list(texts)
        self.sampled: list[SamplingParams] = []

    def generate(self, prompts: PromptBatch, sampling: SamplingParams) -> RolloutBatch:
        self.sampled.append(sampling)
        responses = []
        for _ in range(len(prompts)):
            texts = [self._texts.pop(0) for _ in range(sampling.num_responses_per_prompt)]
            tokens = [torch.tensor(TOKENIZER(text).input_ids) for text in texts]
            responses += [
                Sample(ids, torch.zeros(len(ids)), "stop", weight_version=0) for ids in tokens
            ]
        return assemble_rollouts(prompts, responses, policy_version=0)


class Exact(ScoredAfterwards):
    def __call__(self, rollouts: RolloutBatch, task: PromptStep) -> Scores:
        answers = [extract_answer(text) for text in decode_responses(rollouts, TOKENIZER)]
        num_responses = len(answers) // len(task.rows)
        rewards = [
            float(answer == task.rows[row // num_responses].row.answer)
            for row, answer in enumerate(answers)
        ]
        return scores_of(rewards)


def task_of(name: str, sources: Sequence[str], **given: Any) -> EvalTask:
    settings = replace(config_of().eval.own_set(), name=name, **given)
    rows = [row_of(1, answer="1", source=source) for source in sources]
    sampling = SamplingParams(settings.num_responses_per_prompt, 4, settings.temperature)
    return EvalTask(settings, build_prompt_step(rows, range(len(rows)), seed=0), sampling)


def evaluate(
    speaker: Speaker,
    *tasks: EvalTask,
    num_resamples: int = 100,
    take_agent_metrics: Callable[[], Metrics] | None = None,
) -> Metrics:
    evaluator = Evaluator(
        policy=speaker,
        take_agent_metrics=take_agent_metrics,
        reward=Exact(),
        tokenizer=TOKENIZER,
        correct_reward=1.0,
        num_resamples=num_resamples,
        seed=0,
    )
    _, metrics = evaluator.evaluate(tasks)
    check_declared(metrics)
    return metrics


def test_an_evaluation_describes_lengths_endings_and_groups_of_several_responses() -> None:
    loop = "ab" * 300
    task = task_of("held", ["a", "a"], num_responses_per_prompt=2)
    metrics = evaluate(Speaker("1", "1", "1", loop), task)
    lengths = {
        name: metrics[f"eval/held/length/response_tokens/{name}"].value
        for name in ("mean", "median", "min", "max")
    }
    assert lengths == {"mean": 603 / 4, "median": 1, "min": 1, "max": 600}
    assert metrics["eval/held/truncated_fraction"] == Mean(0.0, 4)
    assert metrics["eval/held/repetition_fraction"] == Mean(1.0, 4)
    assert metrics["eval/held/zero_variance_group_fraction"].value == 0.5
    metrics = evaluate(Speaker("1"), task_of("", ["a"]))
    assert "eval/zero_variance_group_fraction" not in metrics


def test_one_set_has_the_plain_names_and_intervals() -> None:
    task = task_of("", ["a", "b/c"], num_responses_per_prompt=3, pass_at_k=(1, 2, 3))
    metrics = evaluate(Speaker("1", "2", "1", "2", "2", "1"), task)
    values = {name: metric.value for name, metric in metrics.items()}
    assert values["eval/reward/mean"] == pytest.approx(0.5)
    assert values["eval/reward/a"] == pytest.approx(2 / 3)
    assert values["eval/reward/b_c"] == pytest.approx(1 / 3)
    assert values["eval/pass_at_1"] == pytest.approx(0.5)
    assert values["eval/pass_at_2"] == pytest.approx((1 + 2 / 3) / 2)
    assert values["eval/majority_at_3"] == 0.5
    assert "eval/majority_at_1" not in values  # it would be pass@1
    assert values["eval/majority_at_3/low"] == 0.0
    assert values["eval/majority_at_3/high"] == 1.0
    assert values["eval/length/response_tokens/mean"] == 1


def test_named_sets_have_own_sampling_and_names() -> None:
    speaker = Speaker("1", "1", "2", "1", "2", "2")
    greedy = task_of("greedy", ["a", "a"], temperature=0.0)
    sampled = task_of("sampled", ["a", "a"], num_responses_per_prompt=2, temperature=0.7)
    metrics = evaluate(speaker, greedy, sampled, num_resamples=0)
    assert [params.temperature for params in speaker.sampled] == [0.0, 0.7]
    values = {name: metric.value for name, metric in metrics.items()}
    assert values["eval/greedy/reward/mean"] == 1.0
    assert values["eval/sampled/reward/mean"] == 0.25
    assert values["eval/reward/mean"] == 0.625
    assert not [name for name in metrics if name.endswith("/low")]


def test_conversations_of_each_set_have_metrics_of_its_own() -> None:
    waiting: list[Metrics] = [
        {"agent/turns/mean": Mean(6.0, 2)},
        {"agent/turns/mean": Mean(1.0, 1)},
    ]
    tasks = [task_of("", ["a"]), task_of("other", ["a"])]
    metrics = evaluate(
        Speaker("1", "1"), *tasks, take_agent_metrics=lambda: waiting.pop(0), num_resamples=0
    )
    assert metrics["eval/agent/turns/mean"].value == 3.0
    assert metrics["eval/other/agent/turns/mean"].value == 1.0


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_choices_of_k(k: int) -> None:
    rows = [[n < right for n in range(5)] for right in range(6)]
    expected = [fmean(any(chosen) for chosen in combinations(row, k)) for row in rows]
    assert pass_at_k(torch.tensor(rows), k=k).tolist() == pytest.approx(expected)


def test_pass_at_k_of_thousands_of_responses_stays_finite() -> None:
    right = torch.zeros(1, 5000, dtype=torch.bool)
    right[0, 7] = True
    assert float(pass_at_k(right, k=2500)) == pytest.approx(0.5)
    assert pass_at_k(right, k=5000).tolist() == [1.0]


def test_majority_counts_votes_in_groups_of_k() -> None:
    answers = torch.tensor(
        [[1, 2, 2, 1, 1, 2, 9], [-1, -1, 3, -1, -1, -1, 3], [4, 5, 4, 5, 5, 4, 5]]
    )
    right = (answers == torch.tensor([[1], [3], [4]])) & (answers >= 0)
    # Groups of three, the seventh is left over: wrong, right; right, no vote; right, wrong.
    assert majority_at_k(answers, right, k=3).tolist() == [0.5, 0.5, 0.5]
    # Of two votes for each answer the one that came first decides: right, right.
    assert majority_at_k(answers[2:, :4], right[2:, :4], k=4).tolist() == [1.0]
    assert majority_at_k(answers, right, k=1).tolist() == pytest.approx([3 / 7, 2 / 7, 3 / 7])


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = (torch.rand(300, 60, 1, generator=generator) < 0.4).double()
    intervals = [bootstrap_intervals(s, num_resamples=400, seed=1) for s in samples]
    covered = fmean(bool(low <= 0.4 <= high) for low, high in intervals)
    assert 0.90 <= covered <= 0.985


def test_intervals_are_of_each_metric_and_of_the_seed() -> None:
    values = torch.rand(40, 2, generator=torch.Generator().manual_seed(0))
    values[:, 1] = 0.25
    low, high = bootstrap_intervals(values, num_resamples=500, seed=3)
    assert float(low[1]) == float(high[1]) == 0.25
    assert low[0] < values[:, 0].mean() < high[0]
    again = bootstrap_intervals(values, num_resamples=500, seed=3)
    assert torch.equal(low, again[0])
    assert not torch.equal(low, bootstrap_intervals(values, num_resamples=500, seed=4)[0])


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{1}, no: \boxed{\frac{1}{2}}. #### 7", r"\frac{1}{2}"),
        (r"\boxed{3} and \boxed{4", "3"),
        ("6 x 7 = 42\n#### 1,042.\n", "1042"),
        ("The answer is 5.\nThe final Answer:  $ 6 $ .\nBye", "6"),
        ("first\n\n  B) Paris  \n", "b) paris"),
        ("3,4 and 5", "3,4 and 5"),
        ("", ""),
        ("$", ""),
    ],
)
def test_equal_answers_become_equal_text(response: str, answer: str) -> None:
    assert extract_answer(response) == answer


def test_thousands_of_open_boxes_cost_one_pass() -> None:
    assert extract_answer("\\boxed{" * 200_000 + "7}").startswith("7")
