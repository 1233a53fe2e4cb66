"""``mode=check`` of data files: it reads every row, as a run would."""

from __future__ import annotations

from pathlib import Path

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.data.columns import columns_of
from hybridrl.data.files import read_rows
from hybridrl.errors import ConfigError, DataError


def check_rows_are_read(config: ExperimentConfig) -> int:
    """Read all rows, without a tokenizer: their length in tokens is for the run to find.

    Returns:
        The number of rows; 0 for a built-in task.

    Raises:
        ConfigError: a file or a row is unusable; names file and line.
    """
    num_rows = 0
    for key, files in config.files_by_key.items():
        try:
            if files:
                columns = columns_of(config, key.removesuffix(".files"))
                num_rows += len(read_rows([Path(f) for f in files], columns=columns, key=key))
        except DataError as error:
            raise ConfigError(key, list(files), str(error), "correct the files") from error
    return num_rows
