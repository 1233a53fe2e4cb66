"""Files of a run folder that grow by lines, and a checkpoint that remembers how long they were."""

from __future__ import annotations

from collections.abc import Mapping
from io import SEEK_END
from pathlib import Path
from typing import BinaryIO

_CHUNK = 1 << 16


def whole_lines(file: BinaryIO, size: int) -> int:
    """Return the bytes of all whole lines among the first ``size`` bytes of a file."""
    end = min(size, file.seek(0, SEEK_END))
    while end > 0:
        begin = max(0, end - _CHUNK)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


def lost_lines(folder: Path, sizes: Mapping[str, int]) -> list[str]:
    """Say which files of ``folder`` have no longer the lines that a checkpoint counts on.

    Args:
        folder: the run folder.
        sizes: bytes of each file by name, when the checkpoint was taken: after whole lines.
    """
    lost = []
    for name, size in sizes.items():
        try:
            with (folder / name).open("rb") as file:
                num_bytes = file.seek(0, SEEK_END)
                is_there = whole_lines(file, size) == size
        except FileNotFoundError:
            num_bytes, is_there = 0, size == 0
        if not is_there:
            lost.append(f"{name} has {num_bytes} bytes, and no line ends after {size}")
    return lost
