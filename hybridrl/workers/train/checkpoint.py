"""One rank's file of a checkpoint: copied to the host while training waits, written later.

Each rank writes a file of its own without a collective; the driver asks for sizes and checksums.
"""

from __future__ import annotations

import base64
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from hybridrl.checkpoint.store import FileEntry
from hybridrl.errors import CheckpointError
from hybridrl.workers.train.checkpoint_files import (
    ShardReader,
    header_of,
    shards_to_write,
    write_file,
)
from hybridrl.workers.train.offload import SLAB_BYTES, copy_to_host
from hybridrl.workers.train.protocol import LearningEngine

Notes = Mapping[str, object]
"""Small state of a worker besides tensors, in types of JSON."""


class CheckpointWriter:
    """Writes one snapshot at a time in a thread of its own.

    Args:
        slab_bytes: size of an allocation of host memory; see ``SLAB_BYTES``.
    """

    def __init__(self, *, slab_bytes: int = SLAB_BYTES) -> None:
        self._slab_bytes = slab_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[FileEntry] | None = None

    def begin(self, engine: LearningEngine, path: Path, *, notes: Notes) -> None:
        """Copy the engine's checkpoint tensors to the host, and begin to write them.

        Waits for the end of the previous write.

        Args:
            engine: must not be offloaded.
            path: the file to write; its folder is made.
            notes: of the worker, saved beside the tensors.
        """
        if self._writing is not None:
            wait([self._writing])
        shards = shards_to_write(engine.checkpoint_tensors())
        state = {"num_updates": engine.num_updates, "random": _random_state(), **notes}
        header = header_of(shards, state)
        values = (shard.values for shard in shards.values())
        copied = copy_to_host(values, slab_bytes=self._slab_bytes)
        self._writing = self._thread.submit(_write, path, header, copied)

    def collect(self, *, waits: bool) -> FileEntry | None:
        """Return the written file; None during the write, unless ``waits``.

        Raises:
            CheckpointError: the write failed, or none was begun.
        """
        if self._writing is None:
            raise CheckpointError("no checkpoint was begun; call save() first")
        return self._writing.result() if waits or self._writing.done() else None

    def close(self) -> None:
        """Wait for the end of a write."""
        self._thread.shutdown()


def load(engine: LearningEngine, folder: Path, *, rank: int, world_size: int) -> Notes:
    """Restore an engine from the files of all ranks; returns the notes of a worker.

    The states of random number generators return only with the same number of ranks.

    Raises:
        CheckpointError: the files belong to another model, or are incomplete.
    """
    with ShardReader(folder) as reader:
        notes = reader.notes[0]
        engine.begin_restore(num_updates=notes["num_updates"])
        reader.fill(engine.checkpoint_tensors())
        engine.end_restore()
        if len(reader.notes) == world_size:
            notes = reader.notes[rank]
            _restore_random_state(notes["random"])
    return notes


def load_weights(engine: LearningEngine, folder: Path) -> None:
    """Fill the parameters that learn, no moments, from the files of all ranks; see ``load``."""
    with ShardReader(folder) as reader:
        engine.begin_restore(num_updates=0)
        reader.fill(engine.checkpoint_tensors(), allows_more=True)
        engine.end_restore()


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
    """Return the state of this process's generators in types of JSON."""
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
