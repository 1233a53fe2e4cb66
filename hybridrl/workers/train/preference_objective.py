"""The objective of preference pairs: from log-probs of answers to losses and metrics.

Legend: P pairs, the last axis of [P, 2] is the chosen and the rejected answer; S scored tokens of a
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from hybridrl.algorithms.load import Part
from hybridrl.algorithms.preference_losses import PreferenceLoss
from hybridrl.errors import TrainingError
from hybridrl.metrics import Mean, Metrics
from hybridrl.workers.train.microbatcher import MicroBatch

PairValues: TypeAlias = tuple[Tensor, Mapping[str, Tensor]]
"""The loss of each pair, [P], and metrics to average over pairs, each [P]."""

PairLoss: TypeAlias = Callable[[Tensor, Tensor, Tensor], PairValues]
"""From sums over the tokens of both answers [P, 2], the numbers of these tokens [P, 2], and the
positions of the pairs in the batch [P]."""


@dataclass(frozen=True, slots=True)
class PreferenceObjective:
    """A loss of pairs, and the likelihood of the chosen answer beside it."""

    loss: Part  # of algorithms/preference_losses.py
    sft_coefficient: float = 0.0
    """Of the chosen answer's negative log-likelihood per token (arXiv:2404.19733, eq. 1)."""

    def __call__(
        self, policy_P2: Tensor, reference_P2: Tensor | None, lengths_P2: Tensor
    ) -> PairValues:
        """Compare the answers of each pair.

        Args:
            policy_P2: log-probs, sums over the tokens of an answer, nats; may have a gradient.
            reference_P2: likewise; None for a loss that reads no log-ratios.
            lengths_P2: int64, tokens of each answer, at least 1.
        """
        chosen_P, rejected_P = policy_P2.unbind(dim=1)
        lengths_P2 = lengths_P2.to(chosen_P.dtype)
        ratios_P2 = None if reference_P2 is None else policy_P2 - reference_P2
        result = self.loss(
            chosen_logprobs_P=chosen_P,
            rejected_logprobs_P=rejected_P,
            chosen_logratios_P=None if ratios_P2 is None else ratios_P2[:, 0],
            rejected_logratios_P=None if ratios_P2 is None else ratios_P2[:, 1],
            chosen_lengths_P=lengths_P2[:, 0],
            rejected_lengths_P=lengths_P2[:, 1],
        )
        if not isinstance(result, PreferenceLoss):
            rewards_P2 = (policy_P2 if ratios_P2 is None else ratios_P2).detach()
            result = PreferenceLoss(result, rewards_P2[:, 0], rewards_P2[:, 1])
        losses_P = result.losses_P
        if not isinstance(losses_P, Tensor) or losses_P.shape != chosen_P.shape:
            shape = list(losses_P.shape) if isinstance(losses_P, Tensor) else type(losses_P)
            raise TrainingError(
                f"{self.loss.key}={self.loss.spelled} returned {shape}; return the loss of each "
                f"of {len(chosen_P)} pairs"
            )
        metrics = {
            "loss/preference": losses_P,
            **describe_rewards(result.chosen_rewards_P, result.rejected_rewards_P),
            "preference/chosen_logprob_nats/mean": chosen_P,
            "preference/rejected_logprob_nats/mean": rejected_P,
        }
        if self.sft_coefficient:
            metrics["loss/supervised_nats"] = -chosen_P / lengths_P2[:, 0]
            losses_P = losses_P + self.sft_coefficient * metrics["loss/supervised_nats"]
        return losses_P, {name: values_P.detach() for name, values_P in metrics.items()}


def loss_of_microbatch(
    microbatch: MicroBatch, values_S: Tensor, weights_S: Tensor, loss_of: PairLoss
) -> tuple[Tensor, Metrics]:
    """Return a micro-batch's share of the global loss of pairs, to be *summed*, and its metrics.

    Ranks that share the tokens of a pair all compute its loss; each counts for its share of them.

    Args:
        microbatch: has both rows of a pair, or neither; a dummy one has a share of 0 with a
            gradient, and no metrics.
        weights_S: share of each token's *row* in the mean over all rows of the step.
    """
    rows = microbatch.rows
    sums_P2, weights_P2 = rows.sum(values_S).view(-1, 2), rows.mean(weights_S).view(-1, 2)
    lengths_P2 = rows.lengths_R.view(-1, 2)
    computed_P = (lengths_P2 > 0).all(dim=1).nonzero()[:, 0]
    if not len(computed_P):
        return sums_P2.sum() * 0.0, {}
    own_P2 = rows.row_T.bincount(minlength=len(rows.lengths_R)).view(-1, 2)
    shares_P = (own_P2.sum(dim=1) / lengths_P2.sum(dim=1))[computed_P]
    losses_P, values = loss_of(sums_P2[computed_P], lengths_P2[computed_P], computed_P)
    share = (losses_P * shares_P * weights_P2.sum(dim=1)[computed_P]).sum()
    return share, mean_over_pairs(values, shares_P)


def describe_rewards(chosen_P: Tensor, rejected_P: Tensor) -> dict[str, Tensor]:
    """Return metrics of the rewards, or scores, of both answers, to average over pairs."""
    margins_P = chosen_P - rejected_P
    return {
        "preference/chosen_reward/mean": chosen_P,
        "preference/rejected_reward/mean": rejected_P,
        "preference/margin/mean": margins_P,
        "preference/accuracy": torch.heaviside(margins_P, margins_P.new_tensor(0.5)),
    }


def mean_over_pairs(values: Mapping[str, Tensor], shares_P: Tensor) -> Metrics:
    """Return metrics of pairs, [P] each, as means that merge, in one transfer to the host.

    ``shares_P``: the part of each pair that this rank counts for, 1 for all of it.
    """
    sums = [(values_P * shares_P).sum() for values_P in values.values()]
    *totals, count = torch.stack([*sums, shares_P.sum()]).tolist()
    return {name: Mean(total, count) for name, total in zip(values, totals, strict=True)}


def of_held_out(metrics: Metrics) -> Metrics:
    """Return metrics of pairs under the names of held-out ones."""
    return {
        "eval/preference_loss": metrics["loss/preference"],
        "eval/accuracy": metrics["preference/accuracy"],
        "eval/margin": metrics["preference/margin/mean"],
        "eval/chosen_reward": metrics["preference/chosen_reward/mean"],
        "eval/rejected_reward": metrics["preference/rejected_reward/mean"],
    }
