"""A finished conversation: its tokens as they were sampled or appended, and their loss mask.

A conversation is one sequence of tokens, or several: where its history was rewritten, the model
read other tokens than before, and a new sequence begins with them. A trajectory of several
sequences is still one row of a batch: it has one reward, and its sampled tokens share it. Only
the model separates its sequences (``RolloutBatch.sequence_lengths_BQ``).

Records of its turns travel as a column of the batch (``RolloutBatch.turns_BN``), and decide nothing
about training: samples, the report and reward functions that ask for a conversation read them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridrl.agents.tool_calls import BrokenCall, ToolCall
from hybridrl.batch import RolloutBatch, row_offsets
from hybridrl.data.rows import IMAGE_MARK, Message
from hybridrl.images import Images
from hybridrl.json_text import to_json_text
from hybridrl.sampler import FinishReason, Sample

ASSISTANT = "assistant"
UNKNOWN = "environment"
"""Appended as tokens, by an agent that does not say what they mean."""
HISTORY = "history"
"""The earlier conversation, which the chat template or the agent rendered again."""
FAILURE = "failure"
"""Why the conversation broke off, of no tokens: no message, for a person to read."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A call of a tool, without its result, which is the next turn."""

    name: str
    """Of the tool; empty if the call could not be read."""

    arguments: str
    """JSON; of a call that could not be read the reason."""

    is_error: bool


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn of the assistant, or what was appended at once."""

    role: str
    num_tokens: int
    messages: tuple[Message, ...] = ()
    """The appended messages; none of the assistant's turns."""

    calls: tuple[CallRecord, ...] = ()
    """The calls behind an assistant's turn."""


def encode_turns(turns: Sequence[TurnRecord]) -> Tensor:
    """Write turns as a tensor, to travel with a batch: uint8 [n]."""
    written = []
    for turn in turns:  # ``dataclasses.asdict`` takes ten times as long
        calls = [
            {"name": each.name, "arguments": each.arguments, "is_error": each.is_error}
            for each in turn.calls
        ]
        messages = []
        for each in turn.messages:
            text = each.content.replace(IMAGE_MARK, "<image>") if each.images else each.content
            messages.append({"role": each.role, "content": text})
        head = {"role": turn.role, "num_tokens": turn.num_tokens}
        written.append({**head, "messages": messages, "calls": calls})
    return torch.frombuffer(bytearray(to_json_text(written).encode()), dtype=torch.uint8)


def decode_turns(data: Tensor) -> list[TurnRecord]:
    """Read turns from ``encode_turns``."""
    return [
        TurnRecord(
            turn["role"],
            turn["num_tokens"],
            tuple(Message(**message) for message in turn["messages"]),
            tuple(CallRecord(**call) for call in turn["calls"]),
        )
        for turn in json.loads(data.numpy().tobytes())
    ]


def turns_of(rollouts: RolloutBatch, row: int) -> Iterator[tuple[TurnRecord, range]]:
    """Yield the turns behind a row's first context, with their tokens' positions in ``values()``.

    A row without records is a single turn.
    """
    begin, end = row_offsets(rollouts.token_ids_BL)[row : row + 2].tolist()
    if rollouts.turns_BN is None:
        num_tokens = int(rollouts.response_mask_BL.values()[begin:end].sum())
        turns = [TurnRecord(ASSISTANT, num_tokens)]
    else:
        first, last = row_offsets(rollouts.turns_BN)[row : row + 2].tolist()
        turns = decode_turns(rollouts.turns_BN.values()[first:last])
    at = end - sum(turn.num_tokens for turn in turns)
    for turn in turns:
        yield turn, range(at, at + turn.num_tokens)
        at += turn.num_tokens


def failure_of(rollouts: RolloutBatch) -> str:
    """Return why the last conversation that broke did; there must be one."""
    if rollouts.is_failed_B is None:
        raise ValueError("rollouts without an agent")
    [*_, (last, _)] = turns_of(rollouts, int(rollouts.is_failed_B.nonzero()[-1]))
    return last.messages[0].content


def messages_of(
    rollouts: RolloutBatch, row: int, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, str]]:
    """Return the messages behind the prompt: role and text of each, in order.

    The assistant's are without special tokens, as the response that reward functions see. Of tokens
    that an agent appended without a message there is the text of the tokens.
    """
    tokens_T = rollouts.token_ids_BL.values()
    said: list[dict[str, str]] = []
    for turn, at in turns_of(rollouts, row):
        if turn.role in (HISTORY, FAILURE):
            continue
        messages = [(message.role, message.content) for message in turn.messages]
        if not messages:
            token_ids = tokens_T[at.start : at.stop].tolist()
            messages = [(turn.role, tokenizer.decode(token_ids, skip_special_tokens=True))]
        said += ({"role": role, "text": text} for role, text in messages)
    return said


def call_record(call: ToolCall | BrokenCall, *, is_error: bool) -> CallRecord:
    """Describe a call; arguments that JSON has no form for are shown as Python writes them."""
    if isinstance(call, BrokenCall):
        return CallRecord("", call.reason, is_error)
    arguments = dict(call.arguments)
    try:
        text = to_json_text(arguments)
    except TypeError:
        text = repr(arguments)
    return CallRecord(call.name, text, is_error)


Ended = Literal["answer", "turns", "tokens", "time", "error"]
"""Why a conversation ended: the agent was done, or the limit or error that ended it."""

_FINISH: Mapping[Ended, FinishReason] = {"answer": "stop", "error": "failed"}
"""Of the row; all else are limits."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens of one message, or of several that were appended together."""

    token_ids: Tensor
    """int64 [n]."""

    logprobs: Tensor | None
    """float32 [n] nats, of the sampler; None for tokens that the policy did not choose."""

    weight_versions: Tensor | None = None
    """int64 [n], policy version of the weights that sampled each token; None as above."""

    rewards: Tensor | None = None
    """float32 [n], that the agent gave; None: none."""

    player: int = 0
    """Number of the player that sampled it, of those of a game."""

    messages: tuple[Message, ...] = ()
    """The appended messages, if the agent appended messages and not tokens."""

    calls: tuple[CallRecord, ...] = ()
    """Calls of tools behind a sampled turn."""

    @property
    def images(self) -> Images:
        """Return the images among the tokens, in order."""
        return tuple(image for message in self.messages for image in message.images)

    def rewarded(self, value: float | Sequence[float]) -> Turn:
        """Return the turn with one more reward: on its last token, or one for each token."""
        rewards = torch.zeros(len(self.token_ids))
        if isinstance(value, Sequence):
            rewards = torch.tensor([float(each) for each in value])
        elif len(rewards):
            rewards[-1] = float(value)
        if not rewards.isfinite().all() or len(rewards) != len(self.token_ids):
            raise ValueError(
                f"the reward of a turn is a finite number, or one for each of its "
                f"{len(self.token_ids)} tokens, not {value!r:.100}"
            )
        return replace(self, rewards=rewards if self.rewards is None else self.rewards + rewards)

    def record(self) -> TurnRecord:
        """Describe the turn for the driver."""
        appended = self.messages[0].role if self.messages else UNKNOWN
        role = appended if self.logprobs is None else ASSISTANT
        return TurnRecord(role, len(self.token_ids), self.messages, self.calls)


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Tokens that the model read as one context, and its turns in them."""

    context: Tensor
    """int64 [n], n >= 1, tokens before the first sampled one: a prompt, or rendered history."""

    turns: tuple[Turn, ...]
    """At least one; the first and the last were sampled."""

    images: Images = ()
    """Of the context and the turns, in order."""


class OpenSequence:
    """A sequence while it grows: a context, and turns behind it."""

    def __init__(self, context: Tensor, images: Images = ()) -> None:
        """Begin behind a context, int64 [n], n >= 1, with its images."""
        self.context = context
        self.images = images
        """Of the context and all turns."""
        self.token_ids = context
        """int64 [n], of the context and all turns: the next request's context."""
        self.turns: list[Turn] = []
        self._calls: defaultdict[int, list[CallRecord]] = defaultdict(list)
        """By index of the turn behind which they were made."""

    def calls_behind_last_turn(self) -> list[CallRecord]:
        """Return the calls that were made since the last turn, to be added to."""
        return self._calls[len(self.turns) - 1]

    def add(self, turn: Turn) -> None:
        """Append a turn."""
        self.turns.append(turn)
        self.images += turn.images
        self.token_ids = torch.cat([self.token_ids, turn.token_ids])

    def close(self) -> TokenSequence | None:
        """Return it without tokens behind the last sampled turn; None if nothing was sampled."""
        turns = [
            replace(turn, calls=tuple(self._calls[index])) if index in self._calls else turn
            for index, turn in enumerate(self.turns)
        ]
        num_images = len(self.images)
        while turns and turns[-1].logprobs is None:
            num_images -= len(turns.pop().images)
        images = self.images[:num_images]
        return TokenSequence(self.context, tuple(turns), images) if turns else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """All that the policy sampled in a conversation: each sampled token in one sequence."""

    sequences: tuple[TokenSequence, ...]
    """At least one. The last turn of the last sequence is the answer."""

    ended: Ended

    failure: str
    """Why it ended by an error; else empty."""

    num_tool_calls: int
    num_tool_errors: int
    tool_seconds: float
    """Of all calls; those of a turn may run at the same time."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Return the turns of all sequences."""
        return tuple(turn for sequence in self.sequences for turn in sequence.turns)

    @property
    def num_sampled_turns(self) -> int:
        """Return the number of the assistant's turns."""
        return sum(turn.logprobs is not None for turn in self.turns)

    def to_sample(self) -> Sample:
        """Return all sequences end to end, as one continuation of the first context."""
        first, *others = self.sequences
        turns, begins = list(first.turns), []
        records = [turn.record() for turn in turns]
        for sequence in others:
            begins.append(sum(len(turn.token_ids) for turn in turns))
            turns += [Turn(sequence.context, None), *sequence.turns]
            records.append(TurnRecord(HISTORY, len(sequence.context)))
            records += [turn.record() for turn in sequence.turns]
        if self.failure:
            records.append(TurnRecord(FAILURE, 0, (Message(FAILURE, self.failure),)))
        logprobs, versions, is_sampled, rewards, players = [], [], [], [], []
        for turn in turns:
            zeros = torch.zeros(len(turn.token_ids))
            unknown = torch.full_like(turn.token_ids, -1)
            versions.append(unknown if turn.weight_versions is None else turn.weight_versions)
            logprobs.append(zeros if turn.logprobs is None else turn.logprobs)
            rewards.append(zeros if turn.rewards is None else turn.rewards)
            is_sampled.append(torch.full_like(zeros, turn.logprobs is not None, dtype=torch.bool))
            players.append(torch.full_like(zeros, turn.player, dtype=torch.int8))
        versions_L = torch.cat(versions)
        known = versions_L[versions_L >= 0].tolist()
        return Sample(
            token_ids=torch.cat([turn.token_ids for turn in turns]),
            logprobs=torch.cat(logprobs),
            finish_reason=_FINISH.get(self.ended, "length"),
            weight_version=known[0] if known else 0,
            weight_versions=versions_L if len(set(known)) > 1 else None,
            is_sampled=torch.cat(is_sampled),
            rewards=torch.cat(rewards),
            players=torch.cat(players),
            context=first.context,
            sequence_begins=tuple(begins),
            images=tuple(image for sequence in self.sequences for image in sequence.images),
            turns=encode_turns(records),
        )
