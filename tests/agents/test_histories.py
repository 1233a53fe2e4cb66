"""Conversations whose template rewrites history: several sequences, each sampled token in one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.agents.conversation import Conversation, ConversationEnded, Prompt, Setting, hold
from hybridrl.agents.templates import TurnTemplate
from hybridrl.agents.tool_process import ToolLimits
from hybridrl.agents.tools import Toolbox
from hybridrl.agents.trajectory import Trajectory
from hybridrl.data.prompts import render_chat
from hybridrl.data.rows import Message, Row
from hybridrl.errors import AgentError
from tests.agents.chat_templates import FAMILIES, QWEN3, build_tokenizer
from tests.agents.fake_sampler import FakeSampler, conversation_setting

TOKENIZERS = {family: build_tokenizer(family) for family in FAMILIES}
TOOLBOX = Toolbox((), limits=ToolLimits(timeout_s=5.0, max_chars=100), num_processes=1)
THOUGHT = "<think>\nhm\n</think>\n\n"


class Appends:
    """Appends the messages of a script, one after each sampled turn."""

    appended_roles = ("tool", "user")

    def __init__(self, script: Sequence[Message]) -> None:
        self._script = script

    async def run(self, conversation: Conversation) -> None:
        for message in self._script:
            await conversation.sample()
            conversation.append([message])
        await conversation.sample()


def _encode(sampler: FakeSampler, text: str) -> list[int]:
    token_ids: list[int] = sampler.tokenizer.encode(text, add_special_tokens=False)
    return token_ids


def _prompt(sampler: FakeSampler) -> Prompt:
    text = render_chat([Message("user", "Q")], sampler.tokenizer, origin="o")
    return Prompt(
        row=Row(prompt="Q", answer="42", source="s", origin="o"),
        token_ids=torch.tensor(_encode(sampler, text)),
        seed=5,
        response_index=1,
        number=0,
    )


def _setting(sampler: FakeSampler, **limits: int) -> Setting:
    return conversation_setting(
        sampler, **({"max_new_tokens": 4000} | limits), history="branch", max_turns=8
    )


def _hold(sampler: FakeSampler, script: Sequence[Message], **limits: int) -> Trajectory:
    return asyncio.run(hold(Appends(script), _prompt(sampler), _setting(sampler, **limits)))


def _require_each_token_once(trajectory: Trajectory, sampler: FakeSampler) -> None:
    """Compare all sequences with the sampler's records, position by position."""
    requests = [*sampler.requests]
    for sequence in trajectory.sequences:
        read = sequence.context.tolist()
        for turn in sequence.turns:
            if turn.logprobs is not None:
                request = next(r for r in requests if r.context == read)
                requests.remove(request)
                assert torch.equal(request.sample.token_ids, turn.token_ids)
                assert torch.equal(request.sample.logprobs, turn.logprobs)
            read += turn.token_ids.tolist()
    assert requests == []
    sample = trajectory.to_sample()
    assert sample.is_sampled is not None
    sampled = torch.cat([turn.token_ids for turn in trajectory.turns if turn.logprobs is not None])
    assert torch.equal(sample.token_ids[sample.is_sampled], sampled)
    assert sample.logprobs[~sample.is_sampled].eq(0).all()
    for begin, sequence in zip(sample.sequence_begins, trajectory.sequences[1:], strict=True):
        context = sample.token_ids[begin : begin + len(sequence.context)]
        assert torch.equal(context, sequence.context)


@settings(max_examples=100)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    texts=st.lists(st.text(max_size=6), min_size=1, max_size=5),
    thinks=st.lists(st.booleans(), min_size=6, max_size=6),
    roles=st.lists(st.sampled_from(["tool", "user"]), min_size=5, max_size=5),
    max_new_tokens=st.integers(1, 900),
)
def test_each_sampled_token_is_in_one_sequence(
    *,
    family: str,
    texts: list[str],
    thinks: list[bool],
    roles: list[str],
    max_new_tokens: int,
) -> None:
    spoken = zip(thinks, [*texts, "42"], strict=False)
    turns = [THOUGHT * thought + text for thought, text in spoken]
    sampler = FakeSampler(TOKENIZERS[family], turns)
    script = [Message(role, text) for role, text in zip(roles, texts, strict=False)]

    trajectory = _hold(sampler, script, max_new_tokens=max_new_tokens)

    _require_each_token_once(trajectory, sampler)
    sample = trajectory.to_sample()
    assert len(sample.token_ids) <= max_new_tokens
    assert len(trajectory.sequences) == 1 or family == "qwen3"


def test_a_new_sequence_begins_with_the_rendered_history() -> None:
    tokenizer = TOKENIZERS["qwen3"]
    sampler = FakeSampler(tokenizer, [THOUGHT + "a", THOUGHT + "b", THOUGHT + "c"])
    script = [Message("tool", "1"), Message("user", "more<|im_end|>")]

    trajectory = _hold(sampler, script)

    first, second = trajectory.sequences
    assert [turn.logprobs is None for turn in first.turns] == [False, True, False]
    assert tokenizer.decode(second.context) == (
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\n"
        "<tool_response>\n1\n</tool_response><|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nmore< |im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(second.turns[0].token_ids) == THOUGHT + "c<|im_end|>"
    _require_each_token_once(trajectory, sampler)


def test_all_sequences_count_in_the_token_limit() -> None:
    sampler = FakeSampler(TOKENIZERS["qwen3"], [THOUGHT + "a"] * 9)

    trajectory = _hold(sampler, [Message("user", "more")] * 8, max_new_tokens=250)

    assert trajectory.ended == "tokens"
    assert len(trajectory.sequences) > 1
    assert len(trajectory.to_sample().token_ids) <= 250
    _require_each_token_once(trajectory, sampler)


def test_an_agent_holds_sequences_side_by_side() -> None:
    sampler = FakeSampler(TOKENIZERS["qwen2.5"], ["a", "b", "c"])

    async def interleave() -> Trajectory:
        conversation = Conversation(_prompt(sampler), _setting(sampler))
        one, other = (conversation.begin(torch.tensor([65, 66 + n])) for n in range(2))
        await asyncio.gather(conversation.sample_turn(other), conversation.sample_turn(one))
        conversation.append_tokens(one, torch.tensor([70]))
        await conversation.sample_turn(one)
        conversation.begin(torch.tensor([80]))  # nothing is sampled behind it
        return conversation.to_trajectory()

    trajectory = asyncio.run(interleave())

    assert [sequence.context.tolist() for sequence in trajectory.sequences] == [[65, 67], [65, 66]]
    assert trajectory.ended == "answer"
    assert len({request.key for request in sampler.requests}) == 3
    _require_each_token_once(trajectory, sampler)


def test_a_reward_behind_new_messages_is_of_the_turn_before() -> None:
    sampler = FakeSampler(TOKENIZERS["qwen3"], [THOUGHT + "a", THOUGHT + "b"])

    async def play() -> Trajectory:
        conversation = Conversation(_prompt(sampler), _setting(sampler))
        await conversation.sample()
        conversation.append([Message("user", "more")])
        conversation.reward(0.5)
        await conversation.sample()
        return conversation.to_trajectory()

    trajectory = asyncio.run(play())

    first, second = trajectory.turns
    assert first.rewards is not None
    assert (first.rewards.sum().item(), second.rewards) == (0.5, None)
    assert len(trajectory.sequences) == 2


def test_a_history_that_leaves_no_token_ends_it() -> None:
    sampler = FakeSampler(TOKENIZERS["qwen2.5"], ["a"])

    async def fill() -> Trajectory:
        conversation = Conversation(_prompt(sampler), _setting(sampler, max_new_tokens=20))
        await conversation.sample()
        with pytest.raises(ConversationEnded):
            conversation.begin(torch.arange(18))
        return conversation.to_trajectory()

    assert asyncio.run(fill()).ended == "tokens"


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
