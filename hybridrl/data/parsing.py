"""From a record of a data file to a row: its columns, and in words what is wrong with it."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.reward import BATCH_COLUMNS, ROW_COLUMNS
from hybridrl.data.images import parse_images
from hybridrl.data.rows import Malformed, RawMessage, Row
from hybridrl.errors import shown, suggest_name
from hybridrl.json_text import to_json_text

_MESSAGE = "{role: ..., content: ...}"
_REWARD_PARAMETER = "the parameter of reward.function"


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The names of the columns in the files; see ``config/data.py``."""

    prompt: str | None = "prompt"
    """None takes the messages that both chats of a preference pair begin with."""

    answer: str | None = "answer"
    """None takes the last message of the prompt, which must be the assistant's."""

    rejected: str | None = None
    """The worse answer of a preference pair; None reads no pairs."""

    source: str = "source"
    difficulty: str | None = None
    """None reads no difficulty: it is 0."""

    margin: str | None = None
    """None reads no margins: they are 0."""

    images: str | None = "images"
    """A row need not have it; None reads no images but those in messages."""

    own: Mapping[str, str] = field(default_factory=dict)
    """Further ones, each with the key that asks for it: ``Row.columns`` has them."""

    section: str = "data"
    """The configuration section that names them, for messages."""

    needed: Mapping[str, str] = field(init=False)
    """The configuration key of each column that a row must have."""

    def __post_init__(self) -> None:
        keys = {
            self.prompt: f"{self.section}.prompt_key",
            self.answer: f"{self.section}.answer_key",
            self.rejected: f"{self.section}.rejected_key",
            self.difficulty: f"{self.section}.difficulty_key",
            self.margin: "reward_model.margin_key",
        }
        keys |= {name: key for name, key in self.own.items() if name not in keys}
        needed = {name: key for name, key in keys.items() if name is not None}
        object.__setattr__(self, "needed", needed)  # once, since every row asks for it


def columns_of(config: ExperimentConfig, section: str) -> Columns:
    """Return the columns of files that a section lists.

    ``data.sources.NAME``, of a source of a mix, may have its own; any other has those of ``data``.
    """
    data = config.data
    parent, _, name = section.rpartition(".")
    source = data.sources[name] if parent == "data.sources" else None
    is_held_out = section.startswith(("eval.", "data.eval_files"))
    # In this order: the fingerprint of a run's rows depends on it.
    names_by_key: dict[str, tuple[str, ...]] = {}
    if config.offline is None:
        names_by_key[_REWARD_PARAMETER] = config.reward.own_columns
        names_by_key["agent.columns"] = config.agent.columns
    if not is_held_out:
        names_by_key["algorithm.teacher_prompt"] = config.algorithm.teacher_columns
    usual = Columns(
        prompt=data.prompt_key,
        answer=data.answer_key,
        rejected=data.rejected_key,
        source=data.source_key,
        difficulty=None if is_held_out else data.difficulty_key,
        margin=config.reward_model.margin_key if config.mode == "reward_model" else None,
        images=data.images_key,
        own={name: key for key, names in names_by_key.items() for name in names},
    )
    if source is None:
        return usual
    return replace(
        usual,
        prompt=source.prompt_key or usual.prompt,
        answer=source.answer_key or usual.answer,
        rejected=source.rejected_key or usual.rejected,
        source=source.source_key or usual.source,
        difficulty=source.difficulty_key or usual.difficulty,
        section=section,
    )


Record = str | Mapping[str, object] | Malformed
"""The text of a JSON object, the columns of a row, or why those cannot be had."""


class RawRow(NamedTuple):
    """A row that was read, and is not parsed."""

    record: Record
    source: str  # of a row without the source column
    origin: str  # as in `Row`


def parse(raw: RawRow, columns: Columns) -> Row:
    """Parse a row; raises Malformed, which says why it is none."""
    record = raw.record
    if isinstance(record, Malformed):
        raise record
    if isinstance(record, str):
        record = _parse_json(record)
    needed = {name: _require(record, name, key=key) for name, key in columns.needed.items()}
    name = columns.prompt or f"{columns.answer}"
    prompt = needed.get(columns.prompt or "")
    rejected: object = None
    if columns.answer is None:
        why = "since data.answer_key is null"
        prompt, answer = _split_answer(prompt, name, why=why, needs_prompt=True)
        answer_name = f"{name}[-1].content"
    else:
        answer, answer_name = needed[columns.answer], columns.answer
        if columns.rejected is not None:
            names = (columns.answer, columns.rejected)
            prompt, (answer, rejected) = _split_pair(prompt, {n: needed[n] for n in names})
    source = record.get(columns.source) or raw.source
    further = {name: needed[name] for name in columns.own}
    try:
        own = to_json_text(further) if further else ""
    except (TypeError, ValueError) as error:
        raise Malformed(f"{', '.join(further)} cannot be written as JSON: {error}") from error
    parsed, images = parse_images(
        _parse_prompt(prompt, name), record.get(columns.images or ""), raw.origin
    )
    return Row(
        prompt=parsed,
        answer=_parse_answer(answer, answer_name),
        source=_parse_text(source, columns.source),
        origin=raw.origin,
        difficulty=_parse_number(needed, columns.difficulty),
        rejected=None if columns.rejected is None else _parse_text(rejected, columns.rejected),
        margin=_parse_number(needed, columns.margin),
        own=own,
        images=images,
    )


def _parse_json(line: str) -> Mapping[str, object]:
    try:
        line.encode()  # bytes that were not UTF-8 cannot be encoded again
        record = json.loads(line, object_pairs_hook=_parse_object)
    except UnicodeEncodeError as error:
        raise Malformed(f"is not UTF-8 at character {error.start + 1}") from error
    except (ValueError, RecursionError) as error:
        raise Malformed(f"is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise Malformed(f"is a JSON {type(record).__name__}, must be an object {{...}}")
    return record


def _parse_object(pairs: Sequence[tuple[str, object]]) -> Mapping[str, object]:
    """Reject a duplicate name: JSON would silently keep only its last value."""
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        doubled = next(name for name in names if names.count(name) > 1)
        raise Malformed(f"has {doubled!r} twice; keep one")
    return record


def _require(record: Mapping[str, object], name: str, *, key: str) -> object:
    value: object = record
    for part in (name,) if name in record else name.split("."):  # a.b is a field of column a
        if not isinstance(value, Mapping) or part not in value:
            raise Malformed(f"has no {name!r}; {name_column(name, record, key=key)}")
        value = value[part]
    return value


def _parse_number(needed: Mapping[str, object], name: str | None) -> float:
    """Return the number of a column; 0 without one."""
    if name is None:
        return 0.0
    value = needed[name]
    try:  # csv has text alone
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise Malformed(f"{name!r} is {shown(value)}, must be a finite number")
    return number


def _parse_answer(value: object, name: str) -> str:
    """Return text as it is, and an integer as its digits; other numbers have several spellings."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        raise Malformed(f"{name!r} is {value}, must be text or an integer; write it in quotes")
    return _parse_text(value, name)


def _parse_text(value: object, name: str) -> str:
    if not isinstance(value, str):
        how = "as JSON in quotes" if isinstance(value, list | dict) else "in quotes"
        raise Malformed(f"{name!r} is {shown(value)}, must be text; write it {how}")
    if not value.strip():
        raise Malformed(f"{name!r} is empty")
    _require_pairs(value, name)
    return value


def _require_pairs(value: str, name: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON may escape halves of pairs; no tokenizer takes one
        half = f"\\u{ord(value[error.start]):04x}"
        raise Malformed(
            f"{name!r} has half of a pair, {half}, as character {error.start + 1}; write both "
            "halves, or leave it out"
        ) from error


def _parse_prompt(messages: object, name: str) -> str | tuple[RawMessage, ...]:
    if not isinstance(messages, list):
        return _parse_text(messages, name)
    if not messages:
        raise Malformed(f"{name!r} has no messages")
    parsed = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise Malformed(f"{name}[{index}] is {shown(message)}, must be {_MESSAGE}")
        for part in ("role", "content"):
            if part not in message:
                raise Malformed(f"{name}[{index}] has no {part!r}, must be {_MESSAGE}")
        role = _parse_text(message["role"], f"{name}[{index}].role")
        content = _parse_content(message["content"], f"{name}[{index}].content")
        parsed.append(RawMessage(role, content))
    return tuple(parsed)


def _parse_content(content: object, name: str) -> str | list[object]:
    """Return text, or parts that `parse_images` looks at."""
    if not isinstance(content, list):
        return _parse_text(content, name)
    for part in content:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            _require_pairs(part["text"], name)
    return content


def _split_answer(
    chat: object, name: str, *, why: str, needs_prompt: bool
) -> tuple[list[object], object]:
    """Return the messages before the last one, and the content of the last one.

    ``why`` the column must be a chat; ``needs_prompt``: there must be messages before the last one.
    """
    last = chat[-1] if isinstance(chat, list) and chat else None
    if not isinstance(chat, list) or not isinstance(last, dict) or len(chat) < 1 + needs_prompt:
        kind = "two or more messages" if needs_prompt else "a list of messages"
        raise Malformed(f"{name!r} is {shown(chat)}, must be {kind}, {why}")
    if last.get("role") != "assistant":
        raise Malformed(
            f"the last message of {name!r} is of role {shown(last.get('role'))}, must be the "
            f"assistant's: it is the answer, {why}"
        )
    return chat[:-1], last.get("content")


def _split_pair(
    prompt: object, answers: Mapping[str, object]
) -> tuple[object, tuple[object, object]]:
    """Return the prompt of a preference pair, and its answers without the chats around them.

    ``answers``, by column, are texts, or chats that end with the answer, by itself or after the
    prompt. ``prompt`` is None without a column: then both are chats that begin with it.
    """
    (name, chosen), (other, rejected) = answers.items()
    has_none = prompt is None
    before: list[object] = []
    if has_none or isinstance(chosen, list) or isinstance(rejected, list):
        why = "since data.prompt_key is null" if has_none else "as the other answer is"
        before, chosen = _split_answer(chosen, name, why=why, needs_prompt=has_none)
        before_other, rejected = _split_answer(rejected, other, why=why, needs_prompt=has_none)
        if before != before_other:
            raise Malformed(f"{name!r} and {other!r} differ before their last message")
    if chosen == rejected:
        raise Malformed(f"{name!r} and {other!r} are equal: a pair needs two answers")
    if not has_none and before and before != prompt:
        raise Malformed(
            f"{name!r} has messages before the answer, and they are not the prompt of its own "
            "column; set data.prompt_key=null to take them as the prompt"
        )
    return before if has_none else prompt, (chosen, rejected)


def name_column(name: str, known: Collection[str], *, key: str) -> str:
    """Suggest the keys to set where there is no such column."""
    section, _, field = key.rpartition(".")
    if field == "answer_key" and {"reward_model", "data_source"} <= {*known}:  # verl's
        return f"set {key}=reward_model.ground_truth {section}.source_key=data_source"
    if key == _REWARD_PARAMETER:  # which may be a usual one, mistyped
        known = [*known, *ROW_COLUMNS, *BATCH_COLUMNS]
    return f"set {key}: {suggest_name(name, list(known))}"
