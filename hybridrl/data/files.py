"""Reads rows from data files of any format; every malformed row is named by file and line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from hybridrl.data.chats import split_answer, split_pair
from hybridrl.data.columns import Columns
from hybridrl.data.records import Malformed, Record, read_records, require_columns
from hybridrl.data.rows import Message, Row
from hybridrl.errors import DataError, shown, suggest_name

_MAX_PROBLEMS_SHOWN = 20
_MESSAGE = "{role: ..., content: ...}"


def read_rows(
    files: Sequence[Path], *, columns: Columns, key: str, source: str | None = None
) -> list[Row]:
    """Read all rows of all files, in order.

    Blank lines of a jsonl file are skipped.

    Args:
        files: see ``data/records.py``.
        columns: names of the columns.
        key: the configuration key that lists the files, for messages.
        source: of a row without the source column; None is its file's name.

    Raises:
        DataError: a file that is missing, unreadable or of another kind; a table without a
            column; no row at all; or malformed rows: the first 20 are listed, the rest counted.
    """
    rows: list[Row] = []
    problems: list[str] = []
    for path in files:
        require = partial(
            require_columns, needed=columns.needed, optional=(columns.source,), where=str(path)
        )
        for number, record in read_records(path, require, key=key):
            origin = f"{path}:{number}"
            try:
                usual = path.stem if source is None else source
                rows.append(_parse(record, columns=columns, default_source=usual, origin=origin))
            except Malformed as problem:
                problems.append(f"{origin}: {problem}")
    if problems:
        shown = "\n  ".join(problems[:_MAX_PROBLEMS_SHOWN])
        num_unnamed = len(problems) - _MAX_PROBLEMS_SHOWN
        more = f"\n  and {num_unnamed} more" if num_unnamed > 0 else ""
        raise DataError(
            f"{len(problems)} of {len(rows) + len(problems)} rows are malformed; correct or remove:"
            f"\n  {shown}{more}"
        )
    if not rows:
        names = ", ".join(str(path) for path in files) or "no file"
        raise DataError(f"no rows in {names}; list files that have some in {key}")
    return rows


def _parse(record: Record, *, columns: Columns, default_source: str, origin: str) -> Row:
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
        prompt, answer = split_answer(prompt, name, why=why, needs_prompt=True)
        answer_name = f"{name}[-1].content"
    else:
        answer, answer_name = needed[columns.answer], columns.answer
        if columns.rejected is not None:
            names = (columns.answer, columns.rejected)
            prompt, (answer, rejected) = split_pair(prompt, {n: needed[n] for n in names})
    source = record.get(columns.source) or default_source
    return Row(
        prompt=_parse_messages(prompt, name)
        if isinstance(prompt, list)
        else _parse_text(prompt, name),
        answer=_parse_text(answer, answer_name),
        source=_parse_text(source, columns.source),
        origin=origin,
        difficulty=0.0
        if columns.difficulty is None
        else _parse_number(needed[columns.difficulty], columns.difficulty),
        rejected=None if columns.rejected is None else _parse_text(rejected, columns.rejected),
        margin=0.0
        if columns.margin is None
        else _parse_number(needed[columns.margin], columns.margin),
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
    if name not in record:
        raise Malformed(f"has no {name!r}; set {key}: {suggest_name(name, list(record))}")
    return record[name]


def _parse_number(value: object, name: str) -> float:
    try:  # csv has text alone
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise Malformed(f"{name!r} is {shown(value)}, must be a finite number")
    return number


def _parse_text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{name!r} is {shown(value)}, must be text; write it in quotes")
    if not value.strip():
        raise Malformed(f"{name!r} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON may escape halves of pairs; no tokenizer takes one
        half = f"\\u{ord(value[error.start]):04x}"
        raise Malformed(
            f"{name!r} has half of a pair, {half}, as character {error.start + 1}; write both "
            "halves, or leave it out"
        ) from error
    return value


def _parse_messages(messages: Sequence[object], name: str) -> tuple[Message, ...]:
    if not messages:
        raise Malformed(f"{name!r} has no messages")
    parsed = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise Malformed(f"{name}[{index}] is {shown(message)}, must be {_MESSAGE}")
        for part in ("role", "content"):
            if part not in message:
                raise Malformed(f"{name}[{index}] has no {part!r}, must be {_MESSAGE}")
        role, content = (
            _parse_text(message[part], f"{name}[{index}].{part}") for part in ("role", "content")
        )
        parsed.append(Message(role, content))
    return tuple(parsed)
