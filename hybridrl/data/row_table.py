"""Tokenized rows in blocks of bytes, which stay in memory or in a file that is mapped into it.

A row is read when it is asked for, so a set may be larger than the memory. A block holds some rows:
their number, the ends of their four columns, their difficulties, then the columns: token ids,
records, origins, prompts' texts. A file is blocks, JSON about them, and a foot that makes a file
that was cut off known.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import BinaryIO, overload

import numpy as np
import torch
from numpy.typing import NDArray

from hybridrl.atomic_io import flush
from hybridrl.data.prompts import Rendered, TokenizedRow
from hybridrl.data.rows import Row, read_record, write_record
from hybridrl.json_text import to_json_text

log = logging.getLogger(__name__)

ROWS_IN_MEMORY = 20_000
"""Larger sets are kept in a file. So many take about 10 MB, and a second or two to tokenize."""

_COLUMNS = 4
_WORD = 8  # bytes of each number before the columns
_MAGIC = b"rows 1\n\0"
_UNFINISHED = ".unfinished-"
_DAY_S = 86_400.0


def encode_block(rows: Sequence[tuple[Row, Rendered]]) -> bytes:
    """Encode at least one row, with the text and token ids of its prompt."""
    columns: list[list[bytes]] = [[], [], [], []]
    for row, (text, token_ids) in rows:
        columns[0].append(np.array(token_ids, dtype=np.int32).tobytes())
        columns[1].append(write_record(row))
        columns[2].append(row.origin.encode())
        # The record has a prompt that is text and is not wrapped.
        columns[3].append(b"" if text == row.prompt else text.encode())
    ends = np.array([list(accumulate(map(len, column))) for column in columns], dtype=np.int64)
    difficulties = np.array([row.difficulty for row, _ in rows])
    head = [len(rows).to_bytes(_WORD, "little"), ends.T.tobytes(), difficulties.tobytes()]
    return b"".join(chain(head, *columns))


class _Block:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.num_rows = int.from_bytes(data[:_WORD], "little")
        num_ends = self.num_rows * _COLUMNS
        head_bytes = _WORD * (1 + num_ends + self.num_rows)
        self._ends = np.frombuffer(data, np.int64, num_ends, _WORD).reshape(-1, _COLUMNS)
        self._begins = list(accumulate(self._ends[-1].tolist(), initial=head_bytes))

    @property
    def records(self) -> memoryview:
        return self._data[self._begins[1] : self._begins[2]]

    @property
    def difficulties(self) -> NDArray[np.float64]:
        begin = _WORD * (1 + self.num_rows * _COLUMNS)
        return np.frombuffer(self._data, np.float64, self.num_rows, begin)

    def read(self, index: int) -> TokenizedRow:
        begins = self._ends[index - 1].tolist() if index else [0] * _COLUMNS
        ends = self._ends[index].tolist()
        token_ids, record, origin, text = (
            bytes(self._data[column + begin : column + end])
            for column, begin, end in zip(self._begins, begins, ends, strict=False)
        )
        row = read_record(record, origin=origin.decode())
        prompt_text = text.decode()
        if not text and isinstance(row.prompt, str):
            prompt_text = row.prompt
        tokens = torch.from_numpy(np.frombuffer(token_ids, np.int32).astype(np.int64))
        return TokenizedRow(row, prompt_text, tokens)


class RowTable(Sequence[TokenizedRow]):
    """Rows by their number; each is made when it is asked for."""

    def __init__(
        self,
        blocks: Sequence[memoryview],
        counts: Sequence[int],
        *,
        fingerprint: str = "",
        num_dropped: int = 0,
    ) -> None:
        """Hold blocks, which may be mapped from a file.

        Args:
            blocks: see ``encode_block``.
            counts: rows of each block.
            fingerprint: of the rows; see ``data/rows.py``.
            num_dropped: overlong prompts that were left out.
        """
        self._blocks = blocks
        self._counts = counts
        self._begins = list(accumulate(counts, initial=0))
        self.fingerprint = fingerprint
        self.num_dropped = num_dropped

    def __len__(self) -> int:
        return self._begins[-1]

    @overload
    def __getitem__(self, index: int) -> TokenizedRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenizedRow]: ...
    def __getitem__(self, index: int | slice) -> TokenizedRow | list[TokenizedRow]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        block = bisect_right(self._begins, numbers) - 1
        return _Block(self._blocks[block]).read(numbers - self._begins[block])

    def difficulties(self) -> NDArray[np.float64]:
        """Return the difficulty of every row."""
        return np.concatenate([_Block(block).difficulties for block in self._blocks])

    @classmethod
    def joined(cls, tables: Iterable[RowTable]) -> RowTable:
        """Return the rows of all tables, end to end; without a fingerprint."""
        tables = list(tables)
        blocks = [block for table in tables for block in table._blocks]
        return cls(blocks, [count for table in tables for count in table._counts])


class TableWriter:
    """Collects blocks in memory; once there are many rows, in a file."""

    def __init__(self, folder: Path | None) -> None:
        """Begin with no row.

        Args:
            folder: of the file; None keeps all rows in memory.
        """
        self._folder = folder
        self._digest = hashlib.sha256()
        self._num_rows = 0
        self._counts: list[int] = []
        self._blocks: list[bytes] = []  # that are not in the file
        self._sizes: list[int] = []  # of those that are
        self._file: BinaryIO | None = None

    def add(self, data: bytes) -> None:
        """Append a block."""
        block = _Block(memoryview(data))
        self._digest.update(block.records)
        self._num_rows += block.num_rows
        self._counts.append(block.num_rows)
        self._blocks.append(data)
        if self._folder is not None and self._num_rows > ROWS_IN_MEMORY:
            self._move_to_file(self._folder)

    def finish(self, target: Path | None, *, num_dropped: int) -> RowTable:
        """Return the rows.

        Args:
            target: the name of the file, for later runs; None leaves no file.
            num_dropped: overlong prompts that were left out.
        """
        fingerprint = self._digest.hexdigest()
        blocks = _map_blocks(self._file, self._sizes) if self._file and self._sizes else []
        if target is not None and self._file is not None and not self._blocks:
            about = {"sizes": self._sizes, "counts": self._counts, "fingerprint": fingerprint}
            about_text = to_json_text(about | {"num_dropped": num_dropped})
            _keep(self._file, target, about_text.encode())
        blocks += map(memoryview, self._blocks)
        return RowTable(blocks, self._counts, fingerprint=fingerprint, num_dropped=num_dropped)

    def close(self) -> None:
        """Remove a file that was not finished; mapped blocks stay readable."""
        if self._file is not None:
            with suppress(OSError):
                Path(self._file.name).unlink()
            with suppress(OSError):
                self._file.close()

    def _move_to_file(self, folder: Path) -> None:
        """Write the blocks of the memory. A disk that refuses costs no run: the log says so."""
        try:
            if self._file is None:
                folder.mkdir(parents=True, exist_ok=True)
                self._file = (folder / f"{_UNFINISHED}{os.getpid()}-{id(self):x}").open("x+b")
                _remove_old(folder, now_s=os.fstat(self._file.fileno()).st_mtime)
            while self._blocks:
                self._file.write(self._blocks[0])
                self._file.flush()
                self._sizes.append(len(self._blocks.pop(0)))
        except OSError as error:
            log.warning("rows are held in memory: %s cannot be written: %s", folder, error)
            self._folder = None


@contextmanager
def table_writer(folder: Path | None) -> Iterator[TableWriter]:
    """Write a table; what is not finished at the end of the block is removed."""
    writer = TableWriter(folder)
    try:
        yield writer
    finally:
        writer.close()


def open_table(path: Path) -> RowTable | None:
    """Map a file of rows; None if there is none, or it is not complete."""
    try:
        with path.open("rb") as file:
            file.seek(-len(_MAGIC) - _WORD, os.SEEK_END)
            foot = file.read()
            num_bytes = int.from_bytes(foot[:_WORD], "little")
            if foot[_WORD:] != _MAGIC:
                raise ValueError("its end is missing")
            file.seek(-num_bytes - len(foot), os.SEEK_END)
            about = json.loads(file.read(num_bytes))
            blocks = _map_blocks(file, about.pop("sizes"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        log.warning("rows are tokenized again: %s cannot be read: %s", path, error)
        return None
    log.info("%d tokenized rows come from %s", sum(about["counts"]), path)
    return RowTable(blocks, **about)


def _map_blocks(file: BinaryIO, sizes: Sequence[int]) -> list[memoryview]:
    data = memoryview(mmap.mmap(file.fileno(), sum(sizes), access=mmap.ACCESS_READ))
    return [data[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0))]


def _keep(file: BinaryIO, target: Path, about: bytes) -> None:
    """Complete a file, and give it its name."""
    try:
        file.write(about + len(about).to_bytes(_WORD, "little") + _MAGIC)
        file.flush()
        flush(Path(file.name))  # else a loss of power may leave a file with a foot and holes
        Path(file.name).replace(target)
    except OSError as error:
        log.warning("rows are not kept: %s cannot be written: %s", target, error)


def _remove_old(folder: Path, *, now_s: float) -> None:
    """Remove files of runs that were killed while they wrote them; ``now_s`` is a new file's."""
    for path in folder.glob(f"{_UNFINISHED}*"):
        with suppress(FileNotFoundError):
            if now_s - path.stat().st_mtime > _DAY_S:
                path.unlink()
