"""Strings that end an answer, which is cut behind a token: those before it stay as sampled."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from hybridrl.sampler import Sample


def cut_behind(sample: Sample, stops: Sequence[str], decode: Callable[[Tensor], str]) -> Sample:
    """Drop the tokens behind the one that completes the first stop string.

    The engine samples to the end of the turn, and knows nothing of strings: the tokens up to here
    do not depend on those behind them.

    Args:
        stops: not empty strings; may be none.

    Returns:
        The sample itself if its text has none of the strings; else one that lacks a stop token.
    """
    token_ids = sample.token_ids if sample.is_truncated else sample.token_ids[:-1]

    def has_stop(num_tokens: int) -> bool:
        return text_before(decode(token_ids[:num_tokens]), stops) is not None

    if not stops or not has_stop(len(token_ids)):
        return sample
    num_tokens = bisect_left(range(len(token_ids)), 1, key=has_stop)
    return replace(
        sample,
        token_ids=token_ids[:num_tokens],
        logprobs=sample.logprobs[:num_tokens],
        finish_reason="length",
    )


def text_before(text: str, stops: Sequence[str]) -> str | None:
    """Return a text up to the first stop string in it; None if it has none."""
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else None
