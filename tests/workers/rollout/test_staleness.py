"""The ages of tokens: their mean, their maximum, and the histogram, over one rank or several."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.metrics import check_declared, merge
from hybridrl.workers.rollout.assemble import describe_staleness

AGES = st.lists(st.integers(0, 12), min_size=1, max_size=30)


def test_each_age_has_its_place_in_the_histogram() -> None:
    """A fraction of a step counts as the step that it began."""
    metrics = describe_staleness(torch.tensor([0.5, 1, 1, 2, 3.5, 4, 7, 7, 8, 900]).double())
    shares = {
        name.rpartition("/")[2]: metric.value
        for name, metric in metrics.items()
        if "fraction" in name
    }
    assert shares == {"0": 0.1, "1": 0.2, "2": 0.1, "3": 0.1, "4_to_7": 0.3, "8_or_more": 0.2}
    assert metrics["rollout/staleness_steps/mean"].value == pytest.approx(93.4)
    assert metrics["rollout/staleness_steps/max"].value == 900
    check_declared(metrics)


@given(AGES, AGES)
def test_ranks_together_have_the_histogram_of_all_tokens(
    first: list[int], second: list[int]
) -> None:
    parts = [describe_staleness(torch.tensor(ages).double()) for ages in (first, second)]
    merged, joint = merge(parts), describe_staleness(torch.tensor(first + second).double())
    assert {name: one.value for name, one in merged.items()} == {
        name: one.value for name, one in joint.items()
    }
    shares = [one.value for name, one in merged.items() if "fraction" in name]
    assert abs(sum(shares) - 1) < 1e-12
