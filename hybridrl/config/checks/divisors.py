"""Divisors and multiples near a number, by arithmetic: quick for numbers of any size."""

from __future__ import annotations

import math

_LARGEST_TRIED = 2**12


def divisors_of(number: int) -> list[int]:
    """Return divisors of ``number`` (1 or more), in ascending order.

    Up to 2^24 all of them. For a larger number those with a factor of at most 2^12, and the
    number itself: enough for a proposal, in bounded time.
    """
    small = [n for n in range(1, min(math.isqrt(number), _LARGEST_TRIED) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def multiples_near(number: int, step: int) -> tuple[int, int]:
    """Return the multiples of ``step`` around ``number``: the last up to it, and the next."""
    below = number // step * step
    return below, below + step
