from __future__ import annotations

from typing import Literal

import pytest
import torch

from hybridrl.algorithms.gae import AdvantageEstimate
from hybridrl.batch import LogprobBatch, RolloutBatch, jagged
from hybridrl.config.algorithm import GAEConfig, KLConfig
from hybridrl.errors import TrainingError
from hybridrl.trainer.advantages import Generalized, describe_values

MASK_BL = jagged([torch.tensor([False, True, True]), torch.tensor([False, True])])
VALUES_BL = jagged([torch.tensor([0.0, 0.25, 0.5]), torch.tensor([0.0, 1.0])])
REWARDS_B = torch.tensor([1.0, 0.5])


def make_rollouts() -> RolloutBatch:
    zeros_B = torch.zeros(2, dtype=torch.int64)
    return RolloutBatch(
        token_ids_BL=jagged([torch.arange(3), torch.arange(2)]),
        response_mask_BL=MASK_BL,
        sampler_logprobs_BL=VALUES_BL,
        prompt_index_B=zeros_B,
        policy_version_B=zeros_B,
        is_truncated_B=torch.tensor([True, False]),
        batch_size=[2],
    )


def generalized(
    placement: Literal["none", "reward"] = "none", *, whiten: bool = False
) -> Generalized:
    return Generalized(
        gae=GAEConfig(gamma=1.0, lam=1.0, whiten=whiten),
        kl=KLConfig(placement=placement, estimator="k1", coefficient=0.5),
    )


def test_a_reward_comes_at_the_end_and_values_are_subtracted() -> None:
    estimate = generalized()(REWARDS_B, make_rollouts(), LogprobBatch(batch_size=[2]), VALUES_BL)
    assert estimate.advantages_BL.values().tolist() == [0.0, 0.75, 0.5, 0.0, -0.5]
    assert estimate.returns_BL.values().tolist() == [0.0, 1.0, 1.0, 0.0, 0.5]


def test_kl_charge_falls_on_the_token_that_moved() -> None:
    reference_BL = jagged([torch.zeros(3), torch.zeros(2)])
    old_BL = jagged([torch.tensor([9.0, 0.0, 1.0]), torch.tensor([9.0, -1.0])])
    logprobs = LogprobBatch(
        old_logprobs_BL=old_BL, reference_logprobs_BL=reference_BL, batch_size=[2]
    )
    estimate = generalized("reward")(REWARDS_B, make_rollouts(), logprobs, VALUES_BL)
    # Half of (0, 1) and of -1: the first token's return holds what the second one pays.
    assert estimate.returns_BL.values().tolist() == [0.0, 0.5, 0.5, 0.0, 1.0]


def test_a_charge_without_log_probs_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"set algorithm\.old_logprobs=recompute"):
        generalized("reward")(REWARDS_B, make_rollouts(), LogprobBatch(batch_size=[2]), VALUES_BL)


def test_whitening_changes_advantages_and_never_the_returns() -> None:
    logprobs = LogprobBatch(batch_size=[2])
    plain = generalized()(REWARDS_B, make_rollouts(), logprobs, VALUES_BL)
    white = generalized(whiten=True)(REWARDS_B, make_rollouts(), logprobs, VALUES_BL)
    assert torch.equal(plain.returns_BL.values(), white.returns_BL.values())
    chosen = white.advantages_BL.values()[MASK_BL.values()]
    assert float(chosen.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(chosen.std()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("values", "explained"),
    [((1.0, 2.0, 6.0), 1.0), ((5.0, 5.0, 5.0), 0.0), ((0.0, 1.0, 5.0), 1.0), ((6.0, 5.0, 1.0), -3)],
)
def test_explained_variance_of_perfect_and_constant_values(
    values: tuple[float, float, float], explained: float
) -> None:
    returns_BL = jagged([torch.tensor([99.0, 1.0, 2.0]), torch.tensor([99.0, 6.0])])
    first, second, third = values
    values_BL = jagged([torch.tensor([0.0, first, second]), torch.tensor([0.0, third])])
    metrics = describe_values(AdvantageEstimate(returns_BL, returns_BL), values_BL, MASK_BL)
    if explained >= 0:
        assert metrics["critic/explained_variance"].value == pytest.approx(explained)
    else:
        assert metrics["critic/explained_variance"].value < 0
    assert metrics["critic/return/mean"].value == pytest.approx(3.0)


def test_equal_returns_have_no_variance_to_explain() -> None:
    returns_BL = jagged([torch.ones(3), torch.ones(2)])
    metrics = describe_values(AdvantageEstimate(returns_BL, returns_BL), VALUES_BL, MASK_BL)
    assert set(metrics) == {"critic/value/mean", "critic/return/mean"}
