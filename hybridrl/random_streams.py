"""Random numbers of responses: each depends on prompt, response, turn and position alone.

Legend: N responses.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

Bits = TypeVar("Bits", Tensor, int)

_UINT64 = 1 << 64
_UNIFORM_BITS = 52


def _signed(value: int) -> int:
    return value - _UINT64 if value >= _UINT64 // 2 else value


# The increment and the multipliers of splitmix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom
# Number Generators", OOPSLA 2014), as int64: torch multiplies those modulo 2**64, as required.
_INCREMENT = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def _shift_right(bits_N: Bits, count: int) -> Bits:
    # ">>" copies the sign bit of an int64; the mask makes it the unsigned shift of the paper.
    return (bits_N >> count) & ((1 << (64 - count)) - 1)


def _mix(bits_N: Bits) -> Bits:
    # Of an int, which does not overflow, the lowest 64 bits are those of an int64.
    bits_N = (bits_N ^ _shift_right(bits_N, 30)) * _MULTIPLIER_1
    bits_N = (bits_N ^ _shift_right(bits_N, 27)) * _MULTIPLIER_2
    return bits_N ^ _shift_right(bits_N, 31)


def _key(seed_N: Bits, sibling_N: Bits) -> Bits:
    return _mix(_mix(seed_N + _INCREMENT) + (sibling_N + 1) * _INCREMENT)


def response_keys(seed_N: Tensor, sibling_N: Tensor) -> Tensor:
    """Name the random stream of each response for ``uniforms``; all int64 [N].

    The stream depends on the seed of the prompt, and on the response's index among those to it.
    """
    return _key(seed_N, sibling_N)


def request_key(seed: int, response_index: int, *, turn: int = 0) -> int:
    """Name the random stream of a response in a conversation, as ``response_keys`` in turn 0."""
    key = _key(seed, response_index)
    return _signed((_key(key, turn) if turn else key) % _UINT64)  # a tensor takes 0.1 ms


def uniforms(key_N: Tensor, position_N: Tensor) -> Tensor:
    """Return the random number of one token of each response; equal inputs give equal numbers.

    Args:
        key_N: int64 [N], from ``response_keys``.
        position_N: int64 [N], position of the token in prompt + response, from 0.

    Returns:
        float64 [N], multiples of 2**-52 in [0, 1).
    """
    bits_N = _mix(key_N + (position_N + 1) * _INCREMENT)
    return _shift_right(bits_N, 64 - _UNIFORM_BITS).double() * 2.0**-_UNIFORM_BITS
