"""From rows as they were read to Arrow batches, in this process or in several.

Rows are parsed and tokenized, long prompts treated. Order and content of the result do not depend
on the number of processes.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import pyarrow
from transformers import PreTrainedTokenizerBase

from hybridrl import env
from hybridrl.data.parsing import Columns, Malformed, RawRow, parse
from hybridrl.data.prompts import Rendered, render
from hybridrl.data.row_table import SCHEMA, encode_batch
from hybridrl.data.rows import Row
from hybridrl.errors import DataError, HybridRLError
from hybridrl.processes.channel import CallFailed, Refused
from hybridrl.processes.child import Declined, Emit, Service
from hybridrl.processes.pool import Child, Pool

log = logging.getLogger(__name__)

_DAY_S = 86_400.0
"""A chunk takes as long as it takes, and so do imports on a slow disk."""

_ANSWER_BYTES = 1 << 40

Chunk = Sequence[RawRow | Row]
"""Some rows, at least one, that are encoded together."""


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """The rows of a chunk, and the faults of those that are not in it."""

    batch: pyarrow.RecordBatch
    """Of the rows that are left, which may be none; see ``data/row_table.py``."""

    num_rows: int
    """Rows that were well formed, with those that were left out."""

    malformed: Sequence[str]
    """Origin and reason."""

    overlong: Sequence[tuple[str, int]]
    """Origin and tokens of each longer prompt."""

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

    tokenizer: PreTrainedTokenizerBase
    """See ``data/prompts.py``."""

    use_chat_template: bool
    max_prompt_tokens: int

    overlong: str
    """Treatment of a longer prompt: ``error``, ``drop``, or ``keep_end``: its last tokens."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas that the chat template shows the model."""

    columns: Columns | None = None
    """Of rows that were read; None if all rows are parsed."""

    def __call__(self, raws: Chunk) -> EncodedRows:
        """Encode some rows; raises DataError for a prompt that cannot be rendered or tokenized."""
        rows, malformed = [], []
        for raw in raws:
            try:
                rows.append(raw if isinstance(raw, Row) else parse(raw, self.columns or Columns()))
            except Malformed as problem:
                malformed.append(f"{raw.origin}: {problem}")
        rendered = render(
            rows, self.tokenizer, use_chat_template=self.use_chat_template, tools=self.tools
        )
        kept: list[tuple[Row, Rendered]] = []
        overlong = []
        for row, (text, token_ids) in zip(rows, rendered, strict=True):
            if len(token_ids) > self.max_prompt_tokens:
                overlong.append((row.origin, len(token_ids)))
                if self.overlong != "keep_end":
                    continue
            kept.append((row, (text, token_ids[-self.max_prompt_tokens :])))
        return EncodedRows(encode_batch(kept), len(rows), malformed, overlong)


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
