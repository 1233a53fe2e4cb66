"""YAML: how it is read, and limits of a file, as a short one may expand without end."""

from __future__ import annotations

from typing import cast

import yaml

_MOST_BYTES = 2**18
_MOST_DEPTH = 50
TOO_DEEP = f"it is nested more than {_MOST_DEPTH} deep"

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The first is ten times as fast; builds of PyYAML without libyaml lack it."""


def read_yaml(text: str) -> dict[str, object]:
    """Return the mapping of a text that this program wrote; an empty text has an empty one.

    Raises:
        YAMLError: the text is not YAML.
    """
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
