"""Nested mapping from Hydra to frozen dataclasses: strict, all errors at once."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from hybridrl.config.checks import find_violations
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.limits import Within
from hybridrl.errors import ConfigError, ConfigErrors


def load_config(values: Mapping[str, object]) -> ExperimentConfig:
    """Check ``values`` and turn them into the configuration of a run. Starts and writes nothing.

    Args:
        values: one entry per section, as hydra_configs/config.yaml has them.

    Raises:
        ConfigErrors: everything that is wrong. A number outside its interval, or text that spells
            a number, hides nothing: the rules that span sections then see the proposed value.
    """
    config, violations = read_config(values)
    if config is not None:
        violations += find_violations(config)
    if violations or config is None:
        raise ConfigErrors(violations)
    return config


def read_config(
    values: Mapping[str, object],
) -> tuple[ExperimentConfig | None, list[ConfigError]]:
    """Read types and intervals alone, without the rules of checks.py.

    Returns:
        The configuration, with the proposed value wherever one was refused, or None where a value
        could not be understood at all; and what was refused.
    """
    reader = _Reader()
    config = reader.read_section(ExperimentConfig, values, "")
    return config if isinstance(config, ExperimentConfig) else None, reader.violations


def known_keys(section: type = ExperimentConfig, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key that has a field, sections included."""
    for name, hint in get_type_hints(section).items():
        yield prefix + name
        for part in (hint, *get_args(hint)):
            if dataclasses.is_dataclass(part) and isinstance(part, type):
                yield from known_keys(part, f"{prefix}{name}.")


def free_keys(section: type = ExperimentConfig, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key whose entries are another program's."""
    for name, hint in get_type_hints(section).items():
        if get_origin(hint) is Mapping:
            yield prefix + name
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from free_keys(hint, f"{prefix}{name}.")


class _Missing:
    """Stands for a value that is not there, or that cannot be understood."""

    def __repr__(self) -> str:
        return "(missing)"


_MISSING = _Missing()
_MANDATORY = "???"  # how YAML files of Hydra say that the user must give a value
_Convert = Callable[[object], object]
_SCALARS = str | int | float | bool | None


class _Reader:
    """Walks types and values side by side and collects what does not fit."""

    def __init__(self) -> None:
        self.violations: list[ConfigError] = []

    def read_section(self, section: type, values: object, key: str) -> object:
        """Build ``section``, or return ``_MISSING`` when a value of it cannot be understood."""
        if not isinstance(values, Mapping):
            return self._refuse(key or "config", values, "must be a section with keys of its own")
        hints = get_type_hints(section, include_extras=True)
        prefix = f"{key}." if key else ""
        self._refuse_unknown(prefix, values, tuple(hints))
        fields = {
            name: self._read(hint, values.get(name, _MISSING), prefix + name)
            for name, hint in hints.items()
        }
        return _MISSING if _MISSING in fields.values() else section(**fields)

    def _refuse_unknown(
        self, prefix: str, values: Mapping[str, object], known: Sequence[str]
    ) -> None:
        for name in values:
            if name in known:
                continue
            key = prefix + str(name)
            fix = "remove it; known: " + ", ".join(sorted(known))
            remedy: tuple[str, ...] = (f"~{key}",)
            for close in difflib.get_close_matches(str(name), known, n=1, cutoff=0.5):
                fix = f"use {prefix}{close}"
                remedy += (f"{prefix}{close}={spell(values[name])}",)
            self._refuse(key, values[name], "there is no such key", fix=fix, remedies=[remedy])

    def _read(self, hint: object, value: object, key: str) -> object:
        if value is _MISSING or value == _MANDATORY:
            return self._refuse(key, _MISSING, "it has no default", fix=f"set {key}=...")
        if get_origin(hint) is Annotated:
            base, limits = get_args(hint)
            return self._read_number(base, limits, value, key)
        if get_origin(hint) in (Union, types.UnionType):
            inner = next(part for part in get_args(hint) if part is not types.NoneType)
            return None if value is None else self._read(inner, value, key)
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
        number = self._read_scalar(kind, value, key)
        if not isinstance(number, int | float) or limits.contains(number):
            return number
        proposed = kind(limits.nearest_to(number))
        remedies = [(f"{key}={spell(proposed)}",)]
        self._refuse(key, value, f"must be {limits}", remedies=remedies)
        return proposed

    def _read_choice(self, choices: Sequence[object], value: object, key: str) -> object:
        if value in choices:
            return value
        names = [str(choice) for choice in choices]
        close = difflib.get_close_matches(str(value), names, n=2, cutoff=0.5) or names
        remedies = [(f"{key}={name}",) for name in close]
        return self._refuse(key, value, "must be one of " + ", ".join(names), remedies=remedies)

    def _read_collection(self, hint: object, value: object, key: str) -> object:
        if get_origin(hint) is Mapping:
            return self._read_arguments(value, key)
        return self._read_list(get_args(hint)[0], value, key)

    def _read_list(self, hint: object, value: object, key: str) -> object:
        if not isinstance(value, list | tuple):
            remedies = [(f"{key}=[{spell(value)}]",)] if isinstance(value, str) else []
            fix = "" if remedies else f"set {key}=[...]"
            return self._refuse(key, value, "must be a list", remedies=remedies, fix=fix)
        entries = [self._read_entry(hint, value, at, key) for at in range(len(value))]
        return _MISSING if _MISSING in entries else tuple(entries)

    def _read_entry(self, hint: object, values: Sequence[object], at: int, key: str) -> object:
        inner = _Reader()
        entry = inner._read(hint, values[at], key)
        for violation in inner.violations:
            # An override replaces a list as a whole, so a remedy must spell all of it.
            meant = [overrides[0].partition("=")[2] for overrides in violation.remedies]
            lists = [[*map(spell, values[:at]), m, *map(spell, values[at + 1 :])] for m in meant]
            self._refuse(
                key,
                values[at],
                f"each entry {violation.rule}",
                remedies=[(f"{key}=[{','.join(entries)}]",) for entries in lists],
            )
        return entry

    def _read_arguments(self, value: object, key: str) -> object:
        """Read what is meant for another program: names and scalars, or lists of scalars."""
        if not isinstance(value, Mapping):
            return self._refuse(key, value, "must be a mapping", fix=f"set {key}={{name: value}}")
        for name, inner in value.items():
            if not isinstance(inner, _SCALARS | list | tuple):
                rule = "must be text, a number, true, false, null, or a list of those"
                fix = f"write it as JSON in quotes, '{key}.{name}=\"...\"'"
                return self._refuse(f"{key}.{name}", inner, rule, fix=fix)
        return {
            str(name): tuple(inner) if isinstance(inner, list) else inner
            for name, inner in value.items()
        }

    def _read_scalar(self, kind: type, value: object, key: str) -> object:
        if type(value) is kind and not (isinstance(value, float) and not math.isfinite(value)):
            return value
        if kind is float and type(value) is int:
            return float(value)
        meant = _CONVERSIONS[kind](value)
        if meant is None:
            return self._refuse(key, value, f"must be {_KINDS[kind]}")
        remedies = [(f"{key}={spell(meant)}",)]
        self._refuse(key, value, f"must be {_KINDS[kind]}", remedies=remedies)
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
        fix = fix or ("" if remedies else f"give {key} such a value")
        self.violations.append(ConfigError(key, value, rule, fix, remedies=remedies))
        return _MISSING


def spell(value: object) -> str:
    """Write ``value`` as the right-hand side of a Hydra override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(spell(entry) for entry in value) + "]"
    if isinstance(value, str) and _as_number(value) is not None:
        return f"'{value}'"
    return str(value)


def _as_number(value: object) -> float | None:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _as_whole(value: object) -> int | None:
    number = _as_number(value)
    return int(number) if number is not None and number.is_integer() else None


def _as_truth(value: object) -> bool | None:
    text = str(value).lower()
    if text in ("true", "yes", "on", "1"):
        return True
    return False if text in ("false", "no", "off", "0") else None


def _as_text(value: object) -> str | None:
    return str(value) if isinstance(value, int | float) else None


_KINDS: dict[type, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "text",
}
_CONVERSIONS: dict[type, _Convert] = {
    int: _as_whole,
    float: _as_number,
    bool: _as_truth,
    str: _as_text,
}
