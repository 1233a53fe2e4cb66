"""Names that users of other frameworks type, each with the hybridrl name to type instead.

The keys are in ``foreign.yaml``. A test checks that every key in an answer exists.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hybridrl.config.foreign.spelling import read_yaml
from hybridrl.config.functions.paths import is_there
from hybridrl.config.reward import BUILT_IN_REWARDS

_PLACE = re.compile(r"<([A-Za-z.]+)>")
_PLAIN = re.compile(r"[\w./~][\w./+,:@~-]*", re.ASCII)
_RENAMED = re.compile(r"set ([\w.]+)=<VALUE>")
_FOLDERS = (".", "..", "models", "model", "weights", "checkpoints", "runs")
"""First names of a path that are not owners of models on the Hugging Face Hub."""


@dataclass(frozen=True, slots=True)
class ForeignKeys:
    """The tables of ``foreign.yaml``."""

    lines: Mapping[str, str]
    """By key, or by its last words, the line to type here."""

    models: frozenset[str]
    typed: Mapping[str, Mapping[str, str]]
    """By key and typed value."""

    former: frozenset[str]
    """Former keys of hybridrl."""

    constants: Mapping[str, object]
    """By those that are constants now, the value: a checkpoint may have it. None: any value."""

    choices: Mapping[str, Mapping[str, str]]
    """By group of files and name, the line to type here."""


@cache
def foreign_keys() -> ForeignKeys:
    """Read them, at the first key that needs an answer."""
    read: Any = read_yaml(Path(__file__).with_name("foreign.yaml").read_text(encoding="utf-8"))
    former = read["former"].values()
    lines = [*read["keys"].items(), *read["former"].items()]  # both may have the same line
    return ForeignKeys(
        {key: line for line, keys in lines for key in keys},
        frozenset(read["models"]),
        {key: group["typed"] for group in read["values"] for key in group["keys"]},
        frozenset(key for keys in former for key in keys),
        {key: keys[key] for keys in former if isinstance(keys, dict) for key in keys},
        read["choices"],
    )


def name_of_today(key: str) -> str | None:
    """Return the other name that a former key has now; None: it has none, or other values.

    It may be one of the arguments that pass through, which have other values, too.
    """
    table = foreign_keys()
    renamed = _RENAMED.fullmatch(table.lines[key]) if key in table.former else None
    return renamed[1] if renamed else None


def answer_key(key: str, value: str = "", *, known: Collection[str] = ()) -> str:
    """Return the line to type instead of a key of another framework; empty if none has it.

    The answer has the typed value where it means the same here. ``known`` are hybridrl's own keys,
    for one below a section of theirs.
    """
    parts = key.replace("-", "_").split(".")  # slime's are flags
    for first in range(len(parts)):
        name = ".".join(parts[first:])
        # `beta` is TRL's; `actor.optimizer.beta` is mistyped.
        if first > 0 and "." not in name and "_" not in name:
            continue
        if name in foreign_keys().models:
            is_here = is_there(value)
            return f"set model=hf_folder model.path={value}" if is_here else answer_model(value)
        if name in foreign_keys().lines:
            return _with_value(name, value, of_critic=parts[0] == "critic")
        if first > 0 and "." in name and name in known:  # actor_rollout_ref.rollout.temperature
            return f"set {name}={value or 'VALUE'}"
    for part in reversed(parts[:-1]):  # a section of theirs: reward_model.model.path
        if "_" in part and part in foreign_keys().lines:
            return _with_value(part)
    return ""


def _with_value(name: str, value: str = "", *, of_critic: bool = False) -> str:
    """Return the line for a key, with the typed value in its place if it fits there."""
    line, listed = foreign_keys().lines[name], foreign_keys().typed.get(name, {})
    if of_critic:
        line = line.replace("actor.optimizer.lr", "critic.optimizer.lr")
        line = line.replace("algorithm.num_", "critic.num_")
    line = line.replace("<KEY>", name.partition(".")[2])
    text = re.sub(r"[\[\]'\" ]", "", value)
    word = "0" if re.fullmatch(r"0\.?0*", text) else text.lower()
    meant = listed.get(word, "" if "<NAME>" in line else text)
    if " " in meant:  # a line of its own
        return meant
    return _PLACE.sub(lambda place: meant if _PLAIN.fullmatch(meant) else place[1], line)


def answer_model(path: str) -> str:
    """Return how to begin with a model: a folder, or a name on the Hugging Face Hub."""
    name, folder = "NAME", path or "FOLDER"
    on_hub = path.removeprefix("hf://").removeprefix("https://huggingface.co/").rstrip("/")
    owner, _, last = on_hub.partition("/")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", on_hub) and owner not in _FOLDERS:
        name, folder = on_hub, f"models/{last}"
    download = f"hf download {name} --local-dir {folder}"
    return f"type `{download}`, then set model=hf_folder model.path={folder}"


def answer_choice(group: str, name: str) -> str:
    """Return the hybridrl choice for a file name in a group; empty if no framework has it."""
    group, _, owner = group.partition("/")  # model=Qwen/NAME is a file in a folder to Hydra
    if group == "model":
        return answer_model(f"{owner}/{name}" if owner else "")
    if group == "data":
        return _with_value("dataset_name" if owner else "train_files")
    if group == "reward":
        is_built_in = name in BUILT_IN_REWARDS
        own_function = f"{_with_value('reward_fn')}, or reward=exact_match"
        return f"set reward.function={name}" if is_built_in else own_function
    return foreign_keys().choices.get(group, {}).get(name.lower(), "")
