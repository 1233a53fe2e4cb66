"""Reads values into typed fields: strict, all errors at once."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from hybridrl.config.foreign_names import answer_choice, answer_key
from hybridrl.config.limits import Within
from hybridrl.config.scalars import KINDS, flaw_of_argument, flaw_of_text, is_of, meant_by
from hybridrl.config.spelling import to_override
from hybridrl.errors import ConfigError, shown, to_type


class _Missing:
    """Stands for a value that is missing, or that cannot be understood."""

    def __repr__(self) -> str:
        return "(missing)"


_MISSING = _Missing()
_MANDATORY = "???"  # in Hydra's YAML files: the user must give a value
_MOST_ENTRIES = 10_000
_MOST_TOLD = 20  # errors of one kind, for one section
_MOST_TYPED = 1000  # characters of a proposed override
_ENTRY = re.compile(r"[A-Za-z][\w-]{0,39}", re.ASCII)
_TYPEABLE = re.compile(r"[\w.]+", re.ASCII)


@cache  # Python compiles every annotation again at each call, which takes longer than to read it
def hints_of(section: type) -> Mapping[str, object]:
    """Return the types of a section's fields, with their limits."""
    return types.MappingProxyType(get_type_hints(section, include_extras=True))


class Reader:
    """Walks types and values side by side and collects the errors."""

    def __init__(self) -> None:
        self.violations: list[ConfigError] = []

    def read_section(self, section: type, values: object, key: str) -> object:
        """Build ``section``, or return ``_MISSING`` when a value of it cannot be understood."""
        if not isinstance(values, Mapping):
            rule = "must be a section with keys of its own"
            first = next(iter(hints_of(section)))
            fix = f"leave it out, or set its keys one by one: {key}.{first}=..."
            return self._refuse(key or "config", values, rule, fix=fix)
        hints = hints_of(section)
        prefix = f"{key}." if key else ""
        self._refuse_unknown(prefix, values, tuple(hints))
        fields = {
            name: self.read(hint, values.get(name, _MISSING), prefix + name)
            for name, hint in hints.items()
            if name in values or not _has_default(section, name)
        }
        return _MISSING if _MISSING in fields.values() else section(**fields)

    def _refuse_unknown(
        self, prefix: str, values: Mapping[str, object], known: Sequence[str]
    ) -> None:
        unknown = [name for name in values if name not in known]
        for name in unknown[:_MOST_TOLD]:
            key = f"{prefix}{name}"
            fix = "remove it; known: " + ", ".join(sorted(known))
            if key == "recipes":
                fix = "begin the recipe's file with the line: # @package _global_"
            remedy: tuple[str, ...] = (f"~{key}",)
            for close in difflib.get_close_matches(str(name)[:99], known, n=1, cutoff=0.5):
                typed = _typed(prefix + close, values[name])
                fix = f"use {to_type(typed[0]) if typed else prefix + close}"
                remedy += tuple(typed)
            value = "".join(_typed("", values[name])).removeprefix("=")
            fix = answer_key(key, value) or fix
            remedies = [remedy] if _TYPEABLE.fullmatch(key) else []
            self._refuse(key, values[name], "there is no such key", fix=fix, remedies=remedies)
        if (num_more := len(unknown) - _MOST_TOLD) > 0:
            rule = f"{num_more} more of its keys do not exist"
            self._refuse(prefix + "*", "...", rule, fix="remove them")

    def read(self, hint: object, value: object, key: str) -> object:
        """Read a value of type ``hint``; after an error the proposed value, or ``_MISSING``."""
        if value is _MISSING or value == _MANDATORY:
            return self._refuse(key, _MISSING, "it has no default", fix=f"set {key}=...")
        if get_origin(hint) is Annotated:
            base, limits = get_args(hint)
            return self._read_number(base, limits, value, key)
        if get_origin(hint) in (Union, types.UnionType):
            inner = next(part for part in get_args(hint) if part is not types.NoneType)
            return None if value is None else self.read(inner, value, key)
        if get_origin(hint) is Literal:
            return self._read_choice(get_args(hint), value, key)
        if get_origin(hint) in (tuple, Mapping):
            return self._read_collection(hint, value, key)
        if not isinstance(hint, type):
            raise TypeError(f"{key}: a field of type {hint} cannot be read; see {__name__}")
        if dataclasses.is_dataclass(hint):
            return self.read_section(hint, value, key)
        return self._read_scalar(hint, value, key)

    def _read_number(self, kind: type, limits: Within, value: object, key: str) -> object:
        meant = meant_by(kind, value)
        if not isinstance(meant, int | float):
            what = f"{KINDS[kind]} {limits}"
            return self._refuse(key, value, f"must be {what}", fix=f"set {key} to {what}")
        rules = [] if is_of(kind, value) else [_of_kind(kind, value)]
        if not limits.contains(meant):
            rules.append(limits.rule_for(meant))
            meant = kind(limits.nearest_to(meant))
        if rules:
            rule = f"must be {' and '.join(rules)}"
            self._refuse(key, value, rule, remedies=[(f"{key}={to_override(meant)}",)])
        return kind(meant)

    def _read_choice(self, choices: Sequence[object], value: object, key: str) -> object:
        if value in choices:
            return value
        names = [str(choice) for choice in choices]
        section, _, name = key.rpartition(".")
        if name in ("name", "engine", "mode") and (
            answer := answer_choice(section, shown(value).strip("'"))
        ):
            return self._refuse(key, value, "must be one of " + ", ".join(names), fix=answer)
        close = difflib.get_close_matches(shown(value)[:99].strip("'"), names, n=2, cutoff=0.5)
        remedies = [(f"{key}={name}",) for name in close or names]
        return self._refuse(key, value, "must be one of " + ", ".join(names), remedies=remedies)

    def _read_collection(self, hint: object, value: object, key: str) -> object:
        if get_origin(hint) is not Mapping:
            return self._read_list(get_args(hint)[0], value, key)
        section = get_args(hint)[1]
        if dataclasses.is_dataclass(section) and isinstance(section, type):
            return self._read_named(section, value, key)
        return self._read_arguments(value, key)

    def _read_named(self, section: type, value: object, key: str) -> object:
        """Read sections under names of the user's, which become parts of metrics and keys."""
        if not isinstance(value, Mapping):
            fix = f"add entries one by one: {key}.NAME.{next(iter(hints_of(section)))}=VALUE"
            return self._refuse(key, value, "must be a mapping of names to sections", fix=fix)
        entries: dict[str, object] = {}
        for name, values in value.items():
            if not _ENTRY.fullmatch(str(name)):
                rule = "a name has 1 to 40 letters, digits, - and _, and begins with a letter"
                return self._refuse(f"{key}.{name}", values, rule, fix="give it another name")
            entries[name] = self.read_section(section, values, f"{key}.{name}")
        return _MISSING if _MISSING in entries.values() else entries

    def _read_list(self, hint: object, value: object, key: str) -> object:
        if not isinstance(value, list | tuple):
            typed = _typed(key, [value]) if isinstance(value, str) else []
            fix = "" if typed else f"set {key}=[...]"
            remedies = [(override,) for override in typed]
            return self._refuse(key, value, "must be a list", remedies=remedies, fix=fix)
        if len(value) > _MOST_ENTRIES:
            rule = f"must have at most {_MOST_ENTRIES} entries, and has {len(value)}"
            return self._refuse(key, value, rule, fix="put them into fewer")
        entries: list[object] = []
        num_before = len(self.violations)
        for at in range(len(value)):
            entries.append(self._read_entry(hint, value, at, key))
            if len(self.violations) - num_before == _MOST_TOLD:
                return _MISSING
        return _MISSING if _MISSING in entries else tuple(entries)

    def _read_entry(self, hint: object, values: Sequence[object], at: int, key: str) -> object:
        inner = Reader()
        entry = inner.read(hint, values[at], key)
        for violation in inner.violations:
            # An override replaces a list completely, so a remedy must spell all of it.
            meant = [overrides[0].partition("=")[2] for overrides in violation.remedies]
            remedies = [(o,) for m in meant for o in _typed_list(key, values, at, m)]
            fix = "" if remedies else f"correct entry {at + 1} of {key}"
            rule = f"each entry {violation.rule}"
            self._refuse(key, values[at], rule, remedies=remedies, fix=fix)
        return entry

    def _read_arguments(self, value: object, key: str) -> object:
        """Read a value for another program: names and scalars, or lists of scalars."""
        if not isinstance(value, Mapping):
            rule, fix = "must be a mapping", f"add arguments one by one: {key}.NAME=VALUE"
            return self._refuse(key, value, rule, fix=fix)
        for name, inner in value.items():
            flaw = flaw_of_argument(inner)
            if not str(name).isidentifier():
                flaw = "must be named as a Python argument: letters, digits and underscores"
            if flaw:
                fix = "correct or remove it; write a nested value as text: JSON in quotes"
                remedies = [(f"~{key}.{name}",)] if _TYPEABLE.fullmatch(str(name)) else []
                return self._refuse(f"{key}.{name}", inner, flaw, fix=fix, remedies=remedies)
        return {
            str(name): tuple(inner) if isinstance(inner, list) else inner
            for name, inner in value.items()
        }

    def _read_scalar(self, kind: type, value: object, key: str) -> object:
        if is_of(kind, value):
            flaw = flaw_of_text(value) if isinstance(value, str) else ""
            return self._refuse(key, value, flaw, fix=f"correct {key}") if flaw else value
        meant = meant_by(kind, value)
        if meant is None:
            fix = f"set {key} to {KINDS[kind]}"
            return self._refuse(key, value, f"must be {KINDS[kind]}", fix=fix)
        remedies = [(f"{key}={to_override(meant)}",)]
        self._refuse(key, value, f"must be {_of_kind(kind, value)}", remedies=remedies)
        return meant

    def _refuse(
        self,
        key: str,
        value: object,
        rule: str,
        *,
        remedies: Sequence[tuple[str, ...]] = (),
        fix: str = "",
    ) -> _Missing:
        self.violations.append(ConfigError(key, value, rule, fix, remedies=remedies))
        return _MISSING


def _has_default(section: type, name: str) -> bool:
    field = next(field for field in dataclasses.fields(section) if field.name == name)
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


def _of_kind(kind: type, value: object) -> str:
    return f"{KINDS[kind]}, not text" if isinstance(value, str) else KINDS[kind]


def _typed(key: str, value: object) -> list[str]:
    """Return the override that gives ``key`` this value; none if it cannot be typed."""
    if flaw_of_argument(value):
        return []
    override = f"{key}={to_override(value)}"
    return [override] if len(override) <= _MOST_TYPED else []


def _typed_list(key: str, values: Sequence[object], at: int, meant: str) -> list[str]:
    """Return the override that gives ``key`` these values, with one entry replaced."""
    others = [*values[:at], *values[at + 1 :]]
    if not _typed(key, others):
        return []
    entries = [to_override(value) for value in others]
    return [f"{key}=[{','.join([*entries[:at], meant, *entries[at:]])}]"]
