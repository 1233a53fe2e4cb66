"""``mode=check`` of data files: it reads and tokenizes every row, as a run would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError, DataError
from hybridrl.run.doctor import tokenizer_of
from hybridrl.run.rows import eval_key, load_eval_rows, load_rows, train_keys

_FIX = "correct the files, or the key that the message names"


def check_rows(config: ExperimentConfig) -> None:
    """Read all rows of files; of a large set the run then finds its tokens.

    Raises:
        ConfigError: a file or a row is unusable, or prompts are too long; names file and line.
        ModelError: the tokenizer of the model cannot be used.
    """
    tokenizer = tokenizer_of(config)
    for key in train_keys(config):
        with _refused(config, key):
            load_rows(config, key, tokenizer)
    for settings in config.eval.all_sets() if config.evaluates else []:
        key = eval_key(settings)
        if config.files_by_key[key]:  # else a built-in task makes the rows
            with _refused(config, key):
                load_eval_rows(config, settings, tokenizer)


@contextmanager
def _refused(config: ExperimentConfig, key: str) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        files = list(config.files_by_key[key])
        raise ConfigError(key, files, str(error), _FIX) from error
