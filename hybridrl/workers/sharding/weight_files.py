"""Weights into one engine that shares no memory with the trainer: from files, or by broadcast."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from torch import Tensor

from hybridrl.models.load import WeightFiles
from hybridrl.workers.rollout.buckets import Bucket, stage_by_reference
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.memory import ordinary_segments
from hybridrl.workers.sharding.weight_broadcast import WeightOffer, receiving
from hybridrl.workers.sharding.weight_proof import WeightFolder
from hybridrl.workers.sharding.weight_stream import buckets

WeightSource = Path | WeightOffer
"""Where engines get weights: a folder of safetensors, or a sender."""


def load_weights(
    managed: ManagedEngine,
    source: WeightSource,
    *,
    version: int,
    bucket_bytes: int,
    timeout_s: float,
) -> None:
    """Load all tensors of ``source`` and close the update. For an engine of one rank.

    If a comparison is due (``rollout.verify_weights``), the engine loads the same weights from
    files, too. What a sender has is written to files first, in ``$TMPDIR``.

    Args:
        source: a folder with safetensors under Hugging Face names, or a sender.
        bucket_bytes: host memory for tensors from files, unless one tensor is larger.

    Raises:
        ModelError: the files are incomplete, or hold a value that is not finite.
        EngineError: a tensor does not fit the engine.
        TransferError: a broadcast broke off; the engine is well, and lacks tensors.
        LedgerError: the engine lacks a tensor after all were loaded, or has another one than the
            files.
    """
    if managed.is_proof_due:
        with _as_folder(source, timeout_s=timeout_s) as folder:
            managed.load_reference_weights(folder)
            _load_files(managed, folder, bucket_bytes=bucket_bytes)
            managed.finish_update(version=version)
            managed.verify_weights()
        return
    if isinstance(source, WeightOffer):
        with receiving(source, timeout_s=timeout_s) as arriving:
            _load(managed, source.names, arriving)
    else:
        _load_files(managed, source, bucket_bytes=bucket_bytes)
    managed.finish_update(version=version)


@contextmanager
def _as_folder(source: WeightSource, *, timeout_s: float) -> Iterator[Path]:
    """Have the tensors of a source in a folder; those of a sender in their own types."""
    if isinstance(source, Path):
        yield source
        return
    folder = WeightFolder(Path(mkdtemp(prefix="hybridrl-received-")))
    try:
        with receiving(source, timeout_s=timeout_s) as arriving:
            for bucket in arriving:
                folder.write(stage_by_reference(bucket), [])
        yield folder.folder
    finally:
        folder.remove()


def _load_files(managed: ManagedEngine, folder: Path, *, bucket_bytes: int) -> None:
    files = WeightFiles(folder)
    _load(managed, files.names, buckets(_read(files), bucket_bytes=bucket_bytes))


def _load(managed: ManagedEngine, names: Collection[str], arriving: Iterable[Bucket]) -> None:
    managed.begin_part(names)
    try:
        with ordinary_segments():
            for bucket in arriving:
                staged = managed.engine.stage(bucket)
                managed.load(staged, [staged.make_handle()])
    finally:
        managed.engine.release_buffers()
        managed.memory.empty_cache()


def _read(files: WeightFiles) -> Iterator[tuple[str, Tensor]]:
    for name in sorted(files.names):
        yield name, files.read_range(name, [(0, size) for size in files.shape_of(name)])
