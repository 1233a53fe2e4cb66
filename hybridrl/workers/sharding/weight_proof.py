"""The proof of the first sync: what came by the stream is what the same weights are from files.

An engine fuses tensors and cuts them over its ranks, so no hash of ours equals one of its. It loads
the weights from files, as it would those of any model, keeps a copy, forgets them, gets them by the
stream, and compares. A tensor that the stream dropped, mixed up or tore is found by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hybridrl.errors import EngineError
from hybridrl.json_text import to_json_text

_INDEX = "model.safetensors.index.json"


class WeightFolder:
    """The safetensors of a Hugging Face folder, written bucket by bucket on the engine's node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, str] = {}
        self._num_files = 0

    def write(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Write one bucket to a file of its own.

        Raises:
            EngineError: the disk is full, or not writable.
        """
        self._num_files += 1
        file_name = f"model-{self._num_files:05d}.safetensors"
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket}
        try:
            save_file(tensors, self.folder / file_name, metadata={"format": "pt"})
            self._file_of |= dict.fromkeys(tensors, file_name)
            index = {"metadata": {}, "weight_map": self._file_of}
            (self.folder / _INDEX).write_text(to_json_text(index), encoding="utf-8")
        except (OSError, SafetensorError) as error:
            raise EngineError(
                f"the weights of the first sync could not be written to {self.folder} to be "
                f"compared: {error}; set TMPDIR to a disk with room for the model, or "
                "rollout.check_first_sync=false"
            ) from error


@contextmanager
def temporary_weight_folder() -> Iterator[WeightFolder]:
    """A folder that is gone afterwards."""
    with TemporaryDirectory(prefix="hybridrl-first-sync-") as name:
        yield WeightFolder(Path(name))
