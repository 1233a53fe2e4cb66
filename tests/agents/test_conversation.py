"""Conversations: the tokens that are trained are those that were sampled."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from hybridrl.agents.conversation import Agent, Conversation, Prompt, Setting, hold
from hybridrl.agents.rollout import ToolCalls
from hybridrl.agents.templates import History
from hybridrl.agents.tool_calls import PARSERS
from hybridrl.agents.tool_process import ToolLimits
from hybridrl.agents.tools import Toolbox, load_tools
from hybridrl.agents.trajectory import Trajectory
from hybridrl.data.rows import Message, Row
from hybridrl.errors import EngineError
from hybridrl.sampler import RequestParams, Sample
from tests.agents.chat_templates import FAMILIES, build_tokenizer
from tests.agents.fake_sampler import FakeSampler, conversation_setting

TOKENIZERS = {family: build_tokenizer(family) for family in FAMILIES}
ROW = Row(prompt="Q", answer="42", source="s", origin="o")
PROMPT = Prompt(row=ROW, token_ids=torch.tensor([65, 66, 67]), seed=5, response_index=1, number=0)
TOOLBOX = Toolbox(
    load_tools(["calculator"]), limits=ToolLimits(timeout_s=5.0, max_chars=100), num_processes=1
)


def _setting(sampler: FakeSampler, *, style: str = "hermes", **changes: Any) -> Setting:
    given: dict[str, Any] = {"toolbox": TOOLBOX, "max_turns": 6, "parse": PARSERS[style]} | changes
    return conversation_setting(sampler, **given)


def _hold(agent: Agent, setting: Setting) -> Trajectory:
    return asyncio.run(hold(agent, PROMPT, setting))


def _require_as_sampled(trajectory: Trajectory, sampler: FakeSampler) -> None:
    """Compare the row that is trained with the sampler's records, position by position."""
    row = trajectory.to_sample()
    token_ids, logprobs = row.token_ids.tolist(), row.logprobs.tolist()
    assert row.is_sampled is not None
    is_sampled = row.is_sampled.tolist()
    assert len(token_ids) == len(logprobs) == len(is_sampled)
    prompt = PROMPT.token_ids.tolist()
    known: set[int] = set()
    for request in sampler.requests:
        begin = len(request.context) - len(prompt)
        end = begin + len(request.sample.token_ids)
        assert prompt + token_ids[:begin] == request.context
        assert token_ids[begin:end] == request.sample.token_ids.tolist()
        assert logprobs[begin:end] == request.sample.logprobs.tolist()
        known.update(range(begin, end))
    assert [index in known for index in range(len(token_ids))] == is_sampled
    assert all(logprobs[index] == 0.0 for index in range(len(token_ids)) if index not in known)


def test_the_model_reads_results_and_answers() -> None:
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*7"}}\n</tool_call>'
    broken = "<tool_call>\n{}\n</tool_call>"
    tokenizer = TOKENIZERS["qwen2.5"]
    sampler = FakeSampler(tokenizer, [call, broken, "It is 84."])

    trajectory = _hold(ToolCalls(), _setting(sampler))

    texts = [tokenizer.decode(turn.token_ids) for turn in trajectory.turns]
    assert texts[1] == (
        "\n<|im_start|>user\n<tool_response>\n84\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert "Error: the call '{}' cannot be read" in texts[3]
    assert texts[4] == "It is 84.<|im_end|>"
    assert trajectory.ended == "answer"
    assert not trajectory.to_sample().is_truncated
    assert (trajectory.num_tool_calls, trajectory.num_tool_errors) == (2, 1)


@dataclass(frozen=True, slots=True)
class ByFunction:
    """An agent that is one function."""

    function: Callable[[Conversation], Awaitable[None]]
    appended_roles: Sequence[str] = ("user",)

    async def run(self, conversation: Conversation) -> None:
        await self.function(conversation)


async def _forever(conversation: Conversation) -> None:
    while True:
        await conversation.sample()
        conversation.append([Message("user", "Go on")])


async def _forever_and_deaf(conversation: Conversation) -> None:
    for _ in range(100):
        try:
            await conversation.sample()
        except Exception:
            break
        conversation.append([Message("user", "Go on")])


async def _verbose(conversation: Conversation) -> None:
    """Appends more than may follow, and asks for no answer."""
    await conversation.sample()
    conversation.append([Message("user", "on " * 40)])


async def _raising(conversation: Conversation) -> None:
    await conversation.sample()
    raise KeyError("x")


async def _sleeping(conversation: Conversation) -> None:
    await conversation.sample()
    await asyncio.sleep(1000)


async def _silent(conversation: Conversation) -> None:
    pass


@pytest.mark.parametrize(
    ("function", "limited", "ended", "num_turns"),
    [
        (_forever, lambda s: replace(s, max_turns=3), "turns", 3),
        (_forever_and_deaf, lambda s: replace(s, max_turns=3), "turns", 3),
        (_forever, lambda s: replace(s, params=RequestParams(40, 1.0)), "tokens", 2),
        (_forever, lambda s: replace(s, params=RequestParams(2, 1.0)), "tokens", 1),
        (_verbose, lambda s: replace(s, params=RequestParams(40, 1.0)), "tokens", 1),
        (_sleeping, lambda s: replace(s, timeout_s=0.2), "time", 1),
        (_raising, lambda s: s, "error", 1),
        (_silent, lambda s: s, "error", 1),
    ],
    ids=[
        "turns",
        "caught",
        "tokens behind a turn",
        "tokens in a turn",
        "tokens appended",
        "time",
        "raises",
        "silent",
    ],
)
def test_a_limit_ends_a_conversation_as_truncated_and_an_error_as_failed(
    function: Callable[[Conversation], Awaitable[None]],
    limited: Callable[[Setting], Setting],
    ended: str,
    num_turns: int,
) -> None:
    sampler = FakeSampler(TOKENIZERS["qwen2.5"], ["Hello"] * 20)
    setting = limited(_setting(sampler))

    trajectory = _hold(ByFunction(function), setting)

    assert trajectory.ended == ended
    assert trajectory.to_sample().is_truncated == (ended != "error")
    assert trajectory.to_sample().is_failed == (ended == "error")
    assert trajectory.num_sampled_turns == num_turns
    _require_as_sampled(trajectory, sampler)


async def _rewarding(conversation: Conversation) -> None:
    with pytest.raises(ValueError, match="no turn was sampled"):
        conversation.reward(1.0)
    await conversation.sample()
    conversation.append([Message("user", "Go on")])
    conversation.reward(0.5)
    conversation.reward(0.25)
    await conversation.sample()
    num_tokens = len(conversation.last_turn.token_ids)
    conversation.reward([float(n) for n in range(num_tokens)])
    for value in (float("nan"), [1.0], "much", 1e39):
        with pytest.raises(ValueError, match=r"of its 3 tokens|could not convert"):
            conversation.reward(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("history", ["keep", "branch"])
def test_rewards_come_with_their_turn(history: History) -> None:
    sampler = FakeSampler(TOKENIZERS["qwen3"], ["Hello", "Hi"])
    setting = replace(_setting(sampler), history=history)

    sample = _hold(ByFunction(_rewarding), setting).to_sample()

    assert sample.rewards is not None
    assert sample.is_sampled is not None
    first, second = len(sampler.requests[0].sample.token_ids), 3
    rewards = sample.rewards[sample.is_sampled].tolist()
    assert rewards == [0.0] * (first - 1) + [0.75] + [float(n) for n in range(second)]
    assert not sample.rewards[~sample.is_sampled].any()


def test_the_engine_context_is_a_limit() -> None:
    sampler = FakeSampler(TOKENIZERS["llama3"], ["Hello"] * 20, max_context_tokens=50)

    trajectory = _hold(ByFunction(_forever), _setting(sampler))

    assert trajectory.ended == "tokens"
    assert len(PROMPT.token_ids) + len(trajectory.to_sample().token_ids) <= 50


def test_an_error_of_the_engine_is_not_the_agents() -> None:
    class Failing(FakeSampler):
        async def sample(self, *_: object, **__: object) -> Sample:
            raise EngineError("the engine is gone")

    sampler = Failing(TOKENIZERS["qwen2.5"], [])

    for function in (_forever, _forever_and_deaf):
        with pytest.raises(EngineError, match="the engine is gone"):
            _hold(ByFunction(function), _setting(sampler))


class TriesForEver:
    """Catches all errors, and asks again."""

    appended_roles = ("user",)

    async def run(self, conversation: Conversation) -> None:
        while True:
            try:
                await conversation.sample()
                conversation.append([Message("user", "again")])
            except Exception:
                continue


class Exits:
    """Ends its process."""

    appended_roles = ("user",)

    async def run(self, conversation: Conversation) -> None:
        await conversation.sample()
        sys.exit(3)


class LosesItsConnection:
    """Raises what clients raise where a connection closes."""

    appended_roles = ("user",)

    async def run(self, conversation: Conversation) -> None:
        await conversation.sample()
        raise asyncio.CancelledError("the connection closed")


@pytest.mark.parametrize(
    ("agent", "ended"),
    [(TriesForEver(), "turns"), (Exits(), "error"), (LosesItsConnection(), "error")],
)
def test_an_agent_that_never_stops_or_exits_ends_alone(agent: Agent, ended: str) -> None:
    sampler = FakeSampler(TOKENIZERS["qwen2.5"], ["one", "two", "three"])

    trajectory = _hold(agent, _setting(sampler, max_turns=3))

    assert trajectory.ended == ended
    _require_as_sampled(trajectory, sampler)
