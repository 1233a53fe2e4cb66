"""Writing a rank's file as CheckpointWriter does, without a thread."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from hybridrl.checkpoint.store import FileEntry
from hybridrl.workers.train.checkpoint import header_of, write_file
from hybridrl.workers.train.shard_spec import TensorShard


def write_shards(
    path: Path, shards: Mapping[str, TensorShard], *, notes: Mapping[str, object]
) -> FileEntry:
    flat = (shard.values.contiguous().reshape(-1) for shard in shards.values())
    values = (tensor.view(torch.uint8) for tensor in flat)
    return write_file(path, header_of(shards, notes), values)
