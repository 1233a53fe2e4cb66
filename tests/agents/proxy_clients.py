"""A conversation whose chats come over HTTP, and clients for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import torch

from hybridrl.agents.conversation import Conversation, Prompt, Setting
from hybridrl.agents.proxy_server import MODEL, Chats, ProxyServer, serve
from hybridrl.agents.templates import History
from hybridrl.agents.trajectory import Trajectory
from hybridrl.data.rows import Row
from tests.agents.fake_sampler import FakeSampler, conversation_setting

ROW = Row(prompt="Q", answer="42", source="s", origin="o")
PROMPT = Prompt(row=ROW, token_ids=torch.tensor([65, 66, 67]), seed=5, response_index=1, number=0)
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}


def setting_of(
    sampler: FakeSampler, *, max_new_tokens: int = 2000, history: History = "keep"
) -> Setting:
    return conversation_setting(
        sampler, max_new_tokens=max_new_tokens, temperature=0.8, history=history
    )


@dataclass(frozen=True, slots=True)
class Client:
    """A client with the key of a conversation."""

    session: aiohttp.ClientSession
    server: ProxyServer
    key: str
    conversation: Conversation

    async def post(self, **fields: object) -> tuple[int, Any]:
        """Return status and answer of a request."""
        url = f"{self.server.address}/chat/completions"
        body = {"model": MODEL, **fields}
        async with self.session.post(url, json=body, headers=self.headers) as response:
            return response.status, await response.json()

    @property
    def headers(self) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    async def ask(self, *messages: Mapping[str, object], **fields: object) -> Mapping[str, Any]:
        """Return the message that answers a chat."""
        status, answer = await self.post(messages=messages, **fields)
        assert status == 200, answer
        message: Mapping[str, Any] = answer["choices"][0]["message"]
        return message

    def trajectory(self) -> Trajectory:
        return self.conversation.to_trajectory()


@asynccontextmanager
async def served(setting: Setting) -> AsyncIterator[Client]:
    """Serve the chats of one conversation."""
    conversation = Conversation(PROMPT, setting)
    chats = Chats(conversation, setting.template, setting.tokenizer, history=setting.history)
    limit = setting.sampler.max_context_tokens
    async with (
        serve(setting.params, max_context_tokens=limit) as server,
        aiohttp.ClientSession() as session,
    ):
        yield Client(session, server, server.open(chats.ask), conversation)


def user(text: str) -> Mapping[str, object]:
    return {"role": "user", "content": text}


def tool(text: str) -> Mapping[str, object]:
    return {"role": "tool", "tool_call_id": "call_0", "content": text}


def require_as_sampled(trajectory: Trajectory, sampler: FakeSampler) -> None:
    """Compare every sequence with the sampler's records, position by position."""
    requests = list(sampler.requests)
    for sequence in trajectory.sequences:
        context = sequence.context
        for turn in sequence.turns:
            if turn.logprobs is not None:
                (request,) = [r for r in requests if r.sample.logprobs is turn.logprobs]
                requests.remove(request)
                assert request.context == context.tolist()
                assert torch.equal(request.sample.token_ids, turn.token_ids)
            context = torch.cat([context, turn.token_ids])
    assert requests == []
