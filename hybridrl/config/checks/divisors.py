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


def divisors_near(number: int, wanted: int, *, at_most: int, count: int) -> list[int]:
    """Return up to ``count`` divisors of ``number`` in [1, at_most], nearest to ``wanted`` first.

    ``wanted`` itself is left out. Distance is the ratio, so that 8 -> 16 is as far as 8 -> 4.
    Everything divides 0: for 0 the numbers around ``wanted`` are returned.
    """
    if number:
        divisors = divisors_of(number)
    else:
        middle = min(wanted, at_most)
        divisors = list(range(max(1, middle - count), min(middle + count, at_most) + 1))
    legal = [n for n in divisors if n <= at_most and n != wanted]
    return sorted(legal, key=lambda n: abs(math.log(n / wanted)))[:count]
