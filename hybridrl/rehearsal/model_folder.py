"""A model folder of a rehearsal: config.json, and weight files as large as real ones without bytes.

The files are sparse: they have the headers of safetensors and holes. So the product's own loader
reads names, types and shapes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrl.config.model_folder import CONFIG, WEIGHTS, read_settings
from hybridrl.json_text import to_json_text
from hybridrl.models.experts import StoredNames
from hybridrl.models.load import build_empty_model
from hybridrl.rehearsal.gpu import FakeGpu

_STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_TYPES = {stored: dtype for dtype, stored in _STORED.items()}


class HollowFile:
    """Takes the place of safetensors' open file: large tensors have no values.

    Args:
        file: as ``safe_open`` returns it.
        gpu: whose host has the tensors.
    """

    def __init__(self, file: Any, gpu: FakeGpu) -> None:  # noqa: ANN401 - it ships no types
        self._file, self._gpu = file, gpu

    def keys(self) -> list[str]:
        """Return all names."""
        return list(self._file.keys())

    def get_tensor(self, name: str) -> Tensor:
        """Return a full tensor."""
        return self.get_slice(name)[:]

    def get_slice(self, name: str) -> HollowSlice:
        """Return a tensor of which a part can be read."""
        return HollowSlice(self._file.get_slice(name), self._gpu)


class HollowSlice:
    """Takes the place of a slice of safetensors."""

    def __init__(self, stored: Any, gpu: FakeGpu) -> None:  # noqa: ANN401
        self._stored, self._gpu = stored, gpu
        self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

    def __getitem__(self, edges: Any) -> Tensor:  # noqa: ANN401 - slices
        shape = torch.empty(self.get_shape(), device="meta")[edges].shape
        return self._gpu.on_host(shape, _TYPES[self.get_dtype()])


def write_hollow_model(folder: Path, source: Path, *, num_layers: int | None = None) -> Path:
    """Write a folder with the shapes of another one's config.json, and return it.

    Args:
        folder: to write; its parent exists.
        source: a Hugging Face folder; only its config.json is read.
        num_layers: the first layers alone; None: all.

    Raises:
        ModelError: config.json is not usable.
    """
    settings = dict(read_settings(source))
    if num_layers is not None:
        settings["num_hidden_layers"] = num_layers
        if isinstance(kinds := settings.get("layer_types"), list):
            settings["layer_types"] = kinds[:num_layers]
    folder.mkdir()
    (folder / CONFIG).write_text(to_json_text(settings), encoding="utf-8")
    model = build_empty_model(folder, dtype=torch.bfloat16)
    names = StoredNames(model.config.model_type)
    tensors = {
        stored: torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for name, parameter in model.named_parameters()
        for stored, shape in names.shapes(name, parameter.shape)
    }
    write_hollow_file(tensors, folder / WEIGHTS)
    return folder


def write_hollow_file(tensors: Mapping[str, Tensor], path: Path, **_: object) -> None:
    """Take the place of safetensors' ``save_file``: names, types and shapes, and no values."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _STORED[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
