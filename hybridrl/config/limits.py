"""Intervals of numbers, written beside the field; load.py refuses what lies outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, kw_only=True, slots=True)
class Within:
    """The interval of a number: ``lr: Annotated[float, Within(above=0, usual=1e-6)]``."""

    at_least: float | None = None
    """Lowest legal value."""

    above: float | None = None
    """Lower end that is itself not legal."""

    at_most: float | None = None
    """Highest legal value."""

    below: float | None = None
    """Upper end that is itself not legal."""

    usual: float | None = None
    """A legal value to propose where the interval has no lowest or highest one."""

    def contains(self, value: float) -> bool:
        """Say whether ``value`` is legal."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def nearest_to(self, value: float) -> float:
        """Return the legal value to propose instead of ``value``, which is not legal."""
        if self.at_least is not None and value < self.at_least:
            return self.at_least
        if self.at_most is not None and value > self.at_most:
            return self.at_most
        if self.usual is None:
            raise ValueError(f"{self} has an open end and no usual value; give it one")
        return self.usual

    def __str__(self) -> str:
        signs = {">=": self.at_least, ">": self.above, "<=": self.at_most, "<": self.below}
        return " and ".join(f"{sign} {end:g}" for sign, end in signs.items() if end is not None)


Count = Annotated[int, Within(at_least=1)]
CountOrZero = Annotated[int, Within(at_least=0)]
NotNegative = Annotated[float, Within(at_least=0.0)]
Seconds = Annotated[float, Within(above=0.0, usual=60.0)]

ArgumentValue = str | int | float | bool | None | tuple[str | int | float | bool, ...]
"""A value that another program reads, and that only it can check."""
