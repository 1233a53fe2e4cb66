"""JSON that every reader takes: the format has no number for what is not finite."""

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
    """Spell plain data as JSON; a number that is not finite becomes ``null``.

    Python's own ``json.dumps`` would write ``NaN`` and ``Infinity``, which browsers, jq and most
    other readers refuse together with all that stands beside them.

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
    """Return the data with None in place of each number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_non_finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_non_finite(entry) for entry in value]
    return value
