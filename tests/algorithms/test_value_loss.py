from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algorithms.value_loss import clipped_value_loss

number = st.integers(-24, 24).map(lambda n: n / 8)


def loss_and_slope(value: float, *, old: float, target: float, clip: float) -> tuple[float, float]:
    values_T = torch.tensor([value], requires_grad=True)
    loss = clipped_value_loss(
        values_T,
        old_values_T=torch.tensor([old]),
        returns_T=torch.tensor([target]),
        value_clip=clip,
    )
    loss.losses_T.sum().backward()
    assert values_T.grad is not None
    if value != target:  # there the slope is 0 anyway
        assert bool(loss.is_clipped_T[0]) == (values_T.grad.item() == 0.0)
    return loss.losses_T.item(), values_T.grad.item()


@given(number, number, number)
def test_without_a_clip_it_is_half_the_squared_error(
    value: float, old: float, target: float
) -> None:
    loss, slope = loss_and_slope(value, old=old, target=target, clip=0.0)
    assert loss == pytest.approx((value - target) ** 2 / 2, rel=1e-5, abs=1e-6)
    assert slope == pytest.approx(value - target, rel=1e-5, abs=1e-6)


@given(number, number, number, st.sampled_from([0.25, 0.5, 2.0]))
def test_the_clip_never_makes_a_loss_smaller(
    value: float, old: float, target: float, clip: float
) -> None:
    free, _ = loss_and_slope(value, old=old, target=target, clip=0.0)
    clipped, _ = loss_and_slope(value, old=old, target=target, clip=clip)
    assert clipped >= free


def test_clipped_value_near_its_return_has_no_gradient() -> None:
    assert loss_and_slope(0.5, old=0.0, target=1.0, clip=0.25) == (0.28125, 0.0)


def test_value_moved_the_wrong_way_keeps_its_gradient() -> None:
    assert loss_and_slope(-0.5, old=0.0, target=1.0, clip=0.25) == (1.125, -1.5)


def test_value_within_the_clip_learns_unclipped() -> None:
    loss, slope = loss_and_slope(0.25, old=0.125, target=1.0, clip=0.25)
    assert (loss, slope) == (0.28125, -0.75)
