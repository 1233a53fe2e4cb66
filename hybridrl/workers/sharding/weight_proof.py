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
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir, mkdtemp

import torch

from hybridrl.workers.rollout.weight_folder import WeightFolder
from hybridrl.workers.sharding.control import ControlGroup


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
