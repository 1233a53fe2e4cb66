from __future__ import annotations

import math

import pytest
import torch

from hybridrl.algorithms.policy_loss import ClippedSurrogate, clipped_surrogate


def surrogate(
    ratios: list[float], advantages: list[float]
) -> tuple[ClippedSurrogate, torch.Tensor]:
    current_T = torch.tensor(ratios).log().requires_grad_()
    terms = clipped_surrogate(
        current_T,
        old_logprobs_T=torch.zeros(len(ratios)),
        advantages_T=torch.tensor(advantages),
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
    terms = clipped_surrogate(
        torch.tensor([0.0]),
        old_logprobs_T=torch.tensor([-1000.0]),
        advantages_T=torch.tensor([-1.0]),
        clip_low=0.2,
        clip_high=0.2,
    )
    assert terms.losses_T.item() == pytest.approx(math.exp(20), rel=1e-5)
