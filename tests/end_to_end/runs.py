from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.child import to_yaml
from hybridrl.checkpoint.compare import compare_runs
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.data.source import PromptSource, PromptStep
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.run.launch import run
from hybridrl.run.rows import load_train_rows
from hybridrl.run.starter import write_random_model
from tests.end_to_end.small import read_metrics, small_config
from tests.tiny_models import make_tiny_model

TIMED = ("time/", "throughput/", "memory/", "reward/early_fraction", "elapsed_s")
WEIGHTS = "hf/model.safetensors"
STAND_INS = "cluster.worker_setup_hook=tests.megatron.stand_ins.install"


def train(folder: Path, *overrides: str) -> list[dict[str, float]]:
    config = small_config(folder, *overrides)
    run(config, resolved_yaml=to_yaml(config))
    return read_metrics(folder)


def make_teacher(folder: Path) -> Path:
    """Write a random model that reads the starter's tokens."""
    teacher = make_tiny_model(folder / "t", vocab_size=512)
    build_starter_tokenizer().save_pretrained(teacher)
    return teacher


def make_untrained(folder: Path) -> Path:
    """Write the small starter as it is before its warm-up."""
    starter = small_config(folder).model.starter
    assert starter is not None
    write_random_model(starter, folder, seed=0)
    return folder


def go_back_to(step: int, folder: Path, copy: Path) -> Path:
    """Copy a run as it would be if it had been killed behind this step, which has a checkpoint."""
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "hf")
    for path in (copy / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    return copy


def metrics_of(folder: Path, *, without: tuple[str, ...] = TIMED) -> list[dict[str, float]]:
    """What is the same whenever the run is done again."""
    return [
        {name: value for name, value in line.items() if not name.startswith(without)}
        for line in read_metrics(folder)
    ]


def samples_of(folder: Path, split: str | None = None) -> list[Mapping[str, Any]]:
    lines = (folder / "samples.jsonl").read_bytes().splitlines()  # of a text: at U+2028, too
    return [each for each in map(json.loads, lines) if split in (None, each["split"])]


def turns_of(folder: Path, split: str | None = None) -> list[Mapping[str, Any]]:
    return [turn for sample in samples_of(folder, split) for turn in sample.get("turns", ())]


def _draw(config: ExperimentConfig, number: int) -> PromptStep:
    rows = load_train_rows(config, build_starter_tokenizer())
    return PromptSource(
        rows.rows, num_prompts=number, seed=config.seed, sampler=rows.sampler
    ).next()


def prompts_in_order(config: ExperimentConfig, number: int) -> list[str]:
    return [row.prompt_text for row in _draw(config, number).rows]


def prompts_of(config: ExperimentConfig, number: int) -> Sequence[Tensor]:
    """Tokens of the prompts, by their index in the run's stream."""
    return _draw(config, number).prompts.token_ids_PL.unbind()


def assert_same_weights(first: Path, second: Path) -> None:
    """Of the models that two runs left, bit by bit."""
    ours, theirs = load_file(first / WEIGHTS), load_file(second / WEIGHTS)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def assert_same_run(first: Path, second: Path) -> None:
    """Metrics, samples and newest checkpoints; that one bit is seen is shown by test_resume.py."""
    assert [finding for finding in compare_runs(first, second) if finding.differences] == []
