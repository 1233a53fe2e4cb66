"""``${section.key}`` in values: unresolved references, and the length of resolved ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

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
    spelled = _Lengths(values)
    for key, value in leaves(values):
        if spelled.length_of(key) > _MOST_CHARACTERS:
            rule = f"its references spell out more than {_MOST_CHARACTERS} characters"
            raise ConfigError(key, value, rule, "write the value itself")


class _Lengths:
    """Characters of each value with its references resolved; looks at each value once."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = dict(leaves(values))
        self._sections: dict[str, list[str]] = {}
        for key in self._values:
            parts = re.split(r"[.\[]", key)
            for end in range(1, len(parts)):
                self._sections.setdefault(".".join(parts[:end]), []).append(key)
        self._lengths: dict[str, int] = {}

    def length_of(self, key: str) -> int:
        """Return the length of the value or section at ``key``; 0 if there is none."""
        if key not in self._lengths:
            self._lengths[key] = 0  # of a value that refers to itself; its reader reports it
            if key in self._values:
                self._lengths[key] = self._length_of_value(key, str(self._values[key]))
            else:
                self._lengths[key] = sum(map(self.length_of, self._sections.get(key, ())))
        return self._lengths[key]

    def _length_of_value(self, key: str, text: str) -> int:
        referred = [
            ".".join([*key.split(".")[: -len(dots)], name]) if dots else name
            for dots, name in _REFERENCE.findall(text)
        ]
        return len(text) + sum(map(self.length_of, referred))


def unresolved(key: str, value: object, reason: str) -> ConfigError:
    """Describe the error of a value whose reference cannot be resolved.

    Args:
        value: as it was typed.
        reason: what OmegaConf says.
    """
    for pattern, explain in _REASONS:
        if match := re.search(pattern, reason):
            rule, fix = explain(match[1] if match.groups() else "")
            return ConfigError(key, value, rule, fix)
    return ConfigError(key, value, reason, "correct it, or write the value itself")


def _no_key(name: str) -> tuple[str, str]:
    return f"there is no key {name!r}", suggest_name(name, _leaf_keys())


def _no_variable(name: str) -> tuple[str, str]:
    return f"the environment has no {name}", f"export {name}=..., or write ${{oc.env:{name},ELSE}}"


def _no_resolver(name: str) -> tuple[str, str]:
    return f"there is no resolver {name!r}", "write the value itself, or ${section.key}"


def _circle(_: str) -> tuple[str, str]:
    return "it refers to itself", "write the value itself"


def _leaf_keys() -> Sequence[str]:
    return [key for key in known_keys() if "." in key or key in ("mode", "seed")]


_REASONS = (
    (r"Interpolation key '([^']+)' not found", _no_key),
    (r"Environment variable '([^']+)' not found", _no_variable),
    (r"Unsupported interpolation type (\S+)", _no_resolver),
    (r"Recursive interpolation|recursion depth", _circle),
)
