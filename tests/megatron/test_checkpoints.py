from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrl.workers.train.model_engine import ModelEngine
from tests.megatron.engines import build_megatron
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_model
from tests.workers.train.engines import (
    assert_same_weights,
    build_fsdp2,
    load,
    make_rows,
    rows_of,
    save,
    update,
    weights_of,
    whole_tensors,
)


def _learn(engine: Any, seed: int) -> None:
    update(engine, rows_of(make_rows(4, seed=seed), range(engine.dp_rank, 4, engine.dp_size)))


def _go_on(
    _rank: int, folder: Path, come_from: Path, target: Path
) -> tuple[dict[str, Tensor], int]:
    engine = build_megatron(folder, layers="local", pipeline_parallel_size=2)
    load(engine, come_from)
    save(engine, target)
    weights = weights_of(engine)
    _learn(engine, 1)
    return weights | {f"next {n}": w for n, w in weights_of(engine).items()}, engine.num_updates


def _state_of(engine: ModelEngine) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in whole_tensors(engine).items()}


def test_a_run_on_fsdp2_goes_on_through_megatron_and_back(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen2", vocab_size=67)
    engine = build_fsdp2(folder)
    for seed in range(2):
        update(engine, make_rows(4, seed=seed + 5))
    save(engine, tmp_path / "first")
    loaded = weights_of(engine)
    # 4 ranks of 2 stages: the optimizer's state is shared by two, and a border is in a tensor.
    there = run_ranks(4, _go_on, folder, tmp_path / "first", tmp_path / "second")
    back = build_fsdp2(folder)
    load(back, tmp_path / "second")
    wanted, got = _state_of(engine), _state_of(back)
    assert wanted.keys() == got.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], got[name])] == []
    update(engine, make_rows(4, seed=1))
    after = {f"next {name}": tensor for name, tensor in weights_of(engine).items()}
    for weights, num_updates in there:
        assert num_updates == 3
        assert_same_weights(loaded | after, weights, atol=3e-5)
