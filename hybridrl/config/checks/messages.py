"""How a rule says what is wrong: the value is looked up by its key, a remedy is a line to type."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.limits import ArgumentValue
from hybridrl.config.spelling import resetting
from hybridrl.errors import ConfigError, instruction

_BEFORE_OVERRIDE = re.compile(r" (?=~|\+{0,2}[a-z][\w.]*=)")

Reasons = Mapping[str, str]
"""By the name of an argument: the key that sets it, or the reason for its refusal."""


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


def by_argument(names: Mapping[str, str]) -> Reasons:
    """Return the reason of each argument.

    Args:
        names: of arguments, separated by spaces, by their common reason.
    """
    return {name: reason for reason, of_reason in names.items() for name in of_reason.split()}


def refuse_own_arguments(
    config: ExperimentConfig, section: str, *, typed: Reasons, taken: Reasons
) -> Iterator[ConfigError]:
    """Refuse arguments of another package that follow from keys: else two keys could disagree.

    Args:
        section: dotted key that holds arguments by their names in the other package.
        typed: names of arguments that a key sets.
        taken: names of arguments that users may not choose.
    """
    given = value_at(config, section)
    for name in given if isinstance(given, Mapping) else ():
        key = f"{section}.{name}"
        if name in typed:
            fix = f"set {typed[name]}, and ~{key}"
            yield error(config, key, f"{typed[name]} sets it", f"~{key}", fix=fix)
        elif name in taken:
            fix = f"leave it out, or add ~{key}"
            yield error(config, key, f"cannot be chosen: {taken[name]}", f"~{key}", fix=fix)


def unused_keys(
    config: ExperimentConfig, section: str, usual: object, why: str, other: str
) -> Iterator[ConfigError]:
    """Refuse changes of a section that no model of the run reads.

    Args:
        usual: the section with the defaults of hydra_configs.
        why: completes "would be ignored".
        other: what to type for the section to be read.
    """
    for field in fields(usual):  # type: ignore[arg-type]
        key, default = f"{section}.{field.name}", getattr(usual, field.name)
        value = value_at(config, key)
        if value != default:
            overrides = resetting(key, value, default)
            fix = f"{instruction(overrides)}, or {other}"
            yield error(config, key, f"would be ignored{why}", " ".join(overrides), fix=fix)


def removal(section: str, given: Mapping[str, ArgumentValue]) -> str:
    """Return the overrides that delete all entries of a mapping: ``key={}`` would change none."""
    return " ".join(f"~{section}.{name}" for name in given)
