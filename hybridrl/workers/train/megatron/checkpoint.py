"""This rank's part of a checkpoint, under the names that FSDP2 gives its tensors.

A data-parallel rank owns a flat span of each local tensor: its master weights and moments. Cut
into shards of Hugging Face tensors, they are the tensors that every other engine saves. So a run
continues with other parallel sizes, or with FSDP2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.workers.train.megatron.shard_map import LocalShard, ShardMap, cut_flat
from hybridrl.workers.train.shard_spec import RankShards, ShardSpec, TensorShard

MOMENTS = ("exp_avg", "exp_avg_sq")

_MODEL = "model.hf."
"""Prefix of the names of weights."""


@dataclass(frozen=True, slots=True)
class OwnedSpan:
    """The elements of a flattened local tensor that this rank's optimizer steps."""

    name: str
    """Megatron-core's, with the global number of the layer."""

    local_shape: tuple[int, ...]
    """Of the local tensor."""

    begin: int
    """First element."""

    master: Tensor
    """Live float32 values that a step changes, one dimension, contiguous."""

    moments: Mapping[str, Tensor]
    """AdamW's moments by name, like ``master``; empty before the first step."""

    def shards(self, shard_map: ShardMap) -> tuple[LocalShard, ...]:
        """Return the shards of the span; padding of the vocabulary is in none.

        Raises:
            ModelError: the model has no such tensor.
        """
        shards = shard_map.shards_of(self.name, self.local_shape)
        return cut_flat(shards, self.begin, self.begin + self.master.numel())


def checkpoint_tensors(
    spans: Sequence[OwnedSpan],
    full_shapes: Mapping[str, tuple[int, ...]],
    *,
    shard_map: ShardMap,
    num_steps: int,
) -> dict[str, RankShards]:
    """List the tensors that a resumed run needs, as views of the live memory.

    Args:
        full_shapes: of all tensors that learn, on other ranks as well.
        num_steps: optimizer steps taken; moments exist after the first.

    Raises:
        ModelError: a span belongs to no tensor of the model.
    """
    all_shards = [(span, span.shards(shard_map)) for span in spans]

    def named(prefix: str, moment: str | None = None) -> dict[str, RankShards]:
        by_name: dict[str, list[TensorShard]] = {name: [] for name in full_shapes}
        for span, shards in all_shards:
            flat = span.master if moment is None else span.moments[moment]
            for shard in shards:
                values = shard.view(flat.detach(), begin=span.begin)
                by_name[shard.name].append(TensorShard(values, shard.spec))
        return {
            prefix + name: RankShards(tuple(shape), tuple(by_name[name]))
            for name, shape in full_shapes.items()
        }

    weights = named(_MODEL)
    if not num_steps:
        return weights
    # AdamW of PyTorch counts steps per tensor; here one number stands for all of them.
    step = (TensorShard(torch.tensor(float(num_steps)), ShardSpec((), ())),)
    steps = {
        f"optimizer.step.hf.{name.removeprefix(_MODEL)}": RankShards((), step if of.shards else ())
        for name, of in weights.items()
    }
    moments = [named(f"optimizer.{key}.hf.", key) for key in MOMENTS]
    return weights | steps | moments[0] | moments[1]
