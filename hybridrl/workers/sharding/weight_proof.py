"""The comparison of a sync: streamed weights must equal the same weights from files.

An engine fuses tensors and splits them over its ranks, so no hash of the trainer equals one of the
engine. The engine loads the weights from files, as it would those of any model. It keeps a copy,
forgets them, gets them by the stream, and compares. A tensor that the stream dropped, mixed up or
corrupted is found by name.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir, mkdtemp

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hybridrl.errors import EngineError
from hybridrl.json_text import to_json_text
from hybridrl.workers.rollout.buckets import StagedBucket
from hybridrl.workers.sharding.control import ControlGroup

_INDEX = "model.safetensors.index.json"
_IF_FULL = ", or rollout.verify_weights=never"


class WeightFolder:
    """The safetensors of a Hugging Face folder, written bucket by bucket on the engine's node."""

    def __init__(
        self, folder: Path, *, dtype: torch.dtype | None = None, if_full: str = _IF_FULL
    ) -> None:
        """Write nothing yet.

        Args:
            folder: that exists.
            dtype: of floating-point tensors in the files: the engine's, in which weights travel.
                None: as they come.
            if_full: text to type if the disk has no room.
        """
        self.folder = folder
        self._dtype = dtype
        self._if_full = if_full
        self._file_of: dict[str, str] = {}
        self._num_files = 0

    def write(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        """Write one bucket, staged by reference, to a file of its own.

        Raises:
            EngineError: the disk is full, or not writable.
        """
        self._num_files += 1
        file_name = f"model-{self._num_files:05d}.safetensors"
        tensors = {
            name: self._as_sent(tensor).cpu().contiguous() for name, tensor in staged.tensors
        }
        try:
            save_file(tensors, self.folder / file_name, metadata={"format": "pt"})
            self._file_of |= dict.fromkeys(tensors, file_name)
            index = {"metadata": {}, "weight_map": self._file_of}
            (self.folder / _INDEX).write_text(to_json_text(index), encoding="utf-8")
        except (OSError, SafetensorError) as error:
            raise EngineError(
                f"weights could not be written to {self.folder}: {error}; set TMPDIR to a disk "
                f"with room for the model{self._if_full}"
            ) from error

    def _as_sent(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if self._dtype is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(self._dtype)

    def remove(self) -> None:
        """Remove the folder with all that was written. Idempotent."""
        with suppress(FileNotFoundError):
            for file in self.folder.iterdir():
                file.unlink(missing_ok=True)
            self.folder.rmdir()


@contextmanager
def folder_on_each_node(
    readers: Sequence[int], *, dtype: torch.dtype, control: ControlGroup
) -> Iterator[tuple[WeightFolder | None, Path | None]]:
    """Make a folder on each node that has a reader, and remove it. A collective call.

    Args:
        readers: ranks whose engines will load the weights.
        dtype: of floating-point tensors in the files.

    Yields:
        The folder, on the rank that writes it: the first reader of a node. And its path, on all
        ranks of that node.
    """
    node = place_of_temporary_files()
    nodes = control.gather("nodes of first syncs", node)
    writer = next((rank for rank in readers if nodes[rank] == node), None)

    def make() -> WeightFolder | None:
        if writer != control.rank:
            return None
        return WeightFolder(Path(mkdtemp(prefix="hybridrl-first-sync-")), dtype=dtype)

    folder = control.everywhere("folders of first syncs", make)
    try:
        paths = control.gather("folders of first syncs", None if folder is None else folder.folder)
        yield folder, None if writer is None else paths[writer]
    finally:
        if folder is not None:
            folder.remove()


def place_of_temporary_files() -> str:
    """Name the folder of temporary files so that processes have the same name for the same one."""
    status = os.stat(gettempdir())
    return f"{socket.gethostname()} {status.st_dev} {status.st_ino}"
