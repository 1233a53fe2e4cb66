"""The trained model as a Hugging Face folder, once a run, however often it was resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol


class Exporter(Protocol):
    """A worker group that can write its model."""

    def export_hf(self, folder: Path) -> list[None]:
        """Write a Hugging Face folder."""
        ...


def export(model: Exporter, folder: Path, *, is_new: bool) -> None:
    """Write ``folder``, unless it is there already and nothing was learnt since.

    Args:
        model: what to write.
        folder: of an earlier part of the run, it is replaced.
        is_new: whether this process has trained.

    Raises:
        RemoteCallError: the folder cannot be written.
    """
    if folder.is_dir():
        if not is_new:
            return
        shutil.rmtree(folder)
    model.export_hf(folder)
