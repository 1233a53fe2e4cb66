"""One value of a field: whether it has the field's type, and which value it may have meant."""

from __future__ import annotations

import math
from collections.abc import Callable

from hybridrl.config.spelling import to_override

KINDS: dict[type, str] = {
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    str: "text",
}
_MOST_CHARACTERS = 4096  # of a path on Linux
_HIGHEST = 2**63 - 1  # largest integer of other programs


def is_of(kind: type, value: object) -> bool:
    """Return whether ``value`` is of ``kind``, one of KINDS; an integer is a finite float, too."""
    if kind is float and type(value) is int:
        return meant_by(float, value) is not None
    if type(value) is not kind:
        return False
    return not isinstance(value, float) or math.isfinite(value)


def meant_by(kind: type, value: object) -> object | None:
    """Return ``value`` read as ``kind``, as 3 for "3"; None if it cannot be read so."""
    return _CONVERSIONS[kind](value)


def flaw_of_text(text: str) -> str:
    """Return why no file, process or log can take ``text``; empty if they can."""
    if len(text) > _MOST_CHARACTERS:
        return f"must have at most {_MOST_CHARACTERS} characters, and has {len(text)}"
    if "\0" in text:
        return "must not hold the character NUL"
    try:
        text.encode()
    except UnicodeEncodeError as err:
        return (
            f"must be UTF-8, and character {err.start + 1} is half of a pair, or was another byte"
        )
    return ""


def flaw_of_argument(value: object) -> str:
    """Return why ``value`` cannot be passed to another program; empty if it can."""
    if isinstance(value, list | tuple):
        flaws = (flaw_of_argument(v) if _is_scalar(v) else _NO_ARGUMENT for v in value)
        return next((flaw for flaw in flaws if flaw), "")
    if not _is_scalar(value):
        return _NO_ARGUMENT
    if isinstance(value, str):
        return flaw_of_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if isinstance(value, int) and abs(value) > _HIGHEST:
        return f"must be between -{_HIGHEST} and {_HIGHEST}"
    return ""


_NO_ARGUMENT = "must be text, a number, true, false, null, or a list of those"


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def _as_number(value: object) -> float | None:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _as_whole(value: object) -> int | None:
    if type(value) is int:
        return value
    number = _as_number(value)
    return int(number) if number is not None and number.is_integer() else None


def _as_truth(value: object) -> bool | None:
    text = value.lower() if isinstance(value, str) else value
    if text in ("true", "yes", "on", "1", 1):
        return True
    return False if text in ("false", "no", "off", "0", 0) else None


def _as_text(value: object) -> str | None:
    if not isinstance(value, int | float):
        return None
    try:
        return to_override(value)
    except ValueError:  # thousands of digits
        return None


_CONVERSIONS: dict[type, Callable[[object], object]] = {
    int: _as_whole,
    float: _as_number,
    bool: _as_truth,
    str: _as_text,
}
