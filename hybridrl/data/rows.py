"""One example of a data set, before any tokenizer has seen it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from hybridrl.json_text import to_json_text


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    """For example system, user or assistant; a role of the chat template."""

    content: str


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and the answer that its responses are compared with."""

    prompt: str | tuple[Message, ...]
    """Text to continue, or the chat so far; not empty."""

    answer: str
    """Not empty."""

    source: str
    """Name of the data set; rewards and evaluation may distinguish rows by it."""

    origin: str
    """File and line of the row, as ``file:line``, for messages."""

    difficulty: float = 0.0
    """For a curriculum; low is easy."""


def encode_row(row: Row) -> Tensor:
    """Write a row as a tensor, to travel with a batch: uint8 [n] of JSON."""
    return torch.frombuffer(bytearray(to_json_text(asdict(row)).encode()), dtype=torch.uint8)


def decode_row(data: Tensor) -> Row:
    """Read a row from ``encode_row``."""
    values = json.loads(data.numpy().tobytes())
    if not isinstance(values["prompt"], str):
        values["prompt"] = tuple(Message(**message) for message in values["prompt"])
    return Row(**values)


def fingerprint(rows: Iterable[Row]) -> str:
    """Return the sha256 of all prompts, answers and sources, in order, as 64 hexadecimal digits.

    A sampler's position is valid only for the same rows, which the fingerprint identifies.
    """
    digest = hashlib.sha256()
    for row in rows:
        prompt: object = row.prompt
        if not isinstance(row.prompt, str):
            prompt = [[message.role, message.content] for message in row.prompt]
        # The fingerprints of rows without a difficulty are those of runs before it was known.
        values = [prompt, row.answer, row.source, *([row.difficulty] if row.difficulty else [])]
        digest.update(to_json_text(values).encode())
    return digest.hexdigest()
