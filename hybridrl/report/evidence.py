"""What the rules look at, and what they find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hybridrl.report.history import History
from hybridrl.report.settings import Settings

RECENT_STEPS = 10
"""Over so many steps "now" is averaged."""

ENOUGH_STEPS = 30
"""Below, a rule about a trend keeps silent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing worth knowing."""

    severity: Literal["error", "warning", "note"]
    title: str
    text: str
    """What was seen, with values."""

    remedies: tuple[str, ...] = ()
    """Overrides to type, best first."""

    quote: str = ""
    """Lines of a log."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the rules look at."""

    history: History
    settings: Settings
    log_lines: Sequence[str] = ()

    def recent(self, name: str) -> float | None:
        """Return the mean of a metric over the last steps."""
        return self.history.get(name).mean_of_last(RECENT_STEPS)

    def scaled(self, key: str, factor: float) -> tuple[str, ...]:
        """Spell an override that multiplies a number of the configuration; none if it has none."""
        value = self.settings.number(key)
        if not value:
            return ()
        whole = isinstance(self.settings.flat[key], int)
        return (f"{key}={round(value * factor) if whole else float(f'{value * factor:.2g}'):g}",)
