"""Rules about what must be on disk or installed. They look, and neither write nor import."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.python_files import functions_at_top_level, names_at_top_level
from hybridrl.config.reward import BUILT_IN_REWARDS
from hybridrl.errors import ConfigError, nearest

_DATA_SUFFIXES = (".jsonl", ".parquet")
_RUN_FILES = ("config.yaml", "metrics.jsonl")  # as trainer/tracking.py leaves them
_LOCK = ".lock"


def check_data_files(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Data files exist and have a suffix that says how to read them."""
    for key, files in (
        ("data.train_files", config.data.train_files),
        ("data.eval_files", config.data.eval_files),
    ):
        for name in files:
            file = Path(name)
            if file.suffix not in _DATA_SUFFIXES:
                yield ConfigError(
                    key, name, "must end in .jsonl or .parquet", fix="convert or rename the file"
                )
            elif not file.is_file():
                yield ConfigError(
                    key, name, f"{file.absolute()} does not exist", fix=f"correct {key}=[...]"
                )
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
            fix = f"{nearest(spelled, BUILT_IN_REWARDS)}"
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
    if not Path(path).is_file():
        yield ConfigError(key, spelled, f"{Path(path).absolute()} does not exist", fix="correct it")
        return
    yield from _find_function(key, Path(path), name)


def _find_function(key: str, file: Path, name: str) -> Iterator[ConfigError]:
    try:
        functions, names = functions_at_top_level(file), names_at_top_level(file)
    except (SyntaxError, UnicodeDecodeError, OSError) as err:
        yield ConfigError(key, f"{file}:{name}", f"not a Python file: {err}", fix=f"mend {file}")
        return
    if name not in names:
        yield ConfigError(
            key,
            f"{file}:{name}",
            f"{file} defines no function {name!r} at its top level",
            fix=nearest(name, functions) if functions else f"define it in {file}",
            remedies=[(f"{key}={file}:{function}",) for function in functions[:2]],
        )


def check_run_folder(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The run folder is new, or may be replaced, and can be made."""
    folder = Path(config.trainer.run_dir)
    if folder.is_dir() and any(path.name != _LOCK for path in folder.iterdir()):
        yield from _check_replaceable(folder, config)
        return
    above = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        yield ConfigError(
            "trainer.run_dir",
            config.trainer.run_dir,
            f"{above.absolute()} is no folder, or this user may not write there",
            fix="set trainer.run_dir to a folder that you may make",
        )


def _check_replaceable(folder: Path, config: ExperimentConfig) -> Iterator[ConfigError]:
    key, spelled = "trainer.run_dir", config.trainer.run_dir
    base = folder if folder.name.strip(".") else Path("runs/run")  # not "." or ".."
    free = next(n for n in itertools.count(2) if not Path(f"{base}-{n}").exists())
    elsewhere = (f"{key}={base}-{free}",)
    is_run = all((folder / name).exists() for name in _RUN_FILES)
    if not is_run:
        rule = f"holds files, but no {' and '.join(_RUN_FILES)}: it is no run folder"
        yield ConfigError(key, spelled, rule, remedies=[elsewhere])
    elif not config.trainer.overwrite and config.checkpoint.resume == "never":
        rule = "holds another run, which is never overwritten without being asked"
        remedies = [elsewhere, ("trainer.overwrite=true",), ("checkpoint.resume=auto",)]
        yield ConfigError(key, spelled, rule, remedies=remedies)


def check_trackers(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Each tracker's package is installed."""
    trackers = config.tracking.trackers
    missing = [name for name in trackers if find_spec(name) is None]
    if missing:
        rest = ",".join(name for name in trackers if name not in missing)
        yield ConfigError(
            "tracking.trackers",
            list(trackers),
            f"not installed: {', '.join(missing)}",
            fix=f"pip install 'hybridrl[{','.join(missing)}]', or set tracking.trackers=[{rest}]",
            remedies=[(f"tracking.trackers=[{rest}]",)],
        )
