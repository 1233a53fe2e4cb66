"""Reads rows from data files of any format; every malformed row is named by file and line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hybridrl.data.chats import split_answer, split_pair
from hybridrl.data.columns import Columns
from hybridrl.data.records import Malformed, Record, name_column, read_records, require_columns
from hybridrl.data.rows import Message, Row
from hybridrl.errors import DataError, shown
from hybridrl.json_text import to_json_text

_MAX_PROBLEMS_SHOWN = 20
_MESSAGE = "{role: ..., content: ...}"


class RawRow(NamedTuple):
    """A row that was read, and is not parsed."""

    record: Record

    source: str
    """Of a row without the source column."""

    origin: str
    """As in `Row`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFiles:
    """The files that one key of the configuration lists; see ``data/records.py``."""

    files: Sequence[Path]

    columns: Columns

    key: str
    """The configuration key, for messages."""

    source: str | None = None
    """Of a row without the source column; None is its file's name."""

    def read(self) -> Iterator[RawRow]:
        """Yield the rows of all files, in order. Blank lines of a jsonl file are skipped.

        Raises:
            DataError: a file that is missing, unreadable or of another kind; a table without a
                column; or no row at all.
        """
        is_empty = True
        for path in self.files:
            require = partial(
                require_columns,
                needed=self.columns.needed,
                optional=(self.columns.source,),
                where=str(path),
            )
            source = path.stem if self.source is None else self.source
            for number, record in read_records(path, require, key=self.key):
                is_empty = False
                yield RawRow(record, source, f"{path}:{number}")
        if is_empty:
            names = ", ".join(str(path) for path in self.files) or "no file"
            raise DataError(f"no rows in {names}; list files that have some in {self.key}")

    def parsed(self) -> Iterator[Row]:
        """Yield all rows, parsed.

        Raises:
            DataError: as `read`; and at the end, if some rows are malformed.
        """
        problems = Problems()
        for raw in self.read():
            try:
                row = parse(raw, self.columns)
            except Malformed as problem:
                problems.add(f"{raw.origin}: {problem}")
            else:
                problems.num_good += 1
                yield row
        problems.raise_if_any()


def read_rows(
    files: Sequence[Path], *, columns: Columns, key: str, source: str | None = None
) -> list[Row]:
    """Read all rows of all files into memory; see `RowFiles`."""
    return list(RowFiles(files=files, columns=columns, key=key, source=source).parsed())


@dataclass(slots=True)
class Problems:
    """Malformed rows: the first 20, and the number of all."""

    num_good: int = 0
    num_malformed: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, problem: str) -> None:
        """Note a malformed row."""
        self.num_malformed += 1
        if self.num_malformed <= _MAX_PROBLEMS_SHOWN:
            self.first.append(problem)

    def raise_if_any(self) -> None:
        """Name them.

        Raises:
            DataError: there are some.
        """
        if not self.num_malformed:
            return
        lines = "\n  ".join(self.first)
        num_unnamed = self.num_malformed - len(self.first)
        more = f"\n  and {num_unnamed} more" if num_unnamed > 0 else ""
        raise DataError(
            f"{self.num_malformed} of {self.num_good + self.num_malformed} rows are malformed; "
            f"correct or remove:\n  {lines}{more}"
        )


def parse(raw: RawRow, columns: Columns) -> Row:
    """Parse a row.

    Raises:
        Malformed: it is not one; says why.
    """
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
        prompt, answer = split_answer(prompt, name, why=why, needs_prompt=True)
        answer_name = f"{name}[-1].content"
    else:
        answer, answer_name = needed[columns.answer], columns.answer
        if columns.rejected is not None:
            names = (columns.answer, columns.rejected)
            prompt, (answer, rejected) = split_pair(prompt, {n: needed[n] for n in names})
    source = record.get(columns.source) or raw.source
    return Row(
        prompt=_parse_messages(prompt, name)
        if isinstance(prompt, list)
        else _parse_text(prompt, name),
        answer=_parse_answer(answer, answer_name),
        source=_parse_text(source, columns.source),
        origin=raw.origin,
        difficulty=0.0
        if columns.difficulty is None
        else _parse_number(needed[columns.difficulty], columns.difficulty),
        rejected=None if columns.rejected is None else _parse_text(rejected, columns.rejected),
        margin=0.0
        if columns.margin is None
        else _parse_number(needed[columns.margin], columns.margin),
        own=_write_own({name: needed[name] for name in columns.own}),
    )


def _write_own(values: Mapping[str, object]) -> str:
    """Write the columns that reward functions get as they stand."""
    try:
        return to_json_text(values) if values else ""
    except (TypeError, ValueError) as error:
        raise Malformed(f"{', '.join(values)} cannot be written as JSON: {error}") from error


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


def _parse_number(value: object, name: str) -> float:
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
