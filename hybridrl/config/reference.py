"""Every configuration key in words: type, interval, defaults, meaning; and ``--help``.

Read from the code itself, so that ``--help`` and the site always agree with it: types and
docstrings of the sections' fields, and the files of hydra_configs.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Union, cast, get_args, get_origin, get_type_hints

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.foreign.names import answer_key
from hybridrl.config.foreign.spelling import flatten, read_yaml
from hybridrl.config.limits import spell_interval
from hybridrl.errors import ConfigError, suggest_name

_BY_DEVICE = "bfloat16 on cuda, float32 on cpu"
_MOST_FILES = 4
_WIDTH = 100
_MOST_CHOICES = 4
_HEADER = """\
python -m hybridrl.main [recipes=NAME] [SECTION=CHOICE ...] [SECTION.KEY=VALUE ...]

Trains a language model with reinforcement learning.

--help SECTION    every key of a section: type, default and meaning, as in: --help rollout
--help KEY        one key, as in: --help rollout.temperature
--cfg job         print all values that the command would run with
--multirun        a sweep: KEY=A,B runs both, one after the other
"""
_FOOTER = """\
After a run:
  python -m hybridrl.report RUN_FOLDER    one page with curves, samples and findings
  python -m hybridrl.export RUN_FOLDER    a Hugging Face folder of the newest checkpoint
"""

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
    """Describe every section, with the defaults in ``folder``, hydra_configs/.

    The last one has no name and holds the keys that belong to none.
    """
    sections, top_keys = [], []
    meanings = field_meanings(ExperimentConfig)
    experiment = read_yaml((folder / "config.yaml").read_text(encoding="utf-8"))
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
    texts = {choice: _default(key, hint, values) for choice, values in defaults.items()}
    return KeyReference(
        name=key,
        type_text=_type_text(hint),
        interval=spell_interval(hint),
        defaults={choice: text for choice, text in texts.items() if text},
        meaning=meaning,
    )


def _default(key: str, hint: object, values: Mapping[str, str]) -> str:
    """Return a default as it is typed; entries of a mapping together. Empty if there is none."""
    if key in values:
        return values[key]
    prefix = f"{key}."
    inside = {n.removeprefix(prefix): text for n, text in values.items() if n.startswith(prefix)}
    entries = ", ".join(f"{name}: {text}" for name, text in inside.items() if "." not in name)
    return f"{{{entries}}}" if entries or get_origin(hint) is Mapping else ""


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


def _read_choice(file: Path) -> dict[str, object]:
    """Read one file of a section, on top of the file that its ``defaults`` name."""
    values = read_yaml(file.read_text(encoding="utf-8"))
    bases = values.pop("defaults", [])
    merged: dict[str, object] = {}
    for base in cast("list[str]", bases):
        if base != "_self_":
            merged |= _read_choice(file.with_stem(base))
    return merged | values


def _flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Write each scalar value as it is typed on the command line."""
    return {key: _spell(value) for key, value in flatten(values, prefix)}


def _spell(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_spell(entry) for entry in value)}]"
    text = "(to be set)" if value == "???" else str(value)
    return _BY_DEVICE if text.startswith("${dtype_on:") else text


def help_text(names: Sequence[str], folder: Path, recipes: Sequence[str]) -> str:
    """Return the help for sections or keys, or the overview if none is named."""
    sections = read_sections(folder)
    if not names:
        return "\n".join(_overview(sections, recipes)) + "\n"
    return "\n".join("\n".join(_lines_about(name, sections)) for name in names) + "\n"


def _overview(sections: Sequence[SectionReference], recipes: Sequence[str]) -> Iterator[str]:
    *named, top = sections
    yield _HEADER
    for key in top.keys:
        yield from _key_lines(key)
    yield "\nSections, and the choices of each, the default first:"
    for section in named:
        first, *others = section.choices
        listed = " | ".join((first, *others))
        if len(section.choices) > _MOST_CHOICES:
            listed = f"{first} | {others[0]} | ... {len(section.choices)} in all"
        meaning = section.meaning.replace("``", "").split(". ")[0].rstrip(".")
        yield f"  {f'{section.name}={listed}':<52} {meaning}"
    yield ""
    yield from _wrap(f"recipes: {', '.join(recipes)}", "", "         ")
    yield f"\n{_FOOTER}"


def _lines_about(name: str, sections: Sequence[SectionReference]) -> Iterator[str]:
    keys = {key.name: key for section in sections for key in section.keys}
    section = next((section for section in sections if section.name == name), None)
    if section is not None:
        choices = f"{section.meaning} Choose with {name}={' | '.join(section.choices)}"
        yield from _wrap(f"{name}: {choices}", "", "")
        yield ""
        for key in section.keys:
            yield from _key_lines(key)
    elif name in keys:
        yield from _key_lines(keys[name])
    else:
        names = [*(section.name for section in sections), *keys]
        rule = "there is no such section or key"
        raise ConfigError("--help", name, rule, answer_key(name) or suggest_name(name, names))


def _key_lines(key: KeyReference) -> Iterator[str]:
    if key.type_text == "section":
        yield f"{key.name}.*"
    else:
        interval = f" {key.interval}" if key.interval else ""
        yield from _wrap(f"{key.name} = {key.default_text}   [{key.type_text}{interval}]", "", "  ")
    yield from _wrap(key.meaning.replace("``", ""), "    ", "    ")


def _wrap(text: str, first: str, following: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=following,
        break_long_words=False,
        break_on_hyphens=False,
    )
