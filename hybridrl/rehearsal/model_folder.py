"""The model folders of a rehearsal: config.json, and files of weights that end after their headers.

So the product's own loader reads names, types and shapes. The tensors have no values.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ModelError
from hybridrl.images import ImageSettings
from hybridrl.json_text import to_json_text
from hybridrl.models.architecture import starter_settings
from hybridrl.models.experts import StoredNames
from hybridrl.models.image_settings import (
    PROCESSOR,
    image_settings_of,
    in_sections,
    read_image_settings,
)
from hybridrl.models.load import build_empty_model
from hybridrl.models.model_folder import CONFIG, WEIGHTS, read_settings
from hybridrl.models.recurrent import is_recurrent
from hybridrl.rehearsal.gpu import FakeGpu

_LENGTH = "<Q"
_DELTA_BLOCK = 64
"""Tokens that the kernel of a delta rule computes at once."""
_STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_TYPES = {stored: dtype for dtype, stored in _STORED.items()}


class HollowFile:
    """Takes the place of an open file of safetensors, made by ``write_hollow_file``."""

    def __init__(self, path: Path, gpu: FakeGpu) -> None:
        self._gpu = gpu
        with path.open("rb") as file:
            (length,) = struct.unpack(_LENGTH, file.read(8))
            header: dict[str, dict[str, Any]] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        self._header = header

    def keys(self) -> list[str]:
        """Return all names."""
        return list(self._header)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors by name."""
        return {name: tuple(self.get_slice(name).get_shape()) for name in self._header}

    def get_tensor(self, name: str) -> Tensor:
        """Return a full tensor."""
        return self.get_slice(name)[:]

    def get_slice(self, name: str) -> HollowSlice:
        """Return a tensor of which a part can be read."""
        return HollowSlice(self._header[name], self._gpu)


class HollowSlice:
    """Takes the place of a slice of safetensors."""

    def __init__(self, entry: Mapping[str, Any], gpu: FakeGpu) -> None:
        self._entry, self._gpu = entry, gpu

    def get_shape(self) -> list[int]:
        """Return the shape of the full tensor."""
        return list(self._entry["shape"])

    def get_dtype(self) -> str:
        """Return the type as the file spells it."""
        return str(self._entry["dtype"])

    def __getitem__(self, edges: slice | tuple[slice, ...]) -> Tensor:
        edges = edges if isinstance(edges, tuple) else (edges,)
        shape = self.get_shape()
        for dim, edge in enumerate(edges):
            shape[dim] = len(range(*edge.indices(shape[dim])))
        return self._gpu.on_host(shape, _TYPES[self.get_dtype()])


def with_hollow_models(
    config: ExperimentConfig, folder: Path, *, num_layers: int
) -> ExperimentConfig:
    """Return the configuration with hollow folders of at most ``num_layers`` for all its models."""
    if config.model.path is not None:
        settings = read_settings(Path(config.model.path))
    elif config.model.starter is not None:
        settings = starter_settings(config.model.starter) | {"dtype": config.model.dtype}
    else:
        raise ModelError("there is no model to plan for; set model.path=FOLDER, or model=starter")
    most = config.data.max_image_pixels
    images = image_settings_of(config.model, max_pixels=most)
    model = _write_hollow_model(folder / "model", settings, images, num_layers=num_layers)

    def hollow(path: str) -> Path:
        number = len(list(folder.iterdir()))
        other, seen = read_settings(Path(path)), read_image_settings(Path(path), max_pixels=most)
        return _write_hollow_model(folder / f"model {number}", other, seen, num_layers=num_layers)

    algorithm = config.algorithm
    folders = {path: str(hollow(path)) for path in algorithm.teacher_folders}
    taught = {source: folders.get(path, path) for source, path in algorithm.teachers.items()}
    return replace(
        config,
        model=replace(config.model, path=str(model), starter=None),
        algorithm=replace(algorithm, teacher_path=taught.pop("", None), teacher_paths=taught),
        reward=config.reward.with_model_paths(hollow),
    )


def _write_hollow_model(
    folder: Path, settings: Mapping[str, Any], images: ImageSettings | None, *, num_layers: int
) -> Path:
    """Write a folder with the first layers of a language model, and all of its tower."""
    total = settings["num_hidden_layers"]
    changes: dict[str, object] = {"num_hidden_layers": min(num_layers, total)}
    for key, value in settings.items():
        if isinstance(value, list) and len(value) == total:  # one entry for each layer
            changes[key] = value[:num_layers]
    if "mlp_only_layers" in settings:
        changes["mlp_only_layers"] = [n for n in settings["mlp_only_layers"] if n < num_layers]
    folder.mkdir()
    config = {**settings, **changes}
    if images is not None:
        config = in_sections(config)
        size = {"shortest_edge": images.min_pixels, "longest_edge": images.max_pixels}
        colours = {"image_mean": images.mean, "image_std": images.std}
        processor = {"image_processor": {"size": size, **colours}}
        (folder / PROCESSOR).write_text(to_json_text(processor), encoding="utf-8")
    (folder / CONFIG).write_text(to_json_text(config), encoding="utf-8")
    model = build_empty_model(folder, dtype=torch.bfloat16)
    for mixer in filter(is_recurrent, model.modules()):  # by its parts it would take minutes
        code: Any = sys.modules[type(mixer).__module__]
        code.torch_chunk_gated_delta_rule = _run_delta_rule
    names = StoredNames(model.config.model_type)
    tensors = {
        stored: torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for name, parameter in model.named_parameters()
        for stored, shape in names.shapes(name, parameter.shape)
    }
    write_hollow_file(tensors, folder / WEIGHTS)
    return folder


class _DeltaRule(torch.autograd.Function):
    """The kernel of flash-linear-attention (fla.ops.gated_delta_rule): what it makes and keeps."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:  # noqa: ANN401
        query_RLNK, _, value_RLNV, *_ = inputs
        within_blocks = query_RLNK.new_empty(*query_RLNK.shape[:-1], _DELTA_BLOCK)
        ctx.save_for_backward(*inputs, within_blocks)
        return torch.empty_like(value_RLNV)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:-1])


def _run_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: object
) -> tuple[Tensor, None]:
    return _DeltaRule.apply(query, key, value, g, beta), None  # type: ignore[no-untyped-call]


def write_hollow_file(tensors: Mapping[str, Tensor], path: Path, **_: object) -> None:
    """Take the place of safetensors' ``save_file``: the header alone."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        dtype, shape = _STORED[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = to_json_text(header).encode()
    path.write_bytes(struct.pack(_LENGTH, len(text)) + text)
