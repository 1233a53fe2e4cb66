from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from hybridrl.algorithms.kl import (
    KLCoefficient,
    KLGradient,
    absolute,
    estimate_response_kl,
    k1,
    k2,
    k3,
    kl_penalty,
)
from hybridrl.batch import jagged
from hybridrl.config.algorithm import KLConfig
from hybridrl.metrics import Mean

Estimator = Callable[[Tensor, Tensor], Tensor]

P = torch.tensor([0.5, 0.3, 0.2]).double()
Q = torch.tensor([0.2, 0.2, 0.6]).double()
nats = st.floats(-30, 0, width=32)


def true_kl(p: Tensor, q: Tensor) -> float:
    return float((p * (p / q).log()).sum())


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (k1, math.log(2)),
        (k2, math.log(2) ** 2 / 2),
        (k3, 0.5 - 1 + math.log(2)),
        (absolute, math.log(2)),
    ],
)
def test_estimates_are_what_a_pocket_calculator_says(estimator: Estimator, expected: float) -> None:
    # The policy gives the token twice the probability that the reference gives it.
    kl = estimator(torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)]))
    assert kl.item() == pytest.approx(expected, abs=1e-6)


def test_absolute_estimates_have_no_sign() -> None:
    assert absolute(torch.tensor([-2.0]), torch.tensor([-1.5])).tolist() == [0.5]


@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_are_unbiased(estimator: Estimator) -> None:
    assert (P * estimator(P.log(), Q.log())).sum().item() == pytest.approx(true_kl(P, Q))


def gradient_of_mean(
    estimator: Estimator, gradient: KLGradient = "value", *, sampled_by: Tensor = P
) -> Tensor:
    """The expected gradient of the penalty by the policy's logits, over samples of a policy."""
    logits = P.log().clone().requires_grad_()
    penalty = kl_penalty(
        logits.log_softmax(0), sampled_by.log(), Q.log(), estimator=estimator, gradient=gradient
    )
    return torch.autograd.grad((sampled_by * penalty).sum(), logits)[0]


def true_gradient() -> Tensor:
    logits = P.log().clone().requires_grad_()
    p = logits.softmax(0)
    return torch.autograd.grad((p * (p.log() - Q.log())).sum(), logits)[0]


def test_as_a_loss_only_k2_has_the_gradient_of_the_kl() -> None:
    torch.testing.assert_close(gradient_of_mean(k2), true_gradient())
    torch.testing.assert_close(gradient_of_mean(k1), torch.zeros(3).double())
    logits = P.log().clone().requires_grad_()
    (reverse,) = torch.autograd.grad(-(Q * logits.log_softmax(0)).sum(), logits)
    torch.testing.assert_close(gradient_of_mean(k3), reverse)  # that of KL(reference || policy)


@pytest.mark.parametrize("estimator", [k1, k2, k3, absolute])
def test_a_straight_through_penalty_has_the_gradient_of_the_kl(estimator: Estimator) -> None:
    torch.testing.assert_close(gradient_of_mean(estimator, "k2"), true_gradient())
    penalty = kl_penalty(P.log(), Q.log(), Q.log(), estimator=estimator, gradient="k2")
    torch.testing.assert_close(penalty, estimator(P.log(), Q.log()))


def test_k3_times_the_ratio_has_that_gradient_from_other_samples() -> None:
    sampler = torch.tensor([0.1, 0.6, 0.3]).double()
    torch.testing.assert_close(gradient_of_mean(k3, "ratio", sampled_by=sampler), true_gradient())
    penalty = kl_penalty(P.log(), sampler.log(), Q.log(), estimator=k3, gradient="ratio")
    assert (sampler * penalty).sum().item() == pytest.approx(true_kl(P, Q))


def test_a_penalty_gives_old_and_reference_no_gradient() -> None:
    old_T, reference_T = (torch.tensor([-1.0], requires_grad=True) for _ in range(2))
    current_T = torch.tensor([-2.0], requires_grad=True)
    gradients: tuple[KLGradient, ...] = ("value", "k2", "ratio")
    for gradient in gradients:
        kl_penalty(current_T, old_T, reference_T, estimator=k3, gradient=gradient).backward()
    assert old_T.grad is None
    assert reference_T.grad is None


@example([(-1000.0, -0.1)])  # far below the reference, and far above
@example([(-0.1, -1000.0)])
@given(st.lists(st.tuples(nats, nats), min_size=1))
def test_k3_is_never_negative_and_always_finite(pairs: list[tuple[float, float]]) -> None:
    logprobs_T, reference_logprobs_T = torch.tensor(pairs).unbind(1)
    kl = k3(logprobs_T, reference_logprobs_T)
    assert (kl >= 0).all()
    assert kl.isfinite().all()


def test_k3_keeps_its_digits_where_both_policies_nearly_agree() -> None:
    kl = k3(torch.tensor([-1.0]), torch.tensor([-1.001]))
    assert kl.item() == pytest.approx(0.001**2 / 2, rel=1e-2)


def test_only_response_tokens_are_estimated() -> None:
    mask = jagged([torch.tensor([False, True, True]), torch.tensor([False]), torch.tensor([True])])
    old = jagged([torch.tensor([-9.0, -1.0, -1.0]), torch.tensor([-9.0]), torch.tensor([-2.0])])
    nan = float("nan")
    reference = jagged([torch.tensor([nan, -2.0, -3.0]), torch.tensor([nan]), torch.tensor([-2.0])])
    kl_BL = estimate_response_kl(old, reference, mask, estimator=k1)
    assert kl_BL.values().tolist() == [0.0, 1.0, 2.0, 0.0, 0.0]


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
