"""Every configuration key in words: type, interval, defaults, meaning and rules.

Read from the code itself, so that ``--help`` and the site always agree with it: types and
docstrings of the sections' fields, the files of hydra_configs, and the rules of checks.py.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Union, cast, get_args, get_origin, get_type_hints

from hybridrl.config.checks.violations import Rule, rules_of
from hybridrl.config.experiment import OFFLINE_MODES, ExperimentConfig
from hybridrl.config.limits import spell_interval
from hybridrl.config.load import known_keys
from hybridrl.config.yaml_text import read_yaml

_DOTTED = re.compile(r"(?:[a-z_]+|\*)(?:\.[a-z_0-9]+)+")
_BY_DEVICE = "bfloat16 on cuda, float32 on cpu"
_MOST_FILES = 4
_RULE = 2  # place of the rule in the arguments of error()
_TYPE_NAMES = {int: "int", float: "float", bool: "bool", str: "text"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeyReference:
    """One key."""

    name: str
    """Dotted, as typed."""

    type_text: str
    """Type, or the values to choose from; ``section`` for a key that holds keys."""

    interval: str
    """Legal numbers, as ``> 0 and <= 1``; empty if the type allows all."""

    defaults: Mapping[str, str]
    """Default as it is typed, by file of hydra_configs/SECTION."""

    meaning: str
    """The docstring of the field."""

    rules: Sequence[str]
    """Rules over several keys that name this one."""

    @property
    def default_text(self) -> str:
        """The default, or one for each file where files differ; of many files only the first."""
        values = list(dict.fromkeys(self.defaults.values()))
        if len(values) == 1:
            return values[0]
        if len(self.defaults) > _MOST_FILES:
            num_other = sum(value != values[0] for value in self.defaults.values())
            return f"{values[0]}; another with {num_other} of {len(self.defaults)} choices"
        return ", ".join(f"{value} ({name})" for name, value in self.defaults.items())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SectionReference:
    """One section: the keys that begin with its name."""

    name: str
    meaning: str
    choices: Sequence[str]
    """Files of hydra_configs/SECTION, the default first: ``name=choice`` takes one."""

    keys: Sequence[KeyReference]


def read_sections(folder: Path) -> list[SectionReference]:
    """Describe every section, in the order of the configuration.

    Args:
        folder: hydra_configs/, whose files hold the defaults.

    Returns:
        The sections; the last one has no name and holds the keys that belong to none.
    """
    sections, top_keys = [], []
    meanings = field_meanings(ExperimentConfig)
    experiment = _read_yaml(folder / "config.yaml")
    defaults = {"config": _flatten(experiment)}
    chosen: dict[str, str] = {}
    for entry in cast("list[object]", experiment["defaults"]):
        chosen |= entry if isinstance(entry, dict) else {}
    for name, hint in get_type_hints(ExperimentConfig, include_extras=True).items():
        if not (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
            top_keys.append(_describe(name, hint, meanings.get(name, ""), defaults))
            continue
        paths = sorted(folder.glob(f"{name}/*.yaml"))
        paths.sort(key=lambda file: file.stem != chosen[name])
        files = {file.stem: _read_choice(file) for file in paths}
        values = {choice: _flatten(content, f"{name}.") for choice, content in files.items()}
        keys = tuple(_describe_fields(hint, f"{name}.", values))
        sections.append(
            SectionReference(
                name=name, meaning=meanings.get(name, ""), choices=tuple(files), keys=keys
            )
        )
    meaning = "The keys that belong to no section."
    return [*sections, SectionReference(name="", meaning=meaning, choices=(), keys=top_keys)]


def field_meanings(section: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, those it inherits included."""
    meanings: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (definition,) = ast.parse(inspect.cleandoc(inspect.getsource(base))).body
        body = cast(ast.ClassDef, definition).body
        for field, text in pairwise(body):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(words))),
                ):
                    meanings[name] = " ".join(words.split())
    return meanings


def _describe_fields(
    section: type, prefix: str, defaults: Mapping[str, Mapping[str, str]]
) -> Iterator[KeyReference]:
    meanings = field_meanings(section)
    for name, hint in get_type_hints(section, include_extras=True).items():
        yield _describe(prefix + name, hint, meanings.get(name, ""), defaults)
        for inner in (hint, *get_args(hint)) if get_origin(hint) is not Mapping else ():
            if isinstance(inner, type) and dataclasses.is_dataclass(inner):
                yield from _describe_fields(inner, f"{prefix}{name}.", defaults)


def _describe(
    key: str, hint: object, meaning: str, defaults: Mapping[str, Mapping[str, str]]
) -> KeyReference:
    return KeyReference(
        name=key,
        type_text=_type_text(hint),
        interval=spell_interval(hint),
        defaults={
            choice: text for choice, values in defaults.items() if (text := _default(key, values))
        },
        meaning=meaning,
        rules=tuple(rules_by_key().get(key, ())),
    )


def _default(key: str, values: Mapping[str, str]) -> str:
    """Return a default as it is typed; entries of a mapping together. Empty if there is none."""
    if key in values:
        return values[key]
    prefix = f"{key}."
    entries = [
        f"{name.removeprefix(prefix)}: {text}"
        for name, text in values.items()
        if name.startswith(prefix) and "." not in name.removeprefix(prefix)
    ]
    return f"{{{', '.join(entries)}}}" if entries else ""


def _type_text(hint: object) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _type_text(arguments[0])
    if origin is Literal:
        return " | ".join(_spell(argument) for argument in arguments)
    if origin is tuple:
        return f"list of {_type_text(arguments[0])}"
    if origin is Mapping:
        return "names with values"
    if origin in (Union, types.UnionType):
        return " or ".join(_type_text(a) for a in arguments if a is not types.NoneType) + " or null"
    if dataclasses.is_dataclass(hint):
        return "section"
    return _TYPE_NAMES[cast(type, hint)]


@cache
def rules_by_key() -> Mapping[str, Sequence[str]]:
    """Return, for each key, the rules of the checks that name it.

    A function that calls ``error(config, key, rule, ...)`` has a rule in each call; another one has
    the first sentence of its docstring.
    """
    modes = ("train", *OFFLINE_MODES, "eval")
    functions = {rule for mode in modes for rules in rules_of(mode).values() for rule in rules}
    rules: dict[str, dict[str, None]] = {}
    for function in sorted(functions, key=lambda one: (one.__module__, one.__name__)):
        for sentence, texts in _rules_in(function):
            for key in sorted(_keys_in(texts)):
                rules.setdefault(key, {})[sentence] = None
    return {key: tuple(sentences) for key, sentences in rules.items()}


def _rules_in(rule: Rule) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield each rule of a function, with the texts that name its keys."""
    nodes = list(_nodes_of(rule))
    calls = [node for node in nodes if isinstance(node, ast.Call) and len(node.args) > _RULE]
    calls = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "error"]
    summary = " ".join((rule.__doc__ or "").split("\n\n")[0].split())
    for call in calls:
        sentence = "".join(_texts_in([call.args[_RULE]])).replace("*", "...")
        yield sentence or summary, list(_texts_in(ast.walk(call)))
    if not calls:
        yield summary, list(_texts_in(nodes))


def _nodes_of(rule: Rule) -> Iterator[ast.AST]:
    """Yield the syntax of a function, and of the functions of its module that it calls."""
    module = ast.parse(inspect.getsource(cast(types.ModuleType, inspect.getmodule(rule))))
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    pending = [rule.__name__]
    while pending:
        if function := functions.pop(pending.pop(), None):
            for node in ast.walk(function):
                yield node
                pending += [node.id] if isinstance(node, ast.Name) else []


def _keys_in(texts: Sequence[str]) -> set[str]:
    templates = {match for text in texts for match in _DOTTED.findall(text)}
    patterns = [re.compile(t.replace(".", r"\.").replace("*", r"[a-z]+")) for t in templates]
    return {key for key in known_keys() if any(pattern.fullmatch(key) for pattern in patterns)}


def _texts_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield each text among nodes; a computed piece of it becomes ``*``."""
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _read_choice(file: Path) -> dict[str, object]:
    """Read one file of a section, on top of the file that its ``defaults`` name."""
    values = _read_yaml(file)
    bases = values.pop("defaults", [])
    merged: dict[str, object] = {}
    for base in cast("list[str]", bases):
        if base != "_self_":
            merged |= _read_choice(file.with_stem(base))
    return merged | values


def _read_yaml(file: Path) -> dict[str, object]:
    return read_yaml(file.read_text(encoding="utf-8"))


def _flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Write each scalar value as it is typed on the command line."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = _spell(value)
    return flat


def _spell(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_spell(entry) for entry in value)}]"
    text = "(to be set)" if value == "???" else str(value)
    return _BY_DEVICE if text.startswith("${dtype_on:") else text
