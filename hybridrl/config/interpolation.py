"""``${section.key}`` in values: unresolved references, and the length of resolved ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from hybridrl.config.load import known_keys
from hybridrl.errors import ConfigError, suggest_name

_MOST_CHARACTERS = 1_000_000
_REFERENCE = re.compile(r"\$\{(\.*)([\w.]+)\}")


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
    """Refuse references that grow exponentially.

    Args:
        values: as typed, nothing resolved.

    Raises:
        ConfigError: together they would spell out more than a million characters.
    """
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
                lengths[key] += length_of(_absolute(name, key, num_dots=len(dots)))
        else:
            inner = [other for other in typed if other.startswith((f"{key}.", f"{key}["))]
            lengths[key] = sum(map(length_of, inner))
        return lengths[key]

    for key, value in typed.items():
        if "${" in str(value) and length_of(key) > _MOST_CHARACTERS:
            rule = f"its references spell out more than {_MOST_CHARACTERS} characters"
            raise ConfigError(key, value, rule, "write the value itself")


def _absolute(name: str, key: str, *, num_dots: int) -> str:
    """Return the key that a reference means in the value of ``key``."""
    return ".".join([*key.split(".")[:-num_dots], name]) if num_dots else name


def unresolved(key: str, value: object, reason: str) -> ConfigError:
    """Describe the error of a value whose reference cannot be resolved.

    Args:
        value: as it was typed.
        reason: message of OmegaConf, which names the reference.
    """
    fix = "correct it, or write the value itself"
    if missing := re.search(r"Interpolation key '([^']+)' not found", reason):
        fix = suggest_name(missing[1], [*known_keys()])
    return ConfigError(key, value, reason.partition(" full_key:")[0], fix)
