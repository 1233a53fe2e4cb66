"""Weights from files: of engines that share no memory with the trainer, and of a comparison.

An engine fuses tensors and splits them over its ranks, so no hash of the trainer equals one of the
engine. For a comparison it loads the weights from files, as it would those of any model. It keeps a
copy, forgets them, gets them by the stream, and compares. A tensor that the stream dropped, mixed
up or corrupted is found by name.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from uuid import uuid4

import ray
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridrl.models.load import WeightFiles, require_finite
from hybridrl.workers.rollout.buckets import Bucket, StagedBucket, stage_by_reference
from hybridrl.workers.rollout.protocol import FileReader
from hybridrl.workers.rollout.weight_folder import WeightFolder
from hybridrl.workers.sharding.control import ControlGroup, Failures
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.memory import ordinary_segments
from hybridrl.workers.sharding.weight_changes import KeptWeights
from hybridrl.workers.sharding.weight_stream import buckets


@dataclass(slots=True)
class WeightCopy:
    """The weights that a group got, for engines that come later and for comparisons.

    What is written is in Ray's object store for as long as somebody has the copy, and travels once
    to each node that asks.
    """

    names: set[str] = field(default_factory=set)
    """Hugging Face names of all tensors."""

    fetch: list[Callable[[], Bucket]] = field(default_factory=list)
    """Return the buckets, on any machine."""

    def write(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        """Put one bucket, staged by reference, into the store."""
        on_host = [(name, tensor.detach().cpu()) for name, tensor in staged.tensors]
        self.names.update(name for name, _ in on_host)
        self.fetch.append(partial(_fetch, ray.put(on_host)))

    def buckets(self) -> Iterator[Bucket]:
        """Fetch one after the other."""
        return (fetch() for fetch in self.fetch)


def _fetch(reference: ray.ObjectRef[Bucket]) -> Bucket:
    """Return the tensors of a reference; ``ray.get`` warns in the actors of engines."""
    bucket: Bucket = reference.future().result()
    return bucket


@dataclass(frozen=True, slots=True)
class WeightChain:
    """Weights, and what changed in each update since."""

    name: str = field(default_factory=lambda: uuid4().hex)
    """No other chain of any run has it: changes fit on the parts before them alone."""

    parts: tuple[Path | WeightCopy, ...] = ()
    """All weights, then changes, oldest first: folders of safetensors, or copies."""

    def bring(self, kept: KeptWeights) -> WeightCopy:
        """Write what ``kept`` lacks, and return all weights; LedgerError if they are wrong."""
        for number in kept.missing(self.name, len(self.parts)):
            part = self.parts[number]
            for bucket in _files_of(part) if isinstance(part, Path) else part.buckets():
                kept.write(bucket)
        kept.note_written(self.name, len(self.parts))
        return WeightCopy(set(kept.tensors), [partial(list, kept.tensors.items())])


@dataclass(frozen=True, slots=True)
class Sent:
    """How the rank that sends ended a transfer."""

    copy: WeightCopy | None = None  # of all that was sent; None: it broke off
    reason: str = ""  # why it broke off
    failures: Failures = field(default_factory=dict)  # engines by whose fault; empty: none's


FROZEN_VERSION = 0
"""Of weights that never change."""


@dataclass(frozen=True, slots=True)
class AdaptedWeights:
    """An adapter, and the folder of the weights below it, which no step changes."""

    base: Path
    adapter: WeightCopy


WeightSource = Path | WeightCopy | WeightChain | AdaptedWeights
"""Where engines get weights: a folder of safetensors, a copy, either with changes, or a folder and
an adapter."""


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
    if isinstance(source, AdaptedWeights):
        _load_adapted(managed, source, version=version, bucket_bytes=bucket_bytes)
    elif isinstance(source, WeightChain):
        _load_chain(managed, source, version=version, bucket_bytes=bucket_bytes)
    elif has_joined and isinstance(source, WeightCopy):
        is_proof_due = managed.is_proof_due
        managed.begin_part(source.names)
        managed.ledger.receive(source.names)
        managed.finish_update(version=version)
        if is_proof_due:
            with _in_folder(source) as folder:
                managed.compare_with_files(folder)
    else:
        _load_all(managed, source, version=version, bucket_bytes=bucket_bytes)


def _load_adapted(
    managed: ManagedEngine, source: AdaptedWeights, *, version: int, bucket_bytes: int
) -> None:
    """Replace the adapter, and load the weights below it where the engine lacks them."""
    files = WeightFiles(source.base)
    is_proof_due = managed.is_proof_due
    if is_proof_due:
        managed.load_reference_weights(source.base)
    if not managed.ledger.covers(files.names):
        _load(managed, files.names, _read(files), bucket_bytes=bucket_bytes)
    managed.begin_part(source.adapter.names)
    add_adapter(managed, source=source, version=version)
    managed.finish_update(version=version)
    if is_proof_due:
        managed.verify_weights()


def add_adapter(
    managed: ManagedEngine, *, source: AdaptedWeights, version: int, kept: Collection[int] = ()
) -> None:
    """Load the adapter of ``source`` beside those of ``kept``; see ``ManagedEngine``."""
    for bucket in source.adapter.buckets():
        managed.keep_adapter(stage_by_reference(bucket), [])
    managed.load_adapter(version=version, kept=kept)


def _load_chain(
    managed: ManagedEngine, source: WeightChain, *, version: int, bucket_bytes: int
) -> None:
    """Write changes into the kept weights, and load these as from files or from memory."""
    copy, kept = source.bring(managed.kept), managed.kept.tensors
    if managed.is_proof_due or isinstance(managed.engine, FileReader):
        _load_all(managed, copy, version=version, bucket_bytes=bucket_bytes)
    else:
        _load(managed, kept, _finite(kept), bucket_bytes=bucket_bytes)
        managed.finish_update(version=version)


def _load_all(
    managed: ManagedEngine, source: Path | WeightCopy, *, version: int, bucket_bytes: int
) -> None:
    is_proof_due = managed.is_proof_due
    with _in_folder(source) as folder:
        if isinstance(managed.engine, FileReader):
            managed.read_files(managed.engine, folder)
            managed.finish_update(version=version)
            return
        if is_proof_due:
            managed.load_reference_weights(folder)
        files = WeightFiles(folder)
        _load(managed, files.names, _read(files), bucket_bytes=bucket_bytes)
        managed.finish_update(version=version)
        if is_proof_due:
            managed.verify_weights()


@contextmanager
def _in_folder(source: Path | WeightCopy) -> Iterator[Path]:
    """Have the weights in a folder; those of a copy below ``$TMPDIR``, in the block alone."""
    if isinstance(source, Path):
        yield source
        return
    folder = WeightFolder(Path(mkdtemp(prefix="hybridrl-received-")))
    try:
        for bucket in source.buckets():
            folder.write(stage_by_reference(bucket), [])
        yield folder.folder
    finally:
        folder.remove()


def _load(
    managed: ManagedEngine,
    names: Collection[str],
    weights: Iterable[tuple[str, Tensor]],
    *,
    bucket_bytes: int,
) -> None:
    managed.begin_part(names)
    try:
        with ordinary_segments():
            for bucket in buckets(weights, bucket_bytes=bucket_bytes):
                staged = managed.engine.stage(bucket)
                managed.load(staged, [staged.make_handle()])
    finally:
        managed.engine.release_buffers()
        managed.memory.empty_cache()


def _read(files: WeightFiles) -> Iterator[tuple[str, Tensor]]:
    for name in sorted(files.names):
        yield name, files.read_range(name, [(0, size) for size in files.shape_of(name)])


def _finite(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Read weights as ``_read`` does; a ModelError if one is not finite."""
    for name, tensor in sorted(weights.items()):
        require_finite(tensor, name=name, file=Path("an update"), fix="see the loss and its norms")
        yield name, tensor


def _files_of(folder: Path) -> Iterator[Bucket]:
    return (list(load_file(file).items()) for file in sorted(folder.glob("*.safetensors")))


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
