from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from hybridrl.config.model import ATTENTION_LINEAR
from hybridrl.workers.train import checkpoint
from hybridrl.workers.train.checkpoint import CheckpointWriter, ShardReader
from hybridrl.workers.train.model_engine import ModelEngine
from tests.contract.layouts import RESHAPES, RESHAPES_BY_NIGHT, layout_of, on_layouts
from tests.contract.ranks_under_test import (
    Rank,
    RanksUnderTest,
    copy_state,
    rows_of_rank,
    take_step,
)
from tests.workers.train.engines import (
    assert_same_weights,
    load,
    make_lessons,
    make_rows,
    save,
    weights_of,
    with_optimizer,
)
from tests.workers.train.lora_engines import LORA, with_lora

COSINE = {"schedule": "cosine", "num_warmup_steps": 1, "lr": 0.1, "eps": 1e-3}

ROLES = ("policy", "adapter", "merged adapter", "critic")


def _build(rank: Rank, folder: Path, role: str) -> ModelEngine:
    if role == "critic":
        return rank.critic(folder, with_optimizer(**COSINE))
    config = with_optimizer(**COSINE)
    if role == "policy":
        return rank.policy(folder, config)
    lora = LORA if role == "adapter" else with_lora(sync="merged")
    if role == "adapter of attention":
        lora = with_lora(target_modules=ATTENTION_LINEAR)
    return rank.policy(folder, config, lora=lora)


def _learn(engine: Any, role: str, seed: int) -> None:
    if role == "critic":
        engine.update(rows_of_rank(make_lessons(6, seed=seed), engine, 4))
    else:
        take_step(engine, make_rows(6, seed=seed), first=4)


def _save_and_load(rank: Rank, folder: Path, target: Path, role: str, num_before: int) -> None:
    engine = _build(rank, folder, role)
    for seed in range(num_before):
        _learn(engine, role, seed)
    writer = CheckpointWriter()
    name = checkpoint.file_name(rank=dist.get_rank(), world_size=dist.get_world_size())
    writer.begin(engine, target / name, notes={"version": 7})
    for seed in (2, 3):  # at once: what is written is a copy
        _learn(engine, role, seed)
    writer.collect(waits=True)
    writer.close()
    dist.barrier()
    loaded = _build(rank, folder, role)
    _learn(loaded, role, 9)  # whatever it was before
    notes = load(loaded, target)
    assert (notes["version"], loaded.num_updates) == (7, num_before)
    for seed in (2, 3):
        _learn(loaded, role, seed)
    assert_same_weights(copy_state(loaded), copy_state(engine))
    assert loaded.num_updates == engine.num_updates == num_before + 2


@pytest.mark.shows("6.3", "R1.2")
@on_layouts()
@pytest.mark.parametrize(
    ("role", "num_before"),
    [
        *((role, 2) for role in ROLES),
        ("policy", 0),
        *(pytest.param(role, 0, marks=pytest.mark.nightly) for role in ROLES[1:]),
    ],
)
def test_a_loaded_engine_learns_on_as_if_it_had_never_stopped(
    ranks: RanksUnderTest, folder: Path, tmp_path: Path, role: str, num_before: int
) -> None:
    if role == "critic" and not ranks.engine.has_critic:
        pytest.skip(f"{ranks.layout.engine} has no critic")
    if "adapter" in role and not ranks.engine.has_adapters:
        pytest.skip(f"{ranks.layout.engine} has no adapters")
    ranks.run(_save_and_load, folder, tmp_path, role, num_before)


def _save_and_go_on(rank: Rank, folder: Path, target: Path, role: str) -> dict[str, Tensor]:
    engine: Any = _build(rank, folder, role)
    for seed in range(2):
        _learn(engine, role, seed)
    save(engine, target)
    _learn(engine, role, 2)
    return _weights(engine, role)


def _load_and_go_on(rank: Rank, folder: Path, target: Path, role: str) -> dict[str, Tensor]:
    engine: Any = _build(rank, folder, role)
    load(engine, target)
    assert engine.num_updates == 2
    _learn(engine, role, 2)
    return _weights(engine, role)


def _weights(engine: Any, role: str) -> dict[str, Tensor]:
    if role == "policy":
        return weights_of(engine)
    return {name: t.clone() for name, t in engine.full_weights(engine.weight_sets[-1])}


def _assert_values_are_stored_once(folder: Path) -> None:
    """Of several replicas one writes; numbers without a dimension may come from each rank."""
    num_stored: Counter[str] = Counter()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                num_stored[key.partition("#")[0]] += file.get_tensor(key).numel()
    with ShardReader(folder) as reader:
        for name, shape in reader.shapes.items():
            assert not shape or num_stored[name] == math.prod(shape), name


def check_resumes(
    writers: RanksUnderTest, readers: RanksUnderTest, folder: Path, stored: Path, role: str
) -> None:
    saved = writers.run(_save_and_go_on, folder, stored, role)[0]
    for loaded in readers.run(_load_and_go_on, folder, stored, role):
        assert_same_weights(loaded, saved, atol=1e-5)


@pytest.mark.shows("6.2", "R2.3")
@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "role"),
    [
        *((*pair, "policy") for pair in RESHAPES),
        ("megatron-sp2", "fsdp2-1", "adapter"),
        *(pytest.param(*pair, "policy", marks=pytest.mark.nightly) for pair in RESHAPES_BY_NIGHT),
        *(
            pytest.param(*pair, "adapter", marks=pytest.mark.nightly)
            for pair in RESHAPES + RESHAPES_BY_NIGHT
        ),
    ],
)
def test_checkpoint_of_one_layout_resumes_in_another(
    make_model: Any, tmp_path: Path, saved_by: str, loaded_by: str, role: str
) -> None:
    writers, readers = (RanksUnderTest(layout_of(name)) for name in (saved_by, loaded_by))
    if role == "adapter" and not (writers.engine.has_adapters and readers.engine.has_adapters):
        pytest.skip("one of them has no adapters")
    folder = make_model(writers.layout, tie=role == "adapter")
    if role == "adapter" and writers.layout.adapted != readers.layout.adapted:
        role = "adapter of attention"  # one of them cannot adapt experts
    try:
        check_resumes(writers, readers, folder, tmp_path, role)
        if writers.layout.engine == "fsdp2":  # Megatron's ranks each store what they have in full
            _assert_values_are_stored_once(tmp_path)
    finally:
        writers.close()
        readers.close()
