"""The folder of a run's checkpoints, and the manifest of each.

Ranks write their files (``workers/train/checkpoint.py``) when ``run/checkpoints.py`` says so. The
manifest is written last, by one rename: a folder without it is not a checkpoint.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

from hybridrl.atomic_io import atomic_write_text, rename_into_place
from hybridrl.data.rows import SamplerState
from hybridrl.errors import CheckpointError, TornCheckpointError
from hybridrl.json_text import to_json_text

_NAME = "manifest.json"
_FORMAT = 1

Recipe = Mapping[str, object]
"""Dotted keys of the configuration and their values in types of JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    name: str
    """Relative to the checkpoint's folder."""

    num_bytes: int

    crc32: int
    """Of all its bytes, unsigned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """The driver's state of a run, with which it resumes."""

    step: int
    """Steps done."""

    sampler: SamplerState
    """Position in the stream of rows, and the fingerprint of these rows."""

    num_skipped: int
    """Steps in a row up to now in which an update was skipped."""

    elapsed_s: float
    """Seconds that the run has taken, over all its processes."""

    log_sizes: Mapping[str, int]
    """Bytes of each file in the run folder that grows by lines; a resume truncates it to them."""

    kl_coefficient: float | None = None
    """Weight of the KL penalty in the next step; None for a run without one."""

    advantage_state: Mapping[str, float] = field(default_factory=dict)
    """See ``Advantages.state``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFingerprint:
    """The facts besides its state on which the numbers of a run depend."""

    recipe: Recipe
    """Must be the same to resume."""

    model_folder: str
    """Source of configuration, tokenizer and frozen weights."""

    fingerprints: Mapping[str, str]
    """Of the model folder's configuration and tokenizer, of the user's functions and of the
    teacher; must be the same to resume."""

    environment: Mapping[str, str]
    """Must be the same to resume bitwise identically: ranks, threads, processor, versions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A complete checkpoint."""

    run: RunState
    origin: RunFingerprint
    files: tuple[FileEntry, ...]
    score: float | None
    """The last evaluation's result, higher is better; None without one at this step."""

    def write(self, folder: Path) -> None:
        """Write the manifest into ``folder``."""
        text = to_json_text({"format": _FORMAT} | asdict(self), indent=1)
        atomic_write_text(folder / _NAME, text + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest of ``folder``, and compare the files' sizes with it.

        Raises:
            TornCheckpointError: a file is missing, of another size, or cannot be read.
            CheckpointError: it has another format.
        """
        try:
            values = json.loads((folder / _NAME).read_text(encoding="utf-8"))
            if (version := values["format"]) != _FORMAT:
                raise CheckpointError(
                    f"{folder} has checkpoint format {version}, and this version reads {_FORMAT}; "
                    "resume with the version of hybridrl that wrote it"
                )
            run = {**values["run"], "sampler": SamplerState(**values["run"]["sampler"])}
            manifest = cls(
                run=RunState(**run),
                origin=RunFingerprint(**values["origin"]),
                files=tuple(FileEntry(**entry) for entry in values["files"]),
                score=values["score"],
            )
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise TornCheckpointError(
                f"{folder} is incomplete: {_NAME} cannot be read ({err})"
            ) from err
        for entry in manifest.files:
            path = folder / entry.name
            size = path.stat().st_size if path.is_file() else None
            if size != entry.num_bytes:
                state = "is missing" if size is None else f"has {size} bytes"
                raise TornCheckpointError(
                    f"{folder} is incomplete: {entry.name} {state}, and was written with "
                    f"{entry.num_bytes}"
                )
        return manifest


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
        """Return the newest complete checkpoint; None if the run has never written one.

        Incomplete ones are skipped, with a warning.

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
        """Return the checkpoint of a step, if there is one; see ``Manifest.read``."""
        folder = self.folder_of(step)
        return Checkpoint(folder, Manifest.read(folder)) if folder.is_dir() else None

    def begin(self, step: int) -> Path:
        """Make an empty folder for the files of ranks; `commit` makes it a checkpoint."""
        folder = self.folder_of(step).with_suffix(_UNFINISHED)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def commit(self, unfinished: Path, manifest: Manifest) -> Checkpoint:
        """Write the manifest and give the folder its name: the checkpoint appears complete."""
        manifest.write(unfinished)
        folder = unfinished.with_suffix("")
        shutil.rmtree(folder, ignore_errors=True)  # of the same step, before a run was rolled back
        rename_into_place(unfinished, folder)
        return Checkpoint(folder, manifest)

    def judge(self, step: int, score: float) -> None:
        """Give the checkpoint of a step, if there is one, another score."""
        checkpoint = self.at(step)
        if checkpoint is not None:
            replace(checkpoint.manifest, score=score).write(checkpoint.folder)

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
        return sorted(path for path in self._folder.glob("step-*") if _STEP.fullmatch(path.name))
