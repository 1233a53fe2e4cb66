"""A sampler that plays a script of texts and records all that it was asked and answered."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridrl.sampler import RequestParams, Sample


@dataclass(frozen=True, slots=True)
class Request:
    """One request, and the sample that answered it."""

    context: list[int]
    params: RequestParams
    key: int
    sample: Sample


@dataclass(slots=True)
class FakeSampler:
    """Answers with the texts of the script, one after the other, cut at ``max_new_tokens``."""

    tokenizer: PreTrainedTokenizerBase
    script: list[str]
    max_context_tokens: int = 10_000
    requests: list[Request] = field(default_factory=list)

    async def sample(
        self, token_ids: Sequence[int] | Tensor, params: RequestParams, *, key: int
    ) -> Sample:
        context = torch.as_tensor(token_ids).tolist()
        await asyncio.sleep(0)
        stop = self.tokenizer.eos_token_id
        answer = [*self.tokenizer.encode(self.script.pop(0), add_special_tokens=False), stop]
        room = min(params.max_new_tokens, self.max_context_tokens - len(context))
        is_cut = len(answer) > room
        chosen = answer[:room]
        generator = random.Random(key)
        sample = Sample(
            token_ids=torch.tensor(chosen, dtype=torch.int64),
            logprobs=torch.tensor([-generator.random() - 1e-3 for _ in chosen]),
            finish_reason="length" if is_cut else "stop",
            weight_version=3,
        )
        self.requests.append(Request(context, params, key, sample))
        return sample

    async def sample_group(
        self, token_ids: Sequence[int] | Tensor, params: RequestParams, *, keys: Sequence[int]
    ) -> list[Sample]:
        return [await self.sample(token_ids, params, key=key) for key in keys]
