"""Compares mathematical answers by value: ``1/2`` equals ``\\frac{1}{2}``. Imports math-verify.

Runs in a reward process, which has a deadline: a hostile expression can keep a parser busy.
"""

from __future__ import annotations

try:
    import math_verify
except ImportError as err:
    raise ImportError(
        "reward.function=math needs math-verify: pip install 'hybridrl[math]', "
        "or set reward.function=exact_match"
    ) from err


def math(response: str, answer: str) -> float:
    r"""Give 1 to a response whose last expression or ``\boxed{}`` has the answer's value."""
    return float(math_verify.verify(math_verify.parse(f"${answer}$"), math_verify.parse(response)))
