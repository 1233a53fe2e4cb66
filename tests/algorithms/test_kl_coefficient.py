from __future__ import annotations

import math
from typing import Literal

import pytest

from hybridrl.algorithms.kl import KLCoefficient
from hybridrl.config.algorithm import KLConfig
from hybridrl.metrics import Mean


def coefficient(
    placement: Literal["loss", "reward"] = "loss", *, target_nats: float | None = 0.1
) -> KLCoefficient:
    config = KLConfig(
        placement=placement,
        estimator="k3",
        gradient="value",
        coefficient=0.01,
        target_nats=target_nats,
    )
    return KLCoefficient(config, num_rows=1000)


def test_a_step_without_tokens_leaves_the_coefficient() -> None:
    kl = coefficient()
    assert kl.adapt({}) == {"policy/kl_coefficient": Mean(0.01)}
    assert kl.value == 0.01


def test_a_fixed_coefficient_does_not_move() -> None:
    kl = coefficient(target_nats=None)
    assert kl.adapt({"policy/kl_to_reference_nats/mean": Mean(9.0)}) == {}
    assert kl.value == 0.01
    kl.restore(0.5)  # of a run that adapted it, before the recipe was changed
    assert kl.value == 0.01


def test_a_penalty_in_the_reward_is_none_in_the_loss() -> None:
    assert coefficient("loss").in_loss == 0.01
    assert coefficient("reward").in_loss == 0.0


def test_a_resumed_coefficient_goes_on_where_it_was() -> None:
    kl = coefficient()
    kl.restore(0.25)
    assert kl.value == 0.25
    kl.restore(None)  # a checkpoint from before there were targets
    assert kl.value == 0.01


@pytest.mark.parametrize(
    ("placement", "measured"),
    [("loss", "policy/kl_to_reference_nats/mean"), ("reward", "reward/kl_nats/mean")],
)
@pytest.mark.parametrize(
    ("kl_nats", "expected"),
    [
        (0.11, 0.5 * (1 + 0.1 * 1000 / 10_000)),
        (9.0, 0.5 * (1 + 0.2 * 1000 / 10_000)),  # the error counts up to a fifth
        (0.0, 0.5 * (1 - 0.2 * 1000 / 10_000)),
        (0.1, 0.5),
        (math.nan, 0.5),
        (math.inf, 0.5),
    ],
)
def test_a_coefficient_moves_with_the_kl_of_its_placement_towards_the_target(
    placement: Literal["loss", "reward"], measured: str, kl_nats: float, expected: float
) -> None:
    kl = coefficient(placement)
    kl.restore(0.5)
    used = kl.adapt({measured: Mean(kl_nats)})
    assert used == {"policy/kl_coefficient": Mean(0.5)}  # of the step that is over
    assert kl.value == pytest.approx(expected)
