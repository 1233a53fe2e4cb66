"""This rank's tensors in files: read from a Hugging Face folder, and listed for a checkpoint.

A data-parallel rank owns a flat span of each local tensor: its master weights and moments. Cut
into shards of Hugging Face tensors, they are the tensors that every other engine saves. So a run
continues with other parallel sizes, or with FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.models.load import WeightFiles
from hybridrl.workers.train.megatron.architecture import HEAD
from hybridrl.workers.train.megatron.shard_map import LocalShard, ShardMap, cut_flat
from hybridrl.workers.train.shard_spec import RankShards, ShardSpec, TensorShard

MOMENTS = ("exp_avg", "exp_avg_sq")

_MODEL = "model.hf."  # prefix of the names of weights


@dataclass(frozen=True, slots=True)
class OwnedSpan:
    """The elements of a flattened local tensor that this rank's optimizer steps."""

    name: str  # megatron-core's, with the global number of the layer
    local_shape: tuple[int, ...]
    begin: int  # first element
    master: Tensor  # live float32 values that a step changes, [elements], contiguous
    moments: Mapping[str, Tensor]  # by name, like ``master``; empty before the first step

    def shards(self, shard_map: ShardMap) -> tuple[LocalShard, ...]:
        """Return the shards of the span; padding of the vocabulary is in none."""
        shards = shard_map.shards_of(self.name, self.local_shape)
        return cut_flat(shards, self.begin, self.begin + self.master.numel())


def checkpoint_tensors(
    spans: Sequence[OwnedSpan],
    full_shapes: Mapping[str, tuple[int, ...]],
    *,
    shard_map: ShardMap,
    num_steps: int,
) -> dict[str, RankShards]:
    """List the tensors that a resumed run needs, as views; moments exist after the first step."""
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


@torch.no_grad()
def load_weights(local: Mapping[str, Tensor], files: WeightFiles, shard_map: ShardMap) -> None:
    """Give this rank's tensors their values, cast to their type; padding becomes 0.

    Tensors that are in no file, such as an adapter or a critic's head, keep their values. Not a
    collective: each rank reads its own shards through the memory map.
    """
    architecture = shard_map.architecture
    in_files = shard_map.tensors
    copies = [HEAD] if architecture.is_tied else []
    files.require(in_files, known=copies, model=f"{architecture.model_type} model")
    for name, tensor in local.items():
        flat = tensor.view(-1)
        shards = shard_map.shards_of(name, tensor.shape)
        for shard in shards:
            if shard.name in in_files:
                shard.view(flat).copy_(files.read_range(shard.name, shard.spec.range))
        flat[shards[-1].end if shards else 0 :].zero_()


@torch.no_grad()
def fill_masters(spans: Iterable[OwnedSpan], files: WeightFiles, shard_map: ShardMap) -> None:
    """Read this rank's float32 masters of 16-bit weights from the model's files.

    Megatron-core copies them from the weights, which are rounded by then: by up to 0.2 %. For a
    weight of 0.02 that is forty steps at a learning rate of 1e-6. The weights stay unchanged: they
    are the masters rounded. Spans in no file, as of a critic's head, keep their values.
    """
    in_files = shard_map.tensors
    for span in spans:
        for shard in span.shards(shard_map):
            if shard.name in in_files:
                values = files.read_range(shard.name, shard.spec.range)
                shard.view(span.master, begin=span.begin).copy_(values)
