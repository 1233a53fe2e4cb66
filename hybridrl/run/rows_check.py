"""``mode=check`` of data files: it reads and tokenizes every row, as a run would."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from hybridrl.config.eval import EvalSet
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError, DataError
from hybridrl.run.doctor import tokenizer_of
from hybridrl.run.rows import eval_key, files_of, load_eval_rows, load_rows, train_keys

_FIX = "correct the files, or the key that the message names"


def find_bad_rows(
    config: ExperimentConfig, *, refused: Sequence[ConfigError] = ()
) -> list[ConfigError]:
    """Read all rows of files; of a large set the run then finds its tokens.

    Args:
        refused: its violations. If there are some, rows are not tokenized: model or limits may be
            wrong.

    Returns:
        An error for each key whose files are unusable, or hold bad rows or prompts that are too
        long; it names file and line.

    Raises:
        ModelError: the tokenizer of the model cannot be used.
    """
    tokenizer = None if refused else tokenizer_of(config)
    sets: dict[str, EvalSet | None] = dict.fromkeys(train_keys(config))
    for evaluated in config.eval.all_sets() if config.evaluates else []:
        sets[eval_key(evaluated)] = evaluated
    bad_rows = []
    for key, settings in sets.items():
        if any(violation.key == key for violation in refused):  # no such files
            continue
        try:
            _read(config, key, settings, tokenizer)
        except DataError as error:
            bad_rows.append(ConfigError(key, list(config.files_by_key[key]), str(error), _FIX))
    return bad_rows


def _read(
    config: ExperimentConfig,
    key: str,
    settings: EvalSet | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    if not config.files_by_key[key]:  # a built-in task makes the rows
        return
    if tokenizer is None:
        for _ in files_of(config, key).parsed():
            pass
    elif settings is None:
        load_rows(config, key, tokenizer)
    else:
        load_eval_rows(config, settings, tokenizer)
