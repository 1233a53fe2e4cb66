"""Rows of a test: read from files, or as prompts without files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hybridrl.data.files import RowFiles
from hybridrl.data.parsing import Columns
from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.row_table import RowTable
from hybridrl.data.rows import Row, fingerprint
from hybridrl.data.sampler import RowSampler
from hybridrl.data.source import PromptSource
from hybridrl.data.tokenizing import RowEncoder, encode_rows


def read_rows(*files: Path, columns: Columns | None = None, source: str | None = None) -> list[Row]:
    """Read all rows of all files; see `RowFiles`."""
    key = "data.train_files"
    read = RowFiles(files=files, columns=columns or Columns(), key=key, source=source)
    return list(read.parsed())


def read_row(folder: Path, record: object, columns: Columns) -> Row:
    """Read the only row of ``a.jsonl``."""
    path = folder / "a.jsonl"
    path.write_text(json.dumps(record))
    (row,) = read_rows(path, columns=columns)
    return row


def tokenize_rows(
    rows: Iterable[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    use_chat_template: bool = False,
    max_prompt_tokens: int = 100,
    overlong: str = "error",
) -> RowTable:
    """Tokenize rows that are in memory; see `RowEncoder` and `encode_rows`."""
    encoder = RowEncoder(
        tokenizer=tokenizer,
        use_chat_template=use_chat_template,
        max_prompt_tokens=max_prompt_tokens,
        overlong=overlong,
    )
    return encode_rows(rows, encoder)


def source_of(
    rows: Sequence[TokenizedRow], *, num_prompts: int, seed: int, shuffle: bool = True
) -> PromptSource:
    """Draw from one set of rows."""
    digest = fingerprint(row.row for row in rows)
    sampler = RowSampler(len(rows), seed=seed, shuffle=shuffle, fingerprint=digest)
    return PromptSource(rows, num_prompts=num_prompts, seed=seed, sampler=sampler)
