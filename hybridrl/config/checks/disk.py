"""Rules about files that must exist. They look and do not write."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.paths import (
    flaw_of_file,
    flaw_of_folder,
    flaw_of_new_folder,
    is_there,
    split_function,
)
from hybridrl.config.python_files import (
    ANYTHING,
    flaw_of_function,
    functions_of,
    names_at_top_level,
)
from hybridrl.config.spelling import to_override
from hybridrl.errors import ConfigError, suggest_name

_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_DATASET, _DATASETS = "state.json", "dataset_dict.json"  # that datasets' save_to_disk writes
_RUN_FILES = ("config.yaml", "metrics.jsonl")  # written by run/run_folder.py
_LOCK = ".lock"


def check_data_files(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Data files exist, and their suffix shows their format."""
    for key, files in config.files_by_key.items():
        for name in files:
            if function := split_function(name):
                yield from _check_function(key, name, *function)
            else:
                yield from _check_file(key, name)


def _check_file(key: str, name: str) -> Iterator[ConfigError]:
    file = Path(name)
    if name.startswith("hf://"):
        rule = "data sets of the Hugging Face Hub are read from downloaded files alone"
        fix = f"type hf download NAME --repo-type dataset --local-dir data, correct {key}"
        yield ConfigError(key, name, rule, fix)
    elif not flaw_of_folder(file):
        yield from _check_dataset_folder(key, file)
    elif file.suffix not in _DATA_SUFFIXES:
        rule = f"must end in one of {', '.join(_DATA_SUFFIXES)}"
        is_code = file.suffix == ".py"
        name_it = f"name the function that yields rows, too: {name}:NAME"
        yield ConfigError(key, name, rule, name_it if is_code else "convert or rename the file")
    elif flaw := flaw_of_file(file):
        yield ConfigError(key, name, flaw, fix=f"correct {key}=[...]")
    elif file.stat().st_size == 0:
        yield ConfigError(key, name, "the file is empty, 0 bytes", fix=f"correct {key}")


def _check_function(key: str, spelled: str, file: Path, name: str) -> Iterator[ConfigError]:
    """A function of a file yields rows: it exists there, and takes no argument."""
    if flaw := flaw_of_file(file):
        fix = "correct it; the form is path/to/file.py:function"
        yield ConfigError(key, spelled, flaw, fix)
        return
    try:
        names = names_at_top_level(file)
    except SyntaxError as err:
        yield ConfigError(key, spelled, f"not a Python file: {err}", f"correct {file}")
        return
    if name in names:
        if flaw := flaw_of_function(names[name], keywords=()):
            fix = f"write def {name}(): ..., which yields dictionaries"
            yield ConfigError(key, spelled, f"it {flaw}", fix)
    elif ANYTHING not in names:
        rule = f"{file} defines no function {name!r} at its top level"
        functions = functions_of(names)
        fix = suggest_name(name, functions) if functions else f"define it in {file}"
        yield ConfigError(key, spelled, rule, fix)


def _check_dataset_folder(key: str, folder: Path) -> Iterator[ConfigError]:
    """A folder is one split of a data set that `save_to_disk` of Hugging Face datasets wrote."""
    if is_there(folder / _DATASET):
        return
    splits = sorted(path.parent.name for path in folder.glob(f"*/{_DATASET}"))
    rule = f"is a folder without {_DATASET}, so `datasets` did not save it as one split"
    if is_there(folder / _DATASETS) and splits:
        rule = f"holds several splits: {', '.join(splits)}"
    fix = f"set {key}=[{folder / splits[0]}]" if splits else "list its files, or save it again"
    yield ConfigError(key, str(folder), rule, fix=fix)


def check_run_folder(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The run folder is new, or may be replaced, and can be created."""
    folder = Path(config.trainer.run_dir)
    is_folder = not flaw_of_folder(folder)
    if is_folder and any(path.name != _LOCK for path in folder.iterdir()):
        yield from _check_replaceable(folder, config)
    elif flaw := flaw_of_new_folder(folder):
        fix = "set trainer.run_dir to a folder that you may create"
        yield ConfigError("trainer.run_dir", config.trainer.run_dir, flaw, fix=fix)


def _check_replaceable(folder: Path, config: ExperimentConfig) -> Iterator[ConfigError]:
    key, spelled = "trainer.run_dir", config.trainer.run_dir
    base = folder if folder.name.strip(".") else Path("runs/run")  # not "." or ".."
    free = next(n for n in itertools.count(2) if not is_there(f"{base}-{n}"))
    elsewhere = (f"{key}={to_override(f'{base}-{free}')}",)
    is_run = all(is_there(folder / name) for name in _RUN_FILES)
    if not is_run:
        rule = f"holds files, but not {' and '.join(_RUN_FILES)}: it is not a run folder"
        yield ConfigError(key, spelled, rule, remedies=[elsewhere])
    elif not config.trainer.overwrite and config.checkpoint.resume == "never":
        rule = "holds another run, which is overwritten only on request"
        remedies = [elsewhere, ("trainer.overwrite=true",), ("checkpoint.resume=auto",)]
        yield ConfigError(key, spelled, rule, remedies=remedies)
