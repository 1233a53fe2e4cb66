from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from hybridrl.algorithms.value_loss import bradley_terry, clipped_value_loss

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


@example(value=0.5, old=0.0, target=1.0, clip=0.25)  # clipped near its return: no gradient
@example(value=-0.5, old=0.0, target=1.0, clip=0.25)  # moved the wrong way: keeps its gradient
@given(number, number, number, st.sampled_from([0.0, 0.25, 0.5, 2.0]))
def test_the_loss_is_half_the_larger_squared_error_of_the_value_and_of_the_clipped_one(
    value: float, old: float, target: float, clip: float
) -> None:
    near = min(max(value, old - clip), old + clip) if clip else value
    free, clipped = ((each - target) ** 2 / 2 for each in (value, near))
    assume(near == value or free != clipped)  # at a tie there is no one slope
    loss, slope = loss_and_slope(value, old=old, target=target, clip=clip)
    assert loss == pytest.approx(max(free, clipped), rel=1e-5, abs=1e-6)
    assert slope == pytest.approx(0.0 if clipped > free else value - target, rel=1e-5, abs=1e-6)


def test_the_loss_is_that_of_bradley_and_terry() -> None:
    chosen, rejected = torch.tensor([2.0, -1.0, 0.5]), torch.tensor([0.0, 1.0, 0.5])
    expected = [math.log1p(math.exp(-gap)) for gap in (2.0, -2.0, 0.0)]
    assert bradley_terry(chosen, rejected).tolist() == pytest.approx(expected)
    margins = torch.tensor([1.0, 0.0, 3.0])
    expected = [math.log1p(math.exp(-gap)) for gap in (1.0, -2.0, -3.0)]
    assert bradley_terry(chosen, rejected, margins_P=margins).tolist() == pytest.approx(expected)
    centred = bradley_terry(chosen, rejected, center_coefficient=0.1)
    added = (centred - bradley_terry(chosen, rejected)).tolist()
    assert added == pytest.approx([0.4, 0.0, 0.1])


def test_far_scores_neither_overflow_nor_lose_their_gradient() -> None:
    chosen = torch.tensor([-500.0, 500.0], requires_grad=True)
    losses = bradley_terry(chosen, torch.tensor([500.0, -500.0]))
    losses.sum().backward()
    assert losses.tolist() == [1000.0, 0.0]
    assert chosen.grad is not None
    assert chosen.grad.tolist() == [-1.0, 0.0]


def test_gradients_of_pairs_are_those_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = [
        torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    ]
    margins = torch.rand(4, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda c, r: bradley_terry(c, r, margins_P=margins, center_coefficient=0.3), scores
    )
