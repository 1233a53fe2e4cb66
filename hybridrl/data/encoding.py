"""From rows as they were read to Arrow batches, in this process or in several.

Rows are parsed and tokenized, long prompts treated. Order and content of the result do not depend
on the number of processes.
"""

from __future__ import annotations

import logging
import pickle
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pyarrow
from transformers import PreTrainedTokenizerBase

from hybridrl import env
from hybridrl.data.columns import Columns
from hybridrl.data.parsing import RawRow, parse
from hybridrl.data.prompts import Rendered, render
from hybridrl.data.records import Malformed
from hybridrl.data.row_table import encode_batch
from hybridrl.data.rows import Row
from hybridrl.errors import DataError, HybridRLError
from hybridrl.processes.guarded import end_guarded, start_guarded_module

log = logging.getLogger(__name__)

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
        """Encode some rows.

        Raises:
            DataError: a prompt cannot be rendered or tokenized.
        """
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
    No pool of the standard library does: its children get Ctrl-C, outlive a driver that is killed,
    and import the user's main module.

    Args:
        encoder: its tokenizer is a fast one, which can be sent to a process.

    Raises:
        DataError: a chunk cannot be encoded, or a process has ended.
    """
    pickled = pickle.dumps(encoder)
    starting: list[_Child] = []
    idle: list[_Child] = []
    busy: deque[_Child] = deque()  # in the order of their chunks; each has one
    with ExitStack() as at_end:
        for _ in range(num_processes):
            starting.append(_Child())
            at_end.callback(starting[-1].end)
        for chunk in chunks:
            for child in [child for child in starting if child.has_begun(pickled)]:
                starting.remove(child)
                idle.append(child)
                log.info("a process begins to tokenize: %d to come", len(starting))
            if not idle and not busy:
                yield encoder(chunk)
            elif idle:
                busy.append(idle.pop())
                busy[-1].send(chunk)
            else:
                busy.append(busy.popleft())
                encoded = busy[-1].receive()
                busy[-1].send(chunk)
                yield encoded
        for child in busy:
            yield child.receive()


class _Child:
    """A process that encodes. It has a session of its own, so Ctrl-C does not reach it."""

    def __init__(self) -> None:
        self._connection, child_end = Pipe()
        with child_end:
            self._process = start_guarded_module(__name__, child_end.fileno())
        self._has_encoder = False

    def has_begun(self, encoder: bytes) -> bool:
        """Give it the encoder once it has started; return whether it waits for rows."""
        if not self._connection.poll():
            return False
        self.receive()
        if self._has_encoder:
            return True
        with _named_end():
            self._connection.send_bytes(encoder)
        self._has_encoder = True
        return False

    def send(self, chunk: Chunk) -> None:
        with _named_end():
            self._connection.send(chunk)

    def receive(self) -> EncodedRows:
        with _named_end():
            answer: EncodedRows | HybridRLError = self._connection.recv()
        if isinstance(answer, HybridRLError):
            raise answer
        return answer

    def end(self) -> None:
        end_guarded(self._process)
        self._connection.close()


@contextmanager
def _named_end() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise DataError(
            "a process that tokenizes rows has ended, perhaps for want of memory; set "
            "data.num_processes=1, or fewer than now"
        ) from error


def main(descriptor: int) -> None:
    """Be such a process: ask for an encoder, then answer each chunk until the other end closes."""
    env.set_value("TOKENIZERS_PARALLELISM", "false")
    connection: Connection = Connection(descriptor)
    with connection, suppress(EOFError, ConnectionError):
        connection.send(None)
        encoder: RowEncoder = connection.recv()
        connection.send(None)
        while True:
            chunk = connection.recv()
            try:
                connection.send(encoder(chunk))
            except HybridRLError as error:
                connection.send(error)
