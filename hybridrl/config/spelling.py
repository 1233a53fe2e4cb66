"""Keys and values as typed on the command line: Hydra reads back the same value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_PLAIN = re.compile(r"[\w./@%+:-]+", re.ASCII)
_NOT_TEXT = ("null", "true", "false", "nan", "inf", "+inf", "-inf")


def to_override(value: object) -> str:
    """Write ``value`` as the right-hand side of a Hydra override, in quotes where it needs them.

    Raises:
        ValueError: a number so long that Python refuses to write it.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(to_override(entry) for entry in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{to_override(entry)}" for name, entry in value.items()) + "}"
    return _spell_text(value) if isinstance(value, str) else str(value)


def _spell_text(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT and not _is_number(text):
        return text
    # Backslashes are doubled before a quote: one in the text, and the one at its end.
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped).replace("${", "\\${")
    return f"'{escaped}'"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def resetting(key: str, value: object, usual: object) -> tuple[str, ...]:
    """Return the overrides that take ``key`` from ``value`` back to ``usual``.

    Entries of a mapping are deleted one by one: ``key={}`` is merged, and changes nothing.
    """
    if isinstance(value, Mapping):
        return tuple(f"~{key}.{name}" for name in value)
    return (f"{key}={to_override(usual)}",)


def flatten(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield each dotted key of a scalar, with its value."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
