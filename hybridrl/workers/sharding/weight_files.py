"""Weights from files: of engines that share no memory with the trainer, and of a comparison.

An engine fuses tensors and splits them over its ranks, so no hash of the trainer equals one of the
engine. For a comparison it loads the weights from files, as it would those of any model. It keeps a
copy, forgets them, gets them by the stream, and compares. A tensor that the stream dropped, mixed
up or corrupted is found by name.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir, mkdtemp

import torch
from torch import Tensor

from hybridrl.models.load import WeightFiles
from hybridrl.workers.rollout.buckets import Bucket, stage_by_reference
from hybridrl.workers.rollout.protocol import FileReader
from hybridrl.workers.rollout.weight_folder import WeightFolder
from hybridrl.workers.sharding.control import ControlGroup, Failures
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


FROZEN_VERSION = 0
"""Of weights that never change."""


@dataclass(frozen=True, slots=True)
class AdaptedWeights:
    """An adapter, and the folder of the weights below it, which no step changes."""

    base: Path
    adapter: WeightCopy


WeightSource = Path | WeightCopy | AdaptedWeights
"""Where engines get weights: a folder of safetensors, a copy, or a folder and an adapter."""


def load_weights(
    managed: ManagedEngine,
    *,
    source: WeightSource,
    version: int,
    bucket_bytes: int,
    has_joined: bool = False,
) -> None:
    """Load all tensors of ``source`` and close the update, with a comparison if one is due.

    For an engine of one process; one that ``has_joined`` has got the weights in a group already. A
    ModelError if files are incomplete or not finite, an EngineError if a tensor does not fit, a
    LedgerError if one is missing, or not that of the files.
    """
    is_proof_due = managed.is_proof_due
    if isinstance(source, AdaptedWeights):
        _load_adapted(managed, source, bucket_bytes=bucket_bytes)
        managed.finish_update(version=version)
        if is_proof_due:
            managed.verify_weights()
        return
    if has_joined and isinstance(source, WeightCopy):
        managed.note_arrived(source.names, version=version)
        if is_proof_due:
            with _in_folder(source) as folder:
                managed.compare_with_files(folder)
        return
    if isinstance(managed.engine, FileReader) and isinstance(source, Path):
        managed.read_files(managed.engine, source)
        managed.finish_update(version=version)
        return
    with _in_folder(source) as folder:
        if is_proof_due:
            managed.load_reference_weights(folder)
        _load(managed, WeightFiles(folder), bucket_bytes=bucket_bytes)
        managed.finish_update(version=version)
        if is_proof_due:
            managed.verify_weights()


def _load_adapted(managed: ManagedEngine, source: AdaptedWeights, *, bucket_bytes: int) -> None:
    """Replace the adapter, and load the weights below it where the engine lacks them."""
    files = WeightFiles(source.base)
    if managed.is_proof_due:
        managed.load_reference_weights(source.base)
    if not managed.ledger.covers(files.names):
        _load(managed, files, bucket_bytes=bucket_bytes)
    managed.begin_part(source.adapter.names)
    for fetch in source.adapter.fetch:
        managed.keep_adapter(stage_by_reference(fetch()), [])
    managed.load_adapter()


@contextmanager
def _in_folder(source: Path | WeightCopy) -> Iterator[Path]:
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


@contextmanager
def folder_on_each_node(
    readers: Sequence[int], *, dtype: torch.dtype, control: ControlGroup
) -> Iterator[tuple[WeightFolder | None, Path | None]]:
    """Make a folder on each node that has a reader (a rank), and remove it. A collective call.

    Yields the folder, on the rank that writes it: the first reader of a node. And its path, on all
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
