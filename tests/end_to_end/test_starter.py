"""The made model depends on few keys of the run, and on all of those."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.run.starter import find_model
from hybridrl.trainer.interrupt import RunStopped
from tests.end_to_end.small import small_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

OTHERWISE = (
    *("data.task=null", "data.train_files=[no.jsonl]", "eval.every_num_steps=0"),
    *("data.num_task_rows=2", "data.shuffle=false", "data.prompt_key=question"),
    "cluster.num_ranks_per_node=2",
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
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    row = {"question": "what?", "answer": "no"}
    (tmp_path / "no.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def make(config: ExperimentConfig, cache: Path, record: Record | None = None) -> Path:
    """Make the starter of a run in ``cache`` and return its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRIDRL_CACHE", str(cache))
        return find_model(config, cast(Any, record or Record()))


def test_a_run_on_own_files_makes_the_very_model_of_the_default_run(here: Path) -> None:
    default = small_config(
        here / "run",
        "data.max_digits=20",
        "data.max_prompt_tokens=21",
        "rollout.max_response_tokens=21",
    )
    other = small_config(here / "run", *OTHERWISE)
    one, two = make(default, here / "one"), make(other, here / "two")
    assert one.name == two.name
    assert (one / _WEIGHTS).read_bytes() == (two / _WEIGHTS).read_bytes()


def test_a_making_that_is_interrupted_leaves_no_half_taught_model(here: Path) -> None:
    config = small_config(here / "run")
    stop = Record(lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(RunStopped):
        make(config, here / "cache", stop)
    [lock] = (here / "cache").iterdir()
    assert make(config, here / "cache").name == lock.stem
