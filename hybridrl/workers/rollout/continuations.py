"""Interrupted responses continue with the tokens that they have, each on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hybridrl.sampler import RequestParams, Sample, join_parts

Ask = Callable[[Tensor, RequestParams, Sequence[int]], Awaitable[list[Sample]]]
"""Samples continuations of one context, a key each; responses may be interrupted."""


async def sample_to_the_end(
    ask: Ask, token_ids: Sequence[int] | Tensor, params: RequestParams, keys: Sequence[int]
) -> list[Sample]:
    """Sample several continuations of one context, until none is interrupted any more.

    Those that ended stay as they are. A response keeps its key, so its random numbers are those
    of one that was not interrupted. For arguments see ``Sampler``.
    """
    context_L = torch.as_tensor(token_ids)
    samples = await ask(context_L, params, keys)
    while any(sample.is_interrupted for sample in samples):
        samples = await continue_once(ask, samples, context_L, params, keys)
    return samples


async def continue_once(
    ask: Ask,
    samples: Sequence[Sample],
    context_L: Tensor,
    params: RequestParams,
    keys: Sequence[int],
) -> list[Sample]:
    """Ask once for what interrupted responses lack; they may be interrupted again.

    Args:
        samples: the responses so far; those that ended stay.
        context_L: int64 [L], of all.
        params: of all, for responses without tokens.
    """
    joined = list(samples)

    async def ask_for(members: Sequence[int]) -> None:
        begun_L = samples[members[0]].token_ids
        left = replace(params, max_new_tokens=params.max_new_tokens - len(begun_L))
        context = torch.cat([context_L, begun_L])
        answers = await ask(context, left, [keys[index] for index in members])
        for index, answer in zip(members, answers, strict=True):
            joined[index] = join_parts(samples[index], answer)

    tasks = [asyncio.ensure_future(ask_for(members)) for members in _requests(samples)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return joined


def _requests(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the interrupted responses of each request: those without tokens share one."""
    empty: list[int] = []
    begun: list[int] = []
    for index, sample in enumerate(samples):
        if sample.is_interrupted:
            (begun if len(sample.token_ids) else empty).append(index)
    return [[index] for index in begun] + ([empty] if empty else [])
