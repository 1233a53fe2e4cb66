from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest

from hybridrl.config.load import load_config
from hybridrl.main import compose
from hybridrl.report.evidence import Evidence, Finding
from hybridrl.report.findings import RULES, find
from hybridrl.report.history import History
from hybridrl.report.settings import read_defaults

Curve = Callable[[int], float]

NUM_STEPS = 60
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


def titles(evidence: Evidence) -> list[str]:
    return [finding.title for finding in find(evidence)]


def seen(**curves: Curve | list[float]) -> list[str]:
    return titles(Evidence(history(**curves), DEFAULTS))


def rising(at: int) -> float:
    return 0.2 + 0.01 * at + WOBBLE[at % 5]


def flat(at: int) -> float:
    return 0.3 + WOBBLE[at % 5]


BAD: dict[str, dict[str, Curve | list[float]]] = {
    "The reward does not rise": {"reward__mean": flat},
    "The reward has fallen": {"reward__mean": lambda at: rising(60 - at)},
    "Nearly all groups are flat": {
        "reward__flat_group_fraction": lambda at: min(1.0, 0.5 + at / 40),
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
    "Many responses are cut off": {"rollout__truncated_fraction": lambda at: at / 100},
    "Requests were cut off": {"rollout__aborted_requests": lambda at: float(at == 3)},
    "Memory did not move": {"memory__unmoved_releases": lambda at: 3.0},
    "The gradient is clipped nearly always": {"policy__grad_norm": lambda at: 3.0},
    "Sampling takes most of the time": {
        "time__generate_s": lambda at: 9.0,
        "time__step_s": lambda at: 10.0,
        "rollout__slot_occupancy": lambda at: 0.95,
    },
}

GOOD: dict[str, Curve | list[float]] = {
    "reward__mean": rising,
    "reward__max": lambda at: 1.0,
    "reward__flat_group_fraction": lambda at: 0.3,
    "reward__failed_fraction": lambda at: 0.0,
    "eval__reward__mean": [0.3, 0.5, 0.48, 0.6],
    "policy__entropy_nats__mean": lambda at: 0.4 - at / 300,
    "policy__ratio__max": lambda at: 1.5,
    "policy__kl_to_old_nats__mean": lambda at: 0.001,
    "policy__kl_to_reference_nats__mean": lambda at: at / 1000,
    "policy__sampler_mismatch_nats__mean": lambda at: 1e-5,
    "policy__skipped_updates": lambda at: 0.0,
    "policy__grad_norm": lambda at: 0.5 + at % 2,
    "rollout__truncated_fraction": lambda at: 0.05,
    "rollout__aborted_requests": lambda at: 0.0,
    "time__generate_s": lambda at: 4.0,
    "time__step_s": lambda at: 10.0,
}


@pytest.mark.parametrize("title", BAD)
def test_each_rule_speaks_of_its_fault_and_of_no_other(title: str) -> None:
    assert seen(**BAD[title]) == [title]


def test_no_rule_speaks_of_a_run_that_learns() -> None:
    assert seen(**GOOD) == []


def test_no_rule_speaks_of_a_run_that_has_just_begun() -> None:
    for rows in ([], [{"step": 1, "reward/mean": 0.0, "policy/grad_norm": 9.0}]):
        assert titles(Evidence(History(rows), DEFAULTS)) == []


def test_every_rule_has_an_example() -> None:
    both_of_the_reward, both_of_skipped_updates, error = 1, 1, 1
    assert len(BAD) - both_of_the_reward - both_of_skipped_updates + error == len(RULES)


def test_a_reward_that_is_not_finite_is_not_blamed_on_the_learning_rate() -> None:
    (finding,) = find(Evidence(history(**BAD["Rewards were not finite"]), DEFAULTS))
    assert finding.remedies == ("reward.on_error=stop",)
    assert "step 31" in finding.text


def test_a_task_that_is_solved_is_no_warning() -> None:
    curves = {
        "reward__flat_group_fraction": lambda at: 0.95,
        "reward__mean": lambda at: 0.99,
        "reward__max": lambda at: 1.0,
    }
    (finding,) = find(Evidence(history(**curves), DEFAULTS))
    assert finding.severity == "note"
    assert "too easy" in finding.text


def test_a_full_engine_is_told_to_take_more_slots_and_an_idle_one_shorter_responses() -> None:
    busy = BAD["Sampling takes most of the time"]
    idle = busy | {"rollout__slot_occupancy": lambda at: 0.3}
    keys = []
    for curves in (busy, idle):
        (finding,) = find(Evidence(history(**curves), DEFAULTS))
        keys.append(finding.remedies[0].partition("=")[0])
    assert keys == ["rollout.num_slots", "rollout.max_response_tokens"]


def _all_findings() -> list[Finding]:
    return [f for curves in BAD.values() for f in find(Evidence(history(**curves), DEFAULTS))]


def test_every_remedy_can_be_typed_and_changes_something() -> None:
    now = load_config(compose([]))
    remedies = {remedy for finding in _all_findings() for remedy in finding.remedies}
    assert len(remedies) > 10
    unchanged = {"actor.compute_dtype=float32", "algorithm.num_epochs=1", "reward.on_error=stop"}
    # the default experiment is there already
    unchanged |= {"rollout.dtype=float32", "rollout.sleep=false"}
    for remedy in remedies:
        config = load_config(compose(remedy.split()))
        assert (dataclasses.asdict(config) != dataclasses.asdict(now)) or remedy in unchanged


def test_errors_come_before_warnings_and_warnings_before_notes() -> None:
    lines = ["the run ended with an error", "Traceback", "RewardError: no"]
    curves = BAD["The gradient is clipped nearly always"] | BAD["Many responses are cut off"]
    found = find(Evidence(history(**curves), DEFAULTS, lines))
    assert [finding.severity for finding in found] == ["error", "warning", "note"]
    assert found[0].quote == "Traceback\nRewardError: no"
