"""Compares the memory plan with the memory that ranks measured, step by step."""

from __future__ import annotations

import logging

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ModelError
from hybridrl.metrics import Mean, Metrics
from hybridrl.planning.fit import format_bytes
from hybridrl.planning.memory import plan_memory
from hybridrl.planning.plan import MemoryPlan
from hybridrl.planning.workload import Workload

log = logging.getLogger(__name__)


class PlanCheck:
    """Compares predictions for the lengths of a step with its measured peaks."""

    def __init__(self, config: ExperimentConfig) -> None:
        self._config = config
        self._largest_bytes, self._largest = 0.0, ""

    def compare(self, metrics: Metrics) -> Metrics:
        """Return ``memory/<phase>_plan_error_fraction`` of the phases that a step measured.

        That is (measured - predicted) / predicted, on the fullest rank.

        Args:
            metrics: of one step: measured peaks, mean lengths, tokens and micro-batches.
        """
        try:
            plan = self._plan_for(metrics)
        except (ModelError, KeyError):  # no plan for this model, or a step without its sizes
            return {}
        is_first = not self._largest
        errors: Metrics = {}
        # On a CPU malloc keeps freed memory: every phase looks as large as the largest.
        for phase in plan.phases if plan.device == "cuda" else (plan.fullest,):
            measured = metrics.get(f"memory/{phase.name}_peak_bytes/max")
            if measured is None:
                continue
            predicted = plan.measured_bytes(phase)
            errors[f"memory/{phase.name}_plan_error_fraction"] = Mean(
                measured.value / predicted - 1
            )
            if measured.value > self._largest_bytes:
                self._largest_bytes = measured.value
                self._largest = (
                    f"{format_bytes(measured.value)} at most, in {phase.name} "
                    f"(estimate for its rows: {format_bytes(predicted)})"
                )
        if is_first and errors:
            longest = plan_memory(self._config)
            limit = format_bytes(longest.peak_bytes(longest.fullest))
            text = "memory of a rank in the first step: %s; mode=plan, for rows of full length: %s"
            log.info(text, self._largest, limit)
        return errors

    def report(self) -> None:
        """Describe the error of the prediction, at the end of a run."""
        if self._largest:
            log.info("memory of a rank: %s", self._largest)

    def _plan_for(self, metrics: Metrics) -> MemoryPlan:
        workload = Workload.longest(self._config).measured(
            prompt_tokens=metrics["length/prompt_tokens/mean"].value,
            response_tokens=metrics["length/response_tokens/mean"].value,
            microbatch_tokens=metrics["data/train_tokens"].value
            / metrics["data/microbatches"].value,
        )
        return plan_memory(self._config, workload=workload)
