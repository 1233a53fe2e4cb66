"""Corrects for a sampler whose probabilities differ from the trainer's.

Legend: T packed response tokens of this rank, R rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybridrl.algorithms.kl import MAX_LOG_RATIO, clamped_log_ratio
from hybridrl.algorithms.token_rows import TokenRows
from hybridrl.config.algorithm import Rejection, read_rejections
from hybridrl.config.limits import NotNegative, RatioCap, Veto


@dataclass(frozen=True, slots=True)
class SamplerCorrection:
    """Both columns have no gradient."""

    weights_T: Tensor  # float32, multiplies the loss of the token; 0 for a rejected one
    keep_T: Tensor  # bool, False for a rejected token, which leaves the denominators too


def importance(
    old_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    rows: TokenRows,
    *,
    level: Literal["none", "token", "sequence", "geometric"] = "token",
    outside: Literal["truncate", "mask"] = "truncate",
    low: NotNegative = 0.0,
    high: RatioCap = 2.0,
    normalize: bool = False,
    reject: str = "",
    veto: Veto = 0.0,
) -> SamplerCorrection:
    """Weigh what the trainer finds more, or less, likely than the sampler did.

    The raw weight is the ratio of trainer over sampler: of the ``token`` (biased, low variance), of
    the ``sequence``, the product over its tokens (unbiased, high variance), or its ``geometric``
    mean. Outside of ``low`` to ``high`` it is truncated to the end of the range (arXiv:1802.01561,
    4.1; https://fengyao.notion.site/off-policy-rl), or masked to 0, still counted in denominators
    (IcePop). ``normalize`` then divides by the mean weight of all tokens, or all responses with
    tokens.

    ``reject`` has rules such as ``0.999 <= seq_mean_k1 <= 1.001, token_k2 <= 0.1``, all of which a
    token must meet; see ``read_rejections``. With ``g = old - sampler`` statistics are
    ``k1 = -g``, ``k2 = g^2 / 2`` and ``k3 = exp(g) - 1 - g``, of the token, or added, averaged or
    maximal over its response (verl's ``rollout_rs``). Bounds of k1 hold for sampler over trainer,
    as in verl: the inverse of the weight. ``veto`` rejects a response for the ratio of one token.

    Defaults are those of verl's token correction. verl masks where a threshold has two numbers.
    TRL: ``sequence``, ``mask``, high 3; OpenRLHF: ``token``, 0.5 to 5. All clamp as here, to +-20
    nats, or not at all.

    Args:
        old_logprobs_T: float32 nats, the trainer's, before the update; in bypass mode the current.
        sampler_logprobs_T: float32 nats, the rollout engine's.
        rows: of the tokens: of the step, or of a micro-batch, over which ``normalize`` averages.
        level: of the weight; ``none`` is 1.
        veto: smallest ratio of a token in a response that is kept; 0 is off.

    Raises:
        ValueError: ``reject`` cannot be read.
    """
    log_ratio_T = clamped_log_ratio(old_logprobs_T.detach(), sampler_logprobs_T)
    keep_T = torch.ones_like(log_ratio_T, dtype=torch.bool)
    for rule in read_rejections(reject):
        keep_T &= _meets(rule, log_ratio_T, rows)
    if veto:
        keep_T &= rows.spread(rows.max(-log_ratio_T) <= -math.log(veto))
    if level == "none":
        return SamplerCorrection(keep_T.to(log_ratio_T.dtype), keep_T)
    is_of_rows = level != "token"
    weights = log_ratio_T
    if is_of_rows:
        weights = rows.sum(log_ratio_T) if level == "sequence" else rows.mean(log_ratio_T)
    weights = weights.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    is_outside = (weights < low) | (weights > high)
    weights = (
        weights.masked_fill(is_outside, 0.0) if outside == "mask" else weights.clamp(low, high)
    )
    if normalize:
        weights = weights / _mean_weight(weights, rows, is_of_rows=is_of_rows)
    weights_T = rows.spread(weights) if is_of_rows else weights
    return SamplerCorrection(weights_T.masked_fill(~keep_T, 0.0), keep_T)


def _mean_weight(weights: Tensor, rows: TokenRows, *, is_of_rows: bool) -> Tensor:
    """Return the mean over tokens [T], or over rows [R] that have tokens; 1 where it is about 0."""
    if is_of_rows:
        has_tokens_R = rows.lengths_R > 0
        mean = (weights * has_tokens_R).sum() / has_tokens_R.sum().clamp(min=1)
    else:
        mean = rows.total(weights) / max(rows.num_tokens, 1)
    return torch.where(mean > 1e-8, mean, 1.0)


def _meets(rule: Rejection, log_ratio_T: Tensor, rows: TokenRows) -> Tensor:
    """Return whether each token meets a rule, bool [T]."""
    statistic = -log_ratio_T
    if rule.divergence == "k2":
        statistic = log_ratio_T.square() / 2
    elif rule.divergence == "k3":
        statistic = torch.expm1(log_ratio_T) - log_ratio_T
    reduce = {"seq_sum": rows.sum, "seq_mean": rows.mean, "seq_max": rows.max}
    if rule.level != "token":
        statistic = reduce[rule.level](statistic)
    if rule.divergence == "k1":
        keep = (statistic >= math.log(rule.low)) & (statistic <= math.log(rule.high))
    else:
        keep = statistic <= rule.high
    return keep if rule.level == "token" else rows.spread(keep)
