"""How a rule says what is wrong: the value is looked up by its key, a remedy is a line to type."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.foreign.spelling import read_yaml
from hybridrl.config.functions.signatures import Signature
from hybridrl.config.values import errors_of_value
from hybridrl.errors import ConfigError

_BEFORE_OVERRIDE = re.compile(r" (?=~|\+{0,2}[a-z][\w.]*=)")


def error(
    config: ExperimentConfig, key: str, rule: str, *remedies: str, fix: str = "", got: object = None
) -> ConfigError:
    """Return the error of a key.

    Args:
        rule: the condition on the value, and its reason.
        remedies: alternatives, best first; overrides with spaces between them.
        fix: the text to type, where it is more than the remedies.
        got: the value to show, where it is not that of the key.
    """
    value = value_at(config, key) if got is None else got
    if isinstance(value, tuple):
        value = list(value)
    overrides = [tuple(_BEFORE_OVERRIDE.split(remedy)) for remedy in remedies if remedy]
    return ConfigError(key, value, rule, fix, remedies=overrides)


def value_at(config: ExperimentConfig, key: str) -> object:
    """Return the value of a dotted key, through sections and mappings."""
    value: object = config
    for name in key.split("."):
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)
    return value


@dataclass(frozen=True, slots=True)
class OwnArguments:
    """Arguments of another program that follow from keys: else two keys could disagree."""

    typed: Mapping[str, str]
    """By name of the argument: the key that sets it."""

    taken: Mapping[str, str]
    """The reason why users may not choose it."""

    of_model: frozenset[str]
    """Those that follow from the model's config.json."""


@cache
def own_arguments(section: str) -> OwnArguments:
    """Read those of ``arguments.yaml`` for a key that holds arguments of another program."""
    text = Path(__file__).with_name("arguments.yaml").read_text(encoding="utf-8")
    table: Any = read_yaml(text)[section]
    typed, taken = (
        {name: reason for reason, names in table[kind].items() for name in names}
        for kind in ("typed", "taken")
    )
    return OwnArguments(typed, taken, frozenset(table.get("model", ())))


def refuse_own_arguments(
    config: ExperimentConfig, section: str, *, like: str = ""
) -> Iterator[ConfigError]:
    """Refuse what a user passes through at ``section``, or at another ``like`` it."""
    own = own_arguments(like or section)
    for name in cast("Mapping[str, object]", value_at(config, section)):
        key = f"{section}.{name}"
        if name in own.typed:
            fix = f"set {own.typed[name]}, and ~{key}"
            yield error(config, key, f"{own.typed[name]} sets it", f"~{key}", fix=fix)
        elif name in own.taken:
            fix = f"leave it out, or add ~{key}"
            yield error(config, key, f"cannot be chosen: {own.taken[name]}", f"~{key}", fix=fix)


def check_numbers(
    signature: Signature,
    given: Mapping[str, object],
    *,
    function: str,
    key_of: Callable[[str], str],
    removing: Callable[[str], str],
) -> list[ConfigError]:
    """Return the violations of numbers that a user gives to a function.

    ``key_of`` returns the dotted key of a number, ``removing`` the override that takes it back.
    """
    errors: list[ConfigError] = []
    for name, value in given.items():
        number = signature.numbers.get(name)
        if number is None:
            rule = f"{function} has no such number; it has {', '.join(signature.numbers) or 'none'}"
            errors.append(ConfigError(key_of(name), value, rule, remedies=[(removing(name),)]))
        elif number.hint is not None:
            errors += errors_of_value(number.hint, value, key_of(name))
    for name in signature.required:
        if name not in given:
            rule = f"{function} needs it and has no default"
            errors.append(ConfigError(key_of(name), None, rule, f"set {key_of(name)}=VALUE"))
    return errors
