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
    """Write plain data as JSON; a number that is not finite becomes ``null``.

    Python's own ``json.dumps`` would write ``NaN`` and ``Infinity``, which browsers, jq and most
    other readers reject, together with the file.

    Args:
        value: dictionaries, lists, texts, numbers, truth values and None.
        indent: spaces a level; None writes one line.
        separators: between entries, and between a key and its value.
        keeps_unicode: write other characters than ASCII as they are.

    Raises:
        TypeError: something else is in ``value``.
    """

    def spell(plain: object) -> str:
        return json.dumps(
            plain,
            indent=indent,
            separators=separators,
            ensure_ascii=not keeps_unicode,
            allow_nan=False,
        )

    try:
        return spell(value)
    except ValueError:
        return spell(without_non_finite(value))


def without_non_finite(value: object) -> object:
    """Replace each number that is not finite by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_non_finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_non_finite(entry) for entry in value]
    return value
