"""Nested mapping from Hydra to frozen dataclasses, all errors at once; and its keys by name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache, reduce
from typing import Any, get_args, get_origin, get_type_hints

from hybridrl.config.checks.violations import find_violations
from hybridrl.config.experiment import OFFLINE_MODES, ExperimentConfig
from hybridrl.config.foreign.names import answer_key, foreign_keys, name_of_today
from hybridrl.config.values import read_values
from hybridrl.errors import ConfigError, ConfigErrors, close_names, suggest_name, to_type

_MOST_CHARACTERS = 1_000_000
_REFERENCE = re.compile(r"\$\{(\.*)([\w.]+)\}")


def load_config(values: Mapping[str, object]) -> ExperimentConfig:
    """Return the configuration of a run, or raise ``ConfigErrors``, all together; start nothing."""
    config, errors = read_config(values)
    errors += [] if config is None else find_violations(config)
    if config is None or errors:
        raise ConfigErrors(errors)
    return config


def read_config(values: Mapping[str, object]) -> tuple[ExperimentConfig | None, list[ConfigError]]:
    """Read keys, types and intervals alone, without the rules; see `read_values`."""
    return read_values(ExperimentConfig, values)


def read_stored(values: Mapping[str, object]) -> tuple[ExperimentConfig | None, list[ConfigError]]:
    """Read what a run wrote, perhaps under names that keys had then; see `read_config`."""
    renamed: Any = deepcopy(values)
    known = set(known_keys())
    for key, value in leaves(values):
        name = name_of_today(key)
        if name is not None and name in known:
            *sections, last = name.split(".")
            reduce(lambda inner, each: inner.setdefault(each, {}), sections, renamed)[last] = value
    return read_config(renamed)


def known_keys(section: type = ExperimentConfig, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key that has a field, sections included."""
    for name, hint in get_type_hints(section).items():
        yield prefix + name
        for part in (hint, *get_args(hint)) if get_origin(hint) is not Mapping else ():
            if dataclasses.is_dataclass(part) and isinstance(part, type):
                yield from known_keys(part, f"{prefix}{name}.")


@cache
def free_keys(section: type = ExperimentConfig, prefix: str = "") -> tuple[str, ...]:
    """Return every dotted key whose entries have names that no section knows."""
    keys: tuple[str, ...] = ()
    for name, hint in get_type_hints(section).items():
        if get_origin(hint) is Mapping:
            keys += (prefix + name,)
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
            keys += free_keys(hint, f"{prefix}{name}.")
    return keys


def keys_of_other_modes(mode: str, typed: Sequence[str]) -> Iterator[ConfigError]:
    """Yield an error for each key that was typed and that only another mode reads.

    Recipes may set such keys: they are not typed.
    """
    if mode not in ("train", *OFFLINE_MODES):
        return  # they start nothing, or read the settings of several modes
    for override in typed:
        key, _, value = override.lstrip("+~").partition("=")
        section, _, _ = key.partition(".")
        if section in OFFLINE_MODES and section != mode:
            rule = f"mode={mode} does not read it; mode={section} reads it"
            yield ConfigError(key, value, rule, "leave it out")


def unknown_key(typed: str, value: str) -> ConfigError:
    """Return the error of a key that Hydra does not know, with the known keys that are near.

    ``typed`` is dotted, or a flag of another framework, ``--its-key``.
    """
    key = typed.removeprefix("--").replace("-", "_") if typed.startswith("--") else typed
    known = [*known_keys(), "recipes"]
    section, dot, name = key.rpartition(".")
    parts = {other: other.rpartition(".") for other in known}
    neighbours = [last for above, _, last in parts.values() if above == section]
    if answer := answer_key(key, value, known=known):
        is_former = key in foreign_keys().former
        whose = "a former key" if is_former else "a key of another framework"
        return ConfigError(typed, value, f"it is {whose}", answer)
    if key in known:
        fix = f"set {to_type(f'{key}={value}')}"
        return ConfigError(typed, value, "keys are typed without dashes", fix)
    near = [other for other in known if parts[other][2] == name][:3]
    near = near or [section + dot + last for last in close_names(name, neighbours)]
    near = near or close_names(key, known)
    lines = " or ".join(to_type(f"{other}={value}" if value else other) for other in near)
    fix = f"did you mean {lines}?" if near else suggest_name(name, neighbours or known)
    return ConfigError(typed, value, "there is no such key", fix)


def leaves(values: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield each scalar value with its key: ``data.train_files[0]`` in a list."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, list | tuple):
        for at, value in enumerate(values):
            yield from leaves(value, f"{key}[{at}]")
    else:
        yield key, values


def check_lengths(values: Mapping[str, object]) -> None:
    """Refuse values as typed whose references spell out more than a million characters."""
    typed = dict(leaves(values))
    lengths: dict[str, int] = {}

    def length_of(key: str) -> int:
        """Return the length of the value or section at ``key``; 0 if there is none."""
        if key in lengths:
            return lengths[key]
        lengths[key] = 0  # of a value that refers to itself; OmegaConf reports it
        if key in typed:
            text = str(typed[key])
            lengths[key] = len(text)
            for dots, name in _REFERENCE.findall(text):
                above = key.split(".")[: -len(dots)] if dots else []
                lengths[key] += length_of(".".join([*above, name]))
        else:
            inner = [other for other in typed if other.startswith((f"{key}.", f"{key}["))]
            lengths[key] = sum(map(length_of, inner))
        return lengths[key]

    for key, value in typed.items():
        if "${" in str(value) and length_of(key) > _MOST_CHARACTERS:
            rule = f"its references spell out more than {_MOST_CHARACTERS} characters"
            raise ConfigError(key, value, rule, "write the value itself")


def unresolved(key: str, value: object, reason: str) -> ConfigError:
    """Return the error of a value whose reference OmegaConf cannot resolve, for its ``reason``."""
    fix = "correct it, or write the value itself"
    if missing := re.search(r"Interpolation key '([^']+)' not found", reason):
        fix = suggest_name(missing[1], [*known_keys()])
    return ConfigError(key, value, reason.partition(" full_key:")[0], fix)
