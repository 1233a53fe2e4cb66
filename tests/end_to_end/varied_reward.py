"""A reward that tells responses apart, though an untrained model gets nothing right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def varied(responses: Sequence[str], **_: Any) -> list[float]:
    """Score by the number of different characters, modulo 3."""
    return [len(set(text)) % 3 for text in responses]
