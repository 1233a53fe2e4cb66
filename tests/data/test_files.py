"""Rows of files of every format, and of folders that datasets writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from hybridrl.data.parsing import Columns
from hybridrl.data.rows import Message, Row, fingerprint, own_columns, read_record, write_record
from hybridrl.errors import DataError
from tests.data.tokenized import read_rows


def write_lines(folder: Path, *lines: str | bytes, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else x.encode() for x in lines))
    return path


def test_rows_of_several_files_keep_order_and_source(tmp_path: Path) -> None:
    first = write_lines(
        tmp_path,
        '{"prompt": "1+1=", "answer": "2", "source": "sums"}',
        "",
        '{"prompt": "é", "answer": "x", "more": 1}',
    )
    second = write_lines(tmp_path, '{"prompt": "b", "answer": "c"}', name="other.jsonl")
    assert read_rows(first, second) == [
        Row("1+1=", "2", "sums", f"{first}:1"),
        Row("é", "x", "data", f"{first}:3"),
        Row("b", "c", "other", f"{second}:1"),
    ]


@pytest.mark.parametrize("digits", ["42", "-7", "0", "123456789012345678901234567890"])
def test_an_integer_answer_is_read_as_its_digits(digits: str, tmp_path: Path) -> None:
    rows = read_rows(write_lines(tmp_path, f'{{"prompt": "a", "answer": {digits}}}'))
    assert rows[0].answer == digits


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "a"', "is not JSON"),
        (b'{"prompt": "\xff", "answer": "b"}', "is not UTF-8 at character 13"),
        ('["a"]', "is a JSON list, must be an object"),
        ("[" * 100_000, "is not JSON"),
        ('{"promt": "a", "answer": "b"}', "has no 'prompt'; set data.prompt_key: did you mean"),
        ('{"prompt": "a"}', "has no 'answer'; set data.answer_key"),
        ('{"prompt": 5, "answer": "b"}', "'prompt' is 5, must be text; write it in quotes"),
        ('{"prompt": "a", "answer": true}', "'answer' is True, must be text; write it in quotes"),
        ('{"prompt": "a", "answer": 0.5}', "'answer' is 0.5, must be text or an integer; write it"),
        ('{"prompt": "a", "answer": [5]}', "'answer' is [5], must be text; write it as JSON in"),
        ('{"prompt": "a", "answer": null}', "'answer' is None, must be text"),
        ('{"prompt": "a", "answer": " "}', "'answer' is empty"),
        ('{"prompt": "", "answer": "b"}', "'prompt' is empty"),
        ('{"prompt": [], "answer": "b"}', "'prompt' has no messages"),
        ('{"prompt": ["a"], "answer": "b"}', "prompt[0] is 'a', must be {role"),
        ('{"prompt": [{"role": "user"}], "answer": "b"}', "prompt[0] has no 'content'"),
        ('{"prompt": [{"from": "user"}], "answer": "b"}', "prompt[0] has no 'role'"),
        ('{"prompt": "a", "answer": "b", "source": 3}', "'source' is 3, must be text"),
        ('{"prompt": "a", "prompt": "c", "answer": "b"}', "has 'prompt' twice; keep one"),
        (
            r'{"prompt": "ab\ud800", "answer": "b"}',
            r"'prompt' has half of a pair, \ud800, as character 3; write both",
        ),
        (r'{"prompt": "a", "answer": "\udc00"}', r"'answer' has half of a pair, \udc00"),
        (
            r'{"prompt": [{"role": "user", "content": "\udfff"}], "answer": "b"}',
            r"'prompt[0].content' has half of a pair",
        ),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(
    tmp_path: Path, line: str | bytes, problem: str
) -> None:
    path = write_lines(tmp_path, '{"prompt": "a", "answer": "b"}', line)
    with pytest.raises(DataError) as raised:
        read_rows(path)
    assert f"{path}:2: {problem}" in str(raised.value)
    assert "1 of 2 rows are malformed" in str(raised.value)


def test_first_twenty_malformed_rows_are_listed(tmp_path: Path) -> None:
    path = write_lines(tmp_path, *["{}"] * 23)
    with pytest.raises(DataError) as raised:
        read_rows(path)
    assert f"{path}:20: " in str(raised.value)
    assert f"{path}:21: " not in str(raised.value)
    assert str(raised.value).endswith("and 3 more")


def test_parquet_gives_the_same_rows_as_jsonl(tmp_path: Path) -> None:
    records = [
        {"prompt": [{"role": "user", "content": "hi"}], "answer": "a", "source": "s", "n": 1},
        {"prompt": [{"role": "system", "content": "x"}], "answer": "b", "source": None, "n": 2},
    ]
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    rows = read_rows(path)
    assert rows == [
        Row((Message("user", "hi"),), "a", "s", f"{path}:1"),
        Row((Message("system", "x"),), "b", "data", f"{path}:2"),
    ]
    lines = read_rows(write_lines(tmp_path, *map(json.dumps, records)))
    assert fingerprint(lines) == fingerprint(rows)


VERL = {
    "prompt": [{"role": "user", "content": "6*7="}],
    "data_source": "sums",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"index": 7, "split": "train"},
}


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_fields_of_records_and_columns_of_rewards_are_read_as_they_are(
    suffix: str, tmp_path: Path
) -> None:
    path = write_lines(tmp_path, json.dumps(VERL), name=f"data.{suffix}")
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERL]), path)
    columns = Columns(
        answer="reward_model.ground_truth",
        source="data_source",
        own={"extra_info": "the reward", "data_source": "the reward"},
    )
    [row] = read_rows(path, columns=columns)
    assert (row.prompt, row.answer, row.source) == ((Message("user", "6*7="),), "42", "sums")
    assert own_columns([row]) == {
        "extra_info": [{"index": 7, "split": "train"}],
        "data_source": ["sums"],
    }
    assert read_record(write_record(row), origin=row.origin) == row

    keys = r"set data\.answer_key=reward_model\.ground_truth data\.source_key=data_source"
    with pytest.raises(DataError, match=f"no (column )?'answer'; {keys}"):
        read_rows(path)
    keys = r"set data\.sources\.a\.answer_key=reward_model\.ground_truth data\.sources\.a\.source"
    with pytest.raises(DataError, match=f"no (column )?'answer'; {keys}"):
        read_rows(path, columns=Columns(section="data.sources.a"))
    hint = {"hint": "the parameter of reward.function"}
    asked = Columns(answer="reward_model.ground_truth", own=hint)
    with pytest.raises(DataError, match=r"no (column )?'hint'; set the parameter of reward"):
        read_rows(path, columns=asked)
    with pytest.raises(DataError, match=r"no (column )?'hint'; .*the parameter of reward.function"):
        read_rows(
            write_lines(tmp_path, '{"prompt": "a", "answer": "b"}'), columns=Columns(own=hint)
        )


def test_a_mistyped_parameter_of_a_reward_is_not_looked_for_among_columns_alone(
    tmp_path: Path,
) -> None:
    path = write_lines(tmp_path, '{"prompt": "a", "answer": "b"}')
    mistyped = {"respones": "the parameter of reward.function"}
    with pytest.raises(DataError, match=r"no 'respones'; .*did you mean 'responses?'"):
        read_rows(path, columns=Columns(own=mistyped))


def test_parquet_errors_name_row_number_or_column_key(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    table = pyarrow.Table.from_pylist([{"prompt": "a", "answer": "b"}, {"prompt": "a"}])
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(DataError, match=r"data\.parquet:2: 'answer' is None"):
        read_rows(path)
    with pytest.raises(DataError, match=r"no column 'prompts'; set data.prompt_key: did you mean"):
        read_rows(path, columns=Columns(prompt="prompts"))
    table = pyarrow.table([["a"], ["b"], ["c"]], names=["prompt", "answer", "answer"])
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(DataError, match=r"data\.parquet has 2 columns 'answer'; keep one"):
        read_rows(path)


def test_a_parquet_row_that_is_not_utf_8_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    broken = pyarrow.array([b"a", b"b\xff", b"c"]).view(pyarrow.string())
    answers = pyarrow.array(["a", "b", "c"])
    pyarrow.parquet.write_table(pyarrow.table({"prompt": broken, "answer": answers}), path)
    with pytest.raises(DataError) as raised:
        read_rows(path)
    assert f"{path}:2: 'prompt' is not UTF-8 at byte 2" in str(raised.value)
    assert "1 of 3 rows are malformed" in str(raised.value)


def test_files_that_cannot_be_read_are_named_with_the_key(tmp_path: Path) -> None:
    broken = write_lines(tmp_path, "PAR1 is not all", name="broken.parquet")
    empty = write_lines(tmp_path, "", name="empty.jsonl")
    with pytest.raises(DataError, match=r"data\.train_files: .*gone\.jsonl is not a file"):
        read_rows(tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match=r"data\.txt is none of \.jsonl, \.json"):
        read_rows(tmp_path / "data.txt")
    with pytest.raises(DataError, match=r"cannot read .*broken\.parquet"):
        read_rows(broken)
    with pytest.raises(DataError, match=r"no rows in .*empty\.jsonl; .* data\.train_files"):
        read_rows(empty)
    with pytest.raises(DataError, match="no rows in no file"):
        read_rows()


def test_the_fingerprint_sees_every_change_and_nothing_else() -> None:
    row = Row("a", "b", "c", "file:1")
    same = Row("a", "b", "c", "elsewhere:9")
    others = [
        Row("a", "bc", "", "f:1"),
        Row((Message("user", "a"),), "b", "c", "f:1"),
        Row("x", "b", "c", "f:1"),
    ]
    assert fingerprint([row]) == fingerprint([same])
    assert len({fingerprint([r]) for r in [row, *others]} | {fingerprint([row, row])}) == 5


RECORDS = [
    {"prompt": "1+1=", "answer": "2", "source": "sums", "level": 1},
    {"prompt": 'a, "b"\nc', "answer": "é", "source": "texts", "level": 2.5},
]
COLUMNS = Columns(difficulty="level")


def read_levels(path: Path, columns: Columns = COLUMNS, **options: str) -> list[Row]:
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
    expected = read_levels(lines)
    assert [row.difficulty for row in expected] == [1.0, 2.5]
    for path in (array, table, folder):
        assert fingerprint(read_levels(path)) == fingerprint(expected)
    assert read_levels(table)[1].origin == f"{table}:4"  # the line in which the row ends
    assert read_levels(folder)[1].origin == f"{folder}:2"


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
        read_levels(tmp_path / name)
    assert problem in str(raised.value)


def test_csv_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"prompt,answer,level\na,\xff,1\n")
    with pytest.raises(DataError, match=r"a\.csv:\d: cannot be read as CSV"):
        read_levels(tmp_path / "a.csv")


def test_a_folder_that_is_no_data_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"state\.json cannot be read"):
        read_levels(tmp_path)
    selected = write_dataset(tmp_path / "s", [RECORDS], _indices_data_files=[{"filename": "i"}])
    with pytest.raises(DataError, match="flatten_indices"):
        read_levels(selected)
    broken = write_dataset(tmp_path / "b", [RECORDS])
    (broken / "data-00000-of-00001.arrow").write_bytes(b"no arrow")
    with pytest.raises(DataError, match="cannot read"):
        read_levels(broken)


def test_messages_name_the_section_of_the_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "a", "answer": "b"}')
    columns = Columns(prompt="promt", section="data.sources.sums")
    with pytest.raises(DataError, match=r"set data\.sources\.sums\.prompt_key: known: answer, q"):
        read_levels(path, columns)


def test_rows_of_a_named_source_bear_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a", "answer": "b", "source": "c"}')
    assert [row.source for row in read_levels(path, Columns(), source="sums")] == ["sums", "c"]
