"""Reading this rank's tensors and masters from a Hugging Face folder, and no other values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from hybridrl.models.load import WeightFiles
from hybridrl.workers.train.megatron.checkpoint import OwnedSpan
from hybridrl.workers.train.megatron.hf_tensors import HEAD, hf_tensors
from hybridrl.workers.train.megatron.shard_map import ShardMap


@torch.no_grad()
def load_weights(local: Mapping[str, Tensor], files: WeightFiles, shard_map: ShardMap) -> None:
    """Give this rank's tensors their values, cast to their type; padding becomes 0.

    Tensors that are in no file, such as an adapter or a critic's head, keep their values. Not a
    collective: each rank reads its own shards through the memory map.

    Args:
        local: live tensors by megatron-core's names, with global layer numbers.

    Raises:
        ModelError: the files do not fit the architecture, or the tensors do not.
    """
    architecture = shard_map.architecture
    in_files = hf_tensors(architecture)
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
    are the masters rounded.

    Args:
        spans: of weights that are loaded. Those in no file, as a critic's head, keep their values.
    """
    in_files = hf_tensors(shard_map.architecture)
    for span in spans:
        for shard in span.shards(shard_map):
            if shard.name in in_files:
                values = files.read_range(shard.name, shard.spec.range)
                shard.view(span.master, begin=span.begin).copy_(values)
