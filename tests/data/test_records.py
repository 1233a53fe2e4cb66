"""Formats of data files besides jsonl and parquet, and the folders that datasets writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow
import pytest

from hybridrl.data.parsing import Columns
from hybridrl.data.rows import Row, fingerprint
from hybridrl.errors import DataError
from tests.data.tokenized import read_rows

RECORDS = [
    {"prompt": "1+1=", "answer": "2", "source": "sums", "level": 1},
    {"prompt": 'a, "b"\nc', "answer": "é", "source": "texts", "level": 2.5},
]
COLUMNS = Columns(difficulty="level")


def read(path: Path, columns: Columns = COLUMNS, **options: str) -> list[Row]:
    return read_rows(path, columns=columns, **options)


def write_dataset(
    folder: Path, shards: Sequence[Sequence[Mapping[str, object]]], **state: object
) -> Path:
    """As ``save_to_disk`` of datasets 5.2 does: Arrow streams, and state.json."""
    folder.mkdir(parents=True)
    names = [f"data-{n:05}-of-{len(shards):05}.arrow" for n in range(len(shards))]
    for name, records in zip(names, shards, strict=True):
        table = pyarrow.Table.from_pylist(list(records))
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(table)
    entries = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": entries} | state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    lines, array, table = (tmp_path / f"data.{suffix}" for suffix in ("jsonl", "json", "csv"))
    lines.write_text("\n".join(map(json.dumps, RECORDS)))
    array.write_text(json.dumps(RECORDS))
    table.write_text('level,prompt,answer,source\n1,1+1=,2,sums\n2.5,"a, ""b""\nc",é,texts\n')
    folder = write_dataset(tmp_path / "data", [RECORDS[:1], RECORDS[1:]])
    expected = read(lines)
    assert [row.difficulty for row in expected] == [1.0, 2.5]
    for path in (array, table, folder):
        assert fingerprint(read(path)) == fingerprint(expected)
    assert read(table)[1].origin == f"{table}:4"  # the line in which the row ends
    assert read(folder)[1].origin == f"{folder}:2"


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.json", "[1", "a.json is not JSON"),
        ("a.json", '{"prompt": "a"}', "holds a JSON dict, must be a list of rows"),
        ("a.json", '[{"prompt": "a", "answer": "b", "level": 0}, 3]', "a.json:2: is a JSON int"),
        ("a.csv", "prompt,level\na,1\n", "has no column 'answer'; set data.answer_key: known:"),
        ("a.csv", "prompt,answer,level\na,b\n", "a.csv:2: has no cell for 'level'"),
        ("a.csv", "prompt,answer,level\na,b,1,2\n", "a.csv:2: has more cells than the header"),
        ("a.csv", "prompt,answer,level\na,,1\n", "a.csv:2: 'answer' is empty"),
        ("a.csv", 'prompt,answer,level\n"a,b,1\n', "a.csv:2: cannot be read as CSV"),
        ("a.csv", "prompt,answer,level\na,b,x\n", "'level' is 'x', must be a finite number"),
        ("a.csv", "", "has no column 'prompt'"),
        ("a.jsonl", '{"prompt": "a", "answer": "b", "level": NaN}', "must be a finite number"),
        ("a.jsonl", '{"prompt": "a", "answer": "b", "level": true}', "'level' is True"),
        ("a.jsonl", '{"prompt": "a", "answer": "b"}', "has no 'level'; set data.difficulty_key"),
        ("a.txt", "", "a.txt is none of .jsonl, .json, .csv, .parquet, nor a folder"),
    ],
)
def test_a_bad_file_or_row_is_named(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as raised:
        read(tmp_path / name)
    assert problem in str(raised.value)


def test_csv_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"prompt,answer,level\na,\xff,1\n")
    with pytest.raises(DataError, match=r"a\.csv:\d: cannot be read as CSV"):
        read(tmp_path / "a.csv")


def test_a_folder_that_is_no_data_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"state\.json cannot be read"):
        read(tmp_path)
    selected = write_dataset(tmp_path / "s", [RECORDS], _indices_data_files=[{"filename": "i"}])
    with pytest.raises(DataError, match="flatten_indices"):
        read(selected)
    broken = write_dataset(tmp_path / "b", [RECORDS])
    (broken / "data-00000-of-00001.arrow").write_bytes(b"no arrow")
    with pytest.raises(DataError, match="cannot read"):
        read(broken)


def test_messages_name_the_section_of_the_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "a", "answer": "b"}')
    columns = Columns(prompt="promt", section="data.sources.sums")
    with pytest.raises(DataError, match=r"set data\.sources\.sums\.prompt_key: known: answer, q"):
        read(path, columns)


def test_rows_of_a_named_source_bear_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a", "answer": "b", "source": "c"}')
    assert [row.source for row in read(path, Columns(), source="sums")] == ["sums", "c"]
