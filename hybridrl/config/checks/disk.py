"""Rules about files and packages that must exist. They look; they neither write nor import."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.paths import (
    flaw_of_file,
    flaw_of_folder,
    flaw_of_new_folder,
    is_there,
)
from hybridrl.config.python_files import (
    ANYTHING,
    flaw_of_function,
    functions_of,
    names_at_top_level,
)
from hybridrl.config.reward import BUILT_IN_REWARDS, REWARD_COLUMNS
from hybridrl.config.spelling import to_override
from hybridrl.errors import ConfigError, suggest_name

_DATA_SUFFIXES = (".jsonl", ".parquet")
_RUN_FILES = ("config.yaml", "metrics.jsonl")  # written by run/run_folder.py
_LOCK = ".lock"


def check_data_files(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Data files exist, and their suffix shows their format."""
    for key, files in (
        ("data.train_files", config.data.train_files),
        ("data.eval_files", config.data.eval_files),
    ):
        for name in files:
            file = Path(name)
            if name.startswith("hf://"):
                rule = "data sets of the Hugging Face Hub are read from downloaded files alone"
                fix = f"type hf download NAME --repo-type dataset --local-dir data, correct {key}"
                yield ConfigError(key, name, rule, fix)
            elif file.suffix not in _DATA_SUFFIXES:
                yield ConfigError(
                    key, name, "must end in .jsonl or .parquet", fix="convert or rename the file"
                )
            elif flaw := flaw_of_file(file):
                yield ConfigError(key, name, flaw, fix=f"correct {key}=[...]")
            elif file.stat().st_size == 0:
                yield ConfigError(key, name, "the file is empty, 0 bytes", fix=f"correct {key}")


def check_reward_function(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The reward is built in, or a function in a file that can be parsed."""
    key, spelled = "reward.function", config.reward.function
    path, colon, name = spelled.rpartition(":")
    if not colon:
        if spelled not in BUILT_IN_REWARDS:
            rule = "neither a built-in reward nor path/to/file.py:function"
            remedies = [(f"{key}={built_in}",) for built_in in BUILT_IN_REWARDS[:2]]
            fix = f"{suggest_name(spelled, BUILT_IN_REWARDS)}"
            yield ConfigError(key, spelled, rule, fix, remedies=remedies)
        elif spelled == "math" and find_spec("math_verify") is None:
            yield ConfigError(
                key,
                spelled,
                "needs the package math-verify, which is not installed",
                fix="pip install 'hybridrl[math]', or set reward.function=exact_match",
                remedies=[("reward.function=exact_match",)],
            )
        return
    if flaw := flaw_of_file(path):
        yield ConfigError(
            key, spelled, flaw, fix="correct it; the form is path/to/file.py:function"
        )
        return
    yield from _find_function(key, Path(path), name)


def _find_function(key: str, file: Path, name: str) -> Iterator[ConfigError]:
    spelled = f"{file}:{name}"
    if file.suffix != ".py":
        yield ConfigError(key, spelled, f"{file} must end in .py", fix="rename the file")
        return
    try:
        names = names_at_top_level(file)
    except SyntaxError as err:
        yield ConfigError(key, spelled, f"not a Python file: {err}", fix=f"correct {file}")
        return
    functions = functions_of(names)
    if name not in names and ANYTHING not in names:
        yield ConfigError(
            key,
            spelled,
            f"{file} defines no function {name!r} at its top level",
            fix=suggest_name(name, functions) if functions else f"define it in {file}",
            remedies=[
                (f"{key}={to_override(f'{file}:{function}')}",)
                for function in functions
                if not flaw_of_function(names[function], keywords=REWARD_COLUMNS)
            ][:2],
        )
    elif name in names and (flaw := flaw_of_function(names[name], keywords=REWARD_COLUMNS)):
        fix = f"write def {name}({', '.join(REWARD_COLUMNS)}): ..., or **_ for those not needed"
        yield ConfigError(key, spelled, f"it {flaw}", fix=fix)


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
