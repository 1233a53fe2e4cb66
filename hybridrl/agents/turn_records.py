"""The turns of a conversation as the driver sees them: roles, messages and calls beside the tokens.

They travel as a column of the batch (``RolloutBatch.turns_BN``), and decide nothing about training:
samples, the report and reward functions that ask for a conversation read them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridrl.batch import RolloutBatch, row_offsets
from hybridrl.data.rows import Message
from hybridrl.json_text import to_json_text

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
    data = to_json_text([_fields_of(turn) for turn in turns]).encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _fields_of(turn: TurnRecord) -> dict[str, object]:
    """Return the result of ``dataclasses.asdict`` in a tenth of the time."""
    return {
        "role": turn.role,
        "num_tokens": turn.num_tokens,
        "messages": [{"role": each.role, "content": each.content} for each in turn.messages],
        "calls": [
            {"name": each.name, "arguments": each.arguments, "is_error": each.is_error}
            for each in turn.calls
        ],
    }


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


def call_record(name: str, arguments: object, *, is_error: bool) -> CallRecord:
    """Describe a call; arguments that JSON has no form for are shown as Python writes them."""
    try:
        text = arguments if isinstance(arguments, str) else to_json_text(arguments)
    except TypeError:
        text = repr(arguments)
    return CallRecord(name, text, is_error)
