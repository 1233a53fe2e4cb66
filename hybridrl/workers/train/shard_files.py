"""Sharded tensors in safetensors files: one file a rank, readable by any number of ranks.

A file holds the parts that one rank has; where each part lies in its whole tensor stands in the
file's metadata. A tensor of which the rank has one box is called by its name, the boxes of another
are numbered: ``NAME#0``. The bytes are written as they come, so no second copy of them is held.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridrl.checkpoint.manifest import FileEntry
from hybridrl.errors import CheckpointError
from hybridrl.json_text import to_json_text
from hybridrl.workers.train.places import (
    CheckpointTensor,
    ShardedPieces,
    ShardSpec,
    TensorRange,
    TensorShard,
    common_box,
    index_in,
    rest_of,
    size_of,
)
from hybridrl.workers.train.shards import is_first_copy, local_shard

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
_PIECE = "#"
"""Stands between a tensor's name and the number of one of its pieces; in no name of a tensor."""


@dataclass(frozen=True, slots=True)
class _StoredShard:
    """A box of a tensor in a file."""

    file: Any
    key: str
    box: TensorRange


def parts_of(name: str, tensor: CheckpointTensor) -> Iterator[tuple[str, TensorShard]]:
    """Yield what this rank holds of a tensor, views of its memory, by key in a rank's file."""
    if isinstance(tensor, Tensor):
        yield name, TensorShard(local_shard(tensor.detach()), ShardSpec.of(tensor))
    elif len(tensor.pieces) == 1:
        yield name, tensor.pieces[0]
    else:
        for number, piece in enumerate(tensor.pieces):
            yield f"{name}{_PIECE}{number}", piece


def parts_to_write(tensors: Mapping[str, CheckpointTensor]) -> dict[str, TensorShard]:
    """Return what goes into this rank's file, by key: of replicas the first one writes."""
    return {
        key: part
        for name, tensor in tensors.items()
        if not isinstance(tensor, Tensor) or is_first_copy(tensor)
        for key, part in parts_of(name, tensor)
    }


def write_parts(
    path: Path, parts: Mapping[str, TensorShard], *, notes: Mapping[str, object]
) -> FileEntry:
    """Write a safetensors file and flush it to the disk.

    Args:
        path: of the file; its folder exists.
        parts: by key, see ``parts_of``; host tensors.
        notes: small state besides, as JSON has it.

    Raises:
        OSError: the disk is full or gone.
    """
    values = (part.values.contiguous().reshape(-1) for part in parts.values())
    return write_file(path, header_of(parts, notes), (flat.view(torch.uint8) for flat in values))


def write_file(path: Path, header: bytes, values: Iterable[Tensor]) -> FileEntry:
    """Write a safetensors file, and flush it to the disk.

    Args:
        path: of the file; its folder exists.
        header: what the file begins with, see ``header_of``.
        values: uint8 host tensors that hold the values of all parts, end to end.

    Raises:
        OSError: the disk is full or gone.
    """
    checksum = num_bytes = 0
    with path.open("wb", buffering=0) as file:
        for piece in _pieces(header, values):
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
        self._held: dict[str, list[_StoredShard]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Whole shape of every tensor, by name."""
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

    def fill(self, tensors: Mapping[str, CheckpointTensor]) -> None:
        """Copy into what this rank holds of each tensor, whoever wrote it, however it was cut.

        Raises:
            CheckpointError: names or shapes are others, or a part of a tensor is in no file.
        """
        self._check_names({name: _whole_shape(tensor) for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            for _, part in parts_of(name, tensor):
                self._fill(name, part)

    def _fill(self, name: str, wanted: TensorShard) -> None:
        missing = [wanted.box] if wanted.values.numel() else []
        for held in self._held[name]:
            remaining: list[TensorRange] = []
            for box in missing:
                common = common_box(held.box, box)
                if common is None:
                    remaining.append(box)
                else:
                    wanted.values[index_in(wanted.box, common)].copy_(_cut(held, common))
                    remaining += rest_of(box, common)
            missing = remaining
        if missing:
            num_values = wanted.values.numel()
            num_filled = num_values - sum(map(size_of, missing))
            raise CheckpointError(
                f"{self._folder}: {name} has {num_filled} of the {num_values} values that this "
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
        for key, (shape, offset) in places.items():
            name = key.partition(_PIECE)[0]
            place = ShardSpec(tuple(shape), tuple(offset))
            box = place.box(file.get_slice(key).get_shape())
            self._held.setdefault(name, []).append(_StoredShard(file, key, box))
            self.shapes[name] = place.global_shape
        self.notes.append(notes)


def header_of(parts: Mapping[str, TensorShard], notes: Mapping[str, object]) -> bytes:
    """Return the length and the JSON that a safetensors file begins with, padded to 8 bytes.

    Of the parts only places, types and shapes are looked at.
    """
    places = {name: (part.place.global_shape, part.place.offset) for name, part in parts.items()}
    entries: dict[str, object] = {
        "__metadata__": {"places": to_json_text(places), "notes": to_json_text(notes)}
    }
    end = 0
    for name, part in parts.items():
        begin, end = end, end + part.values.nbytes
        entries[name] = {
            "dtype": _DTYPE_NAMES[part.values.dtype],
            "shape": list(part.values.shape),
            "data_offsets": [begin, end],
        }
    text = to_json_text(entries).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _pieces(header: bytes, values: Iterable[Tensor]) -> Iterator[bytes | memoryview]:
    yield header
    for flat in values:
        all_bytes = flat.numpy().data
        for begin in range(0, len(all_bytes), _CHUNK_BYTES):
            yield all_bytes[begin : begin + _CHUNK_BYTES]


def _whole_shape(tensor: CheckpointTensor) -> tuple[int, ...]:
    return tensor.shape if isinstance(tensor, ShardedPieces) else tuple(tensor.shape)


def _cut(held: _StoredShard, common: TensorRange) -> Tensor:
    if not common:  # a number has no dimension to cut
        number: Tensor = held.file.get_tensor(held.key)
        return number
    part: Tensor = held.file.get_slice(held.key)[index_in(held.box, common)]
    return part


def _name_some(problem: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        yield f"{len(names)} tensors: {problem}, first: {', '.join(names[:_NUM_NAMED])}"
