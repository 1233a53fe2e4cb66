"""Strings that end a turn of the assistant. Engines know tokens: they pause where one may end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridrl.images import Images
from hybridrl.sampler import RequestParams, Sample, Sampler, join_parts


async def sample_up_to(
    stops: tuple[str, ...],
    sampler: Sampler,
    context: Tensor,
    params: RequestParams,
    *,
    key: int,
    images: Images,
    tokenizer: PreTrainedTokenizerBase,
) -> Sample:
    """Sample a turn up to the token that completes one of ``stops``, none of which is empty.

    A turn that a string ended lacks a stop token. Random numbers depend on positions alone, so the
    tokens are those of a turn that nobody ends. ``context`` is int64 [L].
    """
    if not stops:
        return await sampler.sample(context, params, key=key, images=images)
    pauses = _pauses(stops, tokenizer).difference(params.stop_token_ids)
    params = replace(params, stop_token_ids=(*params.stop_token_ids, *sorted(pauses)))
    sample = await sampler.sample(context, params, key=key, images=images)
    while sample.finish_reason == "stop" and int(sample.token_ids[-1]) in pauses:
        num_left = params.max_new_tokens - len(sample.token_ids)
        if num_left <= 0 or ends_with(stops, sample.token_ids, tokenizer):
            return replace(sample, finish_reason="length")
        continued = await sampler.sample(
            torch.cat([context, sample.token_ids]),
            replace(params, max_new_tokens=num_left),
            key=key,
            images=images,
        )
        sample = join_parts(replace(sample, finish_reason="interrupted"), continued)
    return sample


def ends_with(stops: Sequence[str], token_ids: Tensor, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether one of ``stops`` is in the text of the last tokens: each has a byte, at the least."""
    most = max((len(stop.encode()) for stop in stops), default=0)
    text: str = tokenizer.decode(token_ids[-most - 1 :])
    return any(stop in text for stop in stops)


@lru_cache(maxsize=64)
def _pauses(stops: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that may complete one of ``stops``."""
    ends = tuple({stop[begin:] for stop in stops for begin in range(len(stop))})
    # A token may have a part of a character: alone it is no text.
    marks = (*stops, *(() if "".join(stops).isascii() else ("\ufffd",)))
    return frozenset(
        token_id
        for token_id, text in enumerate(_texts(tokenizer))
        if text.startswith(ends) or any(mark in text for mark in marks)
    )


@lru_cache(maxsize=1)
def _texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    texts: list[str] = tokenizer.batch_decode([[index] for index in range(len(tokenizer))])
    return texts
