"""The name of a made model in the cache: another one for all that decides what it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from hybridrl.data import examples, sampler, starter_tokenizer, tasks
from hybridrl.run import rows, starter
from hybridrl.run.modes import offline
from hybridrl.workers.train import optimizer
from tests.config.values import config_of

DECIDING = [
    *(examples, sampler, starter_tokenizer, tasks),  # rows, their order and their tokens
    *(starter, offline, rows, optimizer),  # first weights, batches and steps
]


def name_with(*overrides: str) -> str:
    config = config_of(*overrides)
    assert config.model.starter is not None
    return starter.starter_name(starter.warmup_config(config, config.model.starter))


@pytest.mark.parametrize(
    "override",
    [
        *("seed=1", "data.max_digits=19", "cluster.num_threads_per_rank=3"),
        *(f"model.starter.{key}" for key in ("warmup_lr=0.0001", "num_warmup_steps=60")),
        *(f"model.starter.{key}" for key in ("hidden_size=96", "intermediate_size=64")),
        *(f"model.starter.{key}" for key in ("max_position_embeddings=100", "num_layers=3")),
        *("cluster=one_gpu", "data=calculator"),
    ],
)
def test_each_key_that_decides_the_weights_names_the_model(override: str) -> None:
    assert name_with(override) != name_with()


@pytest.mark.parametrize("section", ["actor", "sft", "model"])
def test_a_setting_of_the_warm_up_names_the_model(section: str) -> None:
    config = config_of()
    assert config.model.starter is not None
    warmup = starter.warmup_config(config, config.model.starter)
    other = {
        "actor": replace(warmup.actor, compute_dtype="bfloat16"),
        "sft": replace(warmup.sft, turns="all"),
        "model": replace(warmup.model, dtype="bfloat16"),
    }
    values: dict[str, Any] = {section: other[section]}
    assert starter.starter_name(replace(warmup, **values)) != starter.starter_name(warmup)


@pytest.mark.parametrize("package", [torch, transformers])
def test_the_version_of_a_package_names_the_model(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = name_with()
    used = vars(starter)[package.__name__]  # another one where a test has imported it anew
    monkeypatch.setattr(used, "__version__", f"{package.__version__}.post1")
    assert name_with() != before


@pytest.mark.parametrize("module", DECIDING, ids=lambda module: module.__name__)
def test_the_code_that_decides_is_in_the_name(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = name_with()
    package = starter._PACKAGE
    names = {*starter._CODE, str(Path(str(module.__file__)).relative_to(package))}
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((package / name).read_bytes())
    monkeypatch.setattr(starter, "_PACKAGE", tmp_path)
    assert name_with() == before
    with (tmp_path / Path(str(module.__file__)).relative_to(package)).open("a") as file:
        file.write("# changed\n")
    assert name_with() != before
