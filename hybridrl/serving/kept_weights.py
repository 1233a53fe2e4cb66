"""The weights that a server serves with, kept as files for engines that replace others.

The rank that wrote a folder deletes it after the update. Links to its files stay, and cost no disk.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import mkdtemp

from hybridrl.workers.sharding.weight_broadcast import WeightOffer
from hybridrl.workers.sharding.weight_files import WeightSource


class KeptWeights:
    """Files of the newest weights; those of older ones are deleted."""

    def __init__(self, root: Path) -> None:
        """Keep nothing yet.

        Args:
            root: folder for the files, on the disk of the folders that ``keep`` gets.
        """
        self._root = root
        self._folder: Path | None = None

    def keep(self, source: WeightSource) -> WeightSource:
        """Link all files of a folder, delete those kept before, and return the new folder.

        Files are copied where they cannot be linked. A sender keeps its weights itself.

        Raises:
            OSError: the disk is full, or a file is gone.
        """
        if isinstance(source, WeightOffer):
            self.clear()
            return source
        kept = Path(mkdtemp(dir=self._root))
        for file in source.iterdir():
            if file.is_file():
                _link(file, kept / file.name)
        self.clear()
        self._folder = kept
        return kept

    def clear(self) -> None:
        """Delete the files. Idempotent."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)
