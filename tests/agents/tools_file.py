"""Tools of a user: some work, some misbehave."""

from __future__ import annotations

import asyncio
import enum
import os
import sys
import time
from typing import Literal


def double(number: int, times: int = 1) -> int:
    """Double a number.

    Args:
        number: The number
        times: How often
    """
    return number * 2**times


def misbehave(how: Literal["hang", "raise", "flood", "unencodable", "object", "die"]) -> object:
    """Do something bad.

    Args:
        how: What to do
    """
    match how:
        case "hang":
            time.sleep(1000)
        case "raise":
            raise ValueError("no such city: \ud800")
        case "flood":
            return "x" * 10**9
        case "unencodable":
            return "\ud800é"
        case "object":
            return object()
        case "die":
            os._exit(3)
    return "done"


def shout() -> str:
    """Print a gigabyte."""
    block = "x" * 10**6
    for _ in range(1000):
        sys.stdout.write(block)
    return "done"


async def wait_for(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long
    """
    await asyncio.sleep(seconds)
    return "waited"


async def explode() -> str:
    """Raise."""
    raise RuntimeError("boom")


async def leave() -> str:
    """Leave."""
    sys.exit(1)


async def disconnect() -> str:
    """Lose the connection, as some clients say it."""
    raise asyncio.CancelledError("the connection closed")


async def persist() -> str:
    """Try again for ever, and never let itself be cancelled."""
    while True:
        try:
            await asyncio.sleep(0.2)
        except:  # noqa: E722 - as users write it
            continue


class Colour(enum.Enum):
    RED = 1


def paint(colour: Colour) -> str:
    """Paint.

    Args:
        colour: The colour
    """
    return str(colour)


def sum_all(*numbers: int) -> int:
    """Add.

    Args:
        numbers: The numbers
    """
    return sum(numbers)


def undocumented(number: int) -> int:
    return number


async def echo(text: str) -> str:
    """Repeat a text, with an answer of its own.

    Args:
        text: The text
    """
    return f"{text}\u00e9 \U0001f600 <|im_end|>{text[::-1]}"
