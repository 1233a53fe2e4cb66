"""Nested mapping from Hydra to frozen dataclasses: strict, all errors at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import get_args, get_origin, get_type_hints

from hybridrl.config.checks.violations import find_violations
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.foreign_names import answer_key
from hybridrl.config.reader import Reader
from hybridrl.errors import ConfigError, ConfigErrors, close_names, suggest_name, to_type


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


def unknown_key(typed: str, value: str) -> ConfigError:
    """Return the error of an unknown key, with the known keys that are near.

    Args:
        typed: dotted, as it was typed; or as a flag, ``--key-of-another-framework``.
        value: as it was typed.
    """
    key = typed.removeprefix("--").replace("-", "_") if typed.startswith("--") else typed
    known = [*known_keys(), "recipes"]
    if answer := answer_key(key, value, known=known):
        return ConfigError(typed, value, "it is a key of another framework", answer)
    if key in known:
        fix = f"set {to_type(f'{key}={value}')}"
        return ConfigError(typed, value, "keys are typed without dashes", fix)
    section, dot, name = key.rpartition(".")
    parts = [other.rpartition(".") for other in known]
    neighbours = [last for above, _, last in parts if above == section]
    near = [other for other, (_, _, last) in zip(known, parts, strict=True) if last == name]
    if neighbours:
        near = near or [section + dot + last for last in close_names(name, neighbours)]
        where = f"key{dot and ' in ' + section}"
    else:  # the section itself is mistyped, or the key belongs to another one
        near, where = near or close_names(key, known), "section"
    lines = [to_type(f"{other}={value}" if value else other) for other in near[:3]]
    instead = f"did you mean {' or '.join(lines)}?" if lines else ""
    fix = instead or suggest_name(name, neighbours or known)
    return ConfigError(typed, value, f"there is no such {where}", fix)
