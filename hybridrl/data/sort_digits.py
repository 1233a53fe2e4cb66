"""A verifiable task that needs no download: sort digits, ``31415=`` -> ``11345``."""

from __future__ import annotations

import hashlib
import random
from typing import Literal

from hybridrl.data.rows import Row
from hybridrl.errors import DataError

Split = Literal["train", "eval"]
_EVAL_SHARE = 8  # one number in eight
_MAX_TRIES = 10_000


def build_sort_digits_rows(
    num_rows: int,
    *,
    split: Split,
    seed: int,
    min_digits: int,
    max_digits: int,
    with_rejected: bool = False,
) -> list[Row]:
    """Make rows; the same arguments make the same rows.

    Whether a number is for training or for evaluation depends on the number alone, so the two never
    meet, whatever the seeds: also not when the starting model is warmed up on training rows. Short
    numbers are few, and repeat.

    Args:
        split: ``eval`` numbers are one in eight of all.
        min_digits: shortest number, >= 1. Lengths are uniform.
        with_rejected: make preference pairs: the rejected answer has one other digit.

    Raises:
        DataError: no number of some length belongs to ``split``.
    """
    source = random.Random(f"sort_digits {split} {seed}")
    errors = random.Random(f"sort_digits rejected {split} {seed}")
    rows = []
    for index in range(num_rows):
        number = _draw(source, split=split, num_digits=source.randint(min_digits, max_digits))
        answer = "".join(sorted(number))
        rows.append(
            Row(
                prompt=f"{number}=",
                answer=answer,
                rejected=_with_error(answer, errors) if with_rejected else None,
                source="sort_digits",
                origin=f"sort_digits/{split}:{index + 1}",
            )
        )
    return rows


def _draw(source: random.Random, *, split: Split, num_digits: int) -> str:
    for _ in range(_MAX_TRIES):
        number = str(source.randrange(10 ** (num_digits - 1), 10**num_digits))
        if _split_of(number) == split:
            return number
    raise DataError(
        f"sort_digits has no number of {num_digits} digits for {split}; set data.min_digits=2"
    )


def _with_error(answer: str, source: random.Random) -> str:
    at = source.randrange(len(answer))
    other = source.choice("0123456789".replace(answer[at], ""))
    return answer[:at] + other + answer[at + 1 :]


def _split_of(number: str) -> Split:
    digest = hashlib.blake2b(number.encode(), digest_size=1).digest()
    return "eval" if digest[0] % _EVAL_SHARE == 0 else "train"
