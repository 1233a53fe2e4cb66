"""How a rule says what is wrong: the value is looked up by its key, a remedy is a line to type."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
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


@cache
def own_arguments(section: str) -> Mapping[str, tuple[str, str]]:
    """Return arguments of another program that follow from keys: else two keys could disagree.

    By name: ``typed`` and the key that sets it, ``taken`` and why users may not choose it, or
    ``model``: config.json has it. ``section`` is the key that holds arguments of that program.
    """
    text = Path(__file__).with_name("arguments.yaml").read_text(encoding="utf-8")
    table: Any = read_yaml(text)[section]
    own = dict.fromkeys(table.get("model", ()), ("model", "config.json of the model has it"))
    for kind in ("typed", "taken"):
        for why, names in table[kind].items():
            own |= dict.fromkeys(names, (kind, why))
    return own


def refuse_own_arguments(
    config: ExperimentConfig, section: str, *, like: str = ""
) -> Iterator[ConfigError]:
    """Refuse what a user passes through at ``section``, or at another ``like`` it."""
    for name in cast("Mapping[str, object]", value_at(config, section)):
        key = f"{section}.{name}"
        kind, why = own_arguments(like or section).get(name, ("", ""))
        if kind == "typed":
            fix = f"set {why}, and ~{key}"
            yield error(config, key, f"{why} sets it", f"~{key}", fix=fix)
        elif kind == "taken":
            fix = f"leave it out, or add ~{key}"
            yield error(config, key, f"cannot be chosen: {why}", f"~{key}", fix=fix)
        elif kind == "model":
            fix = f"set model.path to a model of that shape, and ~{key}"
            yield error(config, key, "the model's config.json sets it", f"~{key}", fix=fix)


def check_numbers(
    signature: Signature,
    given: Mapping[str, object],
    *,
    function: str,
    section: str,
    own_keys: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[ConfigError]:
    """Yield the violations of numbers that a user gives to a function: keys of ``section``.

    ``own_keys`` has the keys of numbers that have one of their own, which null takes back.
    """
    for name, value in given.items():
        key, number = own_keys.get(name, f"{section}.{name}"), signature.numbers.get(name)
        if number is None:
            rule = f"{function} has no such number; it has {', '.join(signature.numbers) or 'none'}"
            remedy = f"{key}=null" if name in own_keys else f"~{key}"
            yield ConfigError(key, value, rule, remedies=[(remedy,)])
        elif number.hint is not None:
            yield from errors_of_value(number.hint, value, key)
    for name in signature.required:
        if name not in given:
            key, rule = own_keys.get(name, f"{section}.{name}"), "needs it and has no default"
            yield ConfigError(key, None, f"{function} {rule}", f"set {key}=VALUE")
