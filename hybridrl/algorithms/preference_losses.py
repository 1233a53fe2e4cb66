"""Losses of preference pairs, one function each; ``dpo.loss`` names one.

Legend: P pairs. A *log-ratio* is the log-prob of an answer less that of the reference, a sum over
its tokens in nats. ``delta`` is the log-ratio of the chosen answer less that of the rejected one,
``beta * log-ratio`` the implicit reward of an answer.

Equal to TRL 1.16's ``DPOTrainer`` for the names that both have, unless a docstring says otherwise.
Logs of sigmoids are computed without overflow; pairs do not touch each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybridrl.config.limits import PreferenceBeta

_LARGEST_MEAN_LOGPROB = -1e-6
"""Nats. An answer of probability 1 has infinite odds; nearer than this it has no gradient."""


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """Losses to be averaged over pairs. A loss without rewards may return ``losses_P`` alone."""

    losses_P: Tensor  # float32, with gradient
    chosen_rewards_P: Tensor  # float32, detached
    rejected_rewards_P: Tensor  # float32, detached


def sigmoid(
    chosen_logratios_P: Tensor,
    rejected_logratios_P: Tensor,
    *,
    beta: PreferenceBeta = 0.1,
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0,
) -> PreferenceLoss:
    """Return the loss of DPO (Rafailov et al. 2023, arXiv:2305.18290, eq. 7).

    ``-(1 - s) log sigmoid(beta delta) - s log sigmoid(-beta delta)`` with label smoothing s, the
    share of pairs that may be the wrong way round (cDPO; TRL 1.16 reads it in other losses only).
    """
    logits_P = beta * (chosen_logratios_P - rejected_logratios_P)
    losses_P = -(1 - label_smoothing) * logsigmoid(logits_P) - label_smoothing * logsigmoid(
        -logits_P
    )
    return _with_rewards(losses_P, beta * chosen_logratios_P, beta * rejected_logratios_P)


def robust(
    chosen_logratios_P: Tensor,
    rejected_logratios_P: Tensor,
    *,
    beta: PreferenceBeta = 0.1,
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.1,
) -> PreferenceLoss:
    """Return the unbiased loss under flipped labels (robust DPO, arXiv:2403.00409, eq. 10).

    ``(-(1 - s) log sigmoid(beta delta) + s log sigmoid(-beta delta)) / (1 - 2 s)`` with the share s
    of flipped pairs. May be negative. TRL's default of s is 0, which is ``sigmoid``.
    """
    logits_P = beta * (chosen_logratios_P - rejected_logratios_P)
    clean_P = -(1 - label_smoothing) * logsigmoid(logits_P)
    losses_P = (clean_P + label_smoothing * logsigmoid(-logits_P)) / (1 - 2 * label_smoothing)
    return _with_rewards(losses_P, beta * chosen_logratios_P, beta * rejected_logratios_P)


def hinge(
    chosen_logratios_P: Tensor, rejected_logratios_P: Tensor, *, beta: PreferenceBeta = 0.1
) -> PreferenceLoss:
    """Return ``max(0, 1 - beta delta)`` (SLiC, arXiv:2305.10425; with a reference as in RSO,
    arXiv:2309.06657).
    """
    losses_P = torch.relu(1 - beta * (chosen_logratios_P - rejected_logratios_P))
    return _with_rewards(losses_P, beta * chosen_logratios_P, beta * rejected_logratios_P)


def ipo(
    chosen_logratios_P: Tensor,
    rejected_logratios_P: Tensor,
    chosen_lengths_P: Tensor,
    rejected_lengths_P: Tensor,
    *,
    beta: PreferenceBeta = 0.1,
    per_token: bool = True,
) -> PreferenceLoss:
    """Return ``(delta - 1 / (2 beta))^2`` (IPO, arXiv:2310.12036, eq. 17, whose tau is beta).

    With ``per_token`` log-ratios are means over tokens, as in TRL, whose authors confirmed it with
    the paper's; without it sums, as the paper writes them.
    """
    chosen_P, rejected_P = chosen_logratios_P, rejected_logratios_P
    if per_token:
        chosen_P, rejected_P = chosen_P / chosen_lengths_P, rejected_P / rejected_lengths_P
    losses_P = (chosen_P - rejected_P - 1 / (2 * beta)).square()
    return _with_rewards(losses_P, beta * chosen_logratios_P, beta * rejected_logratios_P)


def sigmoid_norm(
    chosen_logratios_P: Tensor,
    rejected_logratios_P: Tensor,
    chosen_lengths_P: Tensor,
    rejected_lengths_P: Tensor,
    *,
    beta: PreferenceBeta = 0.1,
) -> PreferenceLoss:
    """Return ``-log sigmoid(beta delta)`` of log-ratios that are means over tokens.

    Length-normalised DPO (Tulu 3, arXiv:2411.15124, 5.1, with beta 5: differences are small).
    """
    chosen_P = chosen_logratios_P / chosen_lengths_P
    rejected_P = rejected_logratios_P / rejected_lengths_P
    losses_P = -logsigmoid(beta * (chosen_P - rejected_P))
    return _with_rewards(losses_P, beta * chosen_logratios_P, beta * rejected_logratios_P)


def exo_pair(
    chosen_logratios_P: Tensor,
    rejected_logratios_P: Tensor,
    *,
    beta: PreferenceBeta = 0.1,
    label_smoothing: Annotated[float, Field(gt=0.0, lt=0.5, examples=[1e-3])] = 1e-3,
) -> PreferenceLoss:
    """Return KL(policy || labels) over the two answers (EXO, arXiv:2402.00856, eq. 16).

    The policy's share of the chosen answer is ``sigmoid(beta delta)``, that of the labels
    ``1 - label_smoothing``.
    """
    logits_P = beta * (chosen_logratios_P - rejected_logratios_P)
    chosen_P, rejected_P = logsigmoid(logits_P), logsigmoid(-logits_P)
    losses_P = chosen_P.exp() * (chosen_P - math.log1p(-label_smoothing))
    losses_P = losses_P + rejected_P.exp() * (rejected_P - math.log(label_smoothing))
    return _with_rewards(losses_P, beta * chosen_logratios_P, beta * rejected_logratios_P)


def nca_pair(
    chosen_logratios_P: Tensor, rejected_logratios_P: Tensor, *, beta: PreferenceBeta = 0.1
) -> PreferenceLoss:
    """Return the loss of NCA, which keeps the chosen answer likely (arXiv:2402.05369, algorithm 1).

    ``-log sigmoid(c) - (log sigmoid(-c) + log sigmoid(-r)) / 2`` with the implicit rewards c and r.
    """
    chosen_P, rejected_P = beta * chosen_logratios_P, beta * rejected_logratios_P
    noise_P = logsigmoid(-chosen_P) + logsigmoid(-rejected_P)
    return _with_rewards(-logsigmoid(chosen_P) - noise_P / 2, chosen_P, rejected_P)


def sppo_hard(
    chosen_logratios_P: Tensor, rejected_logratios_P: Tensor, *, beta: PreferenceBeta = 0.1
) -> PreferenceLoss:
    """Return ``(chosen - 1 / (2 beta))^2 + (rejected + 1 / (2 beta))^2`` of the log-ratios.

    SPPO where the chosen answer surely wins (arXiv:2405.00675, eq. 4.7 with P = 1).
    """
    target = 1 / (2 * beta)
    losses_P = (chosen_logratios_P - target).square() + (rejected_logratios_P + target).square()
    return _with_rewards(losses_P, beta * chosen_logratios_P, beta * rejected_logratios_P)


def apo_zero(
    chosen_logratios_P: Tensor, rejected_logratios_P: Tensor, *, beta: PreferenceBeta = 0.1
) -> PreferenceLoss:
    """Return ``1 - sigmoid(c) + sigmoid(r)`` of the implicit rewards (arXiv:2408.06266, eq. 7).

    For chosen answers that are better than the model's own.
    """
    chosen_P, rejected_P = beta * chosen_logratios_P, beta * rejected_logratios_P
    return _with_rewards(1 - chosen_P.sigmoid() + rejected_P.sigmoid(), chosen_P, rejected_P)


def apo_down(
    chosen_logratios_P: Tensor, rejected_logratios_P: Tensor, *, beta: PreferenceBeta = 0.1
) -> PreferenceLoss:
    """Return ``1 + sigmoid(c) - sigmoid(c - r)`` of the implicit rewards (arXiv:2408.06266, eq. 8).

    For chosen answers that are worse than the model's own.
    """
    chosen_P, rejected_P = beta * chosen_logratios_P, beta * rejected_logratios_P
    losses_P = 1 + chosen_P.sigmoid() - (chosen_P - rejected_P).sigmoid()
    return _with_rewards(losses_P, chosen_P, rejected_P)


def simpo(
    chosen_logprobs_P: Tensor,
    rejected_logprobs_P: Tensor,
    chosen_lengths_P: Tensor,
    rejected_lengths_P: Tensor,
    *,
    beta: PreferenceBeta = 2.0,
    gamma: Annotated[float, Field(ge=0.0, le=1e3, description="no margin is wider")] = 1.0,
) -> PreferenceLoss:
    """Return ``-log sigmoid(beta (chosen - rejected) - gamma)`` of mean log-probs, reference-free.

    SimPO (arXiv:2405.14734, eq. 6); gamma is the target margin of rewards. TRL has it as
    ``CPOTrainer`` with ``loss_type=simpo, cpo_alpha=0``, with defaults 0.1 and 0.5.
    """
    chosen_P = beta * chosen_logprobs_P / chosen_lengths_P
    rejected_P = beta * rejected_logprobs_P / rejected_lengths_P
    return _with_rewards(-logsigmoid(chosen_P - rejected_P - gamma), chosen_P, rejected_P)


def orpo(
    chosen_logprobs_P: Tensor,
    rejected_logprobs_P: Tensor,
    chosen_lengths_P: Tensor,
    rejected_lengths_P: Tensor,
    *,
    beta: PreferenceBeta = 0.1,
) -> PreferenceLoss:
    """Return the negative log-likelihood of the chosen answer, plus beta times the odds-ratio term.

    ORPO (arXiv:2403.07691, eq. 6 and 7; its lambda is beta), reference-free. Log-likelihoods are
    means over the answer's tokens. TRL's ``ORPOTrainer`` takes the first term over prompt and
    answer.
    """
    chosen_P = chosen_logprobs_P / chosen_lengths_P
    rejected_P = rejected_logprobs_P / rejected_lengths_P
    odds_ratio_P = logsigmoid(_log_odds(chosen_P) - _log_odds(rejected_P))
    return _with_rewards(-chosen_P - beta * odds_ratio_P, beta * chosen_P, beta * rejected_P)


def _log_odds(logprobs_P: Tensor) -> Tensor:
    """Return ``log(p / (1 - p))`` of log-probs, without cancellation near p = 1."""
    logprobs_P = logprobs_P.clamp(max=_LARGEST_MEAN_LOGPROB)
    return logprobs_P - torch.log(-torch.expm1(logprobs_P))


def _with_rewards(losses_P: Tensor, chosen_P: Tensor, rejected_P: Tensor) -> PreferenceLoss:
    return PreferenceLoss(losses_P, chosen_P.detach(), rejected_P.detach())
