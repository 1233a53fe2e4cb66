"""YAML: how it is read, and limits of a file's size, as a short one may expand without end."""

from __future__ import annotations

from typing import cast

import yaml

_MOST_BYTES = 2**18
_MOST_DEPTH = 50
_MOST_VALUES = 20_000
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
    try:
        if _depth_of(text) > _MOST_DEPTH:
            return TOO_DEEP
        num_values, depth = _Sizes().of(yaml.compose(text, Loader=_LOADER))
    except yaml.YAMLError:
        return ""
    except _Endless:
        return "an alias (*name) stands within what it names, without end"
    if num_values > _MOST_VALUES:
        return f"its aliases (*name) spell out more than {_MOST_VALUES} values"
    return TOO_DEEP if depth > _MOST_DEPTH else ""


class _Endless(Exception):
    """A node that contains itself."""


def _depth_of(text: str) -> int:
    depth = deepest = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            deepest = max(deepest, depth)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    return deepest


class _Sizes:
    """Number of values and depth with each alias expanded; looks at each node once."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[int, int] | None] = {}

    def of(self, node: yaml.Node | None) -> tuple[int, int]:
        """Return the number of values in ``node``, itself included, and their depth."""
        if node is None:
            return 0, 0
        if id(node) not in self._sizes:
            self._sizes[id(node)] = None
            parts = [self.of(part) for part in _parts_of(node)]  # anchors stand before aliases
            num_values = 1 + sum(number for number, _ in parts)
            self._sizes[id(node)] = num_values, 1 + max((depth for _, depth in parts), default=0)
        size = self._sizes[id(node)]
        if size is None:
            raise _Endless
        return size


def _parts_of(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
