"""Dotted keys of nested mappings, as they are typed on the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def flatten(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield each dotted key that holds no section, with its value."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
