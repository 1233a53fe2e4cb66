"""One rank's file of a checkpoint: copied to the host while training waits, written later.

Each rank writes a safetensors file of its own without a collective; the driver asks for sizes and
checksums. Any number of ranks reads them: the metadata gives the offset of each shard in the full
tensor. A tensor of which the rank has one shard is stored under its name; several shards are
numbered, ``NAME#0``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridrl.checkpoint.store import FileEntry
from hybridrl.errors import CheckpointError
from hybridrl.json_text import to_json_text
from hybridrl.workers.train.model_engine import ModelEngine
from hybridrl.workers.train.offload import copy_to_host
from hybridrl.workers.train.shard_spec import (
    RankShards,
    ShardSpec,
    TensorRange,
    TensorShard,
    intersect,
    relative_slices,
    size_of,
    subtract,
)

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
_NUMBER = "#"  # before the number of a shard; in no tensor's name


@dataclass(frozen=True, slots=True)
class _StoredShard:
    file: Any
    key: str
    range: TensorRange

    def read(self, shared: TensorRange) -> Tensor:
        if not shared:  # a number has no dimension to slice
            number: Tensor = self.file.get_tensor(self.key)
            return number
        values: Tensor = self.file.get_slice(self.key)[relative_slices(shared, outer=self.range)]
        return values


def shards_of(name: str, tensor: RankShards) -> Iterator[tuple[str, TensorShard]]:
    """Yield this rank's shards of a tensor, by key in the rank's file."""
    is_one = len(tensor.shards) == 1
    for number, shard in enumerate(tensor.shards):
        yield name if is_one else f"{name}{_NUMBER}{number}", shard


def header_of(shards: Mapping[str, TensorShard], notes: Mapping[str, object]) -> bytes:
    """Return the start of a safetensors file, padded to 8 bytes; no value is read."""
    places = {name: (shard.spec.full_shape, shard.spec.offset) for name, shard in shards.items()}
    entries: dict[str, object] = {
        "__metadata__": {"places": to_json_text(places), "notes": to_json_text(notes)}
    }
    end = 0
    for name, shard in shards.items():
        begin, end = end, end + shard.values.nbytes
        entries[name] = {
            "dtype": _DTYPE_NAMES[shard.values.dtype],
            "shape": list(shard.values.shape),
            "data_offsets": [begin, end],
        }
    text = to_json_text(entries).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, header: bytes, values: Iterable[Tensor]) -> FileEntry:
    """Write the values of all shards, uint8 and end to end, and flush the file to the disk."""
    checksum = num_bytes = 0
    with path.open("wb", buffering=0) as file:
        for chunk in _chunks(header, values):
            if file.write(chunk) != len(chunk):  # an unbuffered file may take fewer bytes
                raise OSError(f"no space left for {path}")
            checksum = zlib.crc32(chunk, checksum)
            num_bytes += len(chunk)
        os.fsync(file.fileno())
    return FileEntry(name=path.name, num_bytes=num_bytes, crc32=checksum)


def _chunks(header: bytes, values: Iterable[Tensor]) -> Iterator[bytes | memoryview]:
    yield header
    for flat in values:
        all_bytes = flat.numpy().data
        for begin in range(0, len(all_bytes), _CHUNK_BYTES):
            yield all_bytes[begin : begin + _CHUNK_BYTES]


def is_unchanged(path: Path, entry: FileEntry) -> bool:
    """Read a file and compare its checksum with that of the written bytes."""
    checksum = 0
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                checksum = zlib.crc32(chunk, checksum)
    except OSError:
        return False
    return checksum == entry.crc32


class ShardReader:
    """The files that all ranks wrote together, opened through memory maps. Use it in a ``with``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened = ExitStack()
        self._stored: dict[str, list[_StoredShard]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Full shape of every tensor, by name."""
        self.notes: list[dict[str, Any]] = []
        """The notes of each rank, by rank."""
        paths = sorted(folder.glob("rank-*.safetensors"))
        if not paths:
            raise CheckpointError(
                f"{folder} contains no rank files; resume from another checkpoint"
            )
        for path in paths:
            self._open(path)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def fill(self, tensors: Mapping[str, RankShards], *, allows_more: bool = False) -> None:
        """Fill this rank's shards of each tensor, however the writers had sharded it.

        The files may hold further tensors if ``allows_more``; they are not read. A CheckpointError
        if names or shapes differ, or no file has some of the values.
        """
        wanted = {name: tensor.full_shape for name, tensor in tensors.items()}
        saved = {n: s for n, s in self.shapes.items() if n in wanted or not allows_more}
        reshaped = [
            f"{name} is {list(saved[name])} in the checkpoint and {list(wanted[name])} in the model"
            for name in sorted(wanted.keys() & saved.keys())
            if saved[name] != wanted[name]
        ]
        differing = {
            "missing": sorted(wanted.keys() - saved.keys()),
            "unexpected": sorted(saved.keys() - wanted.keys()),
            "of another shape": reshaped,
        }
        problems = [
            f"{len(names)} tensors {problem}, first: {', '.join(names[:_NUM_NAMED])}"
            for problem, names in differing.items()
            if names
        ]
        if problems:
            raise CheckpointError(
                f"{self._folder} belongs to another model: {'; '.join(problems)}; set model.path "
                "and the lora and critic sections to the values that the run began with, or start "
                "a new run with another trainer.run_dir"
            )
        for name, tensor in tensors.items():
            for _, shard in shards_of(name, tensor):
                self._fill(name, shard)

    def _fill(self, name: str, wanted: TensorShard) -> None:
        missing = [wanted.spec.range] if wanted.values.numel() else []
        for stored in self._stored[name]:
            remaining: list[TensorRange] = []
            for unfilled in missing:
                shared = intersect(stored.range, unfilled)
                if shared is None:
                    remaining.append(unfilled)
                else:
                    target = wanted.values[relative_slices(shared, outer=wanted.spec.range)]
                    target.copy_(stored.read(shared))
                    remaining += subtract(unfilled, shared)
            missing = remaining
        if missing:
            num_values = wanted.values.numel()
            num_filled = num_values - sum(map(size_of, missing))
            raise CheckpointError(
                f"{self._folder}: {name} has {num_filled} of the {num_values} values that this "
                "rank needs; a file is missing. Resume from another checkpoint"
            )

    def _open(self, path: Path) -> None:
        try:
            file = self._opened.enter_context(safe_open(path, framework="pt"))
            metadata = file.metadata()
            places = json.loads(metadata["places"])
            notes = json.loads(metadata["notes"])
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as err:
            raise CheckpointError(
                f"{path} cannot be read: {err}; resume from another checkpoint"
            ) from err
        for key, (full_shape, offset) in places.items():
            name = key.partition(_NUMBER)[0]
            spec = ShardSpec.at(full_shape, offset, file.get_slice(key).get_shape())
            self._stored.setdefault(name, []).append(_StoredShard(file, key, spec.range))
            self.shapes[name] = spec.full_shape
        self.notes.append(notes)


Notes = Mapping[str, object]  # small state of a worker, in types of JSON


class CheckpointWriter:
    """Writes one snapshot at a time in a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[FileEntry] | None = None

    def begin(self, engine: ModelEngine, path: Path, *, notes: Notes) -> None:
        """Copy checkpoint tensors to the host, and begin to write them, one write at a time."""
        if self._writing is not None:
            wait([self._writing])
        tensors = engine.checkpoint_tensors().items()
        # The first of several replicas writes.
        each = (shards_of(name, tensor) for name, tensor in tensors if not tensor.is_copy)
        shards = dict(chain.from_iterable(each))
        state = {"num_updates": engine.num_updates, "random": _random_state(), **notes}
        header = header_of(shards, state)
        copied = copy_to_host(shard.values for shard in shards.values())
        self._writing = self._thread.submit(_write, path, header, copied)

    def collect(self, *, waits: bool) -> FileEntry | None:
        """Return the written file, None during the write; a CheckpointError if it failed."""
        if self._writing is None:
            raise CheckpointError("no checkpoint was begun; call save() first")
        return self._writing.result() if waits or self._writing.done() else None

    def close(self) -> None:
        """Wait for the end of a write."""
        self._thread.shutdown()


def load(engine: ModelEngine, folder: Path, *, rank: int, world_size: int) -> Notes:
    """Restore an engine from the files of all ranks; returns the notes of a worker.

    The states of random number generators return only with the same number of ranks. A
    CheckpointError if the files belong to another model, or are incomplete.
    """
    with ShardReader(folder) as reader:
        notes = reader.notes[0]
        engine.backend.optimizer.begin_restore(num_steps=notes["num_updates"])
        reader.fill(engine.checkpoint_tensors())
        engine.backend.end_restore()
        if len(reader.notes) == world_size:
            notes = reader.notes[rank]
            _restore_random_state(notes["random"])
    return notes


def load_weights(engine: ModelEngine, folder: Path) -> None:
    """Fill the parameters that learn, no moments, from the files of all ranks; see ``load``."""
    with ShardReader(folder) as reader:
        engine.backend.optimizer.begin_restore(num_steps=0)
        reader.fill(engine.checkpoint_tensors(), allows_more=True)
        engine.backend.end_restore()


def file_name(*, rank: int, world_size: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05}-of-{world_size:05}.safetensors"


def seed_generators(seed: int, *, rank: int) -> None:
    """Seed this process's generators from the run's seed and the rank."""
    own_seed = int.from_bytes(hashlib.blake2b(f"{seed} {rank}".encode(), digest_size=4).digest())
    random.seed(own_seed)
    numpy.random.seed(own_seed)
    torch.manual_seed(own_seed)


def _write(path: Path, header: bytes, copied: Sequence[Tensor]) -> FileEntry:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_file(path, header, copied)
    except OSError as err:
        raise CheckpointError(f"{path} cannot be written: {err}; free space on its disk") from err


def _random_state() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": [version, list(internal), gauss],
        "numpy": _with_keys(dict(numpy.random.get_state(legacy=False)), numpy.ndarray.tolist),
        "torch": _to_text(torch.get_rng_state()),
        "cuda": [_to_text(state) for state in cuda],
    }


def _restore_random_state(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy.random.set_state(_with_keys(state["numpy"], numpy.asarray))
    torch.set_rng_state(_from_text(state["torch"]))
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_from_text(text) for text in state["cuda"]])


def _with_keys(state: dict[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Convert the words of numpy's generator from or to a list for JSON."""
    return state | {"state": state["state"] | {"key": convert(state["state"]["key"])}}


def _to_text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
