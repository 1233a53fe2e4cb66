from __future__ import annotations

from statistics import fmean

import pytest
import torch

from hybridrl.metrics import Mean, check_declared
from hybridrl.trainer.step_metrics import describe_lengths, effective_samples
from tests.trainer.rollouts import rollouts_of


@pytest.mark.shows("4.20")
def test_a_response_that_ends_in_a_loop_counts_as_repeating() -> None:
    generator = torch.Generator().manual_seed(0)
    varied = torch.randint(50_000, (600,), generator=generator)
    looping = torch.cat([varied, varied[:100].repeat(6), torch.tensor([1])])
    looping[-50] = 0  # not to the letter
    short = varied[:10].repeat(20)
    rows = [varied, looping, short, varied % 2]  # few different tokens
    masks = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    rollouts = rollouts_of(rows, masks, [0] * 4)
    metrics = describe_lengths(rollouts)
    assert metrics["rollout/repetition_fraction"].value == 0.25
    check_declared(metrics)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([2.0, 2.0, 2.0], 1.0), ([1.0, 0.0, 0.0, 0.0], 0.25), ([3.0, 1.0], 0.8), ([0.0], 0.0)],
)
def test_effective_samples_are_a_fraction(weights: list[float], expected: float) -> None:
    mean_square = fmean(weight**2 for weight in weights)
    metrics = effective_samples(
        {
            "policy/sampler_ratio/mean": Mean(fmean(weights)),
            "policy/sampler_chi_square/mean": Mean(mean_square - 1),
        }
    )
    assert metrics["policy/effective_sample_fraction"].value == pytest.approx(expected)
