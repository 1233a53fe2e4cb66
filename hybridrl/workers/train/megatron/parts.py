"""What a rank has of a checkpoint's tensors, under the names that FSDP2 gives them.

A data-parallel rank owns a flat stretch of each local tensor: its master weights and moments. Cut
into boxes of Hugging Face tensors, they are the same tensors that any other engine saves, so that a
run goes on with other parallel sizes, or with FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from hybridrl.config.architecture import Architecture
from hybridrl.workers.train.megatron.blocks import blocks_of, flat_pieces
from hybridrl.workers.train.megatron.parallel_rank import ParallelRank
from hybridrl.workers.train.places import ShardedPieces, ShardSpec, TensorShard

MODEL = "model.hf."
"""What names of weights begin with in a checkpoint."""

Pieces = dict[str, ShardedPieces]
"""By name in the checkpoint; every tensor of the model, also those that other ranks have."""


@dataclass(frozen=True, slots=True)
class FlatSpan:
    """What this rank owns of one local tensor."""

    name: str
    """Megatron-core's, with the global number of the layer."""

    local_shape: tuple[int, ...]
    """Of the local tensor."""

    begin: int
    """First of the flattened local tensor's elements."""

    values: Tensor
    """Live memory of the elements from ``begin`` on, one dimension, contiguous."""


def moment_prefix(key: str) -> str:
    """Return what the names of a moment begin with, ``key`` being AdamW's: ``exp_avg``."""
    return f"optimizer.{key}.hf."


def named_pieces(
    spans: Iterable[FlatSpan],
    prefix: str,
    whole_shapes: Mapping[str, tuple[int, ...]],
    *,
    architecture: Architecture,
    parallel: ParallelRank,
) -> Pieces:
    """Cut what this rank owns into boxes; padding of the vocabulary is left out.

    Args:
        stretches: of weights, or of one of the moments.
        prefix: ``MODEL``, or ``moment_prefix(key)``.
        whole_shapes: of all tensors that learn, see ``hf_tensors``, ``critic_tensors`` and
            ``adapter_tensors``.
        architecture: of the model.
        parallel: this rank.

    Raises:
        ModelError: a stretch is of no tensor of the model.
    """
    pieces: dict[str, list[TensorShard]] = {name: [] for name in whole_shapes}
    for stretch in spans:
        blocks = blocks_of(
            stretch.name, stretch.local_shape, architecture=architecture, parallel=parallel
        )
        flat = stretch.values.detach()
        for piece in flat_pieces(blocks, stretch.begin, stretch.begin + flat.numel()):
            part = TensorShard(piece.view(flat, begin=stretch.begin), piece.place)
            pieces[piece.name].append(part)
    return {
        prefix + name: ShardedPieces(tuple(shape), tuple(pieces[name]))
        for name, shape in whole_shapes.items()
    }


def step_pieces(step: Tensor, weights: Pieces) -> Pieces:
    """Let one counter stand for the step of every tensor that this rank has something of.

    AdamW of PyTorch counts for each tensor alone; all of them have taken the same steps.

    Args:
        step: the counter, a live tensor without dimensions.
        weights: pieces under ``MODEL``.
    """
    number = (TensorShard(step.detach(), ShardSpec((), ())),)
    return {
        moment_prefix("step") + name.removeprefix(MODEL): ShardedPieces(
            (), number if held.pieces else ()
        )
        for name, held in weights.items()
    }
