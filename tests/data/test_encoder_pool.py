"""Several processes give the rows that one gives, and end with the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hybridrl.data.columns import Columns
from hybridrl.data.encoder_pool import EncoderPool
from hybridrl.data.encoding import RowEncoder
from hybridrl.data.parsing import RawRow
from hybridrl.data.rows import Row
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.errors import DataError
from tests.waiting import wait_until, wait_until_gone

Chunk = list[RawRow | Row]
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


def running_children() -> set[psutil.Process]:
    """Processes below this one, without those that an earlier test left to be reaped."""
    processes = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                processes.add(process)
    return processes


def test_processes_encode_as_one_does_and_end_with_the_pool() -> None:
    def chunks(pool: EncoderPool) -> Iterator[Chunk]:
        yield chunk_of(0)
        wait_until(lambda: pool.has_begun)
        yield from map(chunk_of, range(1, 30))

    expected = [ENCODER(chunk_of(number)) for number in range(30)]
    already = running_children()
    with EncoderPool(ENCODER, num_processes=2) as pool:
        assert list(pool.map(chunks(pool))) == expected
        # A guard each, and the process below it.
        wait_until(lambda: len(running_children() - already) == 4)
        below = running_children() - already
        chat = [Row((), "a", "s", "f:99")]
        with pytest.raises(DataError, match=r"f:99: .*data\.use_chat_template=false"):
            list(pool.map([chat]))
        for process in below:
            if "encoder_child" in " ".join(process.cmdline()):
                process.kill()
        with pytest.raises(DataError, match=r"has ended, .*set data\.num_processes=1"):
            list(pool.map(map(chunk_of, range(9))))
    wait_until_gone(process.pid for process in below)


ENDLESS = """
    import itertools, signal, sys
    sys.path.insert(0, {root!r})
    from tests.data.test_encoder_pool import ENCODER, chunk_of
    from hybridrl.data.encoder_pool import EncoderPool

    def main():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job ignores it
        with EncoderPool(ENCODER, num_processes=1) as pool:
            for encoded in pool.map(map(chunk_of, itertools.count())):
                if pool.has_begun:
                    print("begun", flush=True)

    main()
"""


def test_an_interrupted_run_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(textwrap.dedent(ENDLESS.format(root=str(Path(__file__).parents[2]))))
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) == 2  # the guard, and the process below it
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert "encoder_child" not in errors  # it did not notice
    wait_until_gone(child.pid for child in below)
