from __future__ import annotations

import logging
import re

import pytest

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.metrics import Max, Mean, Metrics, Sum
from hybridrl.planning.memory import plan_memory
from hybridrl.planning.workload import Workload
from hybridrl.run.plan_check import PlanCheck
from tests.config.values import config_of


def step(
    *, off_by: float, config: ExperimentConfig | None = None
) -> tuple[Metrics, dict[str, float]]:
    """Metrics of a step in which every phase took ``off_by`` more than predicted."""
    config = config or config_of()
    workload = Workload.longest(config).measured(
        prompt_tokens=10, response_tokens=12, microbatch_tokens=1500
    )
    plan = plan_memory(config, workload=workload)
    peaks = {phase.name: plan.measured_bytes(phase) * (1 + off_by) for phase in plan.phases}
    del peaks["export"]  # ends after the last step
    return {
        "length/prompt_tokens/mean": Mean(10),
        "length/response_tokens/mean": Mean(12),
        "data/train_tokens": Sum(3000),
        "data/microbatches": Sum(2),
        **{f"memory/{name}_peak_bytes/max": Max(peak) for name, peak in peaks.items()},
    }, peaks


def test_on_a_gpu_each_phase_that_was_measured_gets_its_error() -> None:
    config = config_of("cluster=one_gpu")
    metrics, peaks = step(off_by=0.1, config=config)
    errors = PlanCheck(config).compare(metrics)
    assert {name: m.value for name, m in errors.items()} == pytest.approx(
        {f"memory/{name}_plan_error_fraction": 0.1 for name in peaks}, abs=1e-6
    )


def test_on_a_cpu_the_fullest_phase_alone_is_compared() -> None:
    errors = PlanCheck(config_of()).compare(step(off_by=0.1)[0])
    assert {name: m.value for name, m in errors.items()} == pytest.approx(
        {"memory/update_plan_error_fraction": 0.1}, abs=1e-6
    )


def test_the_log_has_a_line_after_the_first_step_and_one_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = PlanCheck(config_of())
    with caplog.at_level(logging.INFO):
        for off_by in (0.1, 0.3, 0.2):
            watch.compare(step(off_by=off_by)[0])
        watch.report()
    first, last = caplog.messages
    assert first.startswith("memory of a rank in the first step: ")
    assert " at most, in update (estimate for its rows: " in first
    assert last.startswith("memory of a rank: ")
    assert "error" not in last
    largest_mib, estimated_mib = (float(number) for number in re.findall(r"(\d+) MiB", last))
    assert largest_mib / estimated_mib == pytest.approx(1.3, abs=0.01)


def test_a_step_without_the_numbers_that_a_plan_needs_is_let_pass() -> None:
    watch = PlanCheck(config_of())
    assert watch.compare({"reward/mean": Mean(1.0)}) == {}
    watch.report()
