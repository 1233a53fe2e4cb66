"""Rows of a run: made by a built-in task or read from files, then tokenized."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hybridrl import env
from hybridrl.agents.rollout import tool_schemas
from hybridrl.config.data import SourceConfig
from hybridrl.config.eval import EvalSet
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.data.calculator import build_calculator_rows
from hybridrl.data.columns import columns_of
from hybridrl.data.files import read_rows
from hybridrl.data.prompts import TokenizedRow, tokenize_rows
from hybridrl.data.rows import Row, fingerprint
from hybridrl.data.sampler import MixSampler, RowSampler, Sampler
from hybridrl.data.sort_digits import Split, build_sort_digits_rows

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainRows:
    """The rows to learn from, and the order in which they are drawn."""

    rows: Sequence[TokenizedRow]
    """Of all sources, end to end."""

    sampler: Sampler


def load_train_rows(config: ExperimentConfig, tokenizer: PreTrainedTokenizerBase) -> TrainRows:
    """Read or make the rows to learn from, and tokenize their prompts.

    Raises:
        DataError: bad rows, by file and line; or no rows.
    """
    data = config.data
    if not data.sources:
        rows = _tokenize(read_train_rows(config), config, tokenizer)
        return TrainRows(rows, _sampler_of(rows, config))
    by_source = {
        name: _tokenize(read_source(config, name, source), config, tokenizer)
        for name, source in data.sources.items()
    }
    samplers = {name: _sampler_of(rows, config) for name, rows in by_source.items()}
    weights = [source.weight or 1.0 for source in data.sources.values()]
    rows = [row for rows in by_source.values() for row in rows]
    return TrainRows(rows, MixSampler(samplers, weights, seed=config.seed))


def load_eval_rows(
    config: ExperimentConfig, settings: EvalSet, tokenizer: PreTrainedTokenizerBase
) -> list[TokenizedRow]:
    """Read or make the held-out rows of a set, and tokenize their prompts.

    Raises:
        DataError: bad rows, by file and line; or no rows.
    """
    return _tokenize(read_eval_rows(config, settings), config, tokenizer)


def within_epochs(config: ExperimentConfig, num_rows: int) -> ExperimentConfig:
    """Return the configuration with the steps of ``trainer.num_epochs``, if these are fewer.

    The last step of an epoch may take rows of the next one.
    """
    num_epochs = config.trainer.num_epochs
    if num_epochs is None:
        return config
    is_sft = config.mode == "sft"
    num_a_step = config.sft.batch_size if is_sft else config.trainer.num_prompts_per_step
    num_steps = min(config.num_steps, max(1, math.ceil(num_epochs * num_rows / num_a_step)))
    log.info("%g epochs of %d rows: %d steps", num_epochs, num_rows, num_steps)
    if is_sft:
        return replace(config, sft=replace(config.sft, num_steps=num_steps))
    return replace(config, trainer=replace(config.trainer, num_steps=num_steps))


def read_train_rows(config: ExperimentConfig) -> list[Row]:
    """Read or make the rows to learn from; those of a mix end to end.

    Raises:
        DataError: bad rows, by file and line; or no rows.
    """
    data = config.data
    if data.task is not None:
        return _make(config, data.num_task_rows, split="train")
    if data.sources:
        by_source = (read_source(config, name, s) for name, s in data.sources.items())
        return [row for rows in by_source for row in rows]
    files = [Path(file) for file in data.train_files]
    return read_rows(files, columns=columns_of(config, "data"), key="data.train_files")


def read_source(config: ExperimentConfig, name: str, source: SourceConfig) -> list[Row]:
    """Read the rows of one source of a mix.

    Raises:
        DataError: bad rows, by file and line; or no rows.
    """
    section = f"data.sources.{name}"
    columns = columns_of(config, section)
    files = [Path(file) for file in source.files]
    return read_rows(files, columns=columns, key=f"{section}.files", source=name)


def read_eval_rows(config: ExperimentConfig, settings: EvalSet) -> list[Row]:
    """Read or make the held-out rows of a set.

    Files are read in full, so that each bad row is named; the first ``num_prompts`` are taken.

    Raises:
        DataError: bad rows, by file and line; or no rows.
    """
    data = config.data
    if data.task is not None and settings.files is None:
        return _make(config, settings.num_prompts, split="eval")
    key = "data.eval_files" if settings.files is None else f"{settings.key}.files"
    names = data.eval_files if settings.files is None else settings.files
    columns = columns_of(config, key)
    rows = read_rows([Path(name) for name in names], columns=columns, key=key)
    learned_files = [*data.train_files, *(f for s in data.sources.values() for f in s.files)]
    learned = {Path(name).resolve() for name in learned_files}
    if both := [name for name in names if Path(name).resolve() in learned]:
        log.warning("evaluating on files that are also learnt from: %s", ", ".join(both))
    return rows[: settings.num_prompts]


def _sampler_of(rows: Sequence[TokenizedRow], config: ExperimentConfig) -> RowSampler:
    signs = {"none": 0.0, "easy_first": 1.0, "hard_first": -1.0}
    sign = signs[config.data.curriculum]
    return RowSampler(
        len(rows),
        seed=config.seed,
        shuffle=config.data.shuffle,
        fingerprint=fingerprint(row.row for row in rows),
        difficulties=[sign * row.row.difficulty for row in rows] if sign else None,
    )


def _make(config: ExperimentConfig, num_rows: int, *, split: Split) -> list[Row]:
    data = config.data
    if data.task == "calculator":
        return build_calculator_rows(
            num_rows, split=split, seed=config.seed, has_conversations=config.mode == "sft"
        )
    return build_sort_digits_rows(
        num_rows,
        split=split,
        seed=config.seed,
        min_digits=data.min_digits,
        max_digits=data.max_digits,
    )


def _tokenize(
    rows: Sequence[Row], config: ExperimentConfig, tokenizer: PreTrainedTokenizerBase
) -> list[TokenizedRow]:
    data = config.data
    return tokenize_rows(
        rows,
        tokenizer,
        use_chat_template=data.use_chat_template,
        max_prompt_tokens=data.max_prompt_tokens,
        overlong=data.overlong_prompts,
        tools=tool_schemas(config.agent),
        cache=env.cache_dir() / "tokens",
    )
