"""From a batch of the policy to what its loss sees of one pack: the same for every engine.

Legend: B rows of a batch, L tokens of a row, S scored (response) tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.batch import SupervisedBatch, TrainBatch, jagged_from, row_lengths
from hybridrl.metrics import Metrics, Sum
from hybridrl.workers.train.packing import Pack
from hybridrl.workers.train.protocol import TokenLossInputs


def loss_inputs(
    batch: TrainBatch,
    pack: Pack,
    *,
    weights_S: Tensor,
    current_logprobs_S: Tensor,
    entropy_S: Tensor,
) -> TokenLossInputs:
    """Lay the batch's columns beside the current log-probs and entropies of a pack."""
    device = current_logprobs_S.device

    def at_scored(column_BL: Tensor) -> Tensor:
        return column_BL.values()[pack.place_S].to(device)

    old_BL, reference_BL = batch.old_logprobs_BL, batch.reference_logprobs_BL
    return TokenLossInputs(
        current_logprobs_T=current_logprobs_S,
        entropy_T=entropy_S,
        weights_T=weights_S,
        advantages_T=at_scored(batch.advantages_BL),
        sampler_logprobs_T=at_scored(batch.sampler_logprobs_BL),
        old_logprobs_T=current_logprobs_S.detach() if old_BL is None else at_scored(old_BL),
        reference_logprobs_T=None if reference_BL is None else at_scored(reference_BL),
    )


def count_pack(pack: Pack) -> Metrics:
    """Count what a pack computes; a filler counts for nothing.

    Of ranks that share a pack one alone is to count it.
    """
    if not pack.num_tokens:
        return {}
    return {
        "data/train_tokens": Sum(pack.num_tokens),
        "data/loss_tokens": Sum(pack.num_scored),
        "data/microbatches": Sum(1),
    }


def as_train_batch(batch: SupervisedBatch) -> TrainBatch:
    """Give examples the columns of rollouts, which a supervised loss does not look at."""
    nothing_BL = jagged_from(
        torch.zeros(batch.token_ids_BL.values().shape), row_lengths(batch.token_ids_BL)
    )
    return TrainBatch(
        token_ids_BL=batch.token_ids_BL,
        response_mask_BL=batch.response_mask_BL,
        advantages_BL=nothing_BL,
        sampler_logprobs_BL=nothing_BL,
        batch_size=batch.batch_size,
    )
