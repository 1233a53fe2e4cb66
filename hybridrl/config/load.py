"""Nested mapping from Hydra to frozen dataclasses: strict, all errors at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import get_args, get_origin, get_type_hints

from hybridrl.config.checks.violations import find_violations
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.foreign_names import answer_key
from hybridrl.config.reader import Reader
from hybridrl.errors import ConfigError, ConfigErrors, suggest_name


def load_config(values: Mapping[str, object]) -> ExperimentConfig:
    """Check ``values`` and turn them into the configuration of a run. Starts and writes nothing.

    Args:
        values: one entry per section, as hydra_configs/config.yaml has them.

    Raises:
        ConfigErrors: all errors together. A number outside its interval, or text that spells a
            number, hides no other error: the cross-section rules then use the proposed value.
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
        The configuration, with the proposed value in place of a refused one, or None if a value
        could not be understood at all; and the errors.
    """
    reader = Reader()
    config = reader.read_section(ExperimentConfig, values, "")
    return config if isinstance(config, ExperimentConfig) else None, reader.violations


def known_keys(section: type = ExperimentConfig, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key that has a field, sections included."""
    for name, hint in get_type_hints(section).items():
        yield prefix + name
        for part in (hint, *get_args(hint)) if get_origin(hint) is not Mapping else ():
            if dataclasses.is_dataclass(part) and isinstance(part, type):
                yield from known_keys(part, f"{prefix}{name}.")


def free_keys(section: type = ExperimentConfig, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key whose entries have names that no section knows."""
    for name, hint in get_type_hints(section).items():
        if get_origin(hint) is Mapping:
            yield prefix + name
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from free_keys(hint, f"{prefix}{name}.")


def unknown_key(key: str, value: str) -> ConfigError:
    """Return the error of an unknown ``key``, with the known keys that are near.

    Args:
        key: dotted, as it was typed.
        value: as it was typed.
    """
    section, dot, name = key.rpartition(".")
    if answer := answer_key(key):
        return ConfigError(key, value, "it is a key of another framework", answer)
    all_keys = [known.rpartition(".") for known in (*known_keys(), "recipes")]
    names = [known for above, _, known in all_keys if above == section]
    if not names:  # the section itself is mistyped, or the key belongs to another one
        return ConfigError(
            key, value, "there is no such section", suggest_name(key, [*known_keys()])
        )
    hint = suggest_name(name, names)
    return ConfigError(key, value, f"there is no such key{dot and ' in ' + section}", hint)
