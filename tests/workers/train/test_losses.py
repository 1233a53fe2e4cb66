from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.kl import k1, k2
from hybridrl.algorithms.load import Part
from hybridrl.algorithms.policy_losses.ppo import ppo_clip
from hybridrl.algorithms.rollout_correction import importance
from hybridrl.algorithms.token_rows import TokenRows
from hybridrl.errors import DriftError
from hybridrl.metrics import Mean, Metrics, check_declared, merge
from hybridrl.workers.train.losses import (
    PairValues,
    PolicyGradientLoss,
    loss_of_microbatch,
    supervised_loss,
)
from hybridrl.workers.train.microbatcher import MicroBatch
from hybridrl.workers.train.protocol import TokenLossInputs

NOTHING = cast(Any, None)


def make_inputs(num_tokens: int = 6) -> TokenLossInputs:
    source = torch.Generator().manual_seed(0)
    current_T = torch.log(torch.rand(num_tokens, generator=source) * 0.8 + 0.1).requires_grad_()
    return TokenLossInputs(
        current_logprobs_T=current_T,
        entropy_T=(current_T * -1.5),
        weights_T=torch.rand(num_tokens, generator=source),
        advantages_T=torch.randn(num_tokens, generator=source),
        sampler_logprobs_T=current_T.detach() - 0.1,
        old_logprobs_T=current_T.detach() + 0.05 * torch.randn(num_tokens, generator=source),
        reference_logprobs_T=torch.log(torch.rand(num_tokens, generator=source) * 0.8 + 0.1),
        rows=TokenRows.on_one_rank(torch.zeros(num_tokens, dtype=torch.int64), 1),
        positions_T=torch.arange(num_tokens) * 1000,
    )


def part(inputs: TokenLossInputs, at: slice) -> TokenLossInputs:
    columns = {column.name: getattr(inputs, column.name) for column in fields(inputs)}
    columns = {name: of_T[at] for name, of_T in columns.items() if isinstance(of_T, Tensor)}
    return replace(inputs, **columns, rows=TokenRows.on_one_rank(inputs.rows.row_T[at], 1))


def values(metrics: Metrics) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


CLIP = Part.of(ppo_clip, clip_high=0.3)
EVERYTHING = PolicyGradientLoss(
    policy_loss=CLIP,
    kl_estimator=Part.of(k2),
    kl_coefficient=0.5,
    entropy_coefficient=0.01,
    correction=Part.of(importance),
)


def test_each_term_adds_its_share() -> None:
    inputs = make_inputs()
    assert inputs.reference_logprobs_T is not None
    plain, _ = PolicyGradientLoss(policy_loss=CLIP)(inputs)
    with_kl, _ = PolicyGradientLoss(policy_loss=CLIP, kl_estimator=Part.of(k1), kl_coefficient=0.5)(
        inputs
    )
    kl_T = inputs.current_logprobs_T - inputs.reference_logprobs_T
    charge = 0.5 * (inputs.weights_T * kl_T).sum()
    assert (with_kl - plain).item() == pytest.approx(charge.item(), rel=1e-5)
    with_bonus, _ = PolicyGradientLoss(policy_loss=CLIP, entropy_coefficient=0.1)(inputs)
    bonus = 0.1 * (inputs.weights_T * inputs.entropy_T).sum()
    assert (plain - with_bonus).item() == pytest.approx(bonus.item(), rel=1e-4)
    compared = replace(inputs, divergences_T=inputs.entropy_T)
    taught, _ = PolicyGradientLoss(policy_loss=CLIP, divergence_coefficient=0.1)(compared)
    assert (taught - plain).item() == pytest.approx(bonus.item(), rel=1e-4)


def test_sampler_correction_weighs_only_the_policy_term() -> None:
    inputs = replace(make_inputs(), sampler_logprobs_T=make_inputs().old_logprobs_T - 5.0)
    plain, _ = PolicyGradientLoss(policy_loss=CLIP)(inputs)
    capped, metrics = PolicyGradientLoss(
        policy_loss=CLIP, correction=Part.of(importance, high=3.0)
    )(inputs)
    assert capped.item() == pytest.approx(3.0 * plain.item(), rel=1e-5)
    assert metrics["policy/sampler_weight/mean"].value == pytest.approx(3.0)


def supervised(inputs: TokenLossInputs) -> tuple[Tensor, Metrics]:
    return supervised_loss(inputs.current_logprobs_T, inputs.weights_T)


@pytest.mark.shows("4.20")
@pytest.mark.parametrize("loss", [EVERYTHING, supervised])
def test_microbatches_change_neither_loss_nor_metrics(
    loss: Callable[[TokenLossInputs], tuple[Tensor, Metrics]],
) -> None:
    inputs = make_inputs(7)
    whole, metrics = loss(inputs)
    parts = [loss(part(inputs, at)) for at in (slice(0, 1), slice(1, 1), slice(1, 7))]
    total: Tensor = torch.stack([share for share, _ in parts]).sum()
    assert total.item() == pytest.approx(whole.item(), rel=1e-5)
    check_declared(metrics)
    merged = values(merge(part_metrics for _, part_metrics in parts))
    assert merged == pytest.approx(values(metrics), rel=1e-4, abs=1e-6)


def test_metrics_say_what_happened_to_the_tokens() -> None:
    zeros = torch.zeros(4)
    inputs = TokenLossInputs(
        current_logprobs_T=torch.tensor([0.5, 1.0, 1.5, 1.0]).log(),
        entropy_T=torch.tensor([1.0, 2.0, 3.0, 2.0]),
        weights_T=torch.full((4,), 0.25),
        advantages_T=torch.tensor([-1.0, 1.0, 1.0, 1.0]),
        sampler_logprobs_T=torch.tensor([0.0, 0.0, 0.0, -0.4]),
        old_logprobs_T=zeros,
        reference_logprobs_T=None,
        rows=TokenRows.on_one_rank(torch.zeros(4, dtype=torch.int64), 1),
        positions_T=torch.arange(4),
    )
    _, metrics = PolicyGradientLoss(policy_loss=Part.of(ppo_clip))(inputs)
    assert metrics["policy/entropy_nats/mean"] == Mean(8.0, 4)
    assert metrics["policy/clip_low_fraction"] == Mean(1.0, 4)
    assert metrics["policy/clip_high_fraction"] == Mean(1.0, 4)
    assert metrics["policy/ratio/max"].value == pytest.approx(1.5)
    assert metrics["policy/sampler_mismatch_nats/mean"].value == pytest.approx(0.1)
    assert metrics["policy/sampler_mismatch_nats/max"].value == pytest.approx(0.4)
    assert metrics["loss/policy"].value == pytest.approx((0.8 - 1.0 - 1.2 - 1.0) / 4)
    assert "policy/kl_to_reference_nats/mean" not in metrics
    assert "loss/kl" not in metrics


def test_the_distance_of_trainer_and_sampler_is_told_by_depth_and_for_older_versions() -> None:
    inputs = make_inputs(8)
    distances = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9, 1.1, 1.3, 5.0])
    inputs = replace(
        inputs,
        old_logprobs_T=inputs.sampler_logprobs_T - distances,
        positions_T=torch.tensor([0, 1023, 1024, 8191, 8192, 65_535, 65_536, 0]),
        weight_versions_T=torch.tensor([7] * 7 + [6], dtype=torch.int32),
    )
    loss = PolicyGradientLoss(policy_loss=Part.of(ppo_clip), policy_version=7)
    _, metrics = loss(inputs)
    prefix = "policy/sampler_mismatch_nats"
    expected = {"below_1k": 0.2, "below_8k": 0.6, "below_64k": 1.0, "from_64k": 1.3}
    for name, mean in {**expected, "older_versions": 5.0}.items():
        assert metrics[f"{prefix}/{name}"].value == pytest.approx(mean, rel=1e-4), name
    _, metrics = loss(part(inputs, slice(0, 2)))
    assert {name for name in metrics if name.startswith(prefix)} == {
        *(f"{prefix}/mean", f"{prefix}/max", f"{prefix}/below_1k")
    }


def test_empty_microbatch_has_a_differentiable_zero_loss() -> None:
    inputs = part(make_inputs(3), slice(0, 0))
    loss, metrics = EVERYTHING(inputs)
    assert loss.item() == 0.0
    assert metrics == {}
    loss.backward()


def test_ranks_that_share_the_tokens_of_a_pair_count_for_their_part_of_them() -> None:
    """Of four tokens of each answer this rank has one, and each other one the same."""
    rows = TokenRows(
        torch.tensor([2, 3]), torch.tensor([0, 0, 4, 4]), 8, gather=lambda own: own.expand(4, -1)
    )

    def loss_of(sums_P2: Tensor, lengths_P2: Tensor, index_P: Tensor) -> PairValues:
        assert (lengths_P2.tolist(), index_P.tolist()) == ([[4, 4]], [1])
        losses_P = sums_P2[:, 1] - sums_P2[:, 0]
        return losses_P, {"loss/preference": losses_P}

    share, metrics = loss_of_microbatch(
        MicroBatch(NOTHING, NOTHING, rows, 8), torch.tensor([-1.0, -3.0]), torch.ones(2), loss_of
    )
    loss = 4 * (-3.0) - 4 * (-1.0)
    assert share.item() == 0.25 * 2 * loss  # each row weighs 1
    assert metrics == {"loss/preference": Mean(0.25 * loss, 0.25)}


def test_kl_to_reference_is_measured_without_a_penalty_which_needs_a_reference() -> None:
    free = PolicyGradientLoss(policy_loss=Part.of(ppo_clip))
    _, metrics = free(make_inputs())
    assert metrics["policy/kl_to_reference_nats/mean"].value > 0
    assert not free.needs_entropy_gradient
    assert EVERYTHING.needs_entropy_gradient
    with pytest.raises(ValueError, match=r"algorithm\.kl\.placement=none"):
        EVERYTHING(replace(make_inputs(), reference_logprobs_T=None))


@pytest.mark.shows("1.18")
def test_a_drift_of_the_sampler_beyond_the_limit_is_refused() -> None:
    inputs = make_inputs()
    inputs = replace(inputs, old_logprobs_T=inputs.sampler_logprobs_T + 0.2)
    loss = PolicyGradientLoss(policy_loss=Part.of(ppo_clip), max_drift_nats=0.3)
    _, metrics = loss(inputs)
    assert metrics["policy/sampler_mismatch_nats/mean"].value == pytest.approx(0.2)
    rule = r"0\.2 nats on average and 0\.2 nats at most; rollout\.canary_max_drift_nats=0\.1 is"
    with pytest.raises(DriftError, match=rule):
        replace(loss, max_drift_nats=0.1)(inputs)
    bypassed = replace(loss, is_old_the_sampler=True, max_drift_nats=0.05)
    with pytest.raises(DriftError, match=r"0\.1 nats on average"):
        bypassed(replace(inputs, old_logprobs_T=inputs.sampler_logprobs_T))
    sampler_T = inputs.sampler_logprobs_T.clone()
    sampler_T[3] = float("nan")
    with pytest.raises(DriftError, match="nan nats"):
        loss(replace(inputs, sampler_logprobs_T=sampler_T))
    replace(loss, max_drift_nats=None)(replace(inputs, sampler_logprobs_T=sampler_T))


@pytest.mark.shows("1.18")
def test_only_tokens_of_this_version_are_compared_for_drift() -> None:
    """Others were sampled by another policy: what is far off for it is no sign of a fault."""
    inputs = make_inputs()
    versions_T = torch.full(inputs.sampler_logprobs_T.shape, 7, dtype=torch.int32)
    versions_T[:2] = 6
    old_T = inputs.sampler_logprobs_T.clone()
    old_T[:2] += 5.0
    old_T[2:] += 0.2
    stale = replace(inputs, old_logprobs_T=old_T, weight_versions_T=versions_T)
    loss = PolicyGradientLoss(policy_loss=Part.of(ppo_clip), max_drift_nats=0.3, policy_version=7)
    _, metrics = loss(stale)
    assert metrics["policy/sampler_mismatch_nats/mean"].value == pytest.approx(0.2)
    assert metrics["policy/sampler_mismatch_nats/max"].value == pytest.approx(0.2)
    with pytest.raises(DriftError, match=r"0\.2 nats on average and 0\.2 nats at most"):
        replace(loss, max_drift_nats=0.1)(stale)
    with pytest.raises(DriftError, match=r"5 nats on average"):
        replace(loss, policy_version=6)(stale)
    _, metrics = replace(loss, policy_version=8)(stale)
    assert "policy/sampler_mismatch_nats/mean" not in metrics  # which the report would judge
