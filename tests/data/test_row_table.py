"""Rows in batches: in memory, in a file, and in a file that an earlier run wrote."""

from __future__ import annotations

import logging
import os
import resource
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pyarrow
import pytest

from hybridrl.data import row_table, tokenizing
from hybridrl.data.files import RowFiles
from hybridrl.data.parsing import Columns
from hybridrl.data.row_table import RowTable
from hybridrl.data.rows import Message, Row, fingerprint
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.data.tokenizing import Resources, RowEncoder, tokenize_files
from hybridrl.errors import DataError
from tests.data.tokenized import tokenize_rows

TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
ROWS = [Row(f"é{n}" * (n + 1), str(n), "s", f"f:{n}", float(n % 3)) for n in range(6)]


@pytest.fixture(autouse=True)
def few_rows_are_many(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(row_table, "ROWS_IN_MEMORY", 5)
    monkeypatch.setattr(tokenizing, "_ROWS_PER_CHUNK", 100)
    caplog.set_level(logging.INFO)


def write_rows(folder: Path, *, num_rows: int = 6, prompt: str = "é") -> Path:
    path = folder / "data.jsonl"
    rows = (f'{{"prompt": "{prompt * (n + 1)}", "answer": "{n}"}}\n' for n in range(num_rows))
    path.write_text("".join(rows))
    return path


def encoder_of(
    *, template: str = "", max_prompt_tokens: int = 100, overlong: str = "drop"
) -> RowEncoder:
    tokenizer = build_starter_tokenizer()
    tokenizer.chat_template = template or None
    return RowEncoder(
        tokenizer=tokenizer,
        use_chat_template=bool(template),
        max_prompt_tokens=max_prompt_tokens,
        overlong=overlong,
    )


def load(path: Path, encoder: RowEncoder | None = None) -> RowTable:
    resources = Resources(folder=path.parent / "cache")
    return tokenize_files(files_of(path), encoder or encoder_of(), resources)


def files_of(path: Path) -> RowFiles:
    return RowFiles(files=[path], columns=Columns(), key="data.train_files")


def contents(table: RowTable) -> list[tuple[Row, str, list[int]]]:
    return [(row.row, row.prompt_text, row.token_ids.tolist()) for row in table]


def test_a_table_gives_back_the_rows_that_it_got() -> None:
    chat = Row((Message("user", "é"), Message("assistant", "b")), "c", "s", "f:9")
    tokenizer = build_starter_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenize = partial(tokenize_rows, max_prompt_tokens=100, overlong="drop")
    table = tokenize([*ROWS, chat], tokenizer, use_chat_template=True)
    assert [row.row for row in table] == [*ROWS, chat]
    assert table[6].prompt_text == table[-1].prompt_text == "<é><b>"
    assert tokenizer.decode(table[6].token_ids) == "<é><b>"
    assert [row.row for row in table[1:6:2]] == ROWS[1:6:2]
    assert table.fingerprint == fingerprint([*ROWS, chat])
    assert table.difficulties().tolist() == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(IndexError):
        table[7]
    plain = tokenize(ROWS, tokenizer, use_chat_template=False)
    joined = RowTable.joined([plain, table])
    assert [row.row for row in joined] == [*ROWS, *ROWS, chat]
    assert joined[0].prompt_text == "é0"


def test_a_later_run_reads_the_file_of_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(tmp_path)
    first = load(path)
    (file,) = (tmp_path / "cache").iterdir()
    assert "come from" not in caplog.text
    again = load(path)
    assert "6 tokenized rows come from" in caplog.text
    assert contents(again) == contents(first)
    assert again.fingerprint == first.fingerprint == fingerprint(row.row for row in first)
    file.unlink()
    assert contents(again) == contents(first)  # a file that is in use may go


@pytest.mark.parametrize(
    "change", ["rows", "same size", "limit", "treatment", "template", "token", "time"]
)
def test_other_rows_or_another_tokenizer_are_read_anew(tmp_path: Path, change: str) -> None:
    path = write_rows(tmp_path)
    first, encoder = load(path), encoder_of()
    if change == "rows":
        write_rows(tmp_path, num_rows=7)
    elif change == "same size":
        status = path.stat()
        write_rows(tmp_path, prompt="è")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif change == "limit":
        encoder = encoder_of(max_prompt_tokens=4)
    elif change == "treatment":
        encoder = encoder_of(overlong="keep_end")
    elif change == "template":
        encoder = encoder_of(template=TEMPLATE)
    elif change == "token":
        encoder.tokenizer.add_tokens(["éé"])
    else:
        os.utime(path, ns=(1, 1))
    again = load(path, encoder)
    same_rows = change in ("treatment", "template", "token", "time")
    assert (again.fingerprint == first.fingerprint) == same_rows
    same_tokens = change in ("treatment", "time", "rows")
    assert (contents(again)[:6] == contents(first)) == same_tokens
    # What is left of a small set is kept in no file.
    assert len(list((tmp_path / "cache").iterdir())) == (1 if change == "limit" else 2)


@pytest.mark.parametrize("num_bytes", [0, 10, 300, -1])
def test_a_broken_file_is_made_again(
    tmp_path: Path, num_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(tmp_path)
    expected = contents(load(path))
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(file.read_bytes()[:num_bytes])
    assert contents(load(path)) == expected
    assert "rows are tokenized again" in caplog.text
    caplog.clear()
    assert contents(load(path)) == expected
    assert "come from" in caplog.text


@pytest.mark.parametrize("kind", ["text", "other columns", "no batch", "no end"])
def test_a_foreign_file_is_named_and_made_again(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(tmp_path)
    expected = contents(load(path))
    (file,) = (tmp_path / "cache").iterdir()
    schema = pyarrow.schema({"x": pyarrow.int8()}) if kind == "other columns" else row_table.SCHEMA
    with pyarrow.ipc.new_file(str(file), schema) as writer:
        if kind != "no batch":
            writer.write_table(schema.empty_table())
            writer.write_batch(pyarrow.RecordBatch.from_pylist([], schema=schema))
    if kind == "text":
        file.write_text("ARROW1 " * 1000)
    assert contents(load(path)) == expected
    assert f"rows are tokenized again: {file} cannot be read" in caplog.text


def test_other_tools_read_the_file(tmp_path: Path) -> None:
    load(write_rows(tmp_path))
    (file,) = (tmp_path / "cache").iterdir()
    table = pyarrow.ipc.open_file(str(file)).read_all()
    assert table["record"].to_pylist()[0] == '["\\u00e9", "0", "data"]'
    assert table["origin"].to_pylist() == [f"{tmp_path}/data.jsonl:{n + 1}" for n in range(6)]
    assert list(map(len, table["token_ids"].to_pylist())) == [2, 4, 6, 8, 10, 12]


def test_a_disk_that_fills_up_costs_no_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(tmp_path, num_rows=400)
    encoder = encoder_of(max_prompt_tokens=1000)
    expected = contents(tokenize_files(files_of(path), encoder, Resources()))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        table = load(path, encoder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(table) == expected
    assert "rows are held in memory" in caplog.text
    assert "[Errno 27] File too large" in caplog.text
    assert not list((tmp_path / "cache").iterdir())


def test_two_runs_that_make_the_file_at_once_have_the_same_rows(tmp_path: Path) -> None:
    path = write_rows(tmp_path, num_rows=400)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(load, [path, path])
    assert contents(first) == contents(second) == contents(load(path))
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_small_sets_and_full_disks_keep_no_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(write_rows(tmp_path, num_rows=5))
    assert not (tmp_path / "cache").exists()
    (tmp_path / "cache").write_text("no folder")
    table = load(write_rows(tmp_path))
    assert len(table) == 6
    assert "rows are held in memory" in caplog.text


def test_a_bad_row_leaves_no_file_and_old_leftovers_go(tmp_path: Path) -> None:
    path = write_rows(tmp_path, num_rows=400)
    with path.open("a") as file:
        file.write("no row\n")
    cache = tmp_path / "cache"
    cache.mkdir()
    for name, age_s in (("old", 100_000.0), ("new", 10.0)):
        leftover = cache / f".unfinished-{name}"
        leftover.write_text("")
        began_s = leftover.stat().st_mtime - age_s
        os.utime(leftover, (began_s, began_s))
    encoder = encoder_of(max_prompt_tokens=10_000)
    with pytest.raises(DataError, match="1 of 401 rows are malformed"):
        load(path, encoder)
    assert [file.name for file in cache.iterdir()] == [".unfinished-new"]


def test_dropped_prompts_are_told_by_later_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(tmp_path, num_rows=8)
    for _ in range(2):
        caplog.clear()
        assert len(load(path, encoder_of(max_prompt_tokens=12))) == 6
        assert "count=2 of=8" in caplog.text


def test_memory_does_not_grow_with_the_number_of_rows(tmp_path: Path) -> None:
    peaks = {}
    for num_rows in (500, 2_000):
        lines = (f'{{"prompt": "{n} {"x" * 300}", "answer": "{n}"}}\n' for n in range(num_rows))
        path = tmp_path / f"{num_rows}.jsonl"
        path.write_text("".join(lines))
        tracemalloc.start()
        table = load(path, encoder_of(max_prompt_tokens=400))
        assert table[num_rows - 1].row.answer == str(num_rows - 1)
        _, peaks[num_rows] = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(table) == num_rows
    assert peaks[2_000] < 1.2 * peaks[500]
