from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from hybridrl.agents.conversation import Conversation, ConversationEnded, Prompt, Setting, hold
from hybridrl.agents.templates import History
from hybridrl.agents.trajectory import Trajectory
from hybridrl.data.prompts import render_chat
from hybridrl.data.rows import Message
from hybridrl.errors import EngineError
from tests.agents.chat_templates import TOKENIZERS
from tests.agents.fake_sampler import (
    PROMPT,
    Broken,
    FakeSampler,
    conversation_setting,
    require_as_sampled,
)

Run = Callable[[Conversation], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class ByFunction:
    function: Run
    appended_roles: Sequence[str] = ("user",)

    async def run(self, conversation: Conversation) -> Any:
        return await self.function(conversation)


def _hold(run: Run, setting: Setting) -> Trajectory:
    return asyncio.run(hold(ByFunction(run), PROMPT, setting))


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


async def _tries_for_ever(conversation: Conversation) -> None:
    while True:
        try:
            await conversation.sample()
            conversation.append([Message("user", "again")])
        except Exception:
            continue


async def _verbose(conversation: Conversation) -> None:
    await conversation.sample()
    conversation.append([Message("user", "on " * 40)])


async def _raising(conversation: Conversation) -> None:
    await conversation.sample()
    raise KeyError("x")


async def _exiting(conversation: Conversation) -> None:
    await conversation.sample()
    sys.exit(3)


async def _losing_its_connection(conversation: Conversation) -> None:
    await conversation.sample()
    raise asyncio.CancelledError("the connection closed")


async def _sleeping(conversation: Conversation) -> None:
    await conversation.sample()
    await asyncio.sleep(1000)


async def _silent(conversation: Conversation) -> None:
    pass


async def _returning(conversation: Conversation) -> Any:
    return await conversation.sample()


@pytest.mark.parametrize(
    ("run", "limits", "ended", "num_turns"),
    [
        pytest.param(_forever, {"max_turns": 3}, "turns", 3, id="turns"),
        pytest.param(_tries_for_ever, {"max_turns": 3}, "turns", 3, id="turns, caught"),
        pytest.param(_forever, {"max_new_tokens": 40}, "tokens", 2, id="tokens behind a turn"),
        pytest.param(_forever, {"max_new_tokens": 2}, "tokens", 1, id="tokens in a turn"),
        pytest.param(_verbose, {"max_new_tokens": 40}, "tokens", 1, id="tokens appended"),
        pytest.param(_sleeping, {"timeout_s": 0.2}, "time", 1, id="time"),
        pytest.param(_raising, {}, "error", 1, id="raises"),
        pytest.param(_exiting, {}, "error", 1, id="exits"),
        pytest.param(_losing_its_connection, {}, "error", 1, id="is cancelled by its client"),
        pytest.param(_silent, {}, "error", 1, id="silent"),
        pytest.param(_returning, {}, "error", 1, id="returns a text"),
    ],
)
def test_a_limit_ends_a_conversation_as_truncated_and_an_error_as_failed(
    run: Run, limits: dict[str, Any], ended: str, num_turns: int
) -> None:
    sampler = FakeSampler(TOKENIZERS["qwen2.5"], ["Hello"] * 20)
    trajectory = _hold(run, conversation_setting(sampler, **limits))
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
    trajectory = _hold(_rewarding, conversation_setting(sampler, history=history))
    assert len(trajectory.sequences) == (2 if history == "branch" else 1)
    sample = trajectory.to_sample()
    assert sample.rewards is not None
    assert sample.is_sampled is not None
    first, second = len(sampler.requests[0].sample.token_ids), 3
    rewards = sample.rewards[sample.is_sampled].tolist()
    assert rewards == [0.0] * (first - 1) + [0.75] + [float(n) for n in range(second)]
    assert not sample.rewards[~sample.is_sampled].any()


def test_an_error_of_the_engine_is_not_the_agents() -> None:
    sampler = Broken(TOKENIZERS["qwen2.5"], [])
    for run in (_forever, _forever_and_deaf):
        with pytest.raises(EngineError, match="the engine failed"):
            _hold(run, conversation_setting(sampler))


THOUGHT = "<think>\nhm\n</think>\n\n"


def _question(sampler: FakeSampler) -> Prompt:
    text = render_chat([Message("user", "Q")], sampler.tokenizer, origin="o")
    token_ids = sampler.tokenizer.encode(text, add_special_tokens=False)
    return replace(PROMPT, token_ids=torch.tensor(token_ids))


def _branching(sampler: FakeSampler, max_new_tokens: int = 4000) -> Setting:
    return conversation_setting(
        sampler, max_new_tokens=max_new_tokens, history="branch", max_turns=8
    )


async def test_a_new_sequence_begins_with_the_rendered_history() -> None:
    tokenizer = TOKENIZERS["qwen3"]
    sampler = FakeSampler(tokenizer, [THOUGHT + "a", THOUGHT + "b", THOUGHT + "c"])
    conversation = Conversation(_question(sampler), _branching(sampler))
    for message in (Message("tool", "1"), Message("user", "more<|im_end|>")):
        await conversation.sample()
        conversation.append([message])
    await conversation.sample()
    trajectory = conversation.to_trajectory()
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


async def test_a_history_that_leaves_no_token_ends_it() -> None:
    sampler = FakeSampler(TOKENIZERS["qwen2.5"], ["a"])
    conversation = Conversation(_question(sampler), _branching(sampler, max_new_tokens=20))
    await conversation.sample()
    with pytest.raises(ConversationEnded):
        conversation.begin(torch.arange(18))
    assert conversation.to_trajectory().ended == "tokens"


@pytest.mark.parametrize("most", [None, 100])
async def test_a_context_beyond_the_longest_prompt_takes_from_the_tokens_behind_it(
    most: int | None,
) -> None:
    """An engine with more room, for evaluations, makes no row of training longer."""
    sampler = FakeSampler(TOKENIZERS["qwen2.5"], ["a" * 99], max_context_tokens=10_000)
    setting = conversation_setting(sampler, max_new_tokens=20, max_prompt_tokens=30)
    conversation = Conversation(_question(sampler), setting)
    await conversation.sample_turn(conversation.begin(torch.arange(44)), max_new_tokens=most)
    assert [request.params.max_new_tokens for request in sampler.requests] == [30 + 20 - 44]


async def test_a_stop_string_leaves_the_turn_open_and_what_is_written_on_is_not_learned() -> None:
    tokenizer = TOKENIZERS["qwen2.5"]
    said = "> so <search>é 1</search>, made up", " found</answer>", "bye"
    sampler = FakeSampler(tokenizer, [*said])
    conversation = Conversation(_question(sampler), conversation_setting(sampler))
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


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"stops": "</answer>"}, "stops is a list of texts"),
        ({"stops": [""]}, "stops is a list of texts"),
        ({"max_new_tokens": 0}, "max_new_tokens is at least 1"),
    ],
)
async def test_a_stop_that_is_no_list_and_a_limit_of_no_tokens_are_refused(
    wrong: dict[str, Any], words: str
) -> None:
    sampler = FakeSampler(TOKENIZERS["qwen2.5"], ["a</answer>b"])
    conversation = Conversation(_question(sampler), conversation_setting(sampler))
    with pytest.raises(ValueError, match=words):
        await conversation.sample(**wrong)
    assert not sampler.requests


@pytest.mark.parametrize("stop", ["é", "日本"])
async def test_a_stop_string_of_several_bytes_a_character_is_found(stop: str) -> None:
    sampler = FakeSampler(TOKENIZERS["qwen2.5"], [f"a{stop}b"])
    conversation = Conversation(_question(sampler), conversation_setting(sampler))
    assert await conversation.sample(stops=[stop]) == f"a{stop}"


async def test_a_turn_within_its_own_limit_stays_open_and_an_ended_one_is_not_written_on() -> None:
    sampler = FakeSampler(TOKENIZERS["qwen2.5"], ["abcdef", "gh"])
    conversation = Conversation(_question(sampler), conversation_setting(sampler))
    with pytest.raises(ValueError, match="no turn is open"):
        conversation.append_text("x")
    assert await conversation.sample(max_new_tokens=2) == "ab"
    conversation.append_text("x")
    with pytest.raises(ValueError, match="no text"):
        conversation.append_text("")
    assert await conversation.sample() == "gh"
    with pytest.raises(ValueError, match="behind a turn that has ended append messages"):
        conversation.append_text("x")
