"""Holds the memory plan against what the ranks measured, step by step."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ModelError
from hybridrl.metrics import Mean, Metrics
from hybridrl.planning.memory import plan_memory
from hybridrl.planning.page import format_bytes
from hybridrl.planning.plan import MemoryPlan, Phase
from hybridrl.planning.workload import Workload

log = logging.getLogger(__name__)

_SETTLED_STEP = 2
"""Moments exist from the first update on. On a CPU ranks then give freed memory back once, and only
in this step does each phase show what it needs itself; later all look as large as the largest.
Counted from the first step in which the policy learns; a critic that learned before it has left its
own traces by then."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Prediction and measurement of one phase, both in bytes on the fullest rank."""

    phase: str
    predicted: int
    measured: float

    @property
    def error_fraction(self) -> float:
        """(measured - predicted) / predicted."""
        return self.measured / self.predicted - 1

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.measured)} at most, in {self.phase} "
            f"(mode=plan estimates {format_bytes(self.predicted)})"
        )


class PlanCheck:
    """Compares predictions for the lengths that a step had with its measured peaks."""

    def __init__(self, config: ExperimentConfig) -> None:
        self._config = config
        self._num_steps = 0
        self._largest: Comparison | None = None

    def compare(self, metrics: Metrics) -> Metrics:
        """Return ``memory/<phase>_plan_error_fraction`` of the phases that a step measured.

        Args:
            metrics: of one step: measured peaks, mean lengths, tokens and micro-batches.
        """
        try:
            plan = self._plan_for(metrics)
        except (ModelError, KeyError):  # a model or a step that nothing is foretold of
            return {}
        self._num_steps += 1
        found = [
            Comparison(phase.name, plan.measured_bytes(phase), metrics[name].value)
            for phase in self._comparable(plan)
            if (name := f"memory/{phase.name}_peak_bytes/max") in metrics
        ]
        self._note(found)
        return {f"memory/{c.phase}_plan_error_fraction": Mean(c.error_fraction) for c in found}

    def report(self) -> None:
        """Say at the end of a run how far the prediction was off."""
        if self._largest is not None:
            log.info("memory of a rank: %s", self._largest)

    def _plan_for(self, metrics: Metrics) -> MemoryPlan:
        workload = Workload.longest(self._config).measured(
            prompt_tokens=metrics["length/prompt_tokens/mean"].value,
            response_tokens=metrics["length/response_tokens/mean"].value,
            microbatch_tokens=metrics["data/train_tokens"].value
            / metrics["data/microbatches"].value,
        )
        return plan_memory(self._config, workload=workload)

    def _comparable(self, plan: MemoryPlan) -> tuple[Phase, ...]:
        has_warmed_up = self._config.has_critic and self._config.critic.num_warmup_steps > 0
        is_early = self._num_steps < _SETTLED_STEP and not has_warmed_up
        if plan.device == "cuda" or is_early or self._num_steps == _SETTLED_STEP:
            return plan.phases
        return (plan.fullest,)

    def _note(self, found: list[Comparison]) -> None:
        peak = max(found, key=lambda comparison: comparison.measured, default=None)
        if peak is None:
            return
        if self._largest is None or peak.measured > self._largest.measured:
            self._largest = peak
        if self._num_steps == 1:
            longest = plan_memory(self._config)
            limit = format_bytes(longest.peak_bytes(longest.fullest))
            log.info(
                "memory of a rank in the first step: %s; rows of full length are estimated at %s",
                peak,
                limit,
            )
