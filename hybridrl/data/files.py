"""Reads rows from jsonl and parquet files; every malformed row is named by file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet

from hybridrl.data.rows import Message, Row
from hybridrl.errors import DataError, shown, suggest_name

_MAX_PROBLEMS_SHOWN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The names of the columns in the files; see ``config/data.py``."""

    prompt: str = "prompt"
    answer: str = "answer"
    source: str = "source"


class _Malformed(Exception):
    """An error in one row; collected, never raised to a caller."""


_Record = str | Mapping[str, object] | _Malformed
"""The text of a jsonl line, the columns of a row, or why those cannot be had."""


def read_rows(files: Sequence[Path], *, columns: Columns, key: str) -> list[Row]:
    """Read all rows of all files, in order.

    Blank lines of a jsonl file are skipped. A row without the source column gets its file's name.

    Args:
        files: ``.jsonl`` or ``.parquet``.
        columns: names of the columns.
        key: the configuration key that lists the files, for messages.

    Raises:
        DataError: a file that is missing, unreadable or of another kind; a parquet file without a
            column; no row at all; or malformed rows: the first 20 are listed, the rest counted.
    """
    rows: list[Row] = []
    problems: list[str] = []
    for path in files:
        for number, record in _read_records(path, columns=columns, key=key):
            origin = f"{path}:{number}"
            try:
                rows.append(
                    _parse(record, columns=columns, default_source=path.stem, origin=origin)
                )
            except _Malformed as problem:
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


def _read_records(path: Path, *, columns: Columns, key: str) -> Iterator[tuple[int, _Record]]:
    """Yield row number from 1, and the row."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise DataError(f"{key}: {path} is neither .jsonl nor .parquet; convert or rename it")
    if not path.is_file():
        raise DataError(f"{key}: {path} is not a file; paths are relative to {Path.cwd()}")
    try:
        if path.suffix == ".jsonl":
            yield from _read_lines(path)
        else:
            yield from _read_parquet(path, columns)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{key}: cannot read {path}: {error}") from error


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    # surrogateescape reads a line with bytes that are not UTF-8, so that it can be named.
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, line


def _read_parquet(path: Path, columns: Columns) -> Iterator[tuple[int, _Record]]:
    with pyarrow.parquet.ParquetFile(path) as file:
        known = file.schema_arrow.names
        for name, key in ((columns.prompt, "prompt_key"), (columns.answer, "answer_key")):
            if name not in known:
                raise DataError(
                    f"{path} has no column {name!r}; set data.{key}: {suggest_name(name, known)}"
                )
            if known.count(name) > 1:
                raise DataError(f"{path} has {known.count(name)} columns {name!r}; keep one")
        wanted = [columns.prompt, columns.answer]
        if columns.source in known:
            wanted.append(columns.source)
        records = (r for batch in file.iter_batches(columns=wanted) for r in _records_of(batch))
        yield from enumerate(records, 1)


def _records_of(batch: pyarrow.RecordBatch) -> Iterator[Mapping[str, object] | _Malformed]:
    try:
        yield from batch.to_pylist()
    except ValueError:  # UnicodeDecodeError is one; Arrow does not say in which row
        for number in range(batch.num_rows):
            yield _record_of(batch, number)


def _record_of(batch: pyarrow.RecordBatch, number: int) -> Mapping[str, object] | _Malformed:
    record = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            record[name] = column[number].as_py()
        except UnicodeDecodeError as error:
            return _Malformed(f"{name!r} is not UTF-8 at byte {error.start + 1}")
        except ValueError as error:
            return _Malformed(f"{name!r} cannot be read: {error}")
    return record


def _parse(record: _Record, *, columns: Columns, default_source: str, origin: str) -> Row:
    if isinstance(record, _Malformed):
        raise record
    if isinstance(record, str):
        record = _parse_json(record)
    prompt = _require(record, columns.prompt, key="data.prompt_key")
    answer = _require(record, columns.answer, key="data.answer_key")
    source = record.get(columns.source) or default_source
    return Row(
        prompt=_parse_messages(prompt, columns.prompt)
        if isinstance(prompt, list)
        else _parse_text(prompt, columns.prompt),
        answer=_parse_text(answer, columns.answer),
        source=_parse_text(source, columns.source),
        origin=origin,
    )


def _parse_json(line: str) -> Mapping[str, object]:
    try:
        line.encode()  # bytes that were not UTF-8 cannot be encoded again
        record = json.loads(line, object_pairs_hook=_parse_object)
    except UnicodeEncodeError as error:
        raise _Malformed(f"is not UTF-8 at character {error.start + 1}") from error
    except (ValueError, RecursionError) as error:
        raise _Malformed(f"is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise _Malformed(f"is a JSON {type(record).__name__}, must be an object {{...}}")
    return record


def _parse_object(pairs: Sequence[tuple[str, object]]) -> Mapping[str, object]:
    """Reject a duplicate name: JSON would silently keep only its last value."""
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        doubled = next(name for name in names if names.count(name) > 1)
        raise _Malformed(f"has {doubled!r} twice; keep one")
    return record


def _require(record: Mapping[str, object], name: str, *, key: str) -> object:
    if name not in record:
        raise _Malformed(f"has no {name!r}; set {key}: {suggest_name(name, list(record))}")
    return record[name]


def _parse_text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise _Malformed(f"{name!r} is {shown(value)}, must be text; write it in quotes")
    if not value.strip():
        raise _Malformed(f"{name!r} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON may escape halves of pairs; no tokenizer takes one
        half = f"\\u{ord(value[error.start]):04x}"
        raise _Malformed(
            f"{name!r} has half of a pair, {half}, as character {error.start + 1}; write both "
            "halves, or leave it out"
        ) from error
    return value


def _parse_messages(messages: Sequence[object], name: str) -> tuple[Message, ...]:
    if not messages:
        raise _Malformed(f"{name!r} has no messages")
    parsed = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _Malformed(
                f"{name}[{index}] is {shown(message)}, must be {{role: ..., content: ...}}"
            )
        role, content = (
            _parse_text(message.get(part), f"{name}[{index}].{part}")
            for part in ("role", "content")
        )
        parsed.append(Message(role, content))
    return tuple(parsed)
