"""The manifest of a checkpoint. It is written last: a folder without it is not a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from hybridrl.atomic_io import atomic_write_text
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
            version = values["format"]
            manifest = cls._of(values) if version == _FORMAT else None
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise TornCheckpointError(
                f"{folder} is incomplete: {_NAME} cannot be read ({err})"
            ) from err
        if manifest is None:
            raise CheckpointError(
                f"{folder} has checkpoint format {version}, and this version reads {_FORMAT}; "
                "resume with the version of hybridrl that wrote it"
            )
        manifest._check_sizes(folder)
        return manifest

    @classmethod
    def _of(cls, values: Mapping[str, Any]) -> Self:
        run = {**values["run"], "sampler": SamplerState(**values["run"]["sampler"])}
        return cls(
            run=RunState(**run),
            origin=RunFingerprint(**values["origin"]),
            files=tuple(FileEntry(**entry) for entry in values["files"]),
            score=values["score"],
        )

    def _check_sizes(self, folder: Path) -> None:
        for entry in self.files:
            path = folder / entry.name
            size = path.stat().st_size if path.is_file() else None
            if size != entry.num_bytes:
                state = "is missing" if size is None else f"has {size} bytes"
                raise TornCheckpointError(
                    f"{folder} is incomplete: {entry.name} {state}, and was written with "
                    f"{entry.num_bytes}"
                )
