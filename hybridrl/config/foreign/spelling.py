"""Values as text: overrides that Hydra reads back as the same value, and YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import cast

import yaml

_PLAIN = re.compile(r"[\w./@%+:-]+", re.ASCII)
_NOT_TEXT = ("null", "true", "false", "nan", "inf", "+inf", "-inf")

_MOST_BYTES = 2**18
_MOST_DEPTH = 50
TOO_DEEP = f"it is nested more than {_MOST_DEPTH} deep"

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The first is ten times as fast; builds of PyYAML without libyaml lack it."""


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


def flatten(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield each dotted key of a scalar, with its value."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def read_yaml(text: str) -> dict[str, object]:
    """Return the mapping of a text that this program wrote; an empty text has an empty one."""
    return cast("dict[str, object]", yaml.load(text, Loader=_LOADER) or {})


def flaw_of_yaml(data: bytes) -> str:
    """Return why a file must not be read; empty if it may. Its reader reports syntax errors."""
    if len(data) > _MOST_BYTES:
        return f"a file of {len(data)} bytes is no recipe; at most {_MOST_BYTES} are read"
    try:
        text = data.decode()
    except UnicodeDecodeError as err:
        line = data[: err.start].count(b"\n") + 1
        return f"line {line} is not UTF-8: byte 0x{data[err.start]:02x}"
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            if isinstance(event, yaml.AliasEvent):  # ten of ten of ten ... fill the memory
                line = event.start_mark.line + 1
                return f"line {line} has an alias, *{event.anchor}; ${{section.key}} does the same"
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _MOST_DEPTH:
                return TOO_DEEP
    except yaml.YAMLError:
        return ""
    return ""
