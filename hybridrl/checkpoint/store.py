"""The folder of a run's checkpoints: list them, find the newest complete one, delete old ones."""

from __future__ import annotations

import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from hybridrl.atomic_io import rename_into_place
from hybridrl.checkpoint.manifest import Manifest
from hybridrl.errors import CheckpointError, TornCheckpointError

log = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d{9})")
_UNFINISHED = ".unfinished"
_CORRUPT = ".torn"  # on disk since the first version


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest can be read and whose files have the right sizes."""

    folder: Path
    manifest: Manifest


class CheckpointStore:
    """``<run_dir>/checkpoints``: one folder ``step-000000040`` a checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Look at ``folder``, which need not exist yet."""
        self._folder = folder

    def folder_of(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, whether or not it is there."""
        return self._folder / f"step-{step:09}"

    def newest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint. Incomplete ones are skipped, with a warning.

        Returns:
            None if the run has never written one.

        Raises:
            CheckpointError: all are incomplete, so the run would start over; or the newest has
                another format.
        """
        for folder in reversed(self._folders()):
            try:
                return Checkpoint(folder, Manifest.read(folder))
            except TornCheckpointError as error:
                log.warning("%s; the checkpoint before it is used", error)
        incomplete = [*self._folders(), *self._folder.glob(f"*{_CORRUPT}")]
        if incomplete:
            raise CheckpointError(
                f"all checkpoints in {self._folder} are incomplete or corrupt: "
                f"{', '.join(sorted(folder.name for folder in incomplete))}; set trainer.run_dir "
                "to a new folder, or trainer.overwrite=true to start over"
            )
        return None

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints in order, with incomplete ones."""
        return [int(folder.name.removeprefix("step-")) for folder in self._folders()]

    def at(self, step: int) -> Checkpoint | None:
        """Return the checkpoint of a step, if there is one.

        Raises:
            CheckpointError: it is incomplete, or has another format.
        """
        folder = self.folder_of(step)
        return Checkpoint(folder, Manifest.read(folder)) if folder.is_dir() else None

    def begin(self, step: int) -> Path:
        """Make an empty folder for the files of ranks; `commit` makes it a checkpoint.

        Raises:
            OSError: it cannot be made.
        """
        folder = self.folder_of(step).with_suffix(_UNFINISHED)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def commit(self, unfinished: Path, manifest: Manifest) -> Checkpoint:
        """Write the manifest and give the folder its name: the checkpoint appears complete.

        Raises:
            OSError: the disk is full or gone.
        """
        manifest.write(unfinished)
        folder = unfinished.with_suffix("")
        shutil.rmtree(folder, ignore_errors=True)  # of the same step, before a run was rolled back
        rename_into_place(unfinished, folder)
        return Checkpoint(folder, manifest)

    def quarantine(self, corrupt: Path) -> None:
        """Rename a checkpoint whose bytes have changed, so that no run resumes from it."""
        renamed = corrupt.with_name(corrupt.name + _CORRUPT)
        shutil.rmtree(renamed, ignore_errors=True)
        corrupt.rename(renamed)

    def discard_unfinished(self) -> None:
        """Delete the checkpoint that a killed run did not complete; the log names it."""
        for folder in self._folder.glob(f"*{_UNFINISHED}"):
            log.warning("%s is deleted: it was not completed", folder)
            shutil.rmtree(folder, ignore_errors=True)

    def prune(self, *, keep_last: int, keep_best: int) -> None:
        """Delete all but the newest ``keep_last`` and, of the others, the best ``keep_best``.

        Incomplete ones are not counted, or new checkpoints would be deleted, and not deleted.
        """
        complete: list[Path] = []
        scored: list[tuple[float, Path]] = []
        for folder in self._folders():
            try:
                score = Manifest.read(folder).score
            except TornCheckpointError:
                continue
            complete.append(folder)
            if score is not None:
                scored.append((score, folder))
        kept = set(complete[-keep_last:])
        kept |= {folder for _, folder in sorted(scored, reverse=True)[:keep_best]}
        for folder in complete:
            if folder not in kept:
                # Renamed first: after a kill half-way it must not look like a complete checkpoint.
                doomed = folder.with_name(folder.name + _UNFINISHED)
                folder.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def _folders(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        folders = [path for path in self._folder.iterdir() if _STEP.fullmatch(path.name)]
        return sorted(folders)
