"""Rows of a run: made by a built-in task or read from files, then tokenized.

What loads rows raises a DataError for bad ones, by file and line, and if there are none.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from hybridrl import env
from hybridrl.agents.rollout import tool_schemas
from hybridrl.config.eval import EvalSet
from hybridrl.config.experiment import PAIR_MODES, ExperimentConfig, with_value
from hybridrl.data.examples import PreferencePair, tokenize_pairs
from hybridrl.data.files import RowFiles
from hybridrl.data.parsing import columns_of
from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.row_table import RowTable
from hybridrl.data.rows import Row, fingerprint
from hybridrl.data.sampler import MixSampler, RowOrder, RowSampler, SolveRates, SolveRateSampler
from hybridrl.data.tasks import (
    Split,
    build_calculator_rows,
    build_read_numbers_rows,
    build_sort_digits_rows,
)
from hybridrl.data.tokenizing import Resources, RowEncoder, encode_rows, tokenize_files
from hybridrl.errors import DataError
from hybridrl.models.image_settings import image_settings_of
from hybridrl.processes.guard import usual_num_processes
from hybridrl.trainer.lessons import Lessons, TeacherPrompts

log = logging.getLogger(__name__)

_MIN_DIGITS = 2  # of one digit all numbers are seen in training


_Tokenized = TypeVar("_Tokenized")


@dataclass(frozen=True, slots=True)
class TrainRows(Generic[_Tokenized]):
    """The rows to learn from, and the order in which they are drawn."""

    rows: Sequence[_Tokenized]
    """Of all sources, end to end."""

    sampler: RowOrder

    solve_rates: SolveRates | None = None
    """By which the sampler draws (``data.curriculum=solve_rate``)."""


def load_train_rows(
    config: ExperimentConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    on_progress: Callable[[str], None] = lambda text: None,
) -> TrainRows[TokenizedRow]:
    """Read or make the rows to learn from, and tokenize their prompts.

    ``on_progress`` is called with the number of rows so far.
    """
    tables = _load_tables(config, tokenizer, on_progress)
    for name, table in zip(config.data.sources, tables, strict=False):
        source = table[0].row.source
        if name in config.algorithm.by_source and source != name:
            raise DataError(
                f"algorithm.by_source.{name} is for rows of data.sources.{name}, and these call "
                f"themselves {source}; set data.sources.{name}.source_key to no column of theirs"
            )
    rows = tables[0] if len(tables) == 1 else RowTable.joined(tables)
    if config.data.curriculum != "solve_rate":
        return TrainRows(rows, _order_of([_row_sampler(t, config) for t in tables], config))
    rates = SolveRates(len(rows))
    ends = accumulate(len(table) for table in tables)
    samplers: list[RowSampler] = [
        SolveRateSampler(
            rates.counts_N2[end - len(table) : end],
            seed=config.seed,
            fingerprint=table.fingerprint,
            name=str(number),
        )
        for number, (table, end) in enumerate(zip(tables, ends, strict=True))
    ]
    return TrainRows(rows, _order_of(samplers, config), rates)


def load_train_pairs(
    config: ExperimentConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    on_progress: Callable[[str], None] = lambda text: None,
) -> TrainRows[PreferencePair]:
    """Read or make the preference pairs to learn from, and tokenize prompts and answers.

    All pairs are in memory. Arguments and errors are those of ``load_train_rows``.
    """
    tables = _load_tables(config, tokenizer, on_progress)
    pairs = [_pairs_of(rows, config, tokenizer) for rows in tables]
    order = _order_of([_row_sampler(of_source, config) for of_source in pairs], config)
    return TrainRows(list(chain.from_iterable(pairs)), order)


def _load_tables(
    config: ExperimentConfig, tokenizer: PreTrainedTokenizerBase, on_progress: Callable[[str], None]
) -> list[RowTable]:
    """Read or make the rows to learn from: one table, or one a source of a mix."""
    if config.data.task is not None:
        made = _make(config, config.data.num_task_rows, split="train")
        return [encode_rows(made, _encoder_of(config, tokenizer))]
    return [load_rows(config, key, tokenizer, on_progress) for key in train_keys(config)]


def train_keys(config: ExperimentConfig) -> list[str]:
    """Return the keys that list files to learn from: one, or those of a mix."""
    if config.data.task is not None:
        return []
    keys = [f"data.sources.{name}.files" for name in config.data.sources]
    return keys or ["data.train_files"]


def eval_key(settings: EvalSet) -> str:
    """Return the key that lists the files of an evaluation set."""
    return "data.eval_files" if settings.files is None else f"{settings.key}.files"


def load_rows(
    config: ExperimentConfig,
    key: str,
    tokenizer: PreTrainedTokenizerBase,
    on_progress: Callable[[str], None] = lambda text: None,
) -> RowTable:
    """Read the files of a key, and tokenize their prompts."""
    resources = Resources(
        folder=env.cache_dir() / "rows",
        num_processes=config.data.num_processes or usual_num_processes(),
        on_progress=on_progress,
    )
    return tokenize_files(files_of(config, key), _encoder_of(config, tokenizer), resources)


def load_eval_rows(
    config: ExperimentConfig, settings: EvalSet, tokenizer: PreTrainedTokenizerBase
) -> RowTable:
    """Read or make the held-out rows of a set, and tokenize their prompts.

    Files are read in full, so that each bad row is named; the first ``num_prompts`` are taken.
    """
    data, encoder = config.data, _encoder_of(config, tokenizer)
    if data.task is not None and settings.files is None:
        return encode_rows(_make(config, settings.num_prompts, split="eval"), encoder)
    files = files_of(config, eval_key(settings))
    rows = [row for at, row in enumerate(files.parsed()) if at < settings.num_prompts]
    learned_files = [*data.train_files, *(f for s in data.sources.values() for f in s.files)]
    learned = {Path(name).resolve() for name in learned_files}
    names = config.files_by_key[files.key]
    if both := [name for name in names if Path(name).resolve() in learned]:
        log.warning("evaluating on files that are also learnt from: %s", ", ".join(both))
    return encode_rows(rows, encoder)


def load_eval_pairs(
    config: ExperimentConfig, settings: EvalSet, tokenizer: PreTrainedTokenizerBase
) -> list[PreferencePair]:
    """Read or make the held-out preference pairs of a set, and tokenize prompts and answers."""
    return _pairs_of(load_eval_rows(config, settings, tokenizer), config, tokenizer)


def within_epochs(config: ExperimentConfig, num_rows: int) -> ExperimentConfig:
    """Return the configuration with the steps of ``trainer.num_epochs``, if these are fewer.

    The last step of an epoch may take rows of the next one.
    """
    num_epochs = config.trainer.num_epochs
    if num_epochs is None:
        return config
    num_a_step = config.trainer.num_prompts_per_step
    num_steps = min(config.num_steps, max(1, math.ceil(num_epochs * num_rows / num_a_step)))
    log.info("%g epochs of %d rows: %d steps", num_epochs, num_rows, num_steps)
    return with_value(config, "trainer.num_steps", num_steps)


def files_of(config: ExperimentConfig, key: str) -> RowFiles:
    """Return the files that a key lists, with their columns."""
    section = key.removesuffix(".files")
    parent, _, name = section.rpartition(".")
    return RowFiles(
        files=[Path(file) for file in config.files_by_key[key]],
        columns=columns_of(config, section),
        key=key,
        source=name if parent == "data.sources" else None,
    )


def _order_of(samplers: Sequence[RowSampler], config: ExperimentConfig) -> RowOrder:
    """Return the order of the rows: of one source, or of a mix."""
    sources = config.data.sources
    if not sources:
        return samplers[0]
    weights = [source.weight or 1.0 for source in sources.values()]
    return MixSampler(dict(zip(sources, samplers, strict=True)), weights, seed=config.seed)


def _row_sampler(rows: RowTable | list[PreferencePair], config: ExperimentConfig) -> RowSampler:
    sign = {"none": 0.0, "easy_first": 1.0, "hard_first": -1.0}[config.data.curriculum]
    difficulties = None
    if sign and isinstance(rows, RowTable):
        difficulties = sign * rows.difficulties()
    elif sign:
        difficulties = sign * np.array([row.row.difficulty for row in rows])
    return RowSampler(
        len(rows),
        seed=config.seed,
        shuffle=config.data.shuffle,
        fingerprint=rows.fingerprint
        if isinstance(rows, RowTable)
        else fingerprint(row.row for row in rows),
        difficulties=difficulties,
    )


def _make(config: ExperimentConfig, num_rows: int, *, split: Split) -> list[Row]:
    data = config.data
    if data.task == "calculator":
        return build_calculator_rows(
            num_rows, split=split, seed=config.seed, has_conversations=config.mode == "sft"
        )
    if data.task == "read_numbers":
        return build_read_numbers_rows(
            num_rows,
            split=split,
            seed=config.seed,
            min_digits=min(_MIN_DIGITS, config.max_digits),
            max_digits=config.max_digits,
        )
    return build_sort_digits_rows(
        num_rows,
        split=split,
        seed=config.seed,
        min_digits=min(_MIN_DIGITS, config.max_digits),
        max_digits=config.max_digits,
        with_rejected=config.mode in PAIR_MODES,
    )


def _encoder_of(config: ExperimentConfig, tokenizer: PreTrainedTokenizerBase) -> RowEncoder:
    data = config.data
    return RowEncoder(
        tokenizer=tokenizer,
        use_chat_template=data.use_chat_template,
        max_prompt_tokens=data.max_prompt_tokens,
        overlong=data.overlong_prompts,
        tools=tool_schemas(config.agent),
        images=image_settings_of(config.model, max_pixels=data.max_image_pixels),
    )


def lessons_of(config: ExperimentConfig, tokenizer: PreTrainedTokenizerBase) -> Lessons | None:
    """Return the teachers of rows; None: all rows have the same one, or none, and its prompts."""
    algorithm, template = config.algorithm, config.algorithm.teacher_prompt
    if not algorithm.has_teacher or not (
        algorithm.teacher_paths or algorithm.by_source or template is not None
    ):
        return None
    names = algorithm.teacher_names
    encoder = _encoder_of(config, tokenizer)
    return Lessons(
        numbers={source: names.index(name) for source, name in algorithm.teachers.items()},
        needs_teacher=algorithm.needs_teacher,
        prompts_of=None if template is None else TeacherPrompts(template, encoder),
    )


def _pairs_of(
    rows: RowTable, config: ExperimentConfig, tokenizer: PreTrainedTokenizerBase
) -> list[PreferencePair]:
    return tokenize_pairs(
        rows[:],
        tokenizer,
        max_answer_tokens=config.rollout.max_response_tokens,
        drops_overlong=config.data.overlong_prompts == "drop",
    )
