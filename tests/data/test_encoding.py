"""Several processes give the rows that one gives, and end with the run."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count, takewhile
from pathlib import Path

import psutil
import pytest

from hybridrl.data.parsing import Columns, RawRow
from hybridrl.data.rows import Row
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.data.tokenizing import Chunk, RowEncoder, encode_by_processes
from hybridrl.errors import DataError
from tests.waiting import wait_until, wait_until_gone

ENCODER = RowEncoder(
    tokenizer=build_starter_tokenizer(),
    use_chat_template=False,
    max_prompt_tokens=3,
    overlong="drop",
    columns=Columns(),
)


def chunk_of(number: int) -> Chunk:
    """Three rows: the second is too long in every third chunk, the third malformed in some."""
    rows = [{"prompt": f"{number}", "answer": "1"} for _ in range(3)]
    rows[1] |= {"prompt": "9999"} if number % 3 == 0 else {}
    rows[2] |= {"answer": ""} if number % 7 == 0 else {}
    return [RawRow(row, "s", f"f:{number}.{at}") for at, row in enumerate(rows)]


def endless_chunks() -> Iterator[Chunk]:
    """Some a second: those that this process encodes meanwhile are to cost little."""
    for number in count():
        yield chunk_of(number)
        time.sleep(0.02)


def running_children() -> set[psutil.Process]:
    """Processes below this one, without those that an earlier test left to be reaped."""
    processes = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                processes.add(process)
    return processes


@pytest.fixture
def begun(caplog: pytest.LogCaptureFixture) -> Callable[[], bool]:
    """Whether both processes have begun."""
    caplog.set_level(logging.INFO)
    return lambda: "a process begins to tokenize: 0 to come" in caplog.text


def test_processes_encode_as_one_does_and_end_with_a_fault_that_is_named(
    begun: Callable[[], bool],
) -> None:
    already = running_children()
    encoded = []
    num_after = 0  # the processes have begun

    def chunks() -> Iterator[Chunk]:
        yield from takewhile(lambda _: num_after < 30, endless_chunks())
        yield [Row((), "a", "s", "f:99")]

    rows = encode_by_processes(ENCODER, chunks(), num_processes=2)
    while num_after < 30:
        encoded.append(next(rows))
        num_after += begun()
    assert encoded == [ENCODER(chunk_of(number)) for number in range(len(encoded))]
    below = running_children() - already
    assert len(below) == 4  # a guard each, and the process below it
    with pytest.raises(DataError, match=r"f:99: .*data\.use_chat_template=false"):
        list(rows)
    wait_until_gone(process.pid for process in below)


def test_a_process_that_is_killed_is_told(begun: Callable[[], bool]) -> None:
    already = running_children()

    def chunks() -> Iterator[Chunk]:
        yield from takewhile(lambda _: not begun(), endless_chunks())
        for process in running_children() - already:
            process.kill()
        yield from map(chunk_of, range(9))

    with pytest.raises(DataError, match=r"set data\.num_processes=1"):
        list(encode_by_processes(ENCODER, chunks(), num_processes=1))
    wait_until(lambda: running_children() <= already)


ENDLESS = """
    import logging, signal, sys
    sys.path.insert(0, {root!r})
    from tests.data.test_encoding import ENCODER, endless_chunks
    from hybridrl.data.tokenizing import encode_by_processes

    def main():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job ignores it
        logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
        for encoded in encode_by_processes(ENCODER, endless_chunks(), num_processes=1):
            pass

    main()
"""


@pytest.mark.parametrize(
    "signal_number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.nightly)]
)
def test_an_interrupted_run_leaves_no_process(tmp_path: Path, signal_number: int) -> None:
    script = tmp_path / "endless.py"
    script.write_text(textwrap.dedent(ENDLESS.format(root=str(Path(__file__).parents[2]))))
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert "begins to tokenize" in process.stdout.readline()
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) == 2  # the guard, and the process below it
    os.kill(process.pid, signal_number)
    _, errors = process.communicate(timeout=60)
    assert ("KeyboardInterrupt" in errors) == (signal_number == signal.SIGINT)
    assert errors.count("Traceback") == (signal_number == signal.SIGINT)  # no other one noticed
    wait_until_gone(child.pid for child in below)
