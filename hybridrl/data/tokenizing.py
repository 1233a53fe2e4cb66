"""Tokenizes rows as they are read; large sets by several processes, and kept for later runs."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path

from hybridrl.config.paths import split_function
from hybridrl.data.encoding import Chunk, EncodedRows, RowEncoder, encode_by_processes
from hybridrl.data.files import Problems, RowFiles
from hybridrl.data.parsing import RawRow
from hybridrl.data.prompts import Overlong
from hybridrl.data.row_table import RowTable, TableWriter, open_table
from hybridrl.data.rows import Row
from hybridrl.errors import DataError
from hybridrl.json_text import to_json_text

log = logging.getLogger(__name__)

_FORMAT = 3
_PACKAGES = ("transformers", "tokenizers", "jinja2")
_SAMPLE_BYTES = 2**16
_ROWS_PER_CHUNK = 1024
_SECONDS_ALONE = 5.0  # as long as a process takes to begin
_ROWS_PER_NOTE = 128 * _ROWS_PER_CHUNK
_MAX_CHARS_SHOWN = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """Disk and processes for large sets; the rows do not depend on them."""

    folder: Path | None = None
    """Of files of more than ``ROWS_IN_MEMORY`` rows; None keeps all rows in memory."""

    num_processes: int = 1

    on_progress: Callable[[str], None] = lambda text: None
    """Called about once a second with the number of rows so far."""


def encode_rows(rows: Iterable[Row], encoder: RowEncoder) -> RowTable:
    """Tokenize rows that are in memory, and leave them there; errors as `tokenize_files`."""
    return _tokenize(rows, encoder, Resources(), None)


def tokenize_files(files: RowFiles, encoder: RowEncoder, resources: Resources) -> RowTable:
    """Read and tokenize all rows now, so that a bad one ends the run before it began.

    A set of many rows is kept in a file. Its name is a digest of paths, sizes, times, and first and
    last bytes of the data files, and of all else that the rows depend on. A later run maps it, and
    reads nothing. The fingerprint is of the rows themselves.

    Raises:
        DataError: as `RowFiles.parsed` and `render`; or a prompt is overlong with
            ``overlong="error"``, or all prompts were dropped.
    """
    encoder = replace(encoder, columns=files.columns)
    target = None if resources.folder is None else cache_file(resources.folder, files, encoder)
    table = None if target is None else open_table(target)
    if table is not None:
        _warn_of_dropped(table)
        return table
    return _tokenize(files.read(), encoder, resources, target)


def cache_file(folder: Path, files: RowFiles, encoder: RowEncoder) -> Path | None:
    """Return the file of these rows, which need not exist; None if they cannot be known again.

    That is so for rows of a function, and if the tokenizer is not one of the fast ones.
    """
    tokenizer = encoder.tokenizer
    if not tokenizer.is_fast or any(split_function(path) for path in files.files):
        return None
    parts = [
        *(_FORMAT, [_identify(path) for path in files.files], asdict(files.columns)),
        *(files.source, encoder.use_chat_template, encoder.max_prompt_tokens, encoder.overlong),
        *(tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template),
        *(tokenizer.special_tokens_map, [version(package) for package in _PACKAGES]),
        list(encoder.tools),
    ]
    digest = hashlib.sha256(to_json_text(parts).encode()).hexdigest()
    return folder / f"{digest[:32]}.arrow"


def _identify(path: Path) -> list[object]:
    """Return the facts by which a version of a file, or of a folder, is known."""
    names = sorted(path.iterdir()) if path.is_dir() else [path]
    parts: list[object] = [str(path)]
    for name in names:
        if name.is_file():
            status = name.stat()
            with name.open("rb") as file:
                first = file.read(_SAMPLE_BYTES)
                file.seek(max(0, status.st_size - _SAMPLE_BYTES))
                sample = hashlib.sha256(first + file.read(_SAMPLE_BYTES)).hexdigest()
            parts.append([str(name.resolve()), status.st_size, status.st_mtime_ns, sample])
    return parts


def _tokenize(
    raws: Iterable[RawRow | Row], encoder: RowEncoder, resources: Resources, target: Path | None
) -> RowTable:
    problems, overlong = Problems(), Overlong()
    with (
        closing(TableWriter(resources.folder)) as writer,
        closing(_encode(raws, encoder, resources)) as chunks,
    ):
        for encoded in chunks:
            for problem in encoded.malformed:
                problems.add(problem)
            problems.num_good += encoded.num_rows
            for origin, num_tokens in encoded.overlong:
                overlong.add(origin, num_tokens)
            if not problems.num_malformed:
                writer.add(encoded.batch)
            _note(problems.num_good, encoded.num_rows, resources)
        problems.raise_if_any()
        _refuse_overlong(overlong, encoder, num_rows=problems.num_good)
        num_dropped = overlong.count if encoder.overlong == "drop" else 0
        table = writer.finish(target, num_dropped=num_dropped)
    if encoder.use_chat_template:
        _require_different_texts(table)
    _warn_of_dropped(table)
    return table


def _refuse_overlong(overlong: Overlong, encoder: RowEncoder, *, num_rows: int) -> None:
    """Raise DataError if there are some and none may be, or if no other prompt is left."""
    key = "data.max_prompt_tokens"
    if overlong.count and encoder.overlong == "error":
        raise DataError(overlong.name("prompts", key, encoder.max_prompt_tokens) + " or keep_end")
    if 0 < num_rows == overlong.count and encoder.overlong == "drop":
        raise DataError(
            f"all {num_rows} prompts are longer than {key}={encoder.max_prompt_tokens}; set it to "
            f"{overlong.shortest} tokens or more"
        )


def _note(num_rows: int, num_new: int, resources: Resources) -> None:
    resources.on_progress(f"{num_rows:,} rows")
    if num_rows // _ROWS_PER_NOTE > (num_rows - num_new) // _ROWS_PER_NOTE:
        log.info("tokenized prompts: count=%d", num_rows)


def _encode(
    raws: Iterable[RawRow | Row], encoder: RowEncoder, resources: Resources
) -> Generator[EncodedRows, None, None]:
    """Encode chunks of rows: this process alone for some seconds, then several, if they may."""
    chunks = _chunks(raws)
    begin_s = time.monotonic()
    is_alone = resources.num_processes == 1 or not encoder.tokenizer.is_fast
    for chunk in chunks:
        yield encoder(chunk)
        if not is_alone and time.monotonic() - begin_s > _SECONDS_ALONE:
            break
    further = next(chunks, None)
    if further is not None:
        yield from encode_by_processes(
            encoder, chain([further], chunks), num_processes=resources.num_processes
        )


def _chunks(raws: Iterable[RawRow | Row]) -> Iterator[Chunk]:
    remaining = iter(raws)
    while chunk := list(islice(remaining, _ROWS_PER_CHUNK)):
        yield chunk


def _warn_of_dropped(table: RowTable) -> None:
    if table.num_dropped:
        num_rows = len(table) + table.num_dropped
        log.warning("dropped overlong prompts: count=%d of=%d", table.num_dropped, num_rows)


def _require_different_texts(table: RowTable) -> None:
    """Reject a template that leaves the prompt out: all prompts would be equal."""
    if any(row.prompt_text != table[0].prompt_text for row in table):
        return
    prompts = {row.row.prompt for row in table}
    if len(prompts) > 1:
        raise DataError(
            f"the chat template renders {len(prompts)} different prompts as the same text "
            f"{table[0].prompt_text[:_MAX_CHARS_SHOWN]!r}: it leaves the prompt out; correct it, "
            "or set data.use_chat_template=false"
        )
