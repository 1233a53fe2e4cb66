"""Nested values into a typed section: pydantic reads them, and its errors say what to type."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from hybridrl.config.foreign.names import answer_choice, answer_key
from hybridrl.config.foreign.spelling import to_override
from hybridrl.config.limits import ends_of, field_of, spell_interval
from hybridrl.errors import ConfigError, close_names, shorten, shown, to_type

Place = tuple[str | int, ...]
"""Way to a value: ``("eval", "pass_at_k", 0)``."""

Hint = Any
"""A type as an annotation has it: a class, ``int | None``, ``Annotated[...]``."""

Nested = Any
"""Mappings and lists within each other, or a value of them."""

_MANDATORY = "???"  # in Hydra's YAML files: the user must give a value
_MOST_CHARACTERS = 4096  # of a path on Linux
_MOST_DIGITS = 10**4000  # Python writes 4,300 digits at most
_MOST_DEPTH = 20
_MOST_TOLD = 100  # a list may have thousands of bad entries
_MOST_TYPED = 1000  # characters of a proposed override
_STRICT = ConfigDict(
    strict=True, extra="forbid", allow_inf_nan=False, str_max_length=_MOST_CHARACTERS
)
_SCALARS: dict[str, tuple[str, type]] = {
    "int": ("an integer", int),
    "float": ("a finite number", float),
    "finite": ("a finite number", float),
    "bool": ("true or false", bool),
    "string": ("text", str),
}
"""The type of a field, by the first word of pydantic's name of the error."""

_CONTAINERS = {
    "tuple": ("must be a list", "=[...]"),
    "dict": ("must be a mapping of names to values", ".NAME=VALUE"),
    "mapping": ("must be a mapping of names to values", ".NAME=VALUE"),
    "dataclass": ("must be a section with keys of its own", ".KEY=VALUE, or leave it out"),
}
"""Rule, and the text to type behind the key."""

_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
_TEXT = f"must be text of at most {_MOST_CHARACTERS} characters, in UTF-8 and without NUL"
_ARGUMENT = "must be text, a number, true, false, null, or a list of those"


class _Unknown:
    """Stands for a value that is missing, or of which nobody knows what was meant."""

    def __repr__(self) -> str:
        return "(missing)"


_UNKNOWN: Any = _Unknown()


class _Unreadable(str):
    """Stands for a value that JSON cannot carry: text that is too long for every field."""

    value: object


def read_values(kind: Hint, values: object, prefix: str = "") -> tuple[Nested, list[ConfigError]]:
    """Read keys, types and intervals of a section at ``prefix``, as Hydra composed it.

    Returns:
        The section, with what was meant in place of what was refused, so that the rules are
        checked, too, or None if that is unknown; and the errors.
    """
    plain = _plain(values)
    try:
        return _validate(kind, plain), []
    except ValidationError as refused:
        errors, meant = _Explainer(kind, plain, prefix).explain(refused)
    try:
        return _validate(kind, meant), errors
    except ValidationError:
        return None, errors


def errors_of_value(kind: Hint, value: object, key: str) -> list[ConfigError]:
    """Return the errors of one value, as of a number of a user's function."""
    section, _, name = key.rpartition(".")
    return read_values(Mapping[str, kind], {name: value}, section)[1]


def _validate(kind: Hint, values: object) -> Nested:
    # As JSON, in which lists are tuples and mappings are sections; all else is strict.
    return _adapter_of(kind).validate_json(json.dumps(values))


@cache
def _adapter_of(kind: Hint) -> TypeAdapter[Any]:
    if not dataclasses.is_dataclass(kind):
        return TypeAdapter(kind, config=_STRICT)
    section: Any = kind
    section.__pydantic_config__ = _STRICT  # the sections below inherit it
    return TypeAdapter(section)


def _plain(value: object, depth: int = 0) -> Nested:
    """Copy values as JSON has them, without those that Hydra's files leave to the user."""
    if depth < _MOST_DEPTH:
        if isinstance(value, Mapping):
            entries = {_name(name): entry for name, entry in value.items() if entry != _MANDATORY}
            return {name: _plain(entry, depth + 1) for name, entry in entries.items()}
        if isinstance(value, list | tuple):
            return [_plain(entry, depth + 1) for entry in value]
    is_plain = value is None or isinstance(value, float)
    is_plain |= isinstance(value, int) and abs(value) < _MOST_DIGITS
    is_plain |= isinstance(value, str) and _is_text(value)
    if is_plain:
        return value
    text = _Unreadable("?" * (_MOST_CHARACTERS + 1))
    text.value = value
    return text


def _name(key: object) -> str:
    """Return a key of a mapping as JSON can carry it; no field has one that is changed."""
    return shown(key) if isinstance(key, int) else str(key).encode(errors="replace").decode()


def _is_text(value: str) -> bool:
    """Return whether files, processes and logs can take a text."""
    is_plain = len(value) <= _MOST_CHARACTERS and "\0" not in value
    return is_plain and not any("\ud800" <= character <= "\udfff" for character in value)


class _Explainer:
    """Turns pydantic's errors into ours."""

    def __init__(self, kind: Hint, values: Nested, prefix: str) -> None:
        self._kind = kind
        self._values = values
        self._prefix = prefix

    def explain(self, refused: ValidationError) -> tuple[list[ConfigError], Any]:
        """Return an error for each place, and the values with what was meant."""
        details_at: dict[Place, list[ErrorDetails]] = {}
        for detail in refused.errors(include_url=False)[:_MOST_TOLD]:
            details_at.setdefault(self._place_of(detail), []).append(detail)
        explained = {place: self._explain(place, details) for place, details in details_at.items()}
        for place, (_, meant) in explained.items():
            *above, last = place or ("",)
            if details_at[place][0]["type"] == "unexpected_keyword_argument":
                del _at(self._values, above)[last]
            elif meant is not _UNKNOWN:
                _at(self._values, above)[last] = meant
        return [error for error, _ in explained.values()], self._values

    def _place_of(self, detail: ErrorDetails) -> Place:
        """Return the way to a value, without the members of unions that pydantic tried."""
        values, place = self._values, list[str | int]()
        for part in detail["loc"]:
            known = range(len(values)) if isinstance(values, list) else values
            if not isinstance(known, Mapping | range) or part not in known:
                return (*place, part) if detail["type"] == "missing" else tuple(place)
            values = values[part]
            place.append(part)
        return tuple(place)

    def _explain(self, place: Place, details: Sequence[ErrorDetails]) -> tuple[ConfigError, Any]:
        """Return the error of a value, and what was meant."""
        kind, key = details[0]["type"], self._key(place)
        if kind == "missing":
            return ConfigError(key, _UNKNOWN, "it has no default", f"set {key}=..."), _UNKNOWN
        value = _at(self._values, place)
        if isinstance(value, _Unreadable):
            value = value.value
        if kind == "unexpected_keyword_argument":
            fix = self._fix_of_unknown(place, value)
            return ConfigError(key, value, "there is no such key", fix), _UNKNOWN
        rule, fix, meant = self._rule(place, details, value)
        if place and isinstance(place[-1], int):
            # An override replaces a list completely, so it must spell all of it.
            rule, fix = f"each entry {rule}", fix and f"correct entry {place[-1] + 1} of {key}"
            entries = _at(self._values, place[:-1])
            meant_at_key = [*entries[: place[-1]], meant, *entries[place[-1] + 1 :]]
        else:
            meant_at_key = meant
        if fix:
            return ConfigError(key, value, rule, fix), meant
        override = f"{key}={to_override(meant_at_key)}"
        if len(override) > _MOST_TYPED:
            return ConfigError(key, value, rule, f"correct {key}"), meant
        return ConfigError(key, value, rule, remedies=[(override,)]), meant

    def _rule(
        self, place: Place, details: Sequence[ErrorDetails], value: object
    ) -> tuple[str, str, Any]:
        """Return the rule of a type or an interval, its fix, and what was meant.

        An empty fix is to set what was meant.
        """
        kind, key, hint = details[0]["type"], self._key(place), self._hint_of(place)
        word, _, _ = kind.partition("_")
        if len(details) > 1:  # no member of the union of arguments fits
            return _ARGUMENT, "write a nested value as text: JSON in quotes", _UNKNOWN
        if kind == "literal_error":
            return self._rule_of_choice(place, value)
        if kind in _BOUNDS:
            rule, meant = _rule_of_interval(hint, is_above=word == "less")
            return rule, "", meant
        if kind == "string_pattern_mismatch":
            name = field_of(get_args(self._hint_of(place[:-1]))[0])
            return str(name and name.description), "give it another name", _UNKNOWN
        if kind == "string_too_long":
            return _TEXT, f"correct {key}", _UNKNOWN
        if word in _SCALARS:
            return self._rule_of_scalar(place, value, *_SCALARS[word])
        if word == "tuple" and isinstance(value, str):
            return "must be a list", "", [_at(self._values, place)]
        rule, example = _CONTAINERS.get(word, (details[0]["msg"], ""))
        return rule, f"set {key}{example}" if example else f"correct {key}", _UNKNOWN

    def _rule_of_scalar(
        self, place: Place, value: object, noun: str, kind: type
    ) -> tuple[str, str, Any]:
        meant = _meant_by(kind, _at(self._values, place))
        if meant is not _UNKNOWN:
            return f"must be {noun}{', not text' * isinstance(value, str)}", "", meant
        what = f"{noun} {spell_interval(self._hint_of(place))}".rstrip()
        return f"must be {what}", f"set {self._key(place)} to {what}", _UNKNOWN

    def _rule_of_choice(self, place: Place, value: object) -> tuple[str, str, Any]:
        names = [str(name) for name in _names_of(self._hint_of(place))]
        rule, key = f"must be one of {', '.join(names)}", self._key(place)
        word = shown(value).strip("'")
        near = close_names(word, names) or names
        if isinstance(place[-1], int):
            return rule, "", near[0]
        section, _, last = key.rpartition(".")
        foreign = answer_choice(section, word) if last in ("name", "engine", "mode") else ""
        fix = foreign or ", or ".join(f"set {key}={name}" for name in near)
        return rule, fix, _UNKNOWN

    def _fix_of_unknown(self, place: Place, value: object) -> str:
        """Return the fix of an unknown key: the nearest one, or the answer to another framework."""
        key, name = self._key(place), str(place[-1])
        if place == ("recipes",):
            return "begin the recipe's file with the line: # @package _global_"
        is_scalar = value is None or isinstance(value, str | int | float)
        typed = to_override(value) if is_scalar and len(shown(value)) < _MOST_TYPED else ""
        if answer := answer_key(key, typed):
            return answer
        known = sorted(get_type_hints(self._hint_of(place[:-1])))
        if not (near := close_names(name, known)):
            return f"remove it; known: {', '.join(known)}"
        instead = f"{key.removesuffix(name)}{near[0]}"
        return f"use {to_type(f'{instead}={typed}' if typed else instead)}"

    def _key(self, place: Place) -> str:
        words = [self._prefix, *(part for part in place if isinstance(part, str))]
        return shorten(".".join(word for word in words if word)) or "config"

    def _hint_of(self, place: Place) -> Hint:
        """Return the type of the value at a place; of ``X | None`` and lists the inner one."""
        hint: Hint = self._kind
        for part in place:
            if dataclasses.is_dataclass(hint):
                hint = get_type_hints(hint, include_extras=True)[str(part)]
            elif arguments := get_args(hint):  # of a Mapping, the values; of a tuple, the entries
                hint = arguments[isinstance(part, str)]
            inner = [one for one in get_args(hint) if one is not type(None)]
            if type(None) in get_args(hint) and len(inner) == 1:
                hint = inner[0]
        return hint


def _rule_of_interval(hint: Hint, *, is_above: bool) -> tuple[str, Any]:
    """Return the rule of a number, and a legal one."""
    ends, info = ends_of(hint), field_of(hint)
    usual = [*((info and info.examples) or []), ends.get("ge"), ends.get("le")]
    meant = ends["le"] if is_above and "le" in ends else usual[0]
    return f"must be {spell_interval(hint)}", get_args(hint)[0](meant)


def _at(values: Nested, place: Sequence[str | int]) -> Nested:
    for part in place:
        values = values[part]
    return values


def _names_of(hint: Hint) -> list[object]:
    """Return the names of a Literal, or of one within a union."""
    inner = get_args(hint)
    names = [name for one in inner if not isinstance(one, str | bool) for name in _names_of(one)]
    return [one for one in inner if isinstance(one, str | bool)] + names


def _meant_by(kind: type, value: object) -> Nested:
    """Return the value of the right type that was meant, as 3 for "3" and true for "on"."""
    if isinstance(value, bool) and kind is not str:
        return _UNKNOWN
    if kind is str:
        is_number = isinstance(value, int | float)
        return to_override(value) if is_number else _UNKNOWN
    try:
        return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError:
        return _UNKNOWN
