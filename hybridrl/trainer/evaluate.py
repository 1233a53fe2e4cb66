"""Evaluation on held-out prompts, through the same life cycle as training.

Legend: P prompts, G responses to each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridrl.batch import RolloutBatch, response_lengths
from hybridrl.config.eval import EvalSet
from hybridrl.data.source import PromptStep
from hybridrl.data.tokenizer import decode_responses
from hybridrl.metrics import Mean, Metrics
from hybridrl.rewards.report import flat_fraction
from hybridrl.rewards.scorer import Scores
from hybridrl.sampler import SamplingParams
from hybridrl.trainer.collect import Reward
from hybridrl.trainer.policy import Generates, SamplesBeside
from hybridrl.trainer.step_metrics import Clock, describe_lengths, rewards_by_source

_COVERAGE = 0.95
_NUMBERS_AT_ONCE = 1 << 22
_MARK = re.compile(r"(?:####|answer is|answer:)[ \t]*([^\n]+)", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"[{}]")
_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


@dataclass(frozen=True, slots=True)
class EvalTask:
    """One evaluation set: its prompts, and how responses to them are sampled."""

    settings: EvalSet
    task: PromptStep
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class EvalReport:
    """The results of one set."""

    task: EvalTask
    rollouts: RolloutBatch
    scores: Scores
    metrics: Metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluator:
    """Samples the same held-out prompts with the same seeds each time."""

    policy: Generates
    # returns the metrics of conversations since the last time; None: responses are single turns,
    # which have none
    take_agent_metrics: Callable[[], Metrics] | None
    reward: Reward
    tokenizer: PreTrainedTokenizerBase
    correct_reward: float  # a response with at least this reward is correct
    num_resamples: int  # bootstrap samples for intervals; 0 is no intervals
    seed: int

    def evaluate(self, tasks: Sequence[EvalTask]) -> tuple[list[EvalReport], Metrics]:
        """Sample and score all sets: their reports, and all their metrics with seconds.

        The metrics of a named set have its name. ``eval/reward/mean`` is the mean over sets.
        """
        clock = Clock()
        with clock("eval"):
            reports = [self._evaluate(task) for task in tasks]
        return reports, _joined(reports, clock)

    def begin(
        self, tasks: Sequence[EvalTask], engines: SamplesBeside
    ) -> Callable[[], tuple[list[EvalReport], Metrics]]:
        """Sample all sets beside the next step; what is returned waits for them.

        Seconds are those of the wait, with the scores. Nothing is scored before it.
        """
        engines.begin_evaluation([(task.task.prompts, task.sampling) for task in tasks])

        def finish() -> tuple[list[EvalReport], Metrics]:
            clock = Clock()
            with clock("eval"):
                answers = zip(tasks, engines.end_evaluation(), strict=True)
                reports = [self._describe(*each, agent={}) for each in answers]
            return reports, _joined(reports, clock)

        return finish

    def _evaluate(self, task: EvalTask) -> EvalReport:
        with self.reward.while_sampling(task.task, task.sampling) as sampling:
            rollouts = self.policy.generate(task.task.prompts, sampling)
        agent = self.take_agent_metrics() if self.take_agent_metrics else {}
        return self._describe(task, rollouts, agent=agent)

    def _describe(self, task: EvalTask, rollouts: RolloutBatch, *, agent: Metrics) -> EvalReport:
        scores = self.reward(rollouts, task.task)
        by_source = rewards_by_source(task.task, scores)
        lengths_B = response_lengths(rollouts.response_mask_BL)
        lengths, size = describe_lengths(rollouts), task.settings.num_responses_per_prompt
        metrics: Metrics = {
            "eval/length/response_tokens/mean": lengths["length/response_tokens/mean"],
            "eval/length/response_tokens/median": Mean(float(lengths_B.median())),
            "eval/length/response_tokens/min": lengths["length/response_tokens/min"],
            "eval/length/response_tokens/max": lengths["length/response_tokens/max"],
            "eval/truncated_fraction": lengths["rollout/truncated_fraction"],
            "eval/repetition_fraction": lengths["rollout/repetition_fraction"],
            **{f"eval/reward/{source}": mean for source, mean in by_source.items()},
            **self._quality(task.settings, rollouts, scores),
            **{f"eval/{name}": metric for name, metric in agent.items()},
        }
        if size > 1:
            metrics["eval/zero_variance_group_fraction"] = flat_fraction(scores.rewards_B, size)
        return EvalReport(task, rollouts, scores, metrics)

    def _quality(self, settings: EvalSet, rollouts: RolloutBatch, scores: Scores) -> Metrics:
        """Return mean reward, pass@k and majority@k, with their intervals."""
        rewards_PG = scores.rewards_B.view(-1, settings.num_responses_per_prompt).double()
        is_correct_PG = rewards_PG >= self.correct_reward
        columns: dict[str, Tensor] = {"eval/reward/mean": rewards_PG.mean(dim=1)}
        for k in settings.pass_at_k:
            columns[f"eval/pass_at_{k}"] = pass_at_k(is_correct_PG, k=k)
        if votes := [k for k in settings.pass_at_k if k > 1]:
            answers = map(extract_answer, decode_responses(rollouts, self.tokenizer))
            answer_PG = _number(answers).view_as(is_correct_PG)
            for k in votes:
                columns[f"eval/majority_at_{k}"] = majority_at_k(answer_PG, is_correct_PG, k=k)
        num_prompts = len(rewards_PG)
        metrics: Metrics = {
            name: Mean(float(values_P.sum()), num_prompts) for name, values_P in columns.items()
        }
        if self.num_resamples and num_prompts > 1:
            low_M, high_M = bootstrap_intervals(
                torch.stack(list(columns.values()), dim=1),
                num_resamples=self.num_resamples,
                seed=self.seed,
            )
            for name, low, high in zip(columns, low_M.tolist(), high_M.tolist(), strict=True):
                metrics |= {f"{name}/low": Mean(low), f"{name}/high": Mean(high)}
        return metrics


def _joined(reports: Sequence[EvalReport], clock: Clock) -> Metrics:
    metrics: Metrics = {}
    for report in reports:
        name = report.task.settings.name
        prefix = f"eval/{name}/" if name else "eval/"
        metrics |= {prefix + key[len("eval/") :]: m for key, m in report.metrics.items()}
    mean = fmean(report.metrics["eval/reward/mean"].value for report in reports)
    metrics["eval/reward/mean"] = Mean(mean)
    return metrics | {"time/eval_s": clock.metrics()["time/eval_s"]}


def _number(answers: Iterable[str]) -> Tensor:
    """Give equal answers the same number, int64; -1 stands for no answer."""
    numbers: dict[str, int] = {"": -1}
    return torch.tensor([numbers.setdefault(answer, len(numbers) - 1) for answer in answers])


def pass_at_k(is_correct_PG: Tensor, *, k: int) -> Tensor:
    """Estimate, for each prompt, the probability that one of k responses is correct.

    ``1 - C(n - c, k) / C(n, k)`` with c correct ones of n responses: unbiased, unlike
    ``1 - (1 - c / n)^k`` (arXiv:2107.03374, equation 1). As a product of ratios, since binomial
    coefficients overflow. float64 [P], from bool [P, n] and k from 1 to n.
    """
    n = is_correct_PG.shape[1]
    num_left = torch.arange(n, 0, -1, dtype=torch.float64)  # n - i, i = 0 ... n - 1
    missed = torch.cat(
        [torch.ones(1).double(), ((num_left - k).clamp(min=0) / num_left).cumprod(0)]
    )
    return 1.0 - missed[is_correct_PG.sum(dim=1)]


def majority_at_k(answer_PG: Tensor, is_correct_PG: Tensor, *, k: int) -> Tensor:
    """Average over groups of k responses whether the most frequent answer is correct.

    The responses to a prompt are cut into n // k groups of k in their order; those left over are
    not used. Of equally frequent answers the one that came first counts. A response without an
    answer has no vote, and a group without votes is wrong. Otherwise as ``pass_at_k``.
    ``answer_PG``, int64 [P, n], has the same number for the same answer; -1 is no answer.
    """
    num_groups = is_correct_PG.shape[1] // k
    answer_NK = answer_PG[:, : num_groups * k].reshape(-1, k)
    is_correct_NK = is_correct_PG[:, : num_groups * k].reshape(-1, k)
    group_N1 = torch.arange(len(answer_NK))[:, None]
    # One number for each pair of group and answer, so that equal answers are counted by sorting.
    pair_NK = group_N1 * (int(answer_PG.max()) + 2) + answer_NK + 1
    _, index_NK, counts = torch.unique(pair_NK, return_inverse=True, return_counts=True)
    votes_NK = torch.where(answer_NK < 0, 0, counts[index_NK])
    # The position decides between equal votes: torch does not say which maximum it returns.
    winner_N = (votes_NK * k - torch.arange(k)).argmax(dim=1, keepdim=True)
    is_right_N = is_correct_NK.gather(1, winner_N) & (votes_NK.gather(1, winner_N) > 0)
    return is_right_N.view(-1, num_groups).double().mean(dim=1)


def bootstrap_intervals(
    values_PM: Tensor, *, num_resamples: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Return the 95 % intervals of means over prompts, by the percentile bootstrap.

    Prompts are drawn, not responses: those to one prompt are not independent of each other. All M
    metrics are taken over the same draws of P prompts with replacement.

    Returns:
        Lower and upper ends, float64 [M] each.
    """
    generator = torch.Generator().manual_seed(seed)
    num_prompts = len(values_PM)
    values_PM = values_PM.double()
    num_at_once = max(1, _NUMBERS_AT_ONCE // values_PM.numel())
    means = []
    for begin in range(0, num_resamples, num_at_once):
        num_draws = min(num_at_once, num_resamples - begin)
        drawn = torch.randint(num_prompts, (num_draws, num_prompts), generator=generator)
        means.append(values_PM[drawn].mean(dim=1))
    tail = (1.0 - _COVERAGE) / 2
    low_M, high_M = torch.cat(means).quantile(torch.tensor([tail, 1 - tail]).double(), dim=0)
    return low_M, high_M


def extract_answer(response: str) -> str:
    r"""Return the answer of a response, normalised, so that equal answers can be counted.

    It is the first of these that the response has: the content of its last ``\boxed{...}``; the
    text after its last ``####`` or ``answer is`` or ``answer:``, to the end of the line; its last
    line. White space, dollar signs, the full stop at the end and commas between digits do not
    count, nor does upper case. Empty if there is none.
    """
    if boxed := _normalise(_last_boxed(response)):
        return boxed
    marked = _MARK.findall(response)
    if marked and (answer := _normalise(marked[-1])):
        return answer
    lines = response.strip().splitlines()
    return _normalise(lines[-1]) if lines else ""


def _last_boxed(text: str) -> str:
    """Return the content of the last command that is closed, in one pass over the braces."""
    begins = {match.end() for match in _BOXED.finditer(text)}
    open_braces: list[int] = []
    last = (0, 0)
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            open_braces.append(match.end())
        elif open_braces and (begin := open_braces.pop()) in begins:
            last = max(last, (begin, match.start()))
    return text[slice(*last)]


def _normalise(answer: str) -> str:
    answer = " ".join(answer.replace("$", "").split()).removesuffix(".").strip()
    return _COMMA.sub("", answer).lower()
