"""Atomic files: write, flush to the disk, rename."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Return when a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write_text(path: Path, text: str, *, errors: str = "strict") -> None:
    """Write a text file atomically: a reader gets the old or the new text, even after a crash.

    If ``OSError`` is raised, the disk is full or gone, and a former file is as it was.
    """
    atomic_write_bytes(path, text.encode("utf-8", errors=errors))


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically, as `atomic_write_text`."""
    unfinished = path.with_name(f".{path.name}.unfinished-{os.getpid()}")
    try:
        unfinished.write_bytes(data)
        flush(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    flush(path.parent)


def rename_into_place(unfinished: Path, folder: Path) -> None:
    """Rename a folder, written under another name beside its target: it appears complete."""
    for path in [*unfinished.rglob("*"), unfinished]:
        flush(path)
    unfinished.rename(folder)
    flush(folder.parent)


def free_name(path: Path) -> Path:
    """Return ``path``, or if that is taken the first of ``path-2``, ``path-3`` that is not."""
    free, number = path, 1
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free
