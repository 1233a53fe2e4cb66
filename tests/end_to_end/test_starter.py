"""The made model depends on its recipe alone, and on all of it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.run import starter as starter_module
from hybridrl.run.starter import StarterRecipe, ensure_starter, recipe_of
from hybridrl.run.starter_warmup import warm_up
from hybridrl.trainer.interrupt import RunStopped
from tests.config.values import config_of
from tests.end_to_end.small import small_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

OTHERWISE = (
    *("data.task=null", "data.train_files=[no.jsonl]", "eval.every_num_steps=0"),
    *("data.num_task_rows=2", "data.shuffle=false", "data.prompt_key=question"),
    *("cluster.num_ranks_per_node=2", "cluster.num_cpus_per_rank=0.5"),
    *("model.dtype=bfloat16", "actor.compute_dtype=bfloat16", "actor.reduce_dtype=bfloat16"),
    *("actor.optimizer.beta1=0.5", "actor.optimizer.lr=1.0", "actor.optimizer.weight_decay=0.5"),
    *("actor.optimizer.max_grad_norm=1e-9", "actor.max_tokens_per_microbatch=32"),
    *(
        "lora=default",
        "lora.rank=2",
        "algorithm=ppo",
        "critic.num_warmup_steps=1",
        "rollout.max_response_tokens=30",
    ),
)


class Record:
    """Keeps what a run would show; does ``on_step`` at the first step."""

    def __init__(self, on_step: Any = None) -> None:
        self._on_step = on_step

    def phase(self, name: str) -> None:
        if self._on_step is not None and "step 1/" in name:
            self._on_step()

    def begin_step(self, step: int) -> None:
        pass


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    row = {"question": "what?", "answer": "no"}
    (tmp_path / "no.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def recipe(config: ExperimentConfig) -> StarterRecipe:
    assert config.model.starter is not None
    return recipe_of(config, config.model.starter)


def make(config: ExperimentConfig, cache: Path, record: Record | None = None) -> bytes:
    """Make the starter of a run in ``cache`` and return its weights."""
    made = recipe(config)

    def teach(raw: Path, target: Path) -> None:
        kept = cast(Any, record or Record())
        warm_up(made, raw, cluster=config.cluster, record=kept, target=target)

    folder = ensure_starter(made, cache=cache, warm_up=teach)
    return (folder / "model.safetensors").read_bytes()


def test_a_run_on_own_files_makes_the_very_model_of_the_default_run(here: Path) -> None:
    default = small_config(
        here / "run",
        "data.max_digits=20",
        "data.max_prompt_tokens=21",
        "rollout.max_response_tokens=21",
    )
    other = small_config(here / "run", *OTHERWISE)
    assert recipe(default).name == recipe(other).name
    assert make(default, here / "one") == make(other, here / "two")


@pytest.mark.parametrize(
    "override",
    [
        *("seed=1", "data.max_digits=19", "data.min_digits=3", "cluster.num_threads_per_rank=3"),
        *("model.starter.warmup_lr=0.0001", "model.starter.num_warmup_steps=60"),
        *("model.starter.warmup_batch_size=32", "model.starter.max_position_embeddings=100"),
    ],
)
def test_what_the_made_model_is_made_from_names_it(override: str) -> None:
    assert recipe(config_of(override)).name != recipe(config_of()).name


@pytest.mark.parametrize("name", starter_module._CODE)
def test_other_code_makes_another_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = recipe(config_of()).name
    package = starter_module._PACKAGE
    for file in starter_module._CODE:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes((package / file).read_bytes())
    monkeypatch.setattr(starter_module, "_PACKAGE", tmp_path)
    assert recipe(config_of()).name == before
    with (tmp_path / name).open("a") as file:
        file.write("# changed\n")
    assert recipe(config_of()).name != before


def test_a_making_that_is_interrupted_leaves_no_half_taught_model(here: Path) -> None:
    config = small_config(here / "run")
    stop = Record(lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(RunStopped):
        make(config, here / "cache", stop)
    left = {path.name for path in (here / "cache").iterdir()}
    assert left == {f"{recipe(config).name}.lock"}
    assert make(config, here / "cache")
