"""Rows of data files of each format, as they stand: jsonl, json, csv, parquet, datasets folder.

A Python file with a function is one, too: see ``_call_function``. So is a task of reasoning-gym:
see ``data/tasks.py``. A folder that ``save_to_disk`` of Hugging Face datasets wrote needs no
package of theirs: it is Arrow streams, and a ``state.json`` that names them. Every malformed row is
named by file and line.
"""

from __future__ import annotations

import csv
import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow
import pyarrow.parquet

from hybridrl.config.functions.paths import TASK_PREFIX, split_function
from hybridrl.data.parsing import Columns, RawRow, Record, name_column, parse
from hybridrl.data.rows import Malformed, Row
from hybridrl.data.tasks import make_task_rows
from hybridrl.errors import DataError, shown
from hybridrl.processes.child import load_module

_MAX_PROBLEMS_SHOWN = 20
_STATE = "state.json"  # the file by which a folder is known as a data set on disk


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFiles:
    """The files that one key of the configuration lists."""

    files: Sequence[Path]
    columns: Columns
    key: str  # the configuration key, for messages
    source: str | None = None  # of a row without the source column; None is its file's name

    def read(self) -> Iterator[RawRow]:
        """Yield the rows of all files, in order. Blank lines of a jsonl file are skipped.

        DataError as `read_records`, or if there is no row at all.
        """
        is_empty = True
        for path in self.files:
            source = path.stem if self.source is None else self.source
            for number, record in read_records(path, self.columns, key=self.key):
                is_empty = False
                yield RawRow(record, source, f"{path}:{number}")
        if is_empty:
            names = ", ".join(str(path) for path in self.files) or "no file"
            raise DataError(f"no rows in {names}; list files that have some in {self.key}")

    def parsed(self) -> Iterator[Row]:
        """Yield all rows, parsed; errors as `read`, and at the end if some rows are malformed."""
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
        """Name them in a DataError."""
        if not self.num_malformed:
            return
        lines = "\n  ".join(self.first)
        num_unnamed = self.num_malformed - len(self.first)
        more = f"\n  and {num_unnamed} more" if num_unnamed > 0 else ""
        raise DataError(
            f"{self.num_malformed} of {self.num_good + self.num_malformed} rows are malformed; "
            f"correct or remove:\n  {lines}{more}"
        )


def read_records(path: Path, columns: Columns | None, *, key: str) -> Iterator[tuple[int, Record]]:
    """Yield row number from 1, and the row; for a text file the number of its line.

    Args:
        path: a file by its suffix, a folder, ``file.py:function``, or ``reasoning_gym:TASK``, that
            ``key`` lists.
        columns: to read of a table; None is all.

    Raises:
        DataError: it is missing, unreadable, of another kind, or lacks a column.
    """
    if function := split_function(path):
        yield from enumerate(_call_function(*function, key=key), 1)
        return
    if str(path).startswith(TASK_PREFIX):
        yield from enumerate(make_task_rows(str(path), key=key), 1)
        return
    reader = _read_folder if path.is_dir() else _READERS.get(path.suffix)
    if reader is None:
        raise DataError(
            f"{key}: {path} is none of {', '.join(_READERS)}, nor a folder, nor "
            "file.py:function; convert or rename it"
        )
    if not path.exists():
        raise DataError(f"{key}: {path} is not a file; paths are relative to {Path.cwd()}")
    try:
        yield from reader(path, columns)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{key}: cannot read {path}: {error}") from error


def _read_jsonl(path: Path, _: Columns | None) -> Iterator[tuple[int, Record]]:
    # surrogateescape reads a line with bytes that are not UTF-8, so that it can be named.
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, line


def _read_json(path: Path, _: Columns | None) -> Iterator[tuple[int, Record]]:
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise DataError(
            f"{path} is not JSON: {error}; a file of JSON lines ends in .jsonl"
        ) from error
    if not isinstance(values, list):
        raise DataError(
            f"{path} holds a JSON {type(values).__name__}, must be a list of rows [{{...}}, ...]"
        )
    for number, value in enumerate(values, 1):
        name = type(value).__name__
        is_row = isinstance(value, dict)
        yield number, value if is_row else Malformed(f"is a JSON {name}, must be an object {{...}}")


def _read_csv(path: Path, columns: Columns | None) -> Iterator[tuple[int, Record]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            _columns_to_read(reader.fieldnames or [], columns, path)
            for record in reader:
                short = [name for name, value in record.items() if value is None]
                if None in record:
                    yield reader.line_num, Malformed("has more cells than the header has columns")
                elif short:
                    yield reader.line_num, Malformed(f"has no cell for {short[0]!r}")
                else:
                    yield reader.line_num, record
        except (csv.Error, UnicodeDecodeError) as error:
            line = reader.line_num + 1
            raise DataError(f"{path}:{line}: cannot be read as CSV: {error}") from error


def _read_parquet(path: Path, columns: Columns | None) -> Iterator[tuple[int, Record]]:
    with pyarrow.parquet.ParquetFile(path) as file:
        wanted = _columns_to_read(file.schema_arrow.names, columns, path)
        yield from enumerate(_records_of(file.iter_batches(columns=wanted)), 1)


def _read_folder(path: Path, columns: Columns | None) -> Iterator[tuple[int, Record]]:
    """Read the Arrow streams of a data set, mapped into memory."""
    try:
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        files = [path / str(entry["filename"]) for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is no data set on disk: its {_STATE} cannot be read ({error}); list a folder "
            "that save_to_disk wrote, one split of it"
        ) from error
    if state.get("_indices_data_files"):
        raise DataError(
            f"{path} is a selection of rows by an index file; save it again after "
            "dataset.flatten_indices()"
        )

    def batches() -> Iterator[pyarrow.RecordBatch]:
        for file in files:
            with pyarrow.memory_map(str(file)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
                wanted = _columns_to_read(stream.schema.names, columns, path)
                for batch in stream:
                    yield batch.select(wanted)

    yield from enumerate(_records_of(batches()), 1)


def _records_of(
    batches: Iterable[pyarrow.RecordBatch],
) -> Iterator[Mapping[str, object] | Malformed]:
    for batch in batches:
        try:
            yield from batch.to_pylist()
        except ValueError:  # UnicodeDecodeError is one; Arrow does not say in which row
            for number in range(batch.num_rows):
                yield _record_of(batch, number)


def _record_of(batch: pyarrow.RecordBatch, number: int) -> Mapping[str, object] | Malformed:
    record = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            record[name] = column[number].as_py()
        except UnicodeDecodeError as error:
            return Malformed(f"{name!r} is not UTF-8 at byte {error.start + 1}")
        except ValueError as error:
            return Malformed(f"{name!r} cannot be read: {error}")
    return record


def _columns_to_read(known: Sequence[str], columns: Columns | None, path: Path) -> list[str]:
    """Return some columns of a table; raises DataError if one is missing, or stands there twice."""
    if columns is None:
        return list(known)
    for name, key in columns.needed.items():
        if _column_of(name, known) not in known:
            raise DataError(f"{path} has no column {name!r}; {name_column(name, known, key=key)}")
        if known.count(name) > 1:
            raise DataError(f"{path} has {known.count(name)} columns {name!r}; keep one")
    optional = [name for name in known if name in (columns.source, columns.images)]
    asked = [*columns.needed, *optional]
    return list(dict.fromkeys(_column_of(name, known) for name in asked))


def _column_of(name: str, known: Sequence[str]) -> str:
    """Return the column that has ``name``: ``a.b`` is a field of column ``a``, if no column."""
    return name if name in known else name.partition(".")[0]


_READERS: Mapping[str, Callable[[Path, Columns | None], Iterator[tuple[int, Record]]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _call_function(path: Path, name: str, *, key: str) -> Iterator[Record]:
    """Import a user's file, call its function (``path/to/file.py:function``), and yield its rows.

    It takes no argument and yields dictionaries, always the same in the same order.
    """
    try:
        function = vars(load_module(str(path))).get(name)
        if not callable(function):
            raise AttributeError(f"there is no function {name!r}")
        rows: Iterable[object] = function()
        if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
            raise TypeError(f"it returned {shown(rows)}, must yield dictionaries")
        for row in rows:
            reason = f"is of type {type(row).__name__}, must be a dictionary"
            yield row if isinstance(row, dict) else Malformed(reason)
    except Exception as error:  # of a user's code, which may raise any
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path.absolute())]
        where = f" ({path}:{lines[-1]})" if lines else ""
        raise DataError(
            f"{key}: {path}:{name}: {type(error).__name__}: {error}{where}; correct the file"
        ) from error
