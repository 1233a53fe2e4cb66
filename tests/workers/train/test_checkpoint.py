"""Engines that are saved while they train on, and loaded into new ones, on any number of ranks."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.errors import CheckpointError
from hybridrl.workers.train import checkpoint
from hybridrl.workers.train.checkpoint import CheckpointWriter
from hybridrl.workers.train.critic import FSDP2Critic
from hybridrl.workers.train.protocol import LearningEngine
from hybridrl.workers.train.shards import local_shard
from tests.models import make_tiny_model
from tests.ranks import run_ranks
from tests.workers.train.critics import CRITIC, build_critic, make_lessons
from tests.workers.train.engines import build_fsdp2, make_rows, rows_of, update, with_optimizer
from tests.workers.train.lora_engines import build_lora, with_lora

COSINE = {"schedule": "cosine", "num_warmup_steps": 1, "lr": 0.1, "eps": 1e-3}


def _policy(folder: Path) -> LearningEngine:
    return build_fsdp2(folder, config=with_optimizer(**COSINE))


def _adapter(folder: Path) -> LearningEngine:
    return build_lora(folder, config=with_optimizer(**COSINE))


def _merged_adapter(folder: Path) -> LearningEngine:
    return build_lora(folder, lora=with_lora(sync="merged"), config=with_optimizer(**COSINE))


def _critic(folder: Path) -> LearningEngine:
    optimizer = replace(CRITIC.optimizer, **COSINE)  # type: ignore[arg-type]
    return build_critic(folder, config=replace(CRITIC, optimizer=optimizer))


BUILDERS: Mapping[str, Callable[[Path], LearningEngine]] = {
    "policy": _policy,
    "adapter": _adapter,
    "merged adapter": _merged_adapter,
    "critic": _critic,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def _learn(engine: Any, seed: int) -> None:
    """One optimizer step on six rows, divided over the ranks."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if isinstance(engine, FSDP2Critic):
        engine.update(make_lessons(6, seed=seed))
    else:
        update(engine, rows_of(make_rows(6, seed=seed), range(rank, 6, size)))


def _state_of(engine: LearningEngine) -> dict[str, Tensor]:
    tensors = engine.checkpoint_tensors()
    return {name: local_shard(tensor.detach()).clone() for name, tensor in tensors.items()}


def _assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("role", BUILDERS)
@pytest.mark.parametrize("num_before", [0, 2])
def test_a_loaded_engine_learns_on_as_if_it_had_never_stopped(
    folder: Path, tmp_path: Path, role: str, num_before: int
) -> None:
    engine = BUILDERS[role](folder)
    for seed in range(num_before):
        _learn(engine, seed)
    writer = CheckpointWriter()
    writer.begin(engine, tmp_path / "rank-0.safetensors", notes={"version": 7})
    for seed in (2, 3):  # at once: what is written is a copy
        _learn(engine, seed)
    writer.collect(waits=True)
    writer.close()
    loaded = BUILDERS[role](folder)
    _learn(loaded, 9)  # whatever it was before
    notes = checkpoint.load(loaded, tmp_path, rank=0, world_size=1)
    assert (notes["version"], loaded.num_updates) == (7, num_before)
    for seed in (2, 3):
        _learn(loaded, seed)
    _assert_same(_state_of(loaded), _state_of(engine))
    assert loaded.num_updates == engine.num_updates == num_before + 2


def _save_and_go_on(rank: int, folder: Path, target: Path, role: str) -> dict[str, Tensor]:
    engine = BUILDERS[role](folder)
    _learn(engine, 0)
    writer = CheckpointWriter()
    writer.begin(engine, target / checkpoint.file_name(rank=rank, world_size=2), notes={})
    _learn(engine, 1)
    writer.close()
    return _state_of(engine)


def _load_and_go_on(rank: int, folder: Path, target: Path, role: str) -> dict[str, Tensor]:
    engine = BUILDERS[role](folder)
    checkpoint.load(engine, target, rank=rank, world_size=dist.get_world_size())
    _learn(engine, 1)
    return _state_of(engine)


@pytest.mark.parametrize("role", ["policy", "adapter"])
def test_two_ranks_go_on_bit_by_bit_and_one_goes_on_with_all_that_they_had(
    folder: Path, tmp_path: Path, role: str
) -> None:
    saved = run_ranks(2, _save_and_go_on, folder, tmp_path, role)
    for ours, theirs in zip(
        run_ranks(2, _load_and_go_on, folder, tmp_path, role), saved, strict=True
    ):
        _assert_same(ours, theirs)
    (alone,) = run_ranks(1, _load_and_go_on, folder, tmp_path, role)
    for name, tensor in alone.items():
        shards = [part[name] for part in saved]
        whole = torch.cat(shards) if tensor.ndim else shards[0]
        torch.testing.assert_close(tensor, whole, rtol=1e-3, atol=1e-4, msg=name)


def test_random_generators_go_on_where_they_were(folder: Path, tmp_path: Path) -> None:
    checkpoint.seed_generators(3, rank=1)
    _draw()
    engine = _policy(folder)
    writer = CheckpointWriter()
    writer.begin(engine, tmp_path / "rank-0.safetensors", notes={})
    writer.close()
    expected = _draw()
    assert _draw() != expected
    checkpoint.load(engine, tmp_path, rank=0, world_size=1)
    assert _draw() == expected


def test_a_disk_without_room_is_an_error_of_that_save_and_the_next_one_works(
    folder: Path, tmp_path: Path
) -> None:
    engine, writer = _policy(folder), CheckpointWriter()
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


def _draw() -> list[float]:
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
