"""Tokenizes rows as they are read; large sets by several processes, and kept for later runs.

Order and content of the result do not depend on the number of processes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import pickle
import time
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self

import pyarrow
from transformers import PreTrainedTokenizerBase

from hybridrl import env
from hybridrl.config.functions.paths import is_made
from hybridrl.data.files import Problems, RowFiles
from hybridrl.data.images import expand, size_images
from hybridrl.data.parsing import Columns, RawRow, parse
from hybridrl.data.prompts import Overlong, Rendered, render
from hybridrl.data.row_table import SCHEMA, RowTable, Sizes, TableWriter, encode_batch, open_table
from hybridrl.data.rows import Malformed, Row
from hybridrl.errors import DataError, HybridRLError
from hybridrl.images import ImageSettings
from hybridrl.json_text import to_json_text
from hybridrl.processes.child import Declined, Emit, Service
from hybridrl.processes.pool import CallFailed, Child, Pool, Refused

log = logging.getLogger(__name__)

_FORMAT = 4
_PACKAGES = ("transformers", "tokenizers", "jinja2")
_SAMPLE_BYTES = 2**16
_ROWS_PER_CHUNK = 1024
_SECONDS_ALONE = 5.0  # as long as a process takes to begin
_ROWS_PER_NOTE = 128 * _ROWS_PER_CHUNK
_MAX_CHARS_SHOWN = 80
_DAY_S = 86_400.0  # a chunk takes as long as it takes, and so do imports on a slow disk
_ANSWER_BYTES = 1 << 40

Chunk = Sequence[RawRow | Row]
"""Some rows, at least one, that are encoded together."""


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """The rows of a chunk, and the faults of those that are not in it."""

    # of the rows that are left, which may be none; see `data/row_table.py`
    batch: pyarrow.RecordBatch
    num_rows: int  # rows that were well formed, with those that were left out
    malformed: Sequence[str]  # origin and reason
    overlong: Sequence[tuple[str, int]]  # origin and tokens of each longer prompt

    def to_json(self) -> dict[str, Any]:
        """Return a form for ``from_json``."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "batch": b64encode(self.batch.serialize()).decode()}

    @classmethod
    def from_json(cls, form: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` returned."""
        batch = pyarrow.ipc.read_record_batch(pyarrow.py_buffer(b64decode(form["batch"])), SCHEMA)
        return cls(batch, form["num_rows"], form["malformed"], [*map(tuple, form["overlong"])])


@dataclass(frozen=True, kw_only=True, slots=True)
class RowEncoder:
    """Encodes rows; the result depends on nothing else, so any process may do it."""

    tokenizer: PreTrainedTokenizerBase  # see `data/prompts.py`
    use_chat_template: bool
    max_prompt_tokens: int
    overlong: str  # treatment of a longer prompt: `error`, `drop`, or `keep_end`: its last tokens
    tools: Sequence[Mapping[str, Any]] = ()  # schemas that the chat template shows the model
    columns: Columns | None = None  # of rows that were read; None if all rows are parsed
    images: ImageSettings | None = None  # how the model cuts images; None: it sees none

    def __call__(self, raws: Chunk) -> EncodedRows:
        """Encode some rows; raises DataError for a prompt that cannot be rendered or tokenized."""
        rows, sizes, malformed = [], [], []
        for raw in raws:
            try:
                row = raw if isinstance(raw, Row) else parse(raw, self.columns or Columns())
                sizes.append(size_images(row, self.images))
                rows.append(row)
            except Malformed as problem:
                malformed.append(f"{raw.origin}: {problem}")
        rendered = render(
            rows, self.tokenizer, use_chat_template=self.use_chat_template, tools=self.tools
        )
        kept: list[tuple[Row, Rendered, Sizes]] = []
        overlong = []
        for row, (text, words), images in zip(rows, rendered, sizes, strict=True):
            try:
                token_ids = self._with_images(words, images)
            except Malformed as problem:
                malformed.append(f"{row.origin}: {problem}")
                continue
            is_overlong = len(token_ids) > self.max_prompt_tokens
            if is_overlong:
                overlong.append((row.origin, len(token_ids)))
            if not is_overlong or self.overlong == "keep_end":
                kept.append((row, (text, token_ids[-self.max_prompt_tokens :]), images))
        num_rows = len(raws) - len(malformed)
        return EncodedRows(encode_batch(kept), num_rows, malformed, overlong)

    def _with_images(self, words: Sequence[int], images: Sizes) -> Sequence[int]:
        if self.images is None:
            return words
        token_ids = expand(words, images or (), self.images.placeholder)
        if images and len(token_ids) > self.max_prompt_tokens and self.overlong == "keep_end":
            raise Malformed(
                f"takes {len(token_ids)} tokens with its images, and no image can be cut; set "
                "data.overlong_prompts=drop, or lower data.max_image_pixels"
            )
        return token_ids


def encode_by_processes(
    encoder: RowEncoder, chunks: Iterable[Chunk], *, num_processes: int
) -> Generator[EncodedRows, None, None]:
    """Encode chunks by processes, in order; they end with the generator.

    They take seconds to begin. Nobody waits for that: this process encodes until one has begun.
    The tokenizer is a fast one, which can be sent to a process.

    Raises:
        DataError: a chunk cannot be encoded, or a process has ended.
    """
    pickled = _pickle(encoder)
    pool = Pool([_EncoderProcess(pickled) for _ in range(num_processes)], name="tokenize")
    with closing(pool), _named_end():
        starts = pool.start()
        num_begun = 0
        under_way: deque[Future[EncodedRows]] = deque()
        for chunk in chunks:
            for start in starts[:]:
                if start.done():
                    starts.remove(start)
                    start.result()
                    num_begun += 1
                    log.info("a process begins to tokenize: %d to come", len(starts))
            if not num_begun:
                yield encoder(chunk)
                continue
            under_way.append(pool.submit(partial(_EncoderProcess.encode, chunk=chunk)))
            if len(under_way) > num_begun:
                yield under_way.popleft().result()
        for encoded in under_way:
            yield encoded.result()


class _EncoderProcess(Child):
    """A process that encodes chunks, with this module's service."""

    def __init__(self, pickled: str) -> None:
        super().__init__(
            __name__,
            {"pickled": pickled},
            names=["the tokenizer"],
            timeout_s=_DAY_S,
            load_timeout_s=_DAY_S,
        )

    def encode(self, chunk: Chunk) -> EncodedRows:
        with self.call({"pickled": _pickle(chunk)}, max_bytes=_ANSWER_BYTES) as next_answer:
            return EncodedRows.from_json(next_answer())


def load(pickled: str) -> tuple[Service, None]:
    """Load an encoder in a process; its service, see ``processes/child.py``, encodes chunks."""
    env.set_value("TOKENIZERS_PARALLELISM", "false")
    encoder: RowEncoder = pickle.loads(b64decode(pickled))

    def encode(message: dict[str, Any], emit: Emit) -> None:
        try:
            encoded = encoder(pickle.loads(b64decode(message["pickled"])))
        except HybridRLError as error:
            raise Declined(str(error)) from error
        emit(**encoded.to_json())

    return encode, None


def _pickle(value: object) -> str:
    """Return a value as a text that JSON holds; only a child of this process reads it."""
    return b64encode(pickle.dumps(value)).decode()


@contextmanager
def _named_end() -> Iterator[None]:
    try:
        yield
    except Refused as error:
        raise DataError(str(error)) from error
    except CallFailed as error:
        raise DataError(
            f"a process that tokenizes rows failed, perhaps for want of memory: {error}; set "
            "data.num_processes=1, or fewer than now"
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """Disk and processes for large sets; the rows do not depend on them."""

    # of files of more than `ROWS_IN_MEMORY` rows; None keeps all rows in memory
    folder: Path | None = None
    num_processes: int = 1
    # called about once a second with the number of rows so far
    on_progress: Callable[[str], None] = lambda text: None


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

    That is so for rows of a function or a task, and if the tokenizer is not one of the fast ones.
    """
    tokenizer = encoder.tokenizer
    if not tokenizer.is_fast or any(is_made(path) for path in files.files):
        return None
    parts = [
        *(_FORMAT, [_identify(path) for path in files.files], asdict(files.columns)),
        *(files.source, encoder.use_chat_template, encoder.max_prompt_tokens, encoder.overlong),
        *(tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template),
        *(tokenizer.special_tokens_map, [version(package) for package in _PACKAGES]),
        list(encoder.tools),
        *([] if encoder.images is None else [asdict(encoder.images)]),
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
            num_rows = problems.num_good
            resources.on_progress(f"{num_rows:,} rows")
            if num_rows // _ROWS_PER_NOTE > (num_rows - encoded.num_rows) // _ROWS_PER_NOTE:
                log.info("tokenized prompts: count=%d", num_rows)
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


def _encode(
    raws: Iterable[RawRow | Row], encoder: RowEncoder, resources: Resources
) -> Generator[EncodedRows, None, None]:
    """Encode chunks of rows: this process alone for some seconds, then several, if they may."""
    remaining = iter(raws)
    chunks = iter(lambda: list(islice(remaining, _ROWS_PER_CHUNK)), [])
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
