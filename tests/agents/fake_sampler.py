from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hybridrl.agents.conversation import Prompt, Setting
from hybridrl.agents.templates import TurnTemplate
from hybridrl.agents.tool_calls import load_format
from hybridrl.agents.tool_process import ToolLimits
from hybridrl.agents.tools import Toolbox
from hybridrl.agents.trajectory import Trajectory
from hybridrl.data.rows import Row
from hybridrl.errors import EngineError
from hybridrl.sampler import RequestParams, Sample, Sampler, SampleRequest

ROW = Row(prompt="Q", answer="42", source="s", origin="o")
PROMPT = Prompt(row=ROW, token_ids=torch.tensor([65, 66, 67]), seed=5, response_index=1, number=0)


@dataclass(frozen=True, slots=True)
class Request:
    context: list[int]
    params: RequestParams
    key: int
    sample: Sample
    num_images: int = 0


@dataclass(slots=True)
class FakeSampler(Sampler):
    """Answers with the texts of the script, one after the other, cut at ``max_new_tokens``.

    A stop token of the request ends it before; a context with what was answered so far continues
    it. New weights come within each answer, behind its first token.
    """

    tokenizer: PreTrainedTokenizerBase
    script: list[str]
    max_context_tokens: int = 10_000
    requests: list[Request] = field(default_factory=list)
    unsaid: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    """By context: tokens behind a stop token."""

    async def answer(self, request: SampleRequest) -> list[Sample]:
        return [await self._answer(request, key) for key in request.keys]

    async def _answer(self, request: SampleRequest, key: int) -> Sample:
        context, params = request.token_ids.tolist(), request.params
        await asyncio.sleep(0)
        stop = self.tokenizer.eos_token_id
        answer = self.unsaid.pop(tuple(context), [])
        if not answer:
            answer = [*self.tokenizer.encode(self.script.pop(0), add_special_tokens=False), stop]
        end = next((n for n, t in enumerate(answer, 1) if t in params.stop_token_ids), len(answer))
        if answer[end:]:
            self.unsaid[*context, *answer[:end]] = answer[end:]
            answer = answer[:end]
        room = min(params.max_new_tokens, self.max_context_tokens - len(context))
        is_cut = len(answer) > room
        chosen = answer[:room]
        generator = random.Random(key)
        sample = Sample(
            token_ids=torch.tensor(chosen, dtype=torch.int64),
            logprobs=torch.tensor([-generator.random() - 1e-3 for _ in chosen]),
            finish_reason="length" if is_cut else "stop",
            weight_version=(version := len(self.requests)),
            weight_versions=torch.tensor([version, *[version + 1] * (len(chosen) - 1)]),
        )
        self.requests.append(Request(context, params, key, sample, len(request.images)))
        return sample


class Broken(FakeSampler):
    """An engine that fails at each request."""

    async def sample(self, *_: object, **__: object) -> Sample:
        raise EngineError("the engine failed")


def conversation_setting(
    sampler: FakeSampler, *, max_new_tokens: int = 2000, temperature: float = 1.0, **changes: Any
) -> Setting:
    tokenizer = sampler.tokenizer
    setting = Setting(
        sampler=sampler,
        params=RequestParams(max_new_tokens=max_new_tokens, temperature=temperature),
        max_prompt_tokens=8000,
        tokenizer=tokenizer,
        template=TurnTemplate(tokenizer, stop_token_ids=(tokenizer.eos_token_id,)),
        toolbox=Toolbox((), limits=ToolLimits(timeout_s=5.0, max_chars=100), num_processes=1),
        tool_format=load_format("hermes"),
        max_turns=20,
        timeout_s=60.0,
    )
    return replace(setting, **changes)


def require_as_sampled(trajectory: Trajectory, sampler: FakeSampler) -> None:
    """Compare the row that is trained with the sampler's records, position by position."""
    requests = [*sampler.requests]
    token_ids: list[int] = []
    logprobs: list[float | None] = []
    versions: list[int] = []
    begins = []
    for sequence in trajectory.sequences:
        begins.append(len(token_ids))
        token_ids += sequence.context.tolist()
        logprobs += [None] * len(sequence.context)
        for turn in sequence.turns:
            sampled = [r for r in requests if r.sample.logprobs is turn.logprobs]
            for request in sampled:
                requests.remove(request)
                assert request.context == token_ids[begins[-1] :]
                assert torch.equal(request.sample.token_ids, turn.token_ids)
                logprobs += request.sample.logprobs.tolist()
                versions += request.sample.versions_L.tolist()
            token_ids += turn.token_ids.tolist()
            logprobs += [None] * (len(token_ids) - len(logprobs))
    assert requests == []
    row, first = trajectory.to_sample(), len(trajectory.sequences[0].context)
    assert row.is_sampled is not None
    assert row.token_ids.tolist() == token_ids[first:]
    assert row.is_sampled.tolist() == [value is not None for value in logprobs[first:]]
    assert row.logprobs.tolist() == [value or 0.0 for value in logprobs[first:]]
    assert row.versions_L[row.is_sampled].tolist() == versions
    assert not versions or row.weight_version == versions[0]
    assert [*row.sequence_begins] == [begin - first for begin in begins[1:]]
