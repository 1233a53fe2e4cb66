"""Chats of any form: the trained tokens are the sampled tokens."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.agents.chat import RefusedRequest, completion, read_request
from hybridrl.agents.conversation import Conversation
from hybridrl.agents.proxy_server import Chats
from hybridrl.agents.trajectory import Trajectory
from tests.agents.chat_templates import FAMILIES, build_tokenizer
from tests.agents.fake_sampler import FakeSampler
from tests.agents.proxy_clients import PROMPT, TOOL, require_as_sampled, setting_of

TOKENIZERS = {family: build_tokenizer(family) for family in FAMILIES}
CALL = '<tool_call>{"name": "add", "arguments": {"text": "TEXT"}}</tool_call>'

Step = tuple[int, str, str, int | None]
"""The chat that goes on, role and text of the new message, and the limit of the answer."""


async def _play(sampler: FakeSampler, steps: list[Step]) -> Trajectory:
    """Continue any chat that is known by then, the empty one among them."""
    setting = setting_of(sampler, max_new_tokens=1500)
    conversation = Conversation(PROMPT, setting)
    chats = Chats(conversation, setting.template, setting.tokenizer, history=setting.history)
    known: list[list[Any]] = [[]]
    for number, role, text, limit in steps:
        chat = [*known[number % len(known)], {"role": role, "content": text}]
        body = {"model": "m", "messages": chat, "tools": [TOOL], "max_tokens": limit}
        try:
            request = read_request(json.dumps(body).encode(), model="m", temperature=0.8, top_p=1.0)
            answer = await chats.ask(request)
        except RefusedRequest:  # a limit, or a template that does not have the role there
            continue
        (choice,) = json.loads(completion(answer, request, header={}))["choices"]
        known.append([*chat, choice["message"]])
    return conversation.to_trajectory()


@settings(max_examples=150)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    answers=st.lists(st.text(max_size=8), min_size=8, max_size=8),
    steps=st.lists(
        st.tuples(
            st.integers(0, 7),
            st.sampled_from(("user", "user", "tool")),
            st.text(max_size=8),
            st.none() | st.integers(1, 60),
        ),
        max_size=8,
    ),
)
def test_trained_tokens_of_chats_are_the_sampled_tokens(
    family: str, answers: list[str], steps: list[Step]
) -> None:
    script = [text if len(text) % 2 else CALL.replace("TEXT", text) for text in answers]
    sampler = FakeSampler(TOKENIZERS[family], script)

    trajectory = asyncio.run(_play(sampler, steps))

    if sampler.requests:
        require_as_sampled(trajectory, sampler)
    row = trajectory.to_sample()
    assert row.is_sampled is not None
    sampled = [request.sample for request in sampler.requests]
    assert int(row.is_sampled.sum()) == sum(len(sample.token_ids) for sample in sampled)
    assert row.context is not None
    # The context that was begun first need not be the first one here: last turns order sequences.
    longest = max(len(sequence.context) for sequence in trajectory.sequences)
    assert len(row.context) + len(row.token_ids) <= longest + 1500
