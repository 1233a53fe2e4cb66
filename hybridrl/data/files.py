"""Reads rows from data files of any format; every malformed row is named by file and line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hybridrl.data.columns import Columns
from hybridrl.data.parsing import RawRow, parse
from hybridrl.data.records import Malformed, read_records, require_columns
from hybridrl.data.rows import Row
from hybridrl.errors import DataError

_MAX_PROBLEMS_SHOWN = 20


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
            DataError: as `read_records`; or there is no row at all.
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
