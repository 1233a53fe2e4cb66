"""The loss of a reward model, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from hybridrl.algorithms.value_loss import bradley_terry


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


def test_gradients_are_those_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = [
        torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    ]
    margins = torch.rand(4, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda c, r: bradley_terry(c, r, margins_P=margins, center_coefficient=0.3), scores
    )
