"""An evaluation through a policy that answers as the test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from hybridrl.batch import PromptBatch, RolloutBatch
from hybridrl.config.eval import EvalSet
from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.rows import Row
from hybridrl.data.source import PromptStep, build_prompt_step
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.data.tokenizer import decode_responses
from hybridrl.metrics import Mean, Metrics, check_declared
from hybridrl.rewards.scorer import Scores
from hybridrl.sampler import Sample, SamplingParams
from hybridrl.trainer.evaluate import EvalTask, Evaluator, extract_answer
from hybridrl.workers.rollout.assemble import assemble_rollouts
from tests.config.values import config_of

TOKENIZER = build_starter_tokenizer()


class Speaker:
    """A policy that gives the next of its texts to each request."""

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


class Exact:
    """Gives 1 for the answer itself."""

    def while_sampling(
        self, task: PromptStep, sampling: SamplingParams
    ) -> AbstractContextManager[SamplingParams]:
        return nullcontext(sampling)

    def __call__(self, rollouts: RolloutBatch, task: PromptStep) -> Scores:
        answers = [extract_answer(text) for text in decode_responses(rollouts, TOKENIZER)]
        num_responses = len(answers) // len(task.rows)
        rewards = [
            float(answer == task.rows[row // num_responses].row.answer)
            for row, answer in enumerate(answers)
        ]
        failed_B1 = torch.zeros(len(rewards), 1, dtype=torch.bool)
        return Scores(("exact",), torch.ones(1), torch.tensor(rewards)[:, None], failed_B1)


def task_of(name: str, sources: Sequence[str], **given: object) -> EvalTask:
    values = config_of().eval.own_set()
    settings = EvalSet(
        **{f: getattr(values, f) for f in EvalSet.__slots__} | given | {"name": name}
    )
    rows = [
        TokenizedRow(Row("1=", "1", source, "x:1"), "1=", torch.tensor([1, 2]))
        for source in sources
    ]
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


def test_an_evaluation_describes_lengths_endings_and_groups_of_one_reward() -> None:
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


def test_groups_of_one_response_are_not_called_equal() -> None:
    metrics = evaluate(Speaker("1"), task_of("", ["a"]))
    assert "eval/zero_variance_group_fraction" not in metrics


def test_one_set_has_the_plain_names_and_intervals() -> None:
    task = task_of(
        "", ["a", "b/c"], num_responses_per_prompt=3, pass_at_k=(1, 2), majority_at_k=(3,)
    )
    metrics = evaluate(Speaker("1", "2", "1", "2", "2", "1"), task)
    values = {name: metric.value for name, metric in metrics.items()}
    assert values["eval/reward/mean"] == pytest.approx(0.5)
    assert values["eval/reward/a"] == pytest.approx(2 / 3)
    assert values["eval/reward/b_c"] == pytest.approx(1 / 3)
    assert values["eval/pass_at_1"] == pytest.approx(0.5)
    assert values["eval/pass_at_2"] == pytest.approx((1 + 2 / 3) / 2)
    assert values["eval/majority_at_3"] == 0.5
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
