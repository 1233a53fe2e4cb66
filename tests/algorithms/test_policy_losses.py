from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridrl.algorithms.policy_losses.ppo import ppo_clip

DUAL = {"dual_clip": 3.0}
TWO_SIDED = {"dual_clip": 3.0, "two_sided": True}


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, {}, -2.0, -2.0, ""),  # on-policy: the gradient of REINFORCE
        (1.25, 2.0, {}, -2.5, -2.5, ""),  # within the higher clip
        (1.5, 2.0, {}, -2.6, 0.0, "high"),  # a good token, favoured enough
        (0.5, 2.0, {}, -1.0, -1.0, ""),  # a good token that was pushed away comes back unclipped
        (0.5, -2.0, {}, 1.6, 0.0, "low"),  # a bad token, avoided enough
        (1.5, -2.0, {}, 3.0, 3.0, ""),  # a bad token that was favoured is pushed with full force
        (4.0, -2.0, DUAL, 6.0, 0.0, "high"),  # a bad token far beyond the bound
        (2.5, -2.0, DUAL, 5.0, 5.0, ""),
        (4.0, 2.0, DUAL, -2.6, 0.0, "high"),  # a good one is cut by clip_high
        (4.0, -2.0, TWO_SIDED, 6.0, 0.0, "high"),
        (4.0, 2.0, TWO_SIDED, -2.6, 0.0, "high"),
    ],
)
def test_a_token_counts_as_clipped_where_its_gradient_was_cut(
    ratio: float,
    advantage: float,
    options: dict[str, Any],
    loss: float,
    gradient: float,
    clipped: str,
) -> None:
    current_T = torch.tensor([ratio]).log().requires_grad_()
    gains_T = torch.tensor([advantage])
    terms = ppo_clip(current_T, torch.zeros(1), gains_T, clip_low=0.2, clip_high=0.3, **options)
    (grad_T,) = torch.autograd.grad(terms.losses_T.sum(), current_T)
    assert (terms.losses_T.item(), grad_T.item()) == pytest.approx((loss, gradient), rel=1e-6)
    assert terms.is_clipped_low_T.tolist() == [clipped == "low"]
    assert terms.is_clipped_high_T.tolist() == [clipped == "high"]


def test_a_dual_clip_of_unmoved_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dual_clip=0\.9 would cut .* set it above 1"):
        ppo_clip(torch.zeros(1), torch.zeros(1), torch.ones(1), dual_clip=0.9)
