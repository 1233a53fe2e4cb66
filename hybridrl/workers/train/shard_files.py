"""Sharded tensors in safetensors files: one file a rank, readable by any number of ranks.

A file holds the parts that one rank has; where each part lies in its whole tensor stands in the
file's metadata. The bytes are written as they come, so no second copy of them is held.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hybridrl.checkpoint.manifest import FileEntry
from hybridrl.errors import CheckpointError

_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
_CHUNK_BYTES = 16 * 2**20
_ALIGNMENT = 8
_NUM_NAMED = 4

Box = tuple[tuple[int, int], ...]
"""Begin and end along each dimension of a whole tensor."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank's part lies in its whole tensor."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        """Return the place of what this rank holds of ``tensor``, plain or sharded."""
        if not isinstance(tensor, DTensor):
            return cls(tuple(tensor.shape), (0,) * tensor.ndim)
        _, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        return cls(tuple(tensor.shape), tuple(offset))

    def box(self, local_shape: Sequence[int]) -> Box:
        """Return what a part of ``local_shape`` covers."""
        return tuple((o, o + n) for o, n in zip(self.offset, local_shape, strict=True))


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of a tensor, in host memory."""

    values: Tensor
    place: Place


def write_parts(path: Path, parts: Mapping[str, Part], *, notes: Mapping[str, object]) -> FileEntry:
    """Write a safetensors file and flush it to the disk.

    Args:
        path: of the file; its folder exists.
        parts: by name; contiguous host tensors.
        notes: small state besides, as JSON has it.

    Raises:
        OSError: the disk is full or gone.
    """
    checksum = num_bytes = 0
    with path.open("wb", buffering=0) as file:
        for piece in _pieces(parts, notes):
            if file.write(piece) != len(piece):  # an unbuffered file may take a part of it
                raise OSError(f"no space left for {path}")
            checksum = zlib.crc32(piece, checksum)
            num_bytes += len(piece)
        os.fsync(file.fileno())
    return FileEntry(name=path.name, num_bytes=num_bytes, crc32=checksum)


def is_unchanged(path: Path, entry: FileEntry) -> bool:
    """Read a file and compare its bytes with what was written."""
    checksum = 0
    try:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_CHUNK_BYTES):
                checksum = zlib.crc32(piece, checksum)
    except OSError:
        return False
    return checksum == entry.crc32


class ShardReader:
    """The files that all ranks wrote together, opened through memory maps.

    Use it in a ``with``.

    Raises:
        CheckpointError: there are none, or one cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened = ExitStack()
        self._files: list[Any] = []
        self._places: list[dict[str, Place]] = []
        self.notes: list[dict[str, Any]] = []
        """What each rank noted, by rank."""
        paths = sorted(folder.glob("rank-*.safetensors"))
        if not paths:
            raise CheckpointError(f"{folder} holds no files of ranks; resume from another")
        for path in paths:
            self._open(path)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of every tensor, by name."""
        return {
            name: place.global_shape for places in self._places for name, place in places.items()
        }

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy into what this rank holds of each tensor, whoever wrote it.

        Raises:
            CheckpointError: names or shapes are others, or a part of a tensor is in no file.
        """
        self._check_names({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            place = Place.of(tensor)
            target = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._fill(name, target.detach(), place)

    def _fill(self, name: str, target: Tensor, place: Place) -> None:
        wanted = place.box(target.shape)
        num_filled = 0
        for file, places in zip(self._files, self._places, strict=True):
            if name not in places or num_filled == target.numel():
                continue
            held = places[name].box(file.get_slice(name).get_shape())
            common = _common(held, wanted)
            if common is not None:
                part = _cut(file, name, common, held)
                _view(target, common, wanted).copy_(part)
                num_filled += part.numel()
        if num_filled != target.numel():
            raise CheckpointError(
                f"{self._folder}: {name} has {num_filled} of the {target.numel()} values that this "
                "rank needs; a file is missing. Resume from another checkpoint"
            )

    def _check_names(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        saved = self.shapes
        problems = [
            *_name_some("is missing", sorted(wanted.keys() - saved.keys())),
            *_name_some("is too much", sorted(saved.keys() - wanted.keys())),
            *_name_some(
                "has another shape",
                [
                    f"{name} {list(saved[name])} there, {list(wanted[name])} here"
                    for name in sorted(wanted.keys() & saved.keys())
                    if saved[name] != wanted[name]
                ],
            ),
        ]
        if problems:
            raise CheckpointError(
                f"{self._folder} is of another model: {'; '.join(problems)}; set model.path and "
                "the lora and critic sections to what the run was begun with, or begin a new run "
                "with trainer.run_dir"
            )

    def _open(self, path: Path) -> None:
        try:
            file = self._opened.enter_context(safe_open(path, framework="pt"))
            metadata = file.metadata()
            places = json.loads(metadata["places"])
            notes = json.loads(metadata["notes"])
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as err:
            raise CheckpointError(f"{path} cannot be read: {err}; resume from another") from err
        self._files.append(file)
        self._places.append(
            {name: Place(tuple(shape), tuple(offset)) for name, (shape, offset) in places.items()}
        )
        self.notes.append(notes)


def _header(parts: Mapping[str, Part], notes: Mapping[str, object]) -> bytes:
    """Return the length and the JSON that a safetensors file begins with, padded to 8 bytes."""
    places = {name: (part.place.global_shape, part.place.offset) for name, part in parts.items()}
    entries: dict[str, object] = {
        "__metadata__": {"places": json.dumps(places), "notes": json.dumps(notes)}
    }
    end = 0
    for name, part in parts.items():
        begin, end = end, end + part.values.nbytes
        entries[name] = {
            "dtype": _DTYPE_NAMES[part.values.dtype],
            "shape": list(part.values.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _pieces(parts: Mapping[str, Part], notes: Mapping[str, object]) -> Iterator[bytes | memoryview]:
    yield _header(parts, notes)
    for part in parts.values():
        if part.values.numel():
            flat = part.values.reshape(-1).view(torch.uint8).numpy().data
            for begin in range(0, len(flat), _CHUNK_BYTES):
                yield flat[begin : begin + _CHUNK_BYTES]


def _common(first: Box, second: Box) -> Box | None:
    both = zip(first, second, strict=True)
    box = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in both)
    return box if all(begin < end for begin, end in box) else None


def _cut(file: Any, name: str, common: Box, held: Box) -> Tensor:  # noqa: ANN401 - no types
    if not common:  # a number has no dimension to cut
        number: Tensor = file.get_tensor(name)
        return number
    index = tuple(
        slice(begin - low, end - low) for (begin, end), (low, _) in zip(common, held, strict=True)
    )
    part: Tensor = file.get_slice(name)[index]
    return part


def _view(target: Tensor, common: Box, wanted: Box) -> Tensor:
    index = tuple(
        slice(begin - low, end - low) for (begin, end), (low, _) in zip(common, wanted, strict=True)
    )
    return target[index]


def _name_some(problem: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        yield f"{len(names)} tensors: {problem}, first: {', '.join(names[:_NUM_NAMED])}"
