"""Runs that go from FSDP2 to megatron-core, through other parallel sizes, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.config.megatron import MegatronConfig
from hybridrl.workers.train import checkpoint
from hybridrl.workers.train.checkpoint import CheckpointWriter
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import LearningEngine
from tests.megatron.stand_ins import install
from tests.ranks import run_ranks
from tests.tiny_models import Family, make_tiny_model
from tests.workers.train.engines import (
    ACTOR,
    CPU,
    MODEL,
    assert_same_weights,
    build_fsdp2,
    make_rows,
    rows_of,
    update,
    weights_of,
    whole_tensors,
)

ALONE = replace(MegatronConfig(), layers="local")


def _build(folder: Path, sizes: dict[str, int]) -> Any:
    install()
    from hybridrl.workers.train.megatron.backend import MegatronBackend
    from hybridrl.workers.train.megatron.context import MegatronContext

    megatron = replace(ALONE, **sizes)  # type: ignore[arg-type]
    context = MegatronContext(megatron=megatron, model=MODEL, device=CPU, seed=0, timeout_s=60.0)
    config = replace(ACTOR, engine="megatron")
    backend = MegatronBackend(folder, config=config, context=context, num_total_steps=10)
    return PolicyEngine(backend)


def _learn(engine: Any, seed: int) -> None:
    update(engine, rows_of(make_rows(4, seed=seed), range(engine.dp_rank, 4, engine.dp_size)))


def _save(engine: LearningEngine, target: Path, *, rank: int, world_size: int) -> None:
    writer = CheckpointWriter()
    name = checkpoint.file_name(rank=rank, world_size=world_size)
    writer.begin(engine, target / name, notes={})
    writer.collect(waits=True)
    writer.close()


def _go_on(
    rank: int, folder: Path, sizes: dict[str, int], come_from: Path | None, target: Path
) -> tuple[dict[str, Tensor], int]:
    engine = _build(folder, sizes)
    world_size = dist.get_world_size()
    if come_from is None:
        _learn(engine, 0)
    else:
        checkpoint.load(engine, come_from, rank=rank, world_size=world_size)
    _save(engine, target, rank=rank, world_size=world_size)
    weights = weights_of(engine)
    _learn(engine, 1)
    return weights | {f"next {n}": w for n, w in weights_of(engine).items()}, engine.num_updates


def _state_of(engine: LearningEngine) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in whole_tensors(engine).items()}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ("qwen2", {"pipeline_parallel_size": 2}),
    ],
)
def test_a_run_on_fsdp2_goes_on_through_megatron_and_back(
    tmp_path: Path, family: Family, sizes: dict[str, int]
) -> None:
    folder = make_tiny_model(tmp_path / "model", family, vocab_size=67)
    engine = build_fsdp2(folder)
    for seed in range(2):
        update(engine, make_rows(4, seed=seed + 5))
    _save(engine, tmp_path / "first", rank=0, world_size=1)
    loaded = weights_of(engine)
    # 4 ranks: the optimizer's state is shared by two wherever they are not all taken by the model
    there = run_ranks(4, _go_on, folder, sizes, tmp_path / "first", tmp_path / "second")
    back = build_fsdp2(folder)
    checkpoint.load(back, tmp_path / "second", rank=0, world_size=1)
    wanted, got = _state_of(engine), _state_of(back)
    assert wanted.keys() == got.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], got[name])] == []
    update(engine, make_rows(4, seed=1))
    after = {f"next {name}": tensor for name, tensor in weights_of(engine).items()}
    for weights, num_updates in there:
        assert num_updates == 3
        assert_same_weights(loaded | after, weights, atol=2e-5, rtol=1e-5)


def test_a_run_on_megatron_goes_on_with_other_sizes(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3_moe", vocab_size=67)
    first = run_ranks(2, _go_on, folder, {"expert_parallel_size": 2}, None, tmp_path / "first")
    second = run_ranks(
        2, _go_on, folder, {"pipeline_parallel_size": 2}, tmp_path / "first", tmp_path / "second"
    )
    for (wanted, num_before), (weights, num_after) in zip(first, second, strict=True):
        assert num_before == num_after == 2
        assert_same_weights(wanted, weights, atol=2e-5, rtol=1e-5)
