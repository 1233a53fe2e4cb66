"""JSON for every reader: the format has no NaN or infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_json_text(
    value: object,
    *,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    keeps_unicode: bool = False,
) -> str:
    """Write plain data as ``json.dumps``; a number that is not finite becomes ``null``.

    Python itself would write ``NaN`` and ``Infinity``, which browsers, jq and most other readers
    reject, together with the file. Arrays become lists; a TypeError names what is no data.
    """
    encoder = json.JSONEncoder(
        indent=indent, separators=separators, ensure_ascii=not keeps_unicode, allow_nan=False
    )
    try:
        return encoder.encode(value)
    except (ValueError, TypeError):
        return encoder.encode(_plain(value))


def _plain(value: Any) -> object:  # noqa: ANN401 - whatever somebody wants to write
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, str | int):
        return value
    try:
        return _plain(value.tolist())
    except AttributeError:
        kind = type(value).__name__
        raise TypeError(f"{kind} {value!r:.80} cannot be written as JSON") from None
