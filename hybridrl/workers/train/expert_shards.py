"""Shards of fused experts in a checkpoint: each matrix of each expert by its name in files.

Megatron-core saves the same tensors, so either engine resumes a run of the other.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hybridrl.models.experts import ExpertMatrix, StoredNames
from hybridrl.workers.train.shard_spec import (
    CheckpointTensor,
    RankShards,
    ShardSpec,
    TensorShard,
    intersect,
    relative_slices,
)
from hybridrl.workers.train.shards import is_first_copy, local_shard


def stored_shards(
    prefix: str, name: str, parameter: Tensor, values: Tensor, names: StoredNames
) -> Mapping[str, CheckpointTensor]:
    """Return this rank's shards of a parameter, or of one of its moments, by name in files.

    Args:
        parameter: plain or sharded.
        values: the parameter, a moment sharded alike, or AdamW's number of steps.
    """
    matrices = names.matrices(name, parameter.shape)
    if not matrices:
        return {prefix + names.stored(name): values}
    return {prefix + matrix.name: _shards_of(matrix, parameter, values) for matrix in matrices}


def _shards_of(matrix: ExpertMatrix, parameter: Tensor, values: Tensor) -> RankShards:
    local = ShardSpec.of(parameter).range
    rows, columns = (matrix.begin, matrix.end), (0, matrix.num_columns)
    shared = intersect(((matrix.expert, matrix.expert + 1), rows, columns), local)
    shape = tuple(matrix.shape) if values.ndim else ()
    is_copy = not is_first_copy(parameter)
    if shared is None:
        return RankShards(shape, (), is_copy)
    if not shape:
        return RankShards((), (TensorShard(values, ShardSpec((), ())),), is_copy)
    part = local_shard(values.detach())[relative_slices(shared, outer=local)][0]
    offset = (shared[1][0] - matrix.begin, shared[2][0])
    return RankShards(shape, (TensorShard(part, ShardSpec.at(shape, offset, part.shape)),), is_copy)
