"""What a checkpoint has besides tensors, and disks without room; see tests/contract for engines."""

from __future__ import annotations

import random
import resource
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.errors import CheckpointError
from hybridrl.workers.train import checkpoint, offload
from hybridrl.workers.train.checkpoint import CheckpointWriter
from hybridrl.workers.train.model_engine import ModelEngine
from tests.tiny_models import make_tiny_model
from tests.workers.train.engines import build_fsdp2, whole_tensors, with_optimizer

COSINE = {"schedule": "cosine", "num_warmup_steps": 1, "lr": 0.1, "eps": 1e-3}


def _policy(folder: Path) -> ModelEngine:
    return build_fsdp2(folder, config=with_optimizer(**COSINE))


@pytest.mark.shows("R2.1")
def test_random_generators_resume_their_state(tiny_model: Path, tmp_path: Path) -> None:
    checkpoint.seed_generators(3, rank=1)
    _draw()
    engine = _policy(tiny_model)
    writer = CheckpointWriter()
    writer.begin(engine, tmp_path / "rank-0.safetensors", notes={})
    writer.close()
    expected = _draw()
    assert _draw() != expected
    checkpoint.load(engine, tmp_path, rank=0, world_size=1)
    assert _draw() == expected


@pytest.mark.shows("R1.7")
def test_full_disk_fails_one_save_and_the_next_works(tiny_model: Path, tmp_path: Path) -> None:
    engine, writer = _policy(tiny_model), CheckpointWriter()
    with pytest.raises(CheckpointError, match="call save"):
        writer.collect(waits=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        writer.begin(engine, tmp_path / "f", notes={})
        with pytest.raises(CheckpointError, match=r"cannot be written: .*; free space"):
            writer.collect(waits=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.begin(engine, tmp_path / "f", notes={})
    entry = writer.collect(waits=True)
    writer.close()
    assert entry is not None
    assert (tmp_path / "f").stat().st_size == entry.num_bytes


class _Allocations(TorchDispatchMode):
    """Records the bytes of each piece of memory that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.sizes.append(made.nbytes)
        return made


def test_pinned_snapshot_takes_little_more_than_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "SLAB_BYTES", 2**13)
    # Each pinned allocation is rounded up to a power of two, pytorch issue 150517.
    odd = make_tiny_model(tmp_path / "model", hidden_size=40, vocab_size=67)
    engine, writer = _policy(odd), CheckpointWriter()
    with _Allocations() as allocations:
        writer.begin(engine, tmp_path / "f", notes={})
    writer.close()
    pinned = sum(2 ** (size - 1).bit_length() for size in allocations.sizes)
    tensors = whole_tensors(engine).values()
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    each = sum(2 ** (tensor.nbytes - 1).bit_length() for tensor in tensors)
    assert num_bytes <= sum(allocations.sizes)
    assert pinned <= num_bytes + 2**13 < each


def _draw() -> list[float]:
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
