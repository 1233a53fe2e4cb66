"""``mode=check`` of data files: it reads every row, as a run would."""

from __future__ import annotations

from pathlib import Path

from hybridrl.config.data import DataConfig
from hybridrl.data.files import Columns, read_rows
from hybridrl.errors import ConfigError, DataError


def check_rows_are_read(data: DataConfig) -> int:
    """Read all rows, without a tokenizer: their length in tokens is for the run to find.

    Returns:
        The number of rows; 0 for a built-in task.

    Raises:
        ConfigError: a file or a row is unusable; names file and line.
    """
    columns = Columns(prompt=data.prompt_key, answer=data.answer_key, source=data.source_key)
    num_rows = 0
    for key, files in (
        ("data.train_files", data.train_files),
        ("data.eval_files", data.eval_files),
    ):
        try:
            if files:
                num_rows += len(read_rows([Path(f) for f in files], columns=columns, key=key))
        except DataError as error:
            raise ConfigError(key, list(files), str(error), "correct the files") from error
    return num_rows
