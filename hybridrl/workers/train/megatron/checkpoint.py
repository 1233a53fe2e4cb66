"""What this rank holds of weights that learn and of their moments, as boxes of whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from hybridrl.config.architecture import Architecture
from hybridrl.workers.train.megatron.optimizer import DistributedAdamW
from hybridrl.workers.train.megatron.optimizer_state import MOMENTS
from hybridrl.workers.train.megatron.parallel_rank import ParallelRank
from hybridrl.workers.train.megatron.parts import (
    MODEL,
    FlatSpan,
    Pieces,
    moment_prefix,
    named_pieces,
    step_pieces,
)
from hybridrl.workers.train.places import CheckpointTensor
from hybridrl.workers.train.protocol import WeightSpec


def checkpoint_tensors(
    optimizer: DistributedAdamW,
    *,
    names: Mapping[nn.Parameter, str],
    specs: Sequence[WeightSpec],
    architecture: Architecture,
    parallel: ParallelRank,
) -> dict[str, CheckpointTensor]:
    """Name what a resumed run needs, as views of the live memory.

    Args:
        optimizer: of the stages of this rank.
        names: of its parameters, as ``blocks_of`` wants them.
        specs: all whole tensors that learn, on other ranks as well.
        architecture: of the model.
        parallel: this rank.

    Returns:
        ``ShardedPieces`` under the names that the engine on FSDP2 gives: masters, moments once
        there are any, and with them the number of steps.
    """
    whole_shapes = {spec.name: spec.shape for spec in specs}

    def pieces(prefix: str, moment: str | None = None) -> Pieces:
        spans = [
            FlatSpan(
                name=names[share.parameter],
                local_shape=tuple(share.parameter.shape),
                begin=share.begin,
                values=share.master if moment is None else share.moments[moment],
            )
            for share in optimizer.shares()
        ]
        return named_pieces(
            spans, prefix, whole_shapes, architecture=architecture, parallel=parallel
        )

    weights = pieces(MODEL)
    tensors: dict[str, CheckpointTensor] = {**weights}
    if optimizer.num_steps:
        tensors |= step_pieces(torch.tensor(float(optimizer.num_steps)), weights)
        for key in MOMENTS:
            tensors |= pieces(moment_prefix(key), key)
    return tensors
