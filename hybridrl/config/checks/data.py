"""Rules about the source and the length of rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import combinations

from hybridrl.config.checks.disk import check_data_files
from hybridrl.config.data import MOST_SOURCES
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError

_ROWLESS = ("eval", "plan")
"""Modes that read no rows to train on."""


def check_data_source(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Rows come from a built-in task or from files: from exactly one of them."""
    data = config.data
    if data.task is None and not (data.train_files or data.sources) and config.mode not in _ROWLESS:
        yield ConfigError(
            "data.train_files",
            [],
            "a run needs data files or a built-in task",
            remedies=[("data=sort_digits",)],
            fix="set data.train_files=[FILE.jsonl], or data=sort_digits",
        )
    for key, files in (
        ("data.train_files", data.train_files),
        ("data.eval_files", data.eval_files),
    ):
        if data.task is not None and files:
            yield ConfigError(
                key,
                list(files),
                f"would be ignored, because data.task={data.task} makes its own rows",
                remedies=[(f"{key}=[]",)],
                fix=f"set data=files to read them, or {key}=[]",
            )


def check_data_mix(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A mix replaces files and task, and each of its sources has a share that is drawn."""
    data = config.data
    for key, value, remedy in (
        ("data.train_files", data.train_files, "data.train_files=[]"),
        ("data.task", data.task, "data.task=null"),
    ):
        if data.sources and value:
            rule = "would be ignored, because data.sources has the rows to learn from"
            yield ConfigError(key, value, rule, remedies=[(remedy,)])
    total = sum(source.weight or 1.0 for source in data.sources.values())
    for name, source in data.sources.items():
        weight = 1.0 if source.weight is None else source.weight
        if weight * MOST_SOURCES < total:
            yield ConfigError(
                f"data.sources.{name}.weight",
                weight,
                f"is less than a thousandth of all weights, {total:g}",
                remedies=[(f"data.sources.{name}.weight={total / 500:g}",)],
            )


def check_curriculum(config: ExperimentConfig) -> Iterator[ConfigError]:
    """An order by difficulty needs a column, and a column of difficulty has no other use."""
    data = config.data
    columns = [source.difficulty_key or data.difficulty_key for source in data.sources.values()]
    has_column = all(columns) if data.sources else data.difficulty_key is not None
    if data.curriculum != "none" and (data.task is not None or not has_column):
        yield ConfigError(
            "data.curriculum",
            data.curriculum,
            "rows from files are ordered by the numbers of data.difficulty_key, which is null",
            remedies=[("data.curriculum=none",)],
            fix="set data.difficulty_key=COLUMN, or data.curriculum=none",
        )


def check_sort_digits(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Numbers have a shortest and a longest length, and fit into the prompt and the answer."""
    data = config.data
    if data.task != "sort_digits":
        return
    if data.min_digits > data.max_digits:
        yield ConfigError(
            "data.min_digits",
            data.min_digits,
            f"must be at most data.max_digits={data.max_digits}",
            remedies=[(f"data.min_digits={data.max_digits}",)],
        )
    # One token per digit; the prompt ends in '=' and the answer in the end-of-text token.
    room = min(data.max_prompt_tokens, config.rollout.max_response_tokens) - 1
    if data.max_digits > room:
        yield ConfigError(
            "data.max_digits",
            data.max_digits,
            f"such a number takes {data.max_digits + 1} tokens, one more than digits, and the "
            f"limit is {room + 1}: data.max_prompt_tokens={data.max_prompt_tokens}, "
            f"rollout.max_response_tokens={config.rollout.max_response_tokens}",
            remedies=_room_for_digits(config, room),
        )


def check_calculator(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Its rows are chat messages."""
    if config.data.task == "calculator" and not config.data.use_chat_template:
        yield ConfigError(
            "data.use_chat_template",
            config.data.use_chat_template,
            "the rows of data.task=calculator are chat messages",
            remedies=[("data.use_chat_template=true",)],
        )


def _room_for_digits(config: ExperimentConfig, room: int) -> list[tuple[str, ...]]:
    num_tokens = config.data.max_digits + 1
    prompt = max(num_tokens, config.data.max_prompt_tokens)
    response = max(num_tokens, config.rollout.max_response_tokens)
    longer: tuple[str, ...] = (
        f"data.max_prompt_tokens={prompt}",
        f"rollout.max_response_tokens={response}",
    )
    starter = config.model.starter
    if starter is not None and starter.max_position_embeddings < prompt + response:
        longer += (f"model.starter.max_position_embeddings={prompt + response}",)
    shorter: tuple[str, ...] = (f"data.max_digits={room}",)
    if config.data.min_digits > room:
        shorter += (f"data.min_digits={room}",)
    return [shorter, longer] if room >= 1 else [longer]


_COLUMNS = {"prompt_key": "prompt", "answer_key": "answer", "source_key": "source"}
"""Keys of ``data`` that name a column, with their defaults in hydra_configs/data."""

_OF_PAIRS = {"prompt_key": "prompt", "answer_key": "chosen", "rejected_key": "rejected"}
"""Those of preference pairs."""


def check_data_columns(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Prompt, answer and source are three columns: a prompt that is its answer teaches to copy."""
    if config.data.task is not None:
        return
    names = {
        "prompt_key": config.data.prompt_key,
        "answer_key": config.data.answer_key,
        "rejected_key": config.data.rejected_key,
        "source_key": config.data.source_key,
    }
    columns = _COLUMNS if config.data.rejected_key is None else {**_COLUMNS, **_OF_PAIRS}
    for one, other in combinations(names, 2):
        if names[one] is not None and names[one] == names[other]:
            usual = tuple(f"data.{key}={name}" for key, name in columns.items())
            yield ConfigError(
                f"data.{one}",
                names[one],
                f"data.{other} names the same column",
                remedies=[usual],
            )


def check_pair_columns(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Preference pairs have two columns of answers, and they alone can do without a prompt's."""
    data = config.data
    if data.prompt_key is None and data.rejected_key is None:
        yield ConfigError(
            "data.prompt_key",
            None,
            "only the chats of preference pairs hold their prompt, and data.rejected_key is null",
            remedies=[("data.prompt_key=prompt",)],
        )
    if data.answer_key is None and data.rejected_key is not None:
        yield ConfigError(
            "data.answer_key",
            None,
            f"data.rejected_key={data.rejected_key} makes rows preference pairs, and the chosen "
            "answer has a column of its own",
            remedies=[("data.answer_key=chosen",), ("data.rejected_key=null",)],
        )


def check_files_stand_once(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A file that is listed twice would be learned from twice as often as the others."""
    for key, files in config.files_by_key.items():
        once = {os.path.realpath(file): file for file in reversed(files)}
        if len(once) < len(files):
            yield listed_twice(key, files, tuple(file for file in files if file in once.values()))


def listed_twice(key: str, listed: tuple[str, ...], once: tuple[str, ...]) -> ConfigError:
    """Return the error of a key whose list repeats an entry."""
    remedies = [(f"{key}=[{','.join(dict.fromkeys(once))}]",)]
    return ConfigError(key, list(listed), "lists the same entry twice", remedies=remedies)


RULES = (
    check_data_source,
    check_data_columns,
    check_pair_columns,
    check_data_files,
    check_files_stand_once,
    check_sort_digits,
    check_calculator,
    check_data_mix,
    check_curriculum,
)
