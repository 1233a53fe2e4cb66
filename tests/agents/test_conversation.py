from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.agents.conversation import (
    Agent,
    Conversation,
    ConversationEnded,
    Prompt,
    Setting,
    hold,
)
from hybridrl.agents.rollout import ToolCalls
from hybridrl.agents.templates import History, TurnTemplate
from hybridrl.agents.tool_calls import load_format
from hybridrl.agents.tool_process import ToolLimits
from hybridrl.agents.tools import Toolbox, load_tools
from hybridrl.agents.trajectory import Trajectory
from hybridrl.data.prompts import render_chat
from hybridrl.data.rows import Message, Row
from hybridrl.errors import AgentError, EngineError
from hybridrl.sampler import RequestParams, Sample
from tests.agents.chat_templates import FAMILIES, QWEN3, build_tokenizer
from tests.agents.fake_sampler import FakeSampler, conversation_setting, require_as_sampled

TOKENIZERS = {family: build_tokenizer(family) for family in FAMILIES}
ROW = Row(prompt="Q", answer="42", source="s", origin="o")
PROMPT = Prompt(row=ROW, token_ids=torch.tensor([65, 66, 67]), seed=5, response_index=1, number=0)
TOOLBOX = Toolbox(
    load_tools(["calculator"]), limits=ToolLimits(timeout_s=5.0, max_chars=100), num_processes=1
)


def _setting(sampler: FakeSampler, *, style: str = "hermes", **changes: Any) -> Setting:
    given: dict[str, Any] = {"toolbox": TOOLBOX, "max_turns": 6, **changes}
    given.setdefault("tool_format", load_format(style))
    return conversation_setting(sampler, **given)


def _hold(agent: Agent, setting: Setting) -> Trajectory:
    return asyncio.run(hold(agent, PROMPT, setting))


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
    require_as_sampled(trajectory, sampler)


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


def test_an_error_of_the_engine_is_not_the_agents() -> None:
    class Failing(FakeSampler):
        async def sample(self, *_: object, **__: object) -> Sample:
            raise EngineError("the engine is gone")

    sampler = Failing(TOKENIZERS["qwen2.5"], [])
    for function in (_forever, _forever_and_deaf):
        with pytest.raises(EngineError, match="the engine is gone"):
            _hold(ByFunction(function), _setting(sampler))


class TriesForEver:
    appended_roles = ("user",)

    async def run(self, conversation: Conversation) -> None:
        while True:
            try:
                await conversation.sample()
                conversation.append([Message("user", "again")])
            except Exception:
                continue


class Exits:
    appended_roles = ("user",)

    async def run(self, conversation: Conversation) -> None:
        await conversation.sample()
        sys.exit(3)


class LosesItsConnection:
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
    require_as_sampled(trajectory, sampler)


THOUGHT = "<think>\nhm\n</think>\n\n"


class Appends:
    appended_roles = ("tool", "user")

    def __init__(self, script: Sequence[Message]) -> None:
        self._script = script

    async def run(self, conversation: Conversation) -> None:
        for message in self._script:
            await conversation.sample()
            conversation.append([message])
        await conversation.sample()


def _question(sampler: FakeSampler) -> Prompt:
    text = render_chat([Message("user", "Q")], sampler.tokenizer, origin="o")
    token_ids = sampler.tokenizer.encode(text, add_special_tokens=False)
    return replace(PROMPT, token_ids=torch.tensor(token_ids))


def _branching(sampler: FakeSampler, max_new_tokens: int = 4000) -> Setting:
    return conversation_setting(
        sampler, max_new_tokens=max_new_tokens, history="branch", max_turns=8
    )


def _append_all(
    sampler: FakeSampler, script: Sequence[Message], max_new_tokens: int = 4000
) -> Trajectory:
    agent, setting = Appends(script), _branching(sampler, max_new_tokens)
    return asyncio.run(hold(agent, _question(sampler), setting))


@settings(max_examples=60)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    texts=st.lists(st.text(max_size=6), min_size=1, max_size=5),
    thinks=st.lists(st.booleans(), min_size=6, max_size=6),
    roles=st.lists(st.sampled_from(["tool", "user"]), min_size=5, max_size=5),
    max_new_tokens=st.integers(1, 900),
)
def test_each_sampled_token_is_in_one_sequence(
    *, family: str, texts: list[str], thinks: list[bool], roles: list[str], max_new_tokens: int
) -> None:
    spoken = zip(thinks, [*texts, "42"], strict=False)
    turns = [THOUGHT * thought + text for thought, text in spoken]
    sampler = FakeSampler(TOKENIZERS[family], turns)
    script = [Message(role, text) for role, text in zip(roles, texts, strict=False)]
    trajectory = _append_all(sampler, script, max_new_tokens=max_new_tokens)
    require_as_sampled(trajectory, sampler)
    sample = trajectory.to_sample()
    assert len(sample.token_ids) <= max_new_tokens
    assert len(trajectory.sequences) == 1 or family == "qwen3"


def test_a_new_sequence_begins_with_the_rendered_history() -> None:
    tokenizer = TOKENIZERS["qwen3"]
    sampler = FakeSampler(tokenizer, [THOUGHT + "a", THOUGHT + "b", THOUGHT + "c"])
    script = [Message("tool", "1"), Message("user", "more<|im_end|>")]
    trajectory = _append_all(sampler, script)
    first, second = trajectory.sequences
    assert [turn.logprobs is None for turn in first.turns] == [False, True, False]
    assert tokenizer.decode(second.context) == (
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\n"
        "<tool_response>\n1\n</tool_response><|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nmore< |im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(second.turns[0].token_ids) == THOUGHT + "c<|im_end|>"
    require_as_sampled(trajectory, sampler)


async def test_an_agent_holds_sequences_side_by_side() -> None:
    sampler = FakeSampler(TOKENIZERS["qwen2.5"], ["a", "b", "c"])
    conversation = Conversation(_question(sampler), _branching(sampler))
    one, other = (conversation.begin(torch.tensor([65, 66 + n])) for n in range(2))
    await asyncio.gather(conversation.sample_turn(other), conversation.sample_turn(one))
    conversation.append_tokens(one, torch.tensor([70]))
    await conversation.sample_turn(one)
    conversation.begin(torch.tensor([80]))  # nothing is sampled behind it
    trajectory = conversation.to_trajectory()
    assert [sequence.context.tolist() for sequence in trajectory.sequences] == [[65, 67], [65, 66]]
    assert trajectory.ended == "answer"
    assert len({request.key for request in sampler.requests}) == 3
    require_as_sampled(trajectory, sampler)


async def test_a_reward_behind_new_messages_is_of_the_turn_before() -> None:
    sampler = FakeSampler(TOKENIZERS["qwen3"], [THOUGHT + "a", THOUGHT + "b"])
    conversation = Conversation(_question(sampler), _branching(sampler))
    await conversation.sample()
    conversation.append([Message("user", "more")])
    conversation.reward(0.5)
    await conversation.sample()
    trajectory = conversation.to_trajectory()
    first, second = trajectory.turns
    assert first.rewards is not None
    assert (first.rewards.sum().item(), second.rewards) == (0.5, None)
    assert len(trajectory.sequences) == 2


async def test_a_history_that_leaves_no_token_ends_it() -> None:
    sampler = FakeSampler(TOKENIZERS["qwen2.5"], ["a"])
    conversation = Conversation(_question(sampler), _branching(sampler, max_new_tokens=20))
    await conversation.sample()
    with pytest.raises(ConversationEnded):
        conversation.begin(torch.arange(18))
    assert conversation.to_trajectory().ended == "tokens"


async def test_a_context_beyond_the_longest_prompt_takes_from_the_tokens_behind_it() -> None:
    """An engine with more room, for evaluations, makes no row of training longer."""
    sampler = FakeSampler(TOKENIZERS["qwen2.5"], ["a" * 99], max_context_tokens=10_000)
    setting = conversation_setting(sampler, max_new_tokens=20, max_prompt_tokens=30)
    conversation = Conversation(_question(sampler), setting)
    await conversation.sample_turn(conversation.begin(torch.arange(44)))
    assert [request.params.max_new_tokens for request in sampler.requests] == [30 + 20 - 44]


def test_templates_are_checked_for_rendered_histories() -> None:
    silent = QWEN3.replace("{{- text }}", "")
    for template, message in ((QWEN3, None), (silent, "leaves the text of the assistant's turn")):
        tokenizer = build_tokenizer("qwen3", template=template)
        turns = TurnTemplate(tokenizer, stop_token_ids=(tokenizer.eos_token_id,))
        if message is None:
            turns.require_increments(history="branch", roles=("tool", "user"))
            continue
        with pytest.raises(AgentError, match=message):
            turns.require_increments(history="branch", roles=("tool",))


async def test_a_stop_string_leaves_the_turn_open_and_what_is_written_on_is_not_learned() -> None:
    tokenizer = TOKENIZERS["qwen2.5"]
    said = "> so <search>é 1</search>, made up", " found</answer>", "bye"
    sampler = FakeSampler(tokenizer, [*said])
    conversation = Conversation(_question(sampler), _setting(sampler))
    stops = ["</search>", "</answer>"]
    assert await conversation.sample(stops=stops) == "> so <search>é 1</search>"
    conversation.append_text("<i>7<|im_end|></i>")
    assert await conversation.sample(stops=stops) == " found</answer>"
    conversation.append([Message("user", "more")])
    assert await conversation.sample(stops=["</answer>"]) == "bye"
    trajectory = conversation.to_trajectory()
    assert [(tokenizer.decode(t.token_ids), t.logprobs is None) for t in trajectory.turns] == [
        ("> so <search>é 1</search>", False),
        ("<i>7< |im_end|></i>", True),
        (" found</answer>", False),
        ("<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n", True),
        ("bye<|im_end|>", False),
    ]
    whole = "> so <search>é 1</search><i>7< |im_end|></i> found</answer>"
    assert [m.content for m in conversation.messages[1:]] == [whole, "more", "bye"]
    assert (trajectory.ended, trajectory.num_sampled_turns) == ("answer", 3)
    first = [r.sample for r in sampler.requests if r.key == sampler.requests[0].key]
    assert len(first) > 1  # the engine paused at other tokens that may end the string
    row = trajectory.to_sample()
    assert row.is_sampled is not None
    expected = torch.cat([part.logprobs for part in first])
    assert torch.equal(row.logprobs[: len(expected)], expected)
    assert row.logprobs[~row.is_sampled].abs().sum() == 0


@pytest.mark.parametrize("stop", ["é", "日本"])
async def test_a_stop_string_of_several_bytes_a_character_is_found(stop: str) -> None:
    sampler = FakeSampler(TOKENIZERS["qwen2.5"], [f"a{stop}b"])
    conversation = Conversation(_question(sampler), _setting(sampler))
    assert await conversation.sample(stops=[stop]) == f"a{stop}"


async def test_a_turn_within_its_own_limit_stays_open_and_an_ended_one_is_not_written_on() -> None:
    sampler = FakeSampler(TOKENIZERS["qwen2.5"], ["abcdef", "gh"])
    conversation = Conversation(_question(sampler), _setting(sampler))
    with pytest.raises(ValueError, match="no turn is open"):
        conversation.append_text("x")
    assert await conversation.sample(max_new_tokens=2) == "ab"
    conversation.append_text("x")
    with pytest.raises(ValueError, match="no text"):
        conversation.append_text("")
    assert await conversation.sample() == "gh"
    with pytest.raises(ValueError, match="behind a turn that has ended append messages"):
        conversation.append_text("x")
