"""Intervals of numbers, written beside the field, and how messages spell them.

``ge``, ``gt``, ``le`` and ``lt`` are the ends. ``examples`` has one legal value, to propose where
the lowest is unusual or open.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, get_args

from pydantic import Field
from pydantic.fields import FieldInfo

_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def field_of(hint: object) -> FieldInfo | None:
    """Return the limits of a number, which may stand within ``... | None``; None if it has none."""
    if isinstance(hint, FieldInfo):
        return hint
    return next(filter(None, map(field_of, get_args(hint))), None)


def ends_of(hint: object) -> Mapping[str, float]:
    """Return the ends of a number's interval: ``{"gt": 0.0, "le": 1.0}``."""
    field = field_of(hint)
    metadata = field.metadata if field else []
    return {name: getattr(end, name) for end in metadata for name in _SIGNS if hasattr(end, name)}


def spell_interval(hint: object) -> str:
    """Return the interval of a number as ``> 0 and <= 1``; empty if it has none."""
    return " and ".join(f"{_SIGNS[name]} {_spell(end)}" for name, end in ends_of(hint).items())


def _spell(end: float) -> str:
    """Write an end so that it can be typed: an integer with all its digits."""
    return str(int(end)) if float(end).is_integer() else f"{end:g}"


Count = Annotated[int, Field(ge=1, le=10**9)]
CountOrZero = Annotated[int, Field(ge=0, le=10**9)]

Rows = Annotated[int, Field(ge=1, le=2**20)]
"""Prompts, responses or examples that are processed together."""

Epochs = Annotated[int, Field(ge=1, le=1000)]
"""Passes over the same rollouts."""

Ranks = Annotated[int, Field(ge=1, le=2**16)]
"""Machines, processes, or processes that share a resource."""

RanksOrZero = Annotated[int, Field(ge=0, le=2**16)]

Threads = Annotated[int, Field(ge=0, le=1024)]
"""Threads of one process; 0 leaves the choice to the library."""

Tokens = Annotated[int, Field(ge=1, le=2**24)]
"""Tokens of a prompt or of a response."""

TokensOrZero = Annotated[int, Field(ge=0, le=2**24)]

PackedTokens = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""Tokens of several rows, laid end to end."""

Width = Annotated[int, Field(ge=1, le=2**20)]
"""Columns inside a model."""

Layers = Annotated[int, Field(ge=1, le=10_000)]

MebibytesOrZero = Annotated[int, Field(ge=0, le=2**24)]

Processes = Annotated[int, Field(ge=1, le=1024)]

NotNegative = Annotated[float, Field(ge=0.0, le=1e6)]
"""A weight of a term in a float32 sum."""

PreferenceBeta = Annotated[float, Field(gt=0.0, le=1e3, examples=[0.1])]
"""Weight of the log-ratios of a preference pair."""

Discount = Annotated[float, Field(ge=0.0, le=1.0)]
"""Factor per token of the rewards to come."""

StdFloor = Annotated[float, Field(gt=0.0, le=1.0, examples=[1e-6])]
"""Reward units, added to a standard deviation before something is divided by it."""

ClipLow = Annotated[float, Field(gt=0.0, lt=1.0, examples=[0.2])]
"""Lower clip range of a probability ratio: ratio >= 1 - clip_low."""

ClipHigh = Annotated[float, Field(gt=0.0, le=1e6, examples=[0.2])]
"""Upper clip range of a probability ratio: ratio <= 1 + clip_high."""

DualClip = Annotated[float, Field(ge=0.0, le=1e6, examples=[3.0])]
"""Bound of the ratio of tokens with a negative advantage; 0 is off."""

Share = Annotated[float, Field(gt=0.0, le=1.0, examples=[0.2])]
"""Of the tokens of a micro-batch."""

Exponent = Annotated[float, Field(ge=0.0, le=100.0)]
"""Of a probability ratio, or of e."""

Covariance = Annotated[float, Field(ge=-1e6, le=1e6)]
"""Nats times the unit of advantages."""

GateTemperature = Annotated[float, Field(gt=0.0, le=1e3, examples=[1.0])]
"""Of a sigmoid of a probability ratio."""

Probability = Annotated[float, Field(gt=0.0, le=1.0, examples=[0.2])]

RatioCap = Annotated[float, Field(gt=0.0, le=1e6, examples=[2.0])]
"""Largest weight of a token or response, from a probability ratio."""

Veto = Annotated[float, Field(ge=0.0, le=1.0, examples=[1e-4])]
"""Smallest probability ratio; 0 is off."""

LogRange = Annotated[float, Field(gt=0.0, le=20.0, examples=[0.2])]
"""Nats that a log-prob, or a divergence, may move."""

Seconds = Annotated[float, Field(gt=0.0, le=1e6, examples=[60.0])]
"""A time limit. The sum of two still fits a timer: poll(2) takes 24 days."""

ArgumentValue = str | int | float | bool | None | tuple[str | int | float | bool, ...]
"""A value that another program reads, and that only this program can check."""

Name = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,39}$",
        description="a name has 1 to 40 letters, digits, - and _, and begins with a letter",
    ),
]
"""Of a section of the user's: it becomes part of metrics and keys."""

_ArgumentName = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="must be named as a Python argument: letters, digits and underscores",
    ),
]

Arguments = Mapping[_ArgumentName, ArgumentValue]
"""Arguments of another program, or of a function, by their names there."""
