"""The ``Sampler`` of the embedded engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hybridrl.sampler import RequestParams, Sample, Sampler, interrupted_sample
from hybridrl.workers.rollout.embedded.decoding import Decoding
from hybridrl.workers.rollout.embedded.requests import Request
from hybridrl.workers.rollout.request_gate import ProgramCall
from hybridrl.workers.rollout.sampling import check_request


@dataclass(frozen=True, slots=True)
class EmbeddedSampler(Sampler):
    """Queues requests for ``Decoding``, whose steps the event loop does while all tasks wait."""

    decoding: Decoding
    call: ProgramCall
    max_context_tokens: int
    vocab_size: int

    async def sample_group(
        self, token_ids: Sequence[int] | Tensor, params: RequestParams, *, keys: Sequence[int]
    ) -> list[Sample]:
        """See ``Sampler``."""
        return await self._request(token_ids, params, keys, is_continued=False)

    async def sample(
        self, token_ids: Sequence[int] | Tensor, params: RequestParams, *, key: int
    ) -> Sample:
        """See ``Sampler``. Its keys and values stay until another response needs the slot."""
        (only,) = await self._request(token_ids, params, (key,), is_continued=True)
        return only

    async def _request(
        self,
        token_ids: Sequence[int] | Tensor,
        params: RequestParams,
        keys: Sequence[int],
        *,
        is_continued: bool,
    ) -> list[Sample]:
        tokens_L = check_request(
            token_ids,
            params,
            num_responses=len(keys),
            max_context_tokens=self.max_context_tokens,
            vocab_size=self.vocab_size,
        )
        if self.call.is_interrupted:
            return [interrupted_sample(self.decoding.version)] * len(keys)
        with self.call.request(len(keys)):
            future: asyncio.Future[list[Sample]] = asyncio.get_running_loop().create_future()
            self.decoding.submit(Request(tokens_L, params, keys, is_continued, future))
            return await future
