"""A server's memory as another process can know it: names from files, sizes from the server."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridrl.config.lora import LoraConfig
from hybridrl.errors import ModelError
from hybridrl.models.adapter_names import matrix_names
from hybridrl.models.architecture import read_architecture
from hybridrl.models.load import WeightFiles
from hybridrl.workers.rollout.protocol import MemoryTag, WeightMemory

_WEIGHT = ".weight"
_EMBEDDING = "model.embed_tokens.weight"
_TIED_AWAY = "lm_head.weight"


Shapes = Mapping[str, tuple[int, ...]]


def base_shapes(folder: Path) -> Shapes:
    """Return the shapes of all weights that are sent, by the names in the model's files."""
    files = WeightFiles(folder)
    is_tied = read_architecture(folder).is_tied
    return {
        name: files.shape_of(name)
        for name in sorted(files.names)
        if not (is_tied and name == _TIED_AWAY)
    }


def list_weights(shapes: Shapes, *, itemsize: int) -> tuple[WeightMemory, ...]:
    """List what must be sent to a server before it may sample.

    Buffers (rotary tables, scales) are not listed: SGLang itself copies them before its weights
    are released and restores them afterwards.

    Args:
        shapes: of all weights, and of the matrices of an adapter that the server applies.
        itemsize: bytes of a number in the server.
    """
    return tuple(
        WeightMemory(name, math.prod(shape) * itemsize, is_buffer=False)
        for name, shape in shapes.items()
    )


def adapter_shapes(base: Shapes, lora: LoraConfig | None) -> Shapes:
    """Return names and shapes of a complete adapter of this model; empty without an adapter."""
    return {} if lora is None else dict(_matrices(base, lora))


def _matrices(shapes: Shapes, lora: LoraConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in shapes.items():
        layer = name.removesuffix(_WEIGHT)
        if layer != name and layer.rpartition(".")[2] in lora.modules:
            outputs, inputs = shape
            name_a, name_b = matrix_names(layer)
            yield name_a, (lora.rank, inputs)
            yield name_b, (outputs, lora.rank)


def require_whole_vocabulary(folder: Path) -> None:
    """Refuse a folder whose embedding has another number of rows than its config.json.

    The server takes its size from config.json, the trainer from the tensor.

    Raises:
        ModelError: both numbers.
    """
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
