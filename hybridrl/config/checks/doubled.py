"""Rules about lists and columns in which one thing stands twice, and would count twice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import combinations

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError

_COLUMNS = {"prompt_key": "prompt", "answer_key": "answer", "source_key": "source"}
"""Keys of ``data`` that name a column, with what hydra_configs/data calls it."""


def check_data_columns(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Prompt, answer and source are three columns: a prompt that is its answer teaches to copy."""
    if config.data.task is not None:
        return
    names = {
        "prompt_key": config.data.prompt_key,
        "answer_key": config.data.answer_key,
        "source_key": config.data.source_key,
    }
    for one, other in combinations(names, 2):
        if names[one] == names[other]:
            usual = tuple(f"data.{key}={name}" for key, name in _COLUMNS.items())
            yield ConfigError(
                f"data.{one}",
                names[one],
                f"data.{other} names the same column",
                remedies=[usual],
            )


def check_files_stand_once(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A file that is listed twice would be learnt from twice as often as the others."""
    for key, files in (
        ("data.train_files", config.data.train_files),
        ("data.eval_files", config.data.eval_files),
    ):
        once = {os.path.realpath(file): file for file in reversed(files)}
        if len(once) < len(files):
            yield _twice(key, files, tuple(file for file in files if file in once.values()))


def check_trackers_stand_once(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Each tracker is opened once: two would write each value twice."""
    trackers = config.tracking.trackers
    once = tuple(dict.fromkeys(trackers))
    if len(once) < len(trackers):
        yield _twice("tracking.trackers", trackers, once)


def _twice(key: str, listed: tuple[str, ...], once: tuple[str, ...]) -> ConfigError:
    remedies = [(f"{key}=[{','.join(dict.fromkeys(once))}]",)]
    return ConfigError(key, list(listed), "lists the same entry twice", remedies=remedies)
