"""The results of one step: its seconds by phase, and the metrics that describe it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hybridrl.batch import RolloutBatch, response_lengths, row_lengths, row_offsets
from hybridrl.data.source import PromptStep
from hybridrl.diagnostics import trace
from hybridrl.metrics import Max, Mean, Metrics, Min
from hybridrl.rewards.report import mean_of, reward_metrics
from hybridrl.rewards.scorer import Scores
from hybridrl.trainer.batches import ScoredRollouts

_LOOKED_AT, _LONGEST_PERIOD, _SHARE = 512, 128, 0.9
"""The end of a response at which is looked, its last token left out; tokens of one repetition; and
how many of the tokens must repeat."""


class Clock:
    """Times the phases of one step; ``on_phase`` hears of each as it begins."""

    def __init__(self, on_phase: Callable[[str], None] | None = None) -> None:
        self._begin = time.perf_counter()
        self._on_phase = on_phase
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time one phase; one that comes again adds to its seconds."""
        if self._on_phase is not None:
            self._on_phase(phase)
        begin = time.perf_counter()
        try:
            with trace.span(phase):
                yield
        finally:
            took_s = time.perf_counter() - begin
            self._seconds[phase] = self._seconds.get(phase, 0.0) + took_s

    def metrics(self) -> Metrics:
        """Return ``time/<phase>_s`` of each phase and ``time/step_s`` of the step."""
        phases: Metrics = {f"time/{phase}_s": Mean(s) for phase, s in self._seconds.items()}
        return phases | {"time/step_s": Mean(time.perf_counter() - self._begin)}


@dataclass(frozen=True, slots=True)
class StepReport:
    """All that a step leaves behind."""

    sampled: ScoredRollouts  # all responses of the step, those that it does not learn from included
    update: Metrics
    clock: Clock

    def metrics(self) -> Metrics:
        """Describe the step; see ``hybridrl/metrics.py`` for each name."""
        timings = self.clock.metrics()
        rollouts, scores = self.sampled.rollouts, self.sampled.scores
        by_source = rewards_by_source(self.sampled.task, scores)
        return {
            **reward_metrics(scores, num_responses=self.sampled.num_responses),
            **{f"reward/by_source/{source}": mean for source, mean in by_source.items()},
            **describe_lengths(rollouts),
            **self.update,
            **effective_samples(self.update),
            **timings,
            **_throughput(rollouts, self.update, timings),
        }


def effective_samples(update: Metrics) -> Metrics:
    """Return ``(sum w)^2 / (n sum w^2)``, the share of samples that would do, unweighted.

    Derived from sums over all micro-batches and ranks, since it cannot be averaged. 1 for equal
    weights, 0 without any; verl's ``eff_sample_size`` is this fraction, too.
    """
    ratio = update.get("policy/sampler_ratio/mean")
    chi_square = update.get("policy/sampler_chi_square/mean")
    if ratio is None or chi_square is None:
        return {}
    mean_square = chi_square.value + 1
    share = ratio.value**2 / mean_square if mean_square else 0.0
    return {"policy/effective_sample_fraction": Mean(share)}


def rewards_by_source(task: PromptStep, scores: Scores) -> dict[str, Mean]:
    """Return the mean reward of each source, if there are several; else nothing.

    A name of the hub, as ``openai/gsm8k``, becomes one word of a metric's name: ``openai_gsm8k``.
    """
    rewards = scores.rewards_B.tolist()
    num_responses = len(rewards) // len(task.rows)
    by_source: dict[str, list[float]] = defaultdict(list)
    for row, reward in enumerate(rewards):
        by_source[task.rows[row // num_responses].row.source.replace("/", "_")].append(reward)
    if len(by_source) == 1:
        return {}
    return {name: Mean(sum(values), float(len(values))) for name, values in by_source.items()}


def describe_lengths(rollouts: RolloutBatch) -> Metrics:
    """Summarise lengths, in tokens, and how responses ended."""
    response_lengths_B = response_lengths(rollouts.response_mask_BL)
    prompt_lengths_B = row_lengths(rollouts.token_ids_BL) - response_lengths_B
    return {
        "length/prompt_tokens/mean": mean_of(prompt_lengths_B),
        "length/prompt_tokens/max": Max(float(prompt_lengths_B.max())),
        "length/response_tokens/mean": mean_of(response_lengths_B),
        "length/response_tokens/max": Max(float(response_lengths_B.max())),
        "length/response_tokens/min": Min(float(response_lengths_B.min())),
        "rollout/truncated_fraction": mean_of(rollouts.is_truncated_B),
        "rollout/empty_fraction": mean_of(response_lengths_B == 0),
        "rollout/repetition_fraction": _repetition(rollouts, response_lengths_B),
    }


def _repetition(rollouts: RolloutBatch, response_lengths_B: Tensor) -> Mean:
    """Return the share of responses that end in a loop; short ones count as none."""
    tokens_T = rollouts.token_ids_BL.values().numpy()
    mask_T = rollouts.response_mask_BL.values().numpy()
    offsets = row_offsets(rollouts.token_ids_BL).tolist()
    num_repeating = 0
    for row in (response_lengths_B >= _LOOKED_AT).nonzero()[:, 0].tolist():
        at = slice(offsets[row], offsets[row + 1])
        tokens_L = tokens_T[at][mask_T[at]][-_LOOKED_AT:-1]
        # Nine of ten tokens are those one period before, for some short period.
        periods = np.flatnonzero(tokens_L[-2 : -_LONGEST_PERIOD - 2 : -1] == tokens_L[-1]) + 1
        shares = (np.mean(tokens_L[p:] == tokens_L[:-p]) for p in periods.tolist())
        num_repeating += any(share >= _SHARE for share in shares)
    return Mean(float(num_repeating), float(len(rollouts)))


def _throughput(rollouts: RolloutBatch, update: Metrics, timings: Metrics) -> Metrics:
    num_tokens = rollouts.token_ids_BL.values().numel()
    num_response_tokens = int(rollouts.response_mask_BL.values().sum())
    num_longest = int(response_lengths(rollouts.response_mask_BL).max())
    step_s = timings["time/step_s"].value
    # Engines that sample ahead do so all the time: `generate` only fetches what they have.
    samples_ahead = "time/wait_for_groups_s" in update
    sampling_s = step_s if samples_ahead else timings["time/generate_s"].value
    rates: Metrics = {
        "throughput/tokens_per_s": Mean(num_tokens / step_s),
        "throughput/response_tokens_per_s": Mean(num_response_tokens / sampling_s),
    }
    if not samples_ahead:
        rates["throughput/longest_response_tokens_per_s"] = Mean(num_longest / sampling_s)
    if "time/sample_s" in update:
        rate = num_longest / update["time/sample_s"].value
        rates["throughput/longest_sampled_tokens_per_s"] = Mean(rate)
    if "data/train_tokens" in update:
        rate = update["data/train_tokens"].value / timings["time/update_s"].value
        rates["throughput/train_tokens_per_s"] = Mean(rate)
    return rates
