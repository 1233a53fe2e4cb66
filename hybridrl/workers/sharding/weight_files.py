"""Weights into one engine that shares no memory with the trainer: from files, or out of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp

from torch import Tensor

from hybridrl.models.load import WeightFiles
from hybridrl.workers.rollout.buckets import Bucket, stage_by_reference
from hybridrl.workers.rollout.weight_folder import WeightFolder
from hybridrl.workers.sharding.control import Failures
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.memory import ordinary_segments
from hybridrl.workers.sharding.weight_stream import buckets


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """The weights that a group got, for engines that come later and for comparisons."""

    names: frozenset[str]
    """Hugging Face names of all tensors."""

    fetch: tuple[Callable[[], Bucket], ...]
    """Return the buckets, on any machine."""


@dataclass(frozen=True, slots=True)
class Sent:
    """How the rank that sends ended a transfer."""

    copy: WeightCopy | None = None
    """Of all that was sent; None: it broke off."""

    reason: str = ""
    """Why it broke off."""

    failures: Failures = field(default_factory=dict)
    """Engines by whose fault; empty: none's."""


WeightSource = Path | WeightCopy
"""Where engines get weights: a folder of safetensors, or a copy."""


def load_weights(
    managed: ManagedEngine,
    *,
    source: WeightSource,
    version: int,
    bucket_bytes: int,
    has_joined: bool = False,
) -> None:
    """Load all tensors of ``source`` and close the update. For an engine of one process.

    If a comparison is due (``rollout.verify_weights``), the engine loads the weights from files as
    those of any model, too.

    Args:
        bucket_bytes: host memory for tensors from files, unless one tensor is larger.
        has_joined: whether the engine has got the weights in a group already.

    Raises:
        ModelError: the files are incomplete, or hold a value that is not finite.
        EngineError: a tensor does not fit the engine.
        LedgerError: the engine lacks a tensor after all were loaded, or has another one than the
            files.
    """
    is_proof_due = managed.is_proof_due
    if has_joined and isinstance(source, WeightCopy):
        managed.note_arrived(source.names, version=version)
        if is_proof_due:
            with _in_folder(source) as folder:
                managed.compare_with_files(folder)
        return
    with _in_folder(source) as folder:
        if is_proof_due:
            managed.load_reference_weights(folder)
        _load(managed, WeightFiles(folder), bucket_bytes=bucket_bytes)
        managed.finish_update(version=version)
        if is_proof_due:
            managed.verify_weights()


@contextmanager
def _in_folder(source: WeightSource) -> Iterator[Path]:
    """Have the weights in a folder; those of a copy below ``$TMPDIR``, in the block alone."""
    if isinstance(source, Path):
        yield source
        return
    folder = WeightFolder(Path(mkdtemp(prefix="hybridrl-received-")))
    try:
        for fetch in source.fetch:
            folder.write(stage_by_reference(fetch()), [])
        yield folder.folder
    finally:
        folder.remove()


def _load(managed: ManagedEngine, files: WeightFiles, *, bucket_bytes: int) -> None:
    managed.begin_part(files.names)
    try:
        with ordinary_segments():
            for bucket in buckets(_read(files), bucket_bytes=bucket_bytes):
                staged = managed.engine.stage(bucket)
                managed.load(staged, [staged.make_handle()])
    finally:
        managed.engine.release_buffers()
        managed.memory.empty_cache()


def _read(files: WeightFiles) -> Iterator[tuple[str, Tensor]]:
    for name in sorted(files.names):
        yield name, files.read_range(name, [(0, size) for size in files.shape_of(name)])
