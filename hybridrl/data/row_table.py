"""Tokenized rows in Arrow batches, which stay in memory or in a file that is mapped into it.

A row is made when it is asked for, so a set may be larger than the memory. The file is an ordinary
Arrow file, which other tools read. Its last batch has no rows; it says what the rows are, and that
the file is complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, fields
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, overload

import numpy as np
import pyarrow
import torch
from numpy.typing import NDArray

from hybridrl.atomic_io import flush
from hybridrl.data.pixels import SizedImage
from hybridrl.data.prompts import Rendered, TokenizedRow
from hybridrl.data.rows import Row, read_record, write_record
from hybridrl.json_text import to_json_text

log = logging.getLogger(__name__)

ROWS_IN_MEMORY = 20_000
"""Larger sets are kept in a file. So many take about 10 MB, and a second or two to tokenize."""

SCHEMA = pyarrow.schema(
    {
        "record": pyarrow.large_string(),  # see `write_record`
        "origin": pyarrow.large_string(),
        "prompt_text": pyarrow.large_string(),  # null if it is the prompt of the record
        "token_ids": pyarrow.list_(pyarrow.int32()),
        "difficulty": pyarrow.float64(),
        # of each image the numbers of `SizedImage`; null if the model sees none
        "image_sizes": pyarrow.list_(pyarrow.int32()),
    }
)
Sizes = tuple[SizedImage, ...] | None
"""Of the images of a row; see ``TokenizedRow.images``."""

_NUMBERS = len(fields(SizedImage)) - 1
_ABOUT = b"hybridrl.rows"
_MAGIC_BYTES = 8  # before the first batch of a file
_UNFINISHED = ".unfinished-"
_DAY_S = 86_400.0


def encode_batch(rows: Sequence[tuple[Row, Rendered, Sizes]]) -> pyarrow.RecordBatch:
    """Encode rows, each with the text and token ids of its prompt, and the sizes of its images."""
    columns = {
        "record": [write_record(row) for row, _, _ in rows],
        "origin": [row.origin for row, _, _ in rows],
        "prompt_text": [None if text == row.prompt else text for row, (text, _), _ in rows],
        "token_ids": [token_ids for _, (_, token_ids), _ in rows],
        "difficulty": [row.difficulty for row, _, _ in rows],
        "image_sizes": [
            None if sizes is None else [n for size in sizes for n in astuple(size)[1:]]
            for _, _, sizes in rows
        ],
    }
    return pyarrow.RecordBatch.from_pydict(columns, schema=SCHEMA)


class RowTable(Sequence[TokenizedRow]):
    """Rows by their number; each is made when it is asked for."""

    def __init__(
        self, batches: Sequence[pyarrow.RecordBatch], *, fingerprint: str = "", num_dropped: int = 0
    ) -> None:
        """Hold batches of ``SCHEMA``, which may be mapped from a file."""
        self._batches = batches
        self._begins: list[int] = list(accumulate((batch.num_rows for batch in batches), initial=0))
        self.fingerprint = fingerprint  # of the rows; see `data/rows.py`
        self.num_dropped = num_dropped  # overlong prompts that were left out

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
        at = bisect_right(self._begins, numbers) - 1
        number = numbers - self._begins[at]
        columns = self._batches[at].columns
        record, origin, prompt_text, token_ids, _, sizes = (column[number] for column in columns)
        row = read_record(record.as_py(), origin=origin.as_py())
        tokens = token_ids.values.to_numpy().astype(np.int64)
        text = prompt_text.as_py()
        images = None
        if (flat_sizes := sizes.as_py()) is not None:
            images = tuple(
                SizedImage(source, *flat_sizes[image * _NUMBERS : (image + 1) * _NUMBERS])
                for image, source in enumerate(row.images)
            )
        return TokenizedRow(
            row, str(row.prompt) if text is None else text, torch.from_numpy(tokens), images=images
        )

    def difficulties(self) -> NDArray[np.float64]:
        """Return the difficulty of every row."""
        return np.concatenate([batch.column("difficulty").to_numpy() for batch in self._batches])

    @classmethod
    def joined(cls, tables: Iterable[RowTable]) -> RowTable:
        """Return the rows of all tables, end to end; without a fingerprint."""
        return cls([batch for table in tables for batch in table._batches])


class TableWriter:
    """Collects batches in memory; once there are many rows, in a file. Close it at the end."""

    def __init__(self, folder: Path | None) -> None:
        """Begin with no row; without a folder all rows stay in memory."""
        self._folder = folder
        self._digest = hashlib.sha256()
        self._num_rows = 0
        self._in_memory: list[pyarrow.RecordBatch] = []
        self._num_in_file = 0  # batches
        self._file: BinaryIO | None = None
        self._arrow: pyarrow.RecordBatchFileWriter  # of the file

    def add(self, batch: pyarrow.RecordBatch) -> None:
        """Append rows."""
        for record in batch.column("record").to_pylist():
            self._digest.update(record.encode())
        self._num_rows += batch.num_rows
        self._in_memory.append(batch)
        if self._folder is not None and self._num_rows > ROWS_IN_MEMORY:
            self._move_to_file(self._folder)

    def finish(self, target: Path | None, *, num_dropped: int) -> RowTable:
        """Return the rows; ``target`` is the name of the file for later runs, None leaves none."""
        fingerprint = self._digest.hexdigest()
        mapped: list[pyarrow.RecordBatch] = []
        if self._file is not None and self._num_in_file:
            # The file need not be complete: what follows its magic is a stream.
            with pyarrow.memory_map(self._file.name) as file:
                file.seek(_MAGIC_BYTES)
                stream = pyarrow.ipc.open_stream(file)
                mapped = [stream.read_next_batch() for _ in range(self._num_in_file)]
            if target is not None and not self._in_memory:
                about = {"fingerprint": fingerprint, "num_dropped": num_dropped}
                self._keep(self._file, target, about)
        batches = [*mapped, *self._in_memory]
        return RowTable(batches, fingerprint=fingerprint, num_dropped=num_dropped)

    def close(self) -> None:
        """Remove a file that was not finished; mapped rows stay readable."""
        if self._file is not None:
            with suppress(OSError):
                Path(self._file.name).unlink()
            with suppress(OSError):
                self._file.close()

    def _move_to_file(self, folder: Path) -> None:
        """Write the rows of the memory. A disk that refuses costs no run: the log says so."""
        try:
            if self._file is None:
                folder.mkdir(parents=True, exist_ok=True)
                self._file = (folder / f"{_UNFINISHED}{os.getpid()}-{id(self):x}").open("xb")
                _remove_old(folder, now_s=os.fstat(self._file.fileno()).st_mtime)
                self._arrow = pyarrow.ipc.new_file(self._file, SCHEMA)
            while self._in_memory:
                self._arrow.write_batch(self._in_memory[0])
                self._file.flush()
                del self._in_memory[0]
                self._num_in_file += 1
        except OSError as error:
            log.warning("rows are held in memory: %s cannot be written: %s", folder, error)
            self._folder = None

    def _keep(self, file: BinaryIO, target: Path, about: Mapping[str, object]) -> None:
        """Complete the file, and give it its name."""
        unfinished = Path(file.name)
        no_rows = encode_batch([])
        try:
            self._arrow.write_batch(no_rows, custom_metadata={_ABOUT: to_json_text(about)})
            self._arrow.close()
            file.flush()
            flush(unfinished)  # else a loss of power may leave a complete end, and holes before it
            unfinished.replace(target)
        except OSError as error:
            log.warning("rows are not kept: %s cannot be written: %s", target, error)


def open_table(path: Path) -> RowTable | None:
    """Map a file of rows; None if there is none, or it is not complete."""
    try:
        with pyarrow.memory_map(str(path)) as mapped, pyarrow.ipc.open_file(mapped) as file:
            if file.schema != SCHEMA:
                raise ValueError(f"its columns are {', '.join(file.schema.names)}")
            batches = [file.get_batch(number) for number in range(file.num_record_batches - 1)]
            last = file.get_batch_with_custom_metadata(len(batches))
            table = RowTable(batches, **json.loads(dict(last.custom_metadata or {})[_ABOUT]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, pyarrow.ArrowException) as error:
        log.warning("rows are tokenized again: %s cannot be read: %s", path, error)
        return None
    log.info("%d tokenized rows come from %s", len(table), path)
    return table


def _remove_old(folder: Path, *, now_s: float) -> None:
    """Remove files of runs that were killed while they wrote them; ``now_s`` is a new file's."""
    for path in folder.glob(f"{_UNFINISHED}*"):
        with suppress(FileNotFoundError):
            if now_s - path.stat().st_mtime > _DAY_S:
                path.unlink()
