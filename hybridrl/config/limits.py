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
    """Lower end that is not itself legal."""

    at_most: float | None = None
    """Highest legal value."""

    below: float | None = None
    """Upper end that is not itself legal."""

    usual: float | None = None
    """Legal value to propose for one that is too low, if the lowest is unusual or open."""

    why: str = ""
    """Reason for the upper end: what breaks, or loses its meaning, beyond it."""

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
        if self.at_most is not None and value > self.at_most:
            return self.at_most
        proposed = self.at_least if self.usual is None else self.usual
        if proposed is None:
            raise ValueError(f"{self} has an open end and no usual value; give it one")
        return proposed

    def rule_for(self, value: float) -> str:
        """Return the rule that an illegal ``value`` breaks; beyond the upper end also why."""
        is_above = self.at_most is not None and value > self.at_most
        return f"{self} ({self.why})" if is_above and self.why else f"{self}"

    def __str__(self) -> str:
        signs = {">=": self.at_least, ">": self.above, "<=": self.at_most, "<": self.below}
        return " and ".join(
            f"{sign} {_spell(end)}" for sign, end in signs.items() if end is not None
        )


def _spell(end: float) -> str:
    """Write an end so that it can be typed: an integer with all its digits."""
    return str(int(end)) if float(end).is_integer() else f"{end:g}"


_COUNTED = "no run counts so far"
_IN_MEMORY = "they are held in memory at once"
_ON_CLUSTERS = "no cluster has more"
_IN_FLOAT32 = "float32 keeps seven digits"

Count = Annotated[int, Within(at_least=1, at_most=10**9, why=_COUNTED)]
CountOrZero = Annotated[int, Within(at_least=0, at_most=10**9, why=_COUNTED)]

Rows = Annotated[int, Within(at_least=1, at_most=2**20, why=_IN_MEMORY)]
"""Prompts, responses or examples that are processed together."""

Epochs = Annotated[int, Within(at_least=1, at_most=1000, why="the rollouts are too old by then")]
"""Passes over the same rollouts."""

Ranks = Annotated[int, Within(at_least=1, at_most=2**16, why=_ON_CLUSTERS)]
"""Machines, processes, or processes that share a resource."""

RanksOrZero = Annotated[int, Within(at_least=0, at_most=2**16, why=_ON_CLUSTERS)]

Threads = Annotated[int, Within(at_least=0, at_most=1024, why="no processor has more")]
"""Threads of one process; 0 leaves the choice to the library."""

Tokens = Annotated[int, Within(at_least=1, at_most=2**24, why="no model has a longer context")]
"""Tokens of a prompt or of a response."""

TokensOrZero = Annotated[
    int, Within(at_least=0, at_most=2**24, why="no model has a longer context")
]

PackedTokens = Annotated[
    int, Within(at_least=1, at_most=2**31 - 1, why="attention counts packed tokens in 31 bits")
]
"""Tokens of several rows, laid end to end."""

Width = Annotated[int, Within(at_least=1, at_most=2**20, why="no model is wider")]
"""Columns inside a model."""

Heads = Annotated[int, Within(at_least=1, at_most=4096, why="no model has more")]
"""Attention heads."""

Layers = Annotated[int, Within(at_least=1, at_most=10_000, why="no model has more layers")]

MebibytesOrZero = Annotated[
    int, Within(at_least=0, at_most=2**24, why="16 TiB, and no machine has more memory")
]

Processes = Annotated[int, Within(at_least=1, at_most=1024, why="no processor has more cores")]

NotNegative = Annotated[float, Within(at_least=0.0, at_most=1e6, why=_IN_FLOAT32)]
"""A weight of a term in a float32 sum."""

PreferenceBeta = Annotated[
    float, Within(above=0.0, at_most=1e3, usual=0.1, why="the policy would stay at the reference")
]
"""Weight of the log-ratios of a preference pair."""

Discount = Annotated[float, Within(at_least=0.0, at_most=1.0, why="sums over tokens would grow")]
"""Factor per token of the rewards to come."""

StdFloor = Annotated[
    float, Within(above=0.0, at_most=1.0, usual=1e-6, why="rewards differ by less than it")
]
"""Reward units, added to a standard deviation before something is divided by it."""

ClipLow = Annotated[float, Within(above=0.0, below=1.0, usual=0.2)]
"""Lower clip range of a probability ratio: ratio >= 1 - clip_low."""

ClipHigh = Annotated[
    float, Within(above=0.0, at_most=1e6, usual=0.2, why="it clips nothing any more")
]
"""Upper clip range of a probability ratio: ratio <= 1 + clip_high."""

DualClip = Annotated[
    float, Within(at_least=0.0, at_most=1e6, usual=3.0, why="it clips nothing any more")
]
"""Bound of the ratio of tokens with a negative advantage; 0 is off."""

Share = Annotated[float, Within(above=0.0, at_most=1.0, usual=0.2, why="there are no more tokens")]
"""Of the tokens of a micro-batch."""

Exponent = Annotated[float, Within(at_least=0.0, at_most=100.0, why="float32 overflows")]
"""Of a probability ratio, or of e."""

Covariance = Annotated[float, Within(at_least=-1e6, at_most=1e6, why=_IN_FLOAT32)]
"""Nats times the unit of advantages."""

GateTemperature = Annotated[
    float, Within(above=0.0, at_most=1e3, usual=1.0, why="the gate is a step by then")
]
"""Of a sigmoid of a probability ratio."""

Probability = Annotated[
    float, Within(above=0.0, at_most=1.0, usual=0.2, why="no probability is above 1")
]

RatioCap = Annotated[float, Within(above=0.0, at_most=1e6, usual=2.0, why="it bounds nothing")]
"""Largest weight of a token or response, from a probability ratio."""

Veto = Annotated[float, Within(at_least=0.0, at_most=1.0, usual=1e-4, why="equal policies have 1")]
"""Smallest probability ratio; 0 is off."""

LogRange = Annotated[
    float, Within(above=0.0, at_most=20.0, usual=0.2, why="log-ratios are clamped to 20 nats")
]
"""Nats that a log-prob, or a divergence, may move."""

Seconds = Annotated[
    float,
    Within(
        above=0.0,
        at_most=1e6,
        usual=60.0,
        why="11 days; timers of the system count milliseconds in 31 bits",
    ),
]
"""A time limit. The sum of two still fits a timer: poll(2) takes 24 days."""

ArgumentValue = str | int | float | bool | None | tuple[str | int | float | bool, ...]
"""A value that another program reads, and that only this program can check."""
