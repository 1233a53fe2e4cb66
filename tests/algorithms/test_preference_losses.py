"""Losses of preferences, of reward models and of values."""

from __future__ import annotations

from math import exp, log, log1p
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from hybridrl.algorithms import preference_losses
from hybridrl.algorithms.load import Part
from hybridrl.algorithms.preference_losses import PreferenceLoss
from hybridrl.algorithms.value_loss import bradley_terry, clipped_value_loss
from hybridrl.config.algorithm import DpoConfig
from hybridrl.config.functions.parts import PREFERENCE_LOSS
from hybridrl.errors import TrainingError
from hybridrl.workers.train.losses import PreferenceObjective

# Sums over 2 and 4 tokens, of the policy and of the reference: log-ratios 1 and -2.
PAIR = (
    torch.tensor([[-3.0, -6.0]], dtype=torch.float64),
    torch.tensor([[-4.0, -4.0]], dtype=torch.float64),
    torch.tensor([[2, 4]]),
)
C, R, DELTA = 0.5, -1.0, 1.5  # implicit rewards with beta 0.5


def s(x: float) -> float:
    return 1 / (1 + exp(-x))


def odds(mean_logprob: float) -> float:
    return exp(mean_logprob) / (1 - exp(mean_logprob))


HALF = {"beta": 0.5}
BY_HAND: dict[str, tuple[dict[str, Any], float]] = {
    "sigmoid": (HALF, -log(s(DELTA))),
    "robust": (
        {**HALF, "label_smoothing": 0.1},
        (-0.9 * log(s(DELTA)) + 0.1 * log(s(-DELTA))) / 0.8,
    ),
    "hinge": ({"beta": 0.2}, 1 - 0.2 * 3),
    "ipo": (HALF, (1 / 2 + 2 / 4 - 1) ** 2),
    "sigmoid_norm": (HALF, -log(s(0.5 * (1 / 2 + 2 / 4)))),
    "exo_pair": (
        {**HALF, "label_smoothing": 0.1},
        s(DELTA) * log(s(DELTA) / 0.9) + s(-DELTA) * log(s(-DELTA) / 0.1),
    ),
    "nca_pair": (HALF, -log(s(C)) - (log(s(-C)) + log(s(-R))) / 2),
    "sppo_hard": (HALF, (1 - 1) ** 2 + (-2 + 1) ** 2),
    "apo_zero": (HALF, 1 - s(C) + s(R)),
    "apo_down": (HALF, s(C) + 1 - s(DELTA)),
    "simpo": ({"beta": 2.0, "gamma": 0.5}, -log(s(2 * (-3 / 2 + 6 / 4) - 0.5))),
    "orpo": (HALF, 3 / 2 - 0.5 * log(s(log(odds(-3 / 2) / odds(-6 / 4))))),
}


def test_every_loss_is_held_to_a_case_by_hand() -> None:
    assert BY_HAND.keys() == PREFERENCE_LOSS.built_in.keys()


@pytest.mark.parametrize("name", BY_HAND)
def test_a_pair_has_the_loss_of_its_formula(name: str) -> None:
    numbers, expected = BY_HAND[name]
    objective = PreferenceObjective(Part.of(vars(preference_losses)[name], **numbers))
    losses_P, metrics = objective(*PAIR)
    assert losses_P.item() == pytest.approx(expected, rel=1e-12)
    is_free = name in ("simpo", "orpo")
    assert metrics["preference/accuracy"].item() == (0.5 if is_free else 1.0)  # 0.5: a tie
    ratio = -1.5 if is_free else 1.0
    assert metrics["preference/chosen_reward/mean"].item() == numbers["beta"] * ratio


@pytest.mark.parametrize("name", BY_HAND)
def test_a_loss_has_a_finite_gradient_of_its_value(name: str) -> None:
    part = Part.of(vars(preference_losses)[name])
    torch.manual_seed(0)

    def losses(policy_P2: Tensor) -> Tensor:
        reference_P2 = torch.full((5, 2), -4.0).double()
        return PreferenceObjective(part, 0.3)(policy_P2, reference_P2, LENGTHS)[0]

    policy_P2 = -1 - 8 * torch.rand(5, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(losses, (policy_P2.requires_grad_(),))
    far = torch.tensor([[0.0, -4e4], [-4e4, 0.0]]).repeat(3, 1)[:5].requires_grad_()
    losses(far).sum().backward()
    assert far.grad is not None
    assert far.grad.isfinite().all()


LENGTHS = torch.tensor([[1, 2], [3, 3], [2, 5], [4, 1], [2, 2]])


def test_label_smoothing_of_the_sigmoid_loss_is_cdpo() -> None:
    part = Part.of(preference_losses.sigmoid, beta=0.5, label_smoothing=0.2)
    losses_P, _ = PreferenceObjective(part)(*PAIR)
    assert losses_P.item() == pytest.approx(-0.8 * log(s(DELTA)) - 0.2 * log(s(-DELTA)))


def test_ipo_may_take_sums_as_its_paper_writes() -> None:
    part = Part.of(preference_losses.ipo, beta=0.5, per_token=False)
    assert PreferenceObjective(part)(*PAIR)[0].item() == pytest.approx((3 - 1) ** 2)


def test_the_likelihood_of_the_chosen_answer_is_added() -> None:
    part = Part.of(preference_losses.sigmoid, beta=0.5)
    losses_P, metrics = PreferenceObjective(part, 2.0)(*PAIR)
    assert metrics["loss/supervised_nats"].item() == 1.5
    assert losses_P.item() == pytest.approx(-log(s(DELTA)) + 2 * 1.5)


def test_an_own_loss_may_return_losses_alone() -> None:
    def own(chosen_logratios_P: Tensor, rejected_logratios_P: Tensor) -> Tensor:
        return rejected_logratios_P - chosen_logratios_P

    losses_P, metrics = PreferenceObjective(Part.of(own))(*PAIR)
    assert (losses_P.item(), metrics["preference/margin/mean"].item()) == (-3.0, 3.0)

    def wrong(chosen_logprobs_P: Tensor) -> Tensor:
        return chosen_logprobs_P.sum()

    with pytest.raises(TrainingError, match=r"returned \[\]; return the loss of each of 1 pairs"):
        PreferenceObjective(Part.of(wrong))(*PAIR)


@pytest.mark.parametrize(("loss", "needs"), [("sigmoid", True), ("simpo", False), ("orpo", False)])
def test_a_loss_that_reads_no_log_ratios_needs_no_reference(*, loss: str, needs: bool) -> None:
    section = DpoConfig(loss=loss, beta=None, loss_args={}, sft_coefficient=0.0)
    assert section.needs_reference == needs


def test_rewards_carry_no_gradient() -> None:
    policy_P2 = PAIR[0].clone().requires_grad_()
    result = preference_losses.sigmoid(policy_P2[:, 0], policy_P2[:, 1])
    assert isinstance(result, PreferenceLoss)
    assert not result.chosen_rewards_P.requires_grad


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
    expected = [log1p(exp(-gap)) for gap in (2.0, -2.0, 0.0)]
    assert bradley_terry(chosen, rejected).tolist() == pytest.approx(expected)
    margins = torch.tensor([1.0, 0.0, 3.0])
    expected = [log1p(exp(-gap)) for gap in (1.0, -2.0, -3.0)]
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
