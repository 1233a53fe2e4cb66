"""Configuration objects of megatron-core, of what we say and what a user adds by its own names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

import torch

from hybridrl.config.limits import ArgumentValue
from hybridrl.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Values of fields that are types of numbers."""

Configuration = TypeVar("Configuration")


def build_configuration(
    kind: type[Configuration],
    own_values: Mapping[str, object],
    given: Mapping[str, ArgumentValue],
    *,
    key: str,
) -> Configuration:
    """Build one of megatron-core's configuration classes.

    Args:
        kind: a dataclass.
        own_values: what follows from our own keys.
        given: what the user adds, by the names of its fields; a type of numbers is spelled
            ``bfloat16``.
        key: under which the user gave it.

    Raises:
        ConfigError: there is no such field, or megatron-core refuses the whole.
    """
    types = {field.name: field.type for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name, value in given.items():
        if name not in types:
            entry = f"{key}.{name}"
            close = get_close_matches(name, types, n=3)
            meant = f"did you mean {' or '.join(map(repr, close))}? Else " if close else ""
            raise ConfigError(
                entry,
                value,
                f"megatron-core's {kind.__name__} has no such field",
                f"{meant}leave it out, or add ~{entry}",
                remedies=[(f"~{entry}",)],
            )
    values = {name: _as_field(f"{key}.{name}", types[name], v) for name, v in given.items()}
    try:
        return kind(**{**own_values, **values})
    except (TypeError, ValueError, AssertionError, RuntimeError, ImportError) as err:
        raise ConfigError(
            key if given else "megatron",
            dict(given) or "as configured",
            f"megatron-core's {kind.__name__} refuses it: {' '.join(str(err).split())}",
            f"change what it names; its fields are those of {kind.__module__}.{kind.__name__}",
        ) from err


def _as_field(key: str, kind: object, value: ArgumentValue) -> object:
    """Return the value in the type of its field, as far as text and lists go."""
    if "dtype" in str(kind) and isinstance(value, str):
        if value not in _DTYPES:
            fix = f"set {key} to one of them"
            raise ConfigError(key, value, f"must be one of {', '.join(_DTYPES)}", fix)
        return _DTYPES[value]
    return list(value) if isinstance(value, tuple) else value
