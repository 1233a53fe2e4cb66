"""What this rank holds of weights that learn and of their moments, as boxes of whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from hybridrl.workers.train.mcore.architecture import Architecture
from hybridrl.workers.train.mcore.blocks import blocks_of, flat_pieces
from hybridrl.workers.train.mcore.optimizer import MOMENTS, DistributedAdamW
from hybridrl.workers.train.mcore.parallel_rank import ParallelRank
from hybridrl.workers.train.places import CheckpointTensor, Part, Place, ShardedPieces
from hybridrl.workers.train.protocol import WeightSpec

_WEIGHT = "model.hf."
_MOMENT = "optimizer.{}.hf."


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
    parts: dict[str, list[Part]] = {}
    for share in optimizer.shares():
        blocks = blocks_of(
            names[share.parameter],
            share.parameter.shape,
            architecture=architecture,
            parallel=parallel,
        )
        columns = {_WEIGHT: share.master}
        columns |= {_MOMENT.format(key): value for key, value in share.moments.items()}
        for piece in flat_pieces(blocks, share.begin, share.end):
            for prefix, flat in columns.items():
                part = Part(piece.view(flat, begin=share.begin), piece.place)
                parts.setdefault(prefix + piece.name, []).append(part)
    prefixes = [_WEIGHT]
    if optimizer.num_steps:
        prefixes += [_MOMENT.format(key) for key in MOMENTS]
    tensors: dict[str, CheckpointTensor] = {
        prefix + spec.name: ShardedPieces(spec.shape, tuple(parts.get(prefix + spec.name, ())))
        for prefix in prefixes
        for spec in specs
    }
    if optimizer.num_steps:
        tensors |= {_MOMENT.format("step") + spec.name: _steps(optimizer) for spec in specs}
    return tensors


def _steps(optimizer: DistributedAdamW) -> ShardedPieces:
    """Return the number of steps as torch's AdamW keeps it, with each tensor."""
    return ShardedPieces((), (Part(torch.tensor(float(optimizer.num_steps)), Place((), ())),))
