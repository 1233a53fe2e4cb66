"""Every policy loss against plain Python, token by token, and what all of them promise."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.policy_losses.ppo import ppo_clip
from hybridrl.algorithms.token_rows import TokenRows
from tests.algorithms.packed import LOSSES, Packed, make_packed, shared_rows
from tests.ranks import run_ranks

COVARIANCE = {"clip_cov", "kl_cov"}
WIDE = {"fraction": 0.4}
NUMBERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in LOSSES},
    "clip_cov": {"covariance_low": -0.5, "covariance_high": 0.5, **WIDE},
    "kl_cov": WIDE,
    "gspo": {"clip_low": 0.1, "clip_high": 0.15},
    "dppo_tv": {"ratio_cap": 1.1},
    "dppo_kl": {"ratio_cap": 1.1},
    "reinforce": {"ratio": "sequence"},
}

Slopes = Callable[[float, float, float, list[float]], tuple[float, float]]


def surrogate(ratio: float, gain: float, slope: float, low: float, high: float) -> Any:
    """Loss and its slope for PPO's surrogate of a ratio whose slope is given."""
    clipped = min(max(ratio, 1 - low), 1 + high)
    if ratio * gain <= clipped * gain:
        return -ratio * gain, -slope * gain
    return -clipped * gain, 0.0


def gmpo(_logprob: float, u: float, gain: float, us: list[float]) -> Any:
    def clip(v: float) -> float:
        return min(v, 0.4) if gain > 0 else max(v, -0.4)

    ratio = math.exp(sum(map(clip, us)) / len(us))
    return -gain * ratio, -gain * ratio if clip(u) == u else 0.0


def vespo(logprob: float, _u: float, gain: float, us: list[float]) -> Any:
    power, decay = (2, 3) if gain >= 0 else (3, 2)
    weight = math.exp(sum(us))
    phi = weight**power * math.exp(decay * (1 - weight))
    return -phi * gain * logprob, -phi * gain


def dppo_tv(logprob: float, u: float, gain: float, _us: list[float], cap: float = 20.0) -> Any:
    rise = math.exp(logprob) - math.exp(logprob - u)
    weight = gain * min(math.exp(u), cap) if (rise <= 0.2 if gain > 0 else rise >= -0.2) else 0.0
    return -weight * logprob, -weight


def dppo_kl(logprob: float, u: float, gain: float, _us: list[float], cap: float = 20.0) -> Any:
    p, old = math.exp(logprob), math.exp(logprob - u)
    kl = old * math.log(old / p) + (1 - old) * math.log((1 - old) / (1 - p))
    is_kept = kl <= 0.2 or (p <= old if gain > 0 else p >= old)
    weight = gain * min(math.exp(u), cap) if is_kept else 0.0
    return -weight * logprob, -weight


def sapo(_logprob: float, u: float, gain: float, _us: list[float]) -> Any:
    tau, ratio = (1.0 if gain > 0 else 1.05), math.exp(u)
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -gain * 4 / tau * gate, -gain * 4 * gate * (1 - gate) * ratio


def topr(logprob: float, _u: float, gain: float, us: list[float]) -> Any:
    weight = gain * (min(math.exp(sum(us)), 1.0) if gain < 0 else 1.0)
    return -weight * logprob, -weight


PLAIN: dict[str, Slopes] = {
    "ppo_clip": lambda _, u, a, us: surrogate(math.exp(u), a, math.exp(u), 0.2, 0.2),
    "gspo": lambda _, u, a, us: surrogate(
        s := math.exp(sum(us) / len(us)), a, s, low=0.1, high=0.15
    ),
    "rloo_clip": lambda _, u, a, us: surrogate(
        s := math.exp(sum(us)), a, s * len(us), low=0.2, high=0.2
    ),
    "gmpo": gmpo,
    "vespo": vespo,
    "cispo": lambda lp, u, a, us: (-min(math.exp(u), 5) * a * lp, -min(math.exp(u), 5) * a),
    "sapo": sapo,
    "reinforce": lambda lp, u, a, us: (-(w := min(math.exp(sum(us)), 2.0)) * a * lp, -w * a),
    "topr": topr,
    "dro": lambda lp, u, a, us: (-(a * lp - u * u / 2), -(a - u)),
    "dppo_tv": partial(dppo_tv, cap=1.1),
    "dppo_kl": partial(dppo_kl, cap=1.1),
}
"""Loss and slope of a token from its log-prob, its log-ratio, its advantage, and the log-ratios of
its response."""


def test_each_loss_has_a_plain_form() -> None:
    assert {*PLAIN, *COVARIANCE} == set(LOSSES)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("seed", [0, 6])  # with 6, clips cut responses, too
def test_losses_and_slopes_equal_plain_python(name: str, seed: int) -> None:
    packed = make_packed(seed=seed)
    current_T, old_T = packed.columns["current_logprobs_T"], packed.columns["old_logprobs_T"]
    log_ratios = (current_T.detach() - old_T).double().tolist()
    row, gains = packed.rows.row_T.tolist(), packed.columns["advantages_T"].tolist()
    expected = [
        PLAIN[name](logprob, u, gain, [v for v, r in zip(log_ratios, row, strict=True) if r == own])
        for logprob, u, gain, own in zip(current_T.tolist(), log_ratios, gains, row, strict=True)
    ]
    losses, slopes = (torch.tensor(column) for column in zip(*expected, strict=True))
    loss = LOSSES[name]
    torch.testing.assert_close(packed.losses(loss, **NUMBERS[name]), losses, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(packed.slopes(loss, **NUMBERS[name]), slopes, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_order_of_tokens_changes_no_loss(name: str) -> None:
    packed = make_packed()
    order = torch.randperm(packed.rows.num_tokens, generator=torch.Generator().manual_seed(3))
    losses_T = packed.losses(LOSSES[name], **NUMBERS[name])
    shuffled_T = packed.at(order).losses(LOSSES[name], **NUMBERS[name])
    torch.testing.assert_close(shuffled_T, losses_T[order])


@pytest.mark.parametrize("name", sorted(set(LOSSES) - COVARIANCE))
def test_division_into_microbatches_changes_no_loss(name: str) -> None:
    packed = make_packed()
    current_T, is_first_T = packed.columns["current_logprobs_T"], packed.rows.row_T < 2
    losses_T, slopes_T = packed.losses(LOSSES[name]), packed.slopes(LOSSES[name])
    for index_U in (is_first_T.nonzero()[:, 0], (~is_first_T).nonzero()[:, 0]):
        part_U = packed.at(index_U).losses(LOSSES[name])
        torch.testing.assert_close(part_U, losses_T[index_U])
        (grad_T,) = torch.autograd.grad(part_U.sum(), current_T)
        torch.testing.assert_close(grad_T[index_U], slopes_T[index_U])


@pytest.mark.parametrize("name", LOSSES)
def test_only_the_current_policy_gets_a_gradient(name: str) -> None:
    packed = make_packed()
    for column_T in packed.columns.values():
        column_T.requires_grad_()
    slopes_T = packed.slopes(LOSSES[name], **NUMBERS[name])
    assert slopes_T.isfinite().all()
    packed.losses(LOSSES[name], **NUMBERS[name]).sum().backward()
    for column, column_T in packed.columns.items():
        assert (column_T.grad is not None) == (column == "current_logprobs_T"), column


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_log_probs_keep_losses_finite(name: str) -> None:
    packed = make_packed((2, 2))
    columns = {
        **packed.columns,
        "current_logprobs_T": torch.tensor([-1e3, -1e-7, 0.0, -80.0], requires_grad=True),
        "old_logprobs_T": torch.tensor([-1e-7, -1e3, -80.0, -torch.inf]),
    }
    packed = Packed(columns, packed.rows)
    assert packed.losses(LOSSES[name], **NUMBERS[name]).isfinite().all()
    assert packed.slopes(LOSSES[name], **NUMBERS[name]).isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_microbatch_has_a_loss_with_a_gradient(name: str) -> None:
    empty = make_packed().at(torch.zeros(0, dtype=torch.int64))
    total = empty.losses(LOSSES[name], **NUMBERS[name]).sum()
    assert total.item() == 0.0
    total.backward()


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"rloo_clip"} - COVARIANCE))
def test_on_policy_every_gradient_is_that_of_reinforce(name: str) -> None:
    packed = make_packed(spread=0.0)
    slopes_T = packed.slopes(LOSSES[name])
    torch.testing.assert_close(slopes_T, -packed.columns["advantages_T"])


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_drops_only_what_moved_with_its_advantage(name: str) -> None:
    moved_T = torch.tensor([0.95, 0.1]).log().requires_grad_()
    for sign, is_kept in ((1.0, [0, 1]), (-1.0, [1, 0])):
        gains_T = torch.full((2,), sign)
        terms = LOSSES[name](moved_T, torch.full((2,), 0.5).log(), gains_T)
        (grad_T,) = torch.autograd.grad(terms.losses_T.sum(), moved_T)
        assert (grad_T != 0).int().tolist() == is_kept


def test_reinforce_masks_outside_of_a_range_with_a_floor() -> None:
    current_T = torch.tensor([0.3, 1.0, 4.0, 6.0]).log().requires_grad_()
    terms = LOSSES["reinforce"](
        current_T,
        torch.zeros(4),
        torch.ones(4),
        TokenRows.on_one_rank(torch.arange(4), 4),
        ratio="token",
        ratio_low=0.5,
        ratio_high=5.0,
    )
    (grad_T,) = torch.autograd.grad(terms.losses_T.sum(), current_T)
    assert grad_T.tolist() == pytest.approx([0.0, -1.0, -4.0, 0.0])


def covariance(packed: Packed) -> Tensor:
    logprobs_T = packed.columns["current_logprobs_T"].detach()
    gains_T = packed.columns["advantages_T"]
    return (logprobs_T - logprobs_T.mean()) * (gains_T - gains_T.mean())


def test_clip_cov_drops_a_fraction_of_its_candidates() -> None:
    packed = make_packed((400, 300, 300), spread=0.1)
    clips = {"clip_low": 0.1, "clip_high": 0.1}
    numbers = {"covariance_low": -0.5, "covariance_high": 0.5, "fraction": 0.05, **clips}
    plain_T, losses_T = (
        packed.losses(LOSSES["ppo_clip"], **clips),
        packed.losses(LOSSES["clip_cov"], **numbers),
    )
    is_dropped_T = (losses_T == 0) & (plain_T != 0)
    assert int(is_dropped_T.sum()) == 50
    torch.testing.assert_close(losses_T[~is_dropped_T], plain_T[~is_dropped_T])
    covariance_T = covariance(packed)
    assert (covariance_T[is_dropped_T].abs() < 0.5).all()
    assert packed.slopes(LOSSES["clip_cov"], **numbers)[is_dropped_T].eq(0).all()
    is_clipped_T = packed.slopes(LOSSES["ppo_clip"], **clips) == 0
    assert is_clipped_T.any() and not (is_clipped_T & is_dropped_T).any()
    # The draw has no order: dropped tokens are not the candidates of highest covariance.
    candidates_T = covariance_T[(covariance_T.abs() < 0.5)]
    assert covariance_T[is_dropped_T].min() < candidates_T.quantile(0.3)
    first_half = int(is_dropped_T[:500].sum())
    assert 10 < first_half < 40


def test_kl_cov_charges_the_tokens_of_highest_covariance() -> None:
    packed = make_packed((40, 30, 30), spread=0.02)
    losses_T = packed.losses(LOSSES["kl_cov"], fraction=0.05, coefficient=0.5)
    columns = packed.columns
    log_ratio_T = columns["current_logprobs_T"].detach() - columns["old_logprobs_T"]
    expected_T = -log_ratio_T.exp() * columns["advantages_T"]
    charged = covariance(packed).topk(5).indices
    expected_T[charged] += 0.5 * log_ratio_T[charged].abs()
    torch.testing.assert_close(losses_T, expected_T)


def test_ranks_that_share_rows_have_the_losses_of_one() -> None:
    for shared, whole in run_ranks(2, _losses_and_slopes):
        for name in LOSSES:
            torch.testing.assert_close(shared[name], whole[name], msg=name)


def _losses_and_slopes(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return those of this rank's tokens, first with shared rows, then from all tokens."""
    packed = make_packed()
    logprobs_T = packed.columns["current_logprobs_T"].detach()
    own_U = ((logprobs_T > logprobs_T.median()) == (rank == 0)).nonzero()[:, 0]
    part = packed.at(own_U, shared_rows(packed.rows, own_U))
    current_T = packed.columns["current_logprobs_T"]
    shared, whole = {}, {}
    for name, loss in LOSSES.items():
        losses_T = part.losses(loss, **NUMBERS[name])
        (grad_T,) = torch.autograd.grad(losses_T.sum(), current_T, retain_graph=True)
        shared[name] = torch.stack([losses_T.detach(), grad_T[own_U]])
        both = torch.stack(
            [packed.losses(loss, **NUMBERS[name]), packed.slopes(loss, **NUMBERS[name])]
        )
        whole[name] = both[:, own_U].detach()
    return shared, whole


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
