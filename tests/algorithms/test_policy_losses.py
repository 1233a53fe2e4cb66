from __future__ import annotations

import math

import pytest
import torch

from hybridrl.algorithms.policy_losses import PolicyLoss
from hybridrl.algorithms.policy_losses.ppo import ppo_clip


def surrogate(ratios: list[float], advantages: list[float]) -> tuple[PolicyLoss, torch.Tensor]:
    current_T = torch.tensor(ratios).log().requires_grad_()
    terms = ppo_clip(
        current_T,
        torch.zeros(len(ratios)),
        torch.tensor(advantages),
        clip_low=0.2,
        clip_high=0.3,
    )
    return terms, current_T


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on-policy: the gradient of REINFORCE
        (1.25, 2.0, -2.5, -2.5),  # within the higher clip
        (1.5, 2.0, -2.6, 0.0),  # a good token, favoured enough
        (0.5, 2.0, -1.0, -1.0),  # a good token that was pushed away comes back unclipped
        (0.5, -2.0, 1.6, 0.0),  # a bad token, avoided enough
        (1.5, -2.0, 3.0, 3.0),  # a bad token that was favoured is pushed with full force
    ],
)
def test_loss_and_gradient_equal_hand_computed_values(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    terms, current_T = surrogate([ratio], [advantage])
    terms.losses_T.sum().backward()
    assert terms.losses_T.item() == pytest.approx(loss, rel=1e-6)
    assert current_T.grad is not None
    assert current_T.grad.item() == pytest.approx(gradient, rel=1e-6)


def test_only_tokens_whose_gradient_was_cut_count_as_clipped() -> None:
    terms, _ = surrogate([0.5, 0.5, 1.5, 1.5, 1.0], [-1.0, 1.0, -1.0, 1.0, 1.0])
    assert terms.is_clipped_low_T.tolist() == [True, False, False, False, False]
    assert terms.is_clipped_high_T.tolist() == [False, False, False, True, False]


def test_a_ratio_past_all_bounds_stays_finite() -> None:
    terms = ppo_clip(
        torch.tensor([0.0]),
        torch.tensor([-1000.0]),
        torch.tensor([-1.0]),
        clip_low=0.2,
        clip_high=0.2,
    )
    assert terms.losses_T.item() == pytest.approx(math.exp(20), rel=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "two_sided", "loss", "gradient", "is_clipped"),
    [
        (4.0, -2.0, False, 6.0, 0.0, True),  # a bad token far beyond the bound
        (2.5, -2.0, False, 5.0, 5.0, False),
        (4.0, 2.0, False, -2.6, 0.0, True),  # a good one is cut by clip_high
        (4.0, -2.0, True, 6.0, 0.0, True),
        (4.0, 2.0, True, -2.6, 0.0, True),
    ],
)
def test_dual_clip_bounds_the_loss_of_bad_tokens(
    ratio: float, advantage: float, two_sided: bool, loss: float, gradient: float, is_clipped: bool
) -> None:
    current_T = torch.tensor([ratio]).log().requires_grad_()
    terms = ppo_clip(
        current_T,
        torch.zeros(1),
        torch.tensor([advantage]),
        clip_high=0.3,
        dual_clip=3.0,
        two_sided=two_sided,
    )
    (grad_T,) = torch.autograd.grad(terms.losses_T.sum(), current_T)
    assert (terms.losses_T.item(), grad_T.item()) == pytest.approx((loss, gradient), rel=1e-6)
    assert terms.is_clipped_high_T.tolist() == [is_clipped]


def test_a_dual_clip_of_unmoved_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dual_clip=0\.9 would cut .* set it above 1"):
        ppo_clip(torch.zeros(1), torch.zeros(1), torch.ones(1), dual_clip=0.9)
