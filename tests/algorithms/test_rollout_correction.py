from __future__ import annotations

import pytest
import torch

from hybridrl.algorithms.rollout_correction import truncated_importance_weights


def test_weights_are_ratios_up_to_the_cap() -> None:
    old_T = torch.tensor([0.5, 0.4, 0.9]).log().requires_grad_()
    sampler_T = torch.tensor([0.5, 0.8, 0.1]).log()
    weights_T = truncated_importance_weights(old_T, sampler_T, cap=2.0)
    assert weights_T.tolist() == pytest.approx([1.0, 0.5, 2.0])
    assert not weights_T.requires_grad


def test_engines_that_agree_are_not_corrected_at_all() -> None:
    logprobs_T = -torch.rand(100)
    weights_T = truncated_importance_weights(logprobs_T, logprobs_T, cap=2.0)
    assert torch.equal(weights_T, torch.ones(100))


def test_token_impossible_for_the_sampler_gets_the_cap() -> None:
    weights_T = truncated_importance_weights(torch.zeros(1), torch.tensor([-500.0]), cap=3.0)
    assert weights_T.tolist() == [3.0]
