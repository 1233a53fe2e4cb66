from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridrl.config.load import load_config
from hybridrl.report.findings import RULES, diagnose
from hybridrl.report.run import History, Run, Settings, read_defaults
from tests.composing import composed

Curve = Callable[[int], float]

NUM_STEPS = 60
RECORDED = Path(__file__).parent / "recorded"
DEFAULTS = read_defaults()
WOBBLE = (-0.02, 0.01, 0.02, -0.01, 0.0)


def history(**curves: Curve | list[float]) -> History:
    """Metrics over 60 steps; ``__`` in a name stands for its slash."""
    rows: list[dict[str, float]] = [{"step": step} for step in range(1, NUM_STEPS + 1)]
    for name, curve in curves.items():
        for at, row in enumerate(rows):
            if callable(curve):
                row[name.replace("__", "/")] = curve(at)
            elif at < len(curve):
                row[name.replace("__", "/")] = curve[at]
    return History(rows)


def recorded(name: str) -> list[dict[str, float]]:
    lines = (RECORDED / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def run_of(history: History, *log_lines: str, settings: Settings = DEFAULTS) -> Run:
    return Run(folder=Path("run"), history=history, settings=settings, log_lines=log_lines)


def run_with(**curves: Curve | list[float]) -> Run:
    return run_of(history(**curves))


def titles(run: Run) -> list[str]:
    return [finding.title for finding in diagnose(run)]


def rising(at: int) -> float:
    return 0.2 + 0.01 * at + WOBBLE[at % 5]


def flat(at: int) -> float:
    return 0.3 + WOBBLE[at % 5]


BAD: dict[str, dict[str, Curve | list[float]]] = {
    "The reward does not rise": {"reward__mean": flat},
    "The reward rises slowly": {
        "reward__mean": rising,
        "policy__entropy_nats__mean": lambda at: 0.34 - 0.0001 * at,
    },
    "Rollout engines were lost": {"rollout__lost_engines": lambda at: float(at == 7)},
    "The reward has fallen": {"reward__mean": lambda at: rising(60 - at)},
    "Training made the model worse": {"eval__reward__mean": [0.5, 0.45, 0.3, 0.25]},
    "The reward may be gamed": {
        "reward__mean": rising,
        "rollout__truncated_fraction": lambda at: at / 60,
    },
    "The task is solved": {
        "reward__zero_variance_group_fraction": lambda at: 0.95,
        "reward__mean": lambda at: 0.99,
        "reward__max": lambda at: 1.0,
    },
    "Nearly all rewards are equal": {
        "reward__zero_variance_group_fraction": lambda at: min(1.0, 0.5 + at / 40),
        "reward__mean": lambda at: 0.0,
        "reward__max": lambda at: 0.0,
    },
    "Evaluation is falling": {"eval__reward__mean": [0.3, 0.7, 0.5, 0.4]},
    "Entropy has collapsed": {"policy__entropy_nats__mean": lambda at: 0.5 * 0.9**at},
    "The policy moves too fast within a step": {"policy__ratio__max": lambda at: 1.0 + at},
    "The policy is far from its reference": {
        "policy__kl_to_reference_nats__mean": lambda at: at / 20
    },
    "Trainer and sampler disagree": {"policy__sampler_mismatch_nats__mean": lambda at: 0.1},
    "Updates were left out": {"policy__skipped_updates": lambda at: float(at == 30)},
    "Rewards were not finite": {
        "policy__skipped_updates": lambda at: float(at == 30),
        "reward__mean": lambda at: math.inf if at == 30 else rising(at),
    },
    "Responses could not be scored": {"reward__failed_fraction": lambda at: 0.05},
    "All rewards are equal so far": {"reward__std": [0.0]},
    "No response could be scored": {
        "reward__std": [0.0, 0.0],
        "reward__failed_fraction": [1.0, 1.0],
    },
    "Many responses are cut off": {"rollout__truncated_fraction": lambda at: 0.3},
    "Requests were cut off": {"rollout__aborted_requests": lambda at: float(at == 3)},
    "Memory did not move": {"memory__noop_releases": lambda at: 3.0},
    "The gradient is far above its limit": {"policy__grad_norm": lambda at: 30.0},
    "Sampling takes most of the time": {
        "time__generate_s": lambda at: 9.0,
        "time__step_s": lambda at: 10.0,
        "rollout__slot_occupancy": lambda at: 0.95,
    },
}

GOOD: dict[str, Curve | list[float]] = {
    "reward__mean": rising,
    "reward__max": lambda at: 1.0,
    "reward__zero_variance_group_fraction": lambda at: 0.3,
    "reward__failed_fraction": lambda at: 0.0,
    "eval__reward__mean": [0.3, 0.5, 0.48, 0.6],
    "policy__entropy_nats__mean": lambda at: 0.4 - at / 300,
    "policy__ratio__max": lambda at: 1.5,
    "policy__kl_to_old_nats__mean": lambda at: 0.001,
    "policy__kl_to_reference_nats__mean": lambda at: at / 1000,
    "policy__sampler_mismatch_nats__mean": lambda at: 1e-5,
    "policy__skipped_updates": lambda at: 0.0,
    "policy__grad_norm": lambda at: 2.5 + at % 2,
    "rollout__truncated_fraction": lambda at: 0.05,
    "rollout__aborted_requests": lambda at: 0.0,
    "time__generate_s": lambda at: 4.0,
    "time__step_s": lambda at: 10.0,
}


@pytest.mark.parametrize("title", BAD)
def test_each_rule_speaks_of_its_fault_and_of_no_other(title: str) -> None:
    assert titles(run_with(**BAD[title])) == [title]


def test_no_rule_speaks_of_a_run_that_learns() -> None:
    assert titles(run_with(**GOOD)) == []


def test_no_rule_speaks_of_a_run_that_has_just_begun() -> None:
    for rows in ([], [{"step": 1, "reward/mean": 0.0, "policy/grad_norm": 9.0}]):
        assert titles(run_of(History(rows))) == []


def test_every_rule_has_an_example() -> None:
    # Of the reward twice, of equal rewards, of the first ones, and of skipped updates.
    two_titles = 5
    error = 1
    assert len(BAD) - two_titles + error == len(RULES)


@pytest.mark.parametrize(
    ("name", "lr", "expected", "first_override"),
    [
        ("good", 1e-4, [], None),
        ("too_high", 3e-4, ["Training made the model worse"], "actor.optimizer.lr=3e-05"),
        ("slow", 3e-6, ["The reward rises slowly"], "actor.optimizer.lr=9e-06"),
        ("too_low", 1e-7, ["The reward does not rise"], "actor.optimizer.lr=3e-07"),
        ("collapsed", 1e-3, ["Training made the model worse"], "actor.optimizer.lr=0.0001"),
        (
            "reward_hacked",
            1e-4,
            ["The reward may be gamed"],
            "algorithm.kl.placement=loss algorithm.kl.coefficient=0.01",
        ),
        ("all_zero", 1e-4, ["Nearly all rewards are equal"], "mode=sft"),
    ],
)
def test_findings_of_a_recorded_run(
    name: str, lr: float, expected: list[str], first_override: str | None
) -> None:
    settings = Settings(DEFAULTS.flat | {"actor.optimizer.lr": lr})
    run = run_of(History(recorded(name)), settings=settings)
    findings = diagnose(run)
    assert [finding.title for finding in findings] == expected
    assert [override for f in findings for override in f.overrides(run)[:1]] == [
        override for override in (first_override,) if override
    ]


def test_a_wreck_without_evaluations_is_seen_by_its_reward() -> None:
    rows = [
        {name: value for name, value in row.items() if not name.startswith("eval/")}
        for row in recorded("collapsed")
    ]
    assert titles(run_of(History(rows))) == ["Training made the model worse"]


def test_a_reward_that_is_not_finite_is_not_blamed_on_the_learning_rate() -> None:
    (finding,) = diagnose(run_with(**BAD["Rewards were not finite"]))
    assert finding.remedies == ("reward.on_error=stop",)
    assert "step 31" in finding.text


def test_a_full_engine_needs_slots_and_an_idle_one_shorter_responses() -> None:
    busy = BAD["Sampling takes most of the time"]
    idle = busy | {"rollout__slot_occupancy": lambda at: 0.3}
    overrides = []
    for run in (run_with(**busy), run_with(**idle)):
        (finding,) = diagnose(run)
        overrides += finding.overrides(run)
    assert overrides == ["rollout.num_slots=256", "rollout.max_response_tokens=18"]


def test_every_remedy_can_be_typed_and_changes_something() -> None:
    now = load_config(composed())
    runs = [run_with(**curves) for curves in BAD.values()]
    remedies = {o for run in runs for finding in diagnose(run) for o in finding.overrides(run)}
    assert len(remedies) > 10
    unchanged = {"actor.compute_dtype=float32", "algorithm.num_epochs=1", "reward.on_error=stop"}
    # the default experiment is there already
    unchanged |= {"rollout.dtype=float32", "rollout.sleep=false"}
    for remedy in remedies:
        config = load_config(composed(*remedy.split()))
        assert (dataclasses.asdict(config) != dataclasses.asdict(now)) or remedy in unchanged


def test_errors_come_before_warnings_and_warnings_before_notes() -> None:
    lines = ["the run ended with an error", "Traceback", "RewardError: no"]
    curves = BAD["The gradient is far above its limit"] | BAD["Many responses are cut off"]
    findings = diagnose(run_of(history(**curves), *lines))
    assert [finding.severity for finding in findings] == ["error", "warning", "note"]
    assert findings[0].quote == "Traceback\nRewardError: no"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("hybridrl.errors.RewardError: no", ("The run ended with an error", "error")),
        ("x.RunInterrupted: SIGTERM", ("The run was stopped within a step", "note")),
    ],
)
def test_the_end_of_a_run_is_named_by_its_error_not_its_notes(
    error: str, expected: tuple[str, str]
) -> None:
    trace = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "    f()"]
    notes = ["in step 2 of 3, reward, 3.1 s after that began", "post-mortem: runs/x"]
    lines = ["the run ended with an error", *trace, "KeyError: 1", "", *trace, error, *notes]
    (finding,) = diagnose(run_of(History([]), *lines))
    assert (finding.title, finding.severity) == expected
    assert finding.text == error
