"""Weights as files of a Hugging Face folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from hybridrl.errors import EngineError
from hybridrl.json_text import to_json_text
from hybridrl.workers.rollout.buckets import StagedBucket, as_sent

_INDEX = "model.safetensors.index.json"
_IF_FULL = ", or rollout.verify_weights=never"


class WeightFolder:
    """The safetensors of a Hugging Face folder, written bucket by bucket on the engine's node."""

    def __init__(
        self, folder: Path, *, dtype: torch.dtype | None = None, if_full: str = _IF_FULL
    ) -> None:
        """Write floats in ``dtype``, if given; ``if_full`` says what else helps a full disk."""
        self.folder = folder
        self._dtype = dtype
        self._if_full = if_full
        self._file_of: dict[str, str] = {}
        self._num_files = 0

    def write(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        """Write one bucket, staged by reference, to a file of its own."""
        self._num_files += 1
        file_name = f"model-{self._num_files:05d}.safetensors"
        tensors = {
            name: as_sent(tensor, self._dtype).cpu().contiguous() for name, tensor in staged.tensors
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

    def has_any(self, names: Iterable[str]) -> bool:
        """Whether a file has one of these tensors."""
        return not self._file_of.keys().isdisjoint(names)

    def remove(self) -> None:
        """Remove the folder with all that was written. Idempotent."""
        shutil.rmtree(self.folder, ignore_errors=True)
