"""Rules about the source of rows: its files, its columns, its mix, the length of rows."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from hybridrl.config.checks.messages import error
from hybridrl.config.data import CHAT_TASKS, MOST_SOURCES
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.functions.paths import (
    TASK_PREFIX,
    flaw_of_file,
    flaw_of_folder,
    is_there,
    split_function,
)
from hybridrl.config.functions.signatures import SignatureError, find_name, flaw_of_function
from hybridrl.errors import ConfigError

_ROWLESS = ("eval", "plan")
"""Modes that read no rows to train on."""

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_DATASET, _DATASETS = "state.json", "dataset_dict.json"  # that datasets' save_to_disk writes


def check_data_source(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Rows come from a built-in task, from files or from a mix; some tasks are chat messages."""
    data = config.data
    if data.task is None and not (data.train_files or data.sources) and config.mode not in _ROWLESS:
        rule = "a run needs data files or a built-in task"
        fix = "set data.train_files=[FILE.jsonl], or data=sort_digits"
        yield error(config, "data.train_files", rule, "data=sort_digits", fix=fix)
    if data.task in CHAT_TASKS and not data.use_chat_template:
        key, rule = "data.use_chat_template", f"the rows of data.task={data.task} are chat messages"
        yield error(config, key, rule, f"{key}=true")


def check_data_order(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Each source of a mix has a share that is drawn; an order by difficulty needs a column."""
    data = config.data
    weights = {name: source.weight or 1.0 for name, source in data.sources.items()}
    total = sum(weights.values())
    for name, weight in weights.items():
        if weight * MOST_SOURCES < total:
            key = f"data.sources.{name}.weight"
            rule = f"is less than a thousandth of all weights, {total:g}"
            yield error(config, key, rule, f"{key}={total / 500:g}", got=weight)
    columns = [source.difficulty_key or data.difficulty_key for source in data.sources.values()]
    has_column = all(columns) if data.sources else data.difficulty_key is not None
    key = "data.curriculum"
    if data.curriculum == "solve_rate":
        obstacles = {
            f"mode={config.mode} solves nothing": config.mode not in ("train", *_ROWLESS),
            "prompts that are open (trainer.max_staleness, rollout.oversample) are drawn before "
            "earlier ones are solved": config.samples_ahead or config.oversamples,
        }
        for rule in (rule for rule, is_true in obstacles.items() if is_true):
            yield error(config, key, rule, f"{key}=none")
    elif data.curriculum != "none" and (data.task is not None or not has_column):
        rule = "rows from files are ordered by the numbers of data.difficulty_key, which is null"
        fix = "set data.difficulty_key=COLUMN, or data.curriculum=none"
        yield error(config, key, rule, f"{key}=none", fix=fix)


def check_data_columns(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Only preference pairs can lack a column of prompts, and they have one of chosen answers."""
    data = config.data
    if data.prompt_key is None and data.rejected_key is None:
        key = "data.prompt_key"
        rule = "only the chats of preference pairs hold their prompt, and data.rejected_key is null"
        yield error(config, key, rule, f"{key}=prompt")
    if data.answer_key is None and data.rejected_key is not None:
        key = "data.answer_key"
        rule = (
            f"data.rejected_key={data.rejected_key} makes rows preference pairs, and the chosen "
            "answer has a column of its own"
        )
        yield error(config, key, rule, f"{key}=chosen", "data.rejected_key=null")


def check_data_files(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Data files exist, and their suffix shows their format."""
    for key, files in config.files_by_key.items():
        if len(once := dict.fromkeys(files)) < len(files):
            rule = "lists a file twice, which would be learned from twice as often as others"
            yield error(config, key, rule, f"{key}=[{','.join(once)}]")
        for name in once:
            if function := split_function(name):
                flaw, fix = _flaw_of_function(*function)
            else:
                flaw, fix = _flaw_of_data(key, name)
            if flaw:
                yield error(config, key, flaw, fix=fix, got=name)


def _flaw_of_data(key: str, name: str) -> tuple[str, str]:
    """Return why no rows can be read from a file or folder, and the remedy; empty if they can."""
    file = Path(name)
    if name.startswith(TASK_PREFIX):
        if find_spec("reasoning_gym") is not None:
            return "", ""
        return (
            "needs the package reasoning-gym, which is not installed",
            "pip install 'hybridrl[reasoning-gym]'",
        )
    if name.startswith("hf://"):
        return (
            "data sets of the Hugging Face Hub are read from downloaded files alone",
            f"type hf download NAME --repo-type dataset --local-dir data, correct {key}",
        )
    if not flaw_of_folder(file):
        return _flaw_of_saved_dataset(key, file)
    if file.suffix not in SUFFIXES:
        name_it = f"name the function that yields rows, too: {name}:NAME"
        fix = name_it if file.suffix == ".py" else "convert or rename the file"
        return f"must end in one of {', '.join(SUFFIXES)}", fix
    if flaw := flaw_of_file(file):
        return flaw, f"correct {key}=[...]"
    return ("", "") if file.stat().st_size else ("the file is empty, 0 bytes", f"correct {key}")


def _flaw_of_saved_dataset(key: str, folder: Path) -> tuple[str, str]:
    """A folder is one split of a data set that `save_to_disk` of Hugging Face datasets wrote."""
    if is_there(folder / _DATASET):
        return "", ""
    splits = sorted(path.parent.name for path in folder.glob(f"*/{_DATASET}"))
    rule = f"is a folder without {_DATASET}, so `datasets` did not save it as one split"
    if is_there(folder / _DATASETS) and splits:
        rule = f"holds several splits: {', '.join(splits)}"
    fix = f"set {key}=[{folder / splits[0]}]" if splits else "list its files, or save it again"
    return rule, fix


def _flaw_of_function(file: Path, name: str) -> tuple[str, str]:
    """A function of a file yields rows: it exists there, and takes no argument."""
    try:
        node = find_name(file, name)
    except SignatureError as flaw:
        return flaw.rule, flaw.fix
    flaw_of_node = node and flaw_of_function(node)
    fix = f"write def {name}(): ..., which yields dictionaries"
    return (f"it {flaw_of_node}", fix) if flaw_of_node else ("", "")
