"""The name of a made model in the cache: another one for all that decides what it is."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.data import sampler, sort_digits, starter_tokenizer, supervised
from hybridrl.run import loops, starter
from hybridrl.run.starter import StarterRecipe, recipe_of
from hybridrl.trainer import sft as fine_tuning
from hybridrl.workers.train import optimizer
from tests.config.values import config_of

DECIDING = [
    *(sampler, sort_digits, starter_tokenizer, supervised),  # rows, their order and their tokens
    *(starter, loops, fine_tuning, optimizer),  # first weights, batches and steps
]


def recipe() -> StarterRecipe:
    config: ExperimentConfig = config_of()
    assert config.model.starter is not None
    return recipe_of(config, config.model.starter)


def changed(value: object) -> object:
    """Return another value of its kind: a text, a number, or a section with one key changed."""
    if isinstance(value, str):
        return f"{value}, changed"
    if isinstance(value, int | float):
        return value + 1
    key, old = next(iter(asdict(value).items()))  # type: ignore[call-overload]
    return replace(value, **{key: changed(old)})  # type: ignore[type-var]


@pytest.mark.parametrize("field", [field.name for field in fields(StarterRecipe)])
def test_each_field_of_the_recipe_names_the_model(field: str) -> None:
    before = recipe()
    values: dict[str, Any] = {field: changed(getattr(before, field))}
    other = replace(before, **values)
    assert other.name != before.name
    assert recipe().name == before.name


@pytest.mark.parametrize("package", [torch, transformers])
def test_the_version_of_a_package_names_the_model(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = recipe().name
    used = vars(starter)[package.__name__]  # another one where a test has imported it anew
    monkeypatch.setattr(used, "__version__", f"{package.__version__}.post1")
    assert recipe().name != before


@pytest.mark.parametrize("module", DECIDING, ids=lambda module: module.__name__)
def test_the_code_that_decides_is_in_the_name(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = recipe().name
    package = starter._PACKAGE
    names = {*starter._CODE, str(Path(str(module.__file__)).relative_to(package))}
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((package / name).read_bytes())
    monkeypatch.setattr(starter, "_PACKAGE", tmp_path)
    assert recipe().name == before
    with (tmp_path / Path(str(module.__file__)).relative_to(package)).open("a") as file:
        file.write("# changed\n")
    assert recipe().name != before
