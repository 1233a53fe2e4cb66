"""The position of a sampler, as checkpoints hold it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplerState:
    """The state of a sampler; save it as JSON with ``dataclasses.asdict``."""

    num_drawn: int
    """Rows drawn since the run began."""

    fingerprint: str
    """Of the rows it was drawn from; see ``data/rows.py``. Of a mix ``NAME=...`` for each source,
    with commas between."""
