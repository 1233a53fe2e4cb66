"""One example of a data set, before any tokenizer has seen it, and a position among such rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridrl.json_text import to_json_text

if TYPE_CHECKING:
    from hybridrl.images import Images

IMAGE_MARK = "\ufffc"
"""Where an image stands in a message of a row with images: Unicode's object replacement character.
In rows without images it is a character like others."""


class Malformed(Exception):
    """An error in one row; collected, never raised to a caller."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str  # for example system, user or assistant; a role of the chat template
    content: str  # with an `IMAGE_MARK` for each image
    images: Images = ()  # in a conversation; those of a row's messages are the row's
    name: str = ""  # of the tool whose result it is
    call_id: str = ""  # of that call; both for chat templates that show them


class RawMessage(NamedTuple):
    """A message as a file, a tool or an environment has it."""

    role: str
    content: str | list[object]


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and the answer that its responses are compared with."""

    prompt: str | tuple[Message, ...]
    """Text to continue, or the chat so far; not empty."""

    answer: str
    """Not empty; of an integer its digits."""

    source: str
    """Name of the data set; rewards and evaluation may distinguish rows by it."""

    origin: str
    """File and line of the row, as ``file:line``, for messages."""

    difficulty: float = 0.0
    """For a curriculum; low is easy."""

    rejected: str | None = None
    """The worse answer of a preference pair, whose better one is ``answer``; None without pairs."""

    margin: float = 0.0
    """By how much the score of a reward model's better answer must be higher."""

    own: str = ""
    """JSON object of ``columns``; empty: none. As text a row is immutable, and small."""

    images: tuple[str, ...] = ()
    """Files, by absolute path, or their bytes as ``data:`` URLs, in the order of their marks."""

    @property
    def columns(self) -> dict[str, Any]:
        """Return the further columns that rewards, agents and teachers ask for, by name."""
        return json.loads(self.own) if self.own else {}


def fingerprint(rows: Iterable[Row]) -> str:
    """Return the sha256 of all prompts, answers and sources, in order, as 64 hexadecimal digits.

    A sampler's position is valid only for the same rows, which the fingerprint identifies.
    """
    digest = hashlib.sha256()
    for row in rows:
        digest.update(write_record(row))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class SamplerState:
    """The state of a sampler; save it as JSON with ``dataclasses.asdict``."""

    num_drawn: int  # rows drawn since the run began
    # of the rows it was drawn from; see `data/rows.py`. Of a mix `NAME=...` for each source, with
    # commas between.
    fingerprint: str
    # indices of drawn rows that no step has learned from, in rising order, each below `num_drawn`;
    # the run that resumes draws them first
    open_prompts: tuple[int, ...] = ()
    # of rows drawn so far, with `data.curriculum=solve_rate`; see `data/sampler.py`
    solve_rates: tuple[tuple[int, float, float], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "open_prompts", tuple(self.open_prompts))  # JSON has lists
        object.__setattr__(self, "solve_rates", tuple(map(tuple, self.solve_rates)))


def own_columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Return the further columns of all rows, by name."""
    own = [row.columns for row in rows if row.own]
    return {name: [values[name] for values in own] for name in (own[0] if own else ())}


def write_record(row: Row) -> bytes:
    """Write a row as JSON without its origin; the fingerprint is the digest of these bytes."""
    prompt: object = row.prompt
    if not isinstance(row.prompt, str):
        prompt = [[message.role, message.content] for message in row.prompt]
    # The fingerprints of rows without a difficulty are those of runs before it was known.
    values = [prompt, row.answer, row.source, *([row.difficulty] if row.difficulty else [])]
    values += [] if row.rejected is None else [{"rejected": row.rejected}]
    values += [{"margin": row.margin}] if row.margin else []
    values += [{"own": row.own}] if row.own else []
    values += [{"images": row.images}] if row.images else []
    return to_json_text(values).encode()


def read_record(record: bytes, *, origin: str) -> Row:
    """Read a row that `write_record` wrote."""
    prompt, answer, source, *further = json.loads(record)
    if not isinstance(prompt, str):
        prompt = tuple(Message(role, content) for role, content in prompt)
    difficulty = [value for value in further if not isinstance(value, dict)]
    named = {key: text for value in further[len(difficulty) :] for key, text in value.items()}
    if "images" in named:
        named["images"] = tuple(named["images"])
    return Row(prompt, answer, source, origin, *difficulty, **named)
