"""From a batch of the critic to the loss of one pack: the same for every engine.

Legend: S scored (response) tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.value_loss import clipped_value_loss
from hybridrl.batch import CriticBatch
from hybridrl.metrics import Mean, Metrics
from hybridrl.workers.train.packing import Pack


def value_share(
    batch: CriticBatch, pack: Pack, *, values_S: Tensor, weights_S: Tensor, value_clip: float
) -> tuple[Tensor, Metrics]:
    """Return a pack's share of the global loss, to be *summed*, and its metrics.

    Args:
        batch: whose rows are packed.
        pack: a filler, which scores nothing, gives a 0 that carries a gradient, and no metrics.
        values_S: with gradient, reward units.
        weights_S: share in the global loss.
        value_clip: reward units that a value may move before its loss is clipped; 0 is off.
    """
    device = values_S.device
    loss = clipped_value_loss(
        values_S,
        old_values_T=batch.old_values_BL.values()[pack.place_S].to(device),
        returns_T=batch.returns_BL.values()[pack.place_S].to(device),
        value_clip=value_clip,
    )
    share = (loss.losses_T * weights_S).sum()
    num_tokens = len(pack.place_S)
    if not num_tokens:
        return share, {}
    sums = torch.stack([share, weights_S.sum(), loss.is_clipped_T.sum()]).detach().tolist()
    return share, {
        "loss/value": Mean(sums[0], sums[1]),
        "critic/clip_fraction": Mean(sums[2], num_tokens),
    }
