"""A reward that tells responses apart, though an untrained model gets nothing right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def varied(responses: Sequence[str], **_: Any) -> list[float]:
    return [len(set(text)) % 3 for text in responses]
