from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
import transformers

from hybridrl.config import model
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.data import drawn_numbers, examples, sampler, starter_tokenizer, tasks
from hybridrl.models import seeing
from hybridrl.run import rows, starter
from hybridrl.run.modes import offline
from hybridrl.run.starter import find_model
from hybridrl.trainer.interrupt import RunStopped
from hybridrl.workers.train import optimizer
from tests.config.values import config_of
from tests.end_to_end.small import small_config

OTHERWISE = (
    *("data.task=null", "data.train_files=[no.jsonl]", "eval.every_num_steps=0"),
    *("data.num_task_rows=2", "data.shuffle=false", "data.prompt_key=question"),
    "cluster.num_ranks_per_node=2",
    *("model.dtype=bfloat16", "actor.compute_dtype=bfloat16"),
    *("actor.optimizer.beta1=0.5", "actor.optimizer.lr=1.0", "actor.optimizer.weight_decay=0.5"),
    *("actor.optimizer.max_grad_norm=1e-9", "actor.max_tokens_per_microbatch=32"),
    *("lora=default", "lora.rank=2", "algorithm=ppo", "critic.num_warmup_steps=1"),
    "rollout.max_response_tokens=30",
)


_WEIGHTS = "model.safetensors"


class Record:
    """What a run would show; ``on_step`` is done at the first step."""

    def __init__(self, on_step: Any = None) -> None:
        self._on_step = on_step
        self.live = self

    def phase(self, name: str) -> None:
        if self._on_step is not None and "step 1/" in name:
            self._on_step()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    row = {"question": "what?", "answer": "no"}
    (tmp_path / "no.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(config: ExperimentConfig, cache: Path, record: Record | None = None) -> Path:
    """Make the starter of a run in ``cache`` and return its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRIDRL_CACHE", str(cache))
        return find_model(config, cast(Any, record or Record()))


@pytest.mark.usefixtures("ray_cluster")
def test_a_run_on_own_files_makes_the_very_model_of_the_default_run(here: Path) -> None:
    limits = ("data.max_prompt_tokens=21", "rollout.max_response_tokens=21")
    default = small_config(here / "run", *limits)
    other = small_config(here / "run", *OTHERWISE)
    one, two = make(default, here / "one"), make(other, here / "two")
    assert one.name == two.name
    assert (one / _WEIGHTS).read_bytes() == (two / _WEIGHTS).read_bytes()


@pytest.mark.usefixtures("ray_cluster")
def test_a_making_that_is_interrupted_leaves_no_half_taught_model(here: Path) -> None:
    config = small_config(here / "run")
    stop = Record(lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(RunStopped):
        make(config, here / "cache", stop)
    [lock] = (here / "cache").iterdir()
    assert make(config, here / "cache").name == lock.stem


DECIDING = [
    *(examples, sampler, starter_tokenizer, tasks),  # rows, their order and their tokens
    *(drawn_numbers, seeing),
    *(model, starter, offline, rows, optimizer),  # first weights, batches and steps
]


def warmup_of(*overrides: str) -> ExperimentConfig:
    config = config_of(*overrides)
    assert config.model.starter is not None
    return starter.warmup_config(config, config.model.starter)


def name_with(*overrides: str) -> str:
    return starter.starter_name(warmup_of(*overrides))


@pytest.mark.parametrize(
    "override",
    [
        *("seed=1", "rollout.max_response_tokens=20", "cluster.num_threads_per_rank=3"),
        *(f"model.starter.{key}" for key in ("num_warmup_steps=60", "hidden_size=96")),
        "model.starter.num_layers=3",
        *("cluster=one_gpu", "data=calculator"),
    ],
)
def test_each_key_that_decides_the_weights_names_the_model(override: str) -> None:
    assert name_with(override) != name_with()


def test_no_more_numbers_are_drawn_than_a_warm_up_reads() -> None:
    for num_steps, num_rows in ((2, 128), (230, 10_000)):
        sees = ("model=starter_that_sees", f"model.starter.num_warmup_steps={num_steps}")
        assert warmup_of(*sees, "data=read_numbers").data.num_task_rows == num_rows


@pytest.mark.parametrize("section", ["actor", "sft", "model"])
def test_a_setting_of_the_warm_up_names_the_model(section: str) -> None:
    warmup = warmup_of()
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
    before, package = name_with(), starter._PACKAGE
    deciding = str(Path(str(module.__file__)).relative_to(package))
    for name in {*starter._CODE, deciding}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((package / name).read_bytes())
    monkeypatch.setattr(starter, "_PACKAGE", tmp_path)
    assert name_with() == before
    with (tmp_path / deciding).open("a") as file:
        file.write("# changed\n")
    assert name_with() != before
