"""Rows and tokenizer of a run, from the ``data`` section."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hybridrl.config.data import DataConfig
from hybridrl.data.files import Columns, read_rows
from hybridrl.data.prompts import TokenizedRow, tokenize_rows
from hybridrl.data.rows import Row
from hybridrl.data.sort_digits import Split, build_sort_digits_rows
from hybridrl.errors import DataError

log = logging.getLogger(__name__)


def load_rows(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: Split,
    num_rows: int,
    seed: int,
) -> list[TokenizedRow]:
    """Read or make the rows of a split and tokenize their prompts.

    Args:
        data: the section.
        tokenizer: of the model.
        split: train or eval.
        num_rows: rows that a built-in task makes; files give all, evaluation its first
            ``num_rows``.
        seed: of a built-in task's rows.

    Raises:
        DataError: bad rows, by file and line; or nothing to evaluate on.
    """
    rows = _read(data, split=split, num_rows=num_rows, seed=seed)
    if not rows:
        raise DataError(
            f"there are no rows for {split}; set data.{split}_files to files that have some"
        )
    return tokenize_rows(
        rows,
        tokenizer,
        use_chat_template=data.use_chat_template,
        max_prompt_tokens=data.max_prompt_tokens,
        overlong=data.overlong_prompts,
    )


def _read(data: DataConfig, *, split: Split, num_rows: int, seed: int) -> Sequence[Row]:
    if data.task == "sort_digits":
        return build_sort_digits_rows(
            num_rows,
            split=split,
            seed=seed,
            min_digits=data.min_digits,
            max_digits=data.max_digits,
        )
    columns = Columns(prompt=data.prompt_key, answer=data.answer_key, source=data.source_key)
    files = data.train_files if split == "train" else data.eval_files
    if split == "eval":
        _warn_of_files_in_both(data)
    rows = read_rows([Path(file) for file in files], columns=columns, key=f"data.{split}_files")
    return rows if split == "train" else rows[:num_rows]


def _warn_of_files_in_both(data: DataConfig) -> None:
    learnt = {Path(file).resolve() for file in data.train_files}
    both = [file for file in data.eval_files if Path(file).resolve() in learnt]
    if both:
        log.warning("evaluating on files that are also learnt from: %s", ", ".join(both))
