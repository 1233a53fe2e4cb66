"""JSON for every reader: the format has no NaN or infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping


def to_json_text(
    value: object,
    *,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    keeps_unicode: bool = False,
) -> str:
    """Write plain data as ``json.dumps``; a number that is not finite becomes ``null``.

    Python itself would write ``NaN`` and ``Infinity``, which browsers, jq and most other readers
    reject, together with the file.
    """
    encoder = json.JSONEncoder(
        indent=indent, separators=separators, ensure_ascii=not keeps_unicode, allow_nan=False
    )
    try:
        return encoder.encode(value)
    except ValueError:
        return encoder.encode(_without_non_finite(value))


def _without_non_finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_non_finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(entry) for entry in value]
    return value
