"""The trained model as folders that others load, once a run, however often it was resumed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hybridrl.config.lora import LoraConfig


class Exporter(Protocol):
    """A worker group that can write its model."""

    def export_hf(self, folder: Path) -> list[None]:
        """Write a Hugging Face folder, an adapter merged into it."""
        ...

    def export_adapter(self, folder: Path) -> list[None]:
        """Write a peft folder."""
        ...


def export(model: Exporter, run_folder: Path, *, is_new: bool, lora: LoraConfig) -> None:
    """Write ``hf/`` and, with LoRA, ``adapter/``, unless they are there and nothing was learnt.

    Args:
        model: what to write.
        run_folder: folders of an earlier part of the run are replaced.
        is_new: whether this process has trained.
        lora: whether there is an adapter.

    Raises:
        RemoteCallError: a folder cannot be written.
    """
    run_folder = run_folder.absolute()  # ranks have a working folder of their own
    _write(model.export_hf, run_folder / "hf", is_new=is_new)
    if lora.enabled:
        _write(model.export_adapter, run_folder / "adapter", is_new=is_new)


def _write(write: Callable[[Path], object], folder: Path, *, is_new: bool) -> None:
    if folder.is_dir():
        if not is_new:
            return
        shutil.rmtree(folder)
    write(folder)
