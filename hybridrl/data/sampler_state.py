"""The state of a sampler, for readers that import no numpy."""

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

    open_prompts: tuple[int, ...] = ()
    """Indices of drawn rows that no step has learned from, in rising order, each below
    ``num_drawn``; the run that resumes draws them first."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "open_prompts", tuple(self.open_prompts))  # JSON has lists
