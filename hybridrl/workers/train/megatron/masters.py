"""float32 masters that begin as the files' values, and not as what bfloat16 leaves of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hybridrl.config.architecture import Architecture
from hybridrl.models.load import WeightFiles
from hybridrl.workers.train.megatron.blocks import blocks_of, flat_pieces
from hybridrl.workers.train.megatron.hf_tensors import hf_tensors
from hybridrl.workers.train.megatron.optimizer import DistributedAdamW
from hybridrl.workers.train.megatron.parallel_rank import ParallelRank


@torch.no_grad()
def fill_masters(
    optimizer: DistributedAdamW,
    files: WeightFiles,
    *,
    names: Mapping[nn.Parameter, str],
    architecture: Architecture,
    parallel: ParallelRank,
) -> None:
    """Read this rank's share of the masters of weights in another type from the model's files.

    Megatron-core copies them from the weights, which are rounded by then: by up to 0.2 %, which of
    a weight of 0.02 is forty steps at a learning rate of 1e-6. The weights stay as they are: they
    are the masters rounded.

    Args:
        optimizer: of weights that are loaded.
        files: of the model's folder. What is in none, as a critic's head, is left as it is.
        names: of parameters, as ``blocks_of`` wants them.
        architecture: of the same folder.
        parallel: this rank.
    """
    in_files = hf_tensors(architecture)
    for share in optimizer.shares():
        if share.parameter.dtype == share.master.dtype:
            continue
        name, shape = names[share.parameter], share.parameter.shape
        blocks = blocks_of(name, shape, architecture=architecture, parallel=parallel)
        for piece in flat_pieces(blocks, share.begin, share.end):
            if piece.name in in_files:
                values = files.read_box(piece.name, piece.place.box(piece.shape))
                piece.view(share.master, begin=share.begin).copy_(values)
