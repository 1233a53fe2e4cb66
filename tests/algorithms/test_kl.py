from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algorithms.kl import estimate_kl, subtract_sequence_kl
from hybridrl.batch import jagged

P = torch.tensor([0.5, 0.3, 0.2]).double()
Q = torch.tensor([0.2, 0.2, 0.6]).double()
nats = st.floats(-30, 0, width=32)


def true_kl(p: torch.Tensor, q: torch.Tensor) -> float:
    return float((p * (p / q).log()).sum())


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 0.5 - 1 + math.log(2))],
)
def test_estimates_are_what_a_pocket_calculator_says(estimator: str, expected: float) -> None:
    # The policy gives the token twice the probability that the reference gives it.
    kl = estimate_kl(
        torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)]), estimator=estimator
    )
    assert kl.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: str) -> None:
    expectation = (P * estimate_kl(P.log(), Q.log(), estimator=estimator)).sum().item()
    assert expectation == pytest.approx(true_kl(P, Q))


def gradient_of_mean(estimator: str) -> torch.Tensor:
    """The expected gradient of the estimate, by the policy's logits, under the policy itself."""
    logits = P.log().clone().requires_grad_()
    estimate = estimate_kl(logits.log_softmax(0), Q.log(), estimator=estimator)
    return torch.autograd.grad((P * estimate).sum(), logits)[0]


def test_as_a_loss_only_k2_has_the_gradient_of_the_kl() -> None:
    logits = P.log().clone().requires_grad_()
    p = logits.softmax(0)
    (true_gradient,) = torch.autograd.grad((p * (p.log() - Q.log())).sum(), logits)
    torch.testing.assert_close(gradient_of_mean("k2"), true_gradient)
    torch.testing.assert_close(gradient_of_mean("k1"), torch.zeros(3).double())
    (reverse,) = torch.autograd.grad(-(Q * logits.log_softmax(0)).sum(), logits)
    torch.testing.assert_close(gradient_of_mean("k3"), reverse)  # that of KL(reference || policy)


@given(st.lists(st.tuples(nats, nats), min_size=1))
def test_k3_is_never_negative_and_always_finite(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = torch.tensor(pairs).unbind(1)
    kl = estimate_kl(ours, theirs, estimator="k3")
    assert (kl >= 0).all()
    assert kl.isfinite().all()


def test_k3_keeps_its_digits_where_both_policies_nearly_agree() -> None:
    kl = estimate_kl(torch.tensor([-1.0]), torch.tensor([-1.001]), estimator="k3")
    assert kl.item() == pytest.approx(0.001**2 / 2, rel=1e-2)


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'k4'; set algorithm.kl.estimator"):
        estimate_kl(torch.zeros(1), torch.zeros(1), estimator="k4")


def test_the_reward_is_charged_for_response_tokens_alone() -> None:
    mask = jagged([torch.tensor([False, True, True]), torch.tensor([False]), torch.tensor([True])])
    old = jagged([torch.tensor([-9.0, -1.0, -1.0]), torch.tensor([-9.0]), torch.tensor([-2.0])])
    reference = jagged(
        [torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([0.0]), torch.tensor([-2.0])]
    )
    charged = subtract_sequence_kl(
        torch.tensor([1.0, 1.0, 0.5]),
        old_logprobs_BL=old,
        reference_logprobs_BL=reference,
        response_mask_BL=mask,
        estimator="k1",
        coefficient=0.1,
    )
    assert charged.tolist() == pytest.approx([1.0 - 0.1 * (1 + 2), 1.0, 0.5])
