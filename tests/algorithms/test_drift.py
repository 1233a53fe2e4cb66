"""Drift is measured over tokens, and its cause is what makes it go away."""

from __future__ import annotations

import pytest
import torch

from hybridrl.algorithms.drift import Cause, Drift, DriftMeasurement, attribute_drift, measure_drift

NONE, SMALL, LARGE = Drift(0.0, 0.0), Drift(0.01, 0.05), Drift(0.2, 0.9)


def evidence(
    *, sampled: Drift = SMALL, greedy: Drift = SMALL, foreign: int = 0
) -> DriftMeasurement:
    return DriftMeasurement(as_sampled=sampled, greedy=greedy, num_foreign_ids=foreign)


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (evidence(), Cause.WEIGHTS),  # it went when they were sent again
        (evidence(sampled=LARGE), Cause.SAMPLING),
        (evidence(sampled=LARGE, greedy=LARGE), Cause.KERNELS),
        (evidence(greedy=LARGE), Cause.KERNELS),
        (evidence(sampled=LARGE, greedy=LARGE, foreign=1), Cause.TOKENS),
    ],
)
def test_drift_cause_follows_by_elimination(found: DriftMeasurement, cause: Cause) -> None:
    assert attribute_drift(found, limit_nats=0.1) is cause


def test_the_limit_itself_is_within() -> None:
    assert Drift(0.1, 0.1).is_within(0.1)
    assert not Drift(0.1, 0.11).is_within(0.1)


def test_mean_and_largest_distance_are_taken_over_tokens() -> None:
    drift = measure_drift(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -2.5, -2.0]))
    assert drift == Drift(pytest.approx(0.5), 1.0)
    assert str(drift) == "mean 0.5, max 1 nats"
    assert measure_drift(torch.zeros(0), torch.zeros(0)) == NONE


@pytest.mark.parametrize("lost", [float("nan"), float("-inf")])
def test_what_is_not_a_number_is_never_within(lost: float) -> None:
    drift = measure_drift(torch.tensor([-1.0, lost]), torch.tensor([-1.0, -1.0]))
    assert not drift.is_within(1e9)
