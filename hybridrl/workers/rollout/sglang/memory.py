"""A server's memory as another process can know it: names from files, sizes from the server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.errors import ModelError
from hybridrl.models.architecture import read_architecture
from hybridrl.models.load import WeightFiles, shapes_as_read
from hybridrl.workers.rollout.adapter_fit import Shapes
from hybridrl.workers.rollout.protocol import MemoryTag

_EMBEDDING = "model.embed_tokens.weight"
_TIED_AWAY = "lm_head.weight"


def base_shapes(folder: Path) -> Shapes:
    """Return the shapes of all weights that are sent, by the names in the model's files."""
    files = WeightFiles(folder)
    is_tied = read_architecture(folder).is_tied
    shapes = shapes_as_read(files)
    return {name: shapes[name] for name in sorted(shapes) if not (is_tied and name == _TIED_AWAY)}


def require_whole_vocabulary(folder: Path) -> None:
    """Raise a ModelError if the embedding has other rows than config.json, which SGLang reads."""
    files = WeightFiles(folder)
    expected = read_architecture(folder).vocab_size
    for name in (_EMBEDDING, _TIED_AWAY):
        rows = files.shape_of(name)[0] if name in files.names else expected
        if rows != expected:
            raise ModelError(
                f"{folder}: {name} has {rows} rows, and config.json says vocab_size={expected}; "
                "SGLang would be built for another vocabulary than the trainer's: save the model "
                "again with the right config.json"
            )


def held_bytes(info: Mapping[str, Any], part: MemoryTag) -> int:
    """Return how many bytes a tag holds on a device, as a server counts them.

    The server rounds to a thousandth of a GB: this is the smallest value before rounding. Weights
    and graphs are counted as the drop of free memory while they were made. So they include memory
    that was allocated at the same time and cannot be released: most of the graphs' (the shared
    buffer of logits alone is 156 MB with 256 slots and 152k tokens), a little of the weights'.
    """
    usage = info["internal_states"][0]["memory_usage"]
    graphs = usage["graph"]
    gigabytes = {
        MemoryTag.WEIGHTS: usage["weight"],
        MemoryTag.KV_CACHE: usage["kvcache"],
        MemoryTag.CUDA_GRAPH: sum(graphs.values()) if isinstance(graphs, dict) else graphs,
    }[part]
    return int(max(0.0, gigabytes - 1e-3) * 2**30)
