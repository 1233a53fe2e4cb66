from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.diagnostics.trace import SpanBatch, SpanRecord, SpanRecorder
from hybridrl.run.trace_file import FIRST_NAME, NAME, PREVIOUS_NAME, TraceFile
from tests.trace_events import check, names_of, read_events, spans_of
from tests.waiting import wait_until


def _harvest(*names: str, num_dropped: int = 0) -> SpanBatch:
    spans = [
        SpanRecord(name, 1_000_000 * number, 500_000, 7, {"bytes": number}, is_open=False)
        for number, name in enumerate(names)
    ]
    return SpanBatch(spans, num_dropped, at_ns=10_000_000, host_bytes=2**20)


def test_a_closed_trace_is_json_with_a_named_row_for_each_process(tmp_path: Path) -> None:
    with TraceFile(tmp_path) as file:
        file.add("driver on host-a", _harvest("generate", "update"))
        file.add("rank 0 Actor on host-b", _harvest("sync", num_dropped=4))
        file.count("driver on host-a", at_ns=5000, values={"reward/mean": 0.5})
    events = json.loads((tmp_path / NAME).read_text())
    check(events)
    assert names_of(events) == {1: "driver on host-a", 2: "rank 0 Actor on host-b"}
    assert [e["args"] for e in spans_of(events, "update")] == [{"bytes": 1}]
    assert [e["args"]["value"] for e in events if e["name"] == "reward/mean"] == [0.5]
    assert any("4 spans were dropped" in e["name"] for e in events)


def test_a_value_that_is_not_finite_is_no_point_of_a_counter(tmp_path: Path) -> None:
    with TraceFile(tmp_path) as file:
        file.add("driver", _harvest())
        file.count("driver", at_ns=1, values={"a": float("nan"), "b": float("inf"), "c": 1.0})
    events = json.loads((tmp_path / NAME).read_text())
    assert {e["name"] for e in events if e["ph"] == "C"} == {"c", "host memory, MiB"}


_WRITE_FOR_EVER = """
import sys
from pathlib import Path
from hybridrl.diagnostics.trace import SpanRecorder
from hybridrl.run.trace_file import TraceFile
recorder, file = SpanRecorder(), TraceFile(Path(sys.argv[1]))
while True:
    for number in range(50):
        with recorder.span("outer"), recorder.span("inner", text="x" * 100):
            pass
    file.add("driver", recorder.take())
"""


def test_after_a_kill_in_the_middle_of_writing_the_trace_opens_and_goes_on(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _WRITE_FOR_EVER, str(tmp_path)]) as process:
        path = tmp_path / NAME
        wait_until(lambda: path.exists() and path.stat().st_size > 200_000, process=process)
        os.kill(process.pid, signal.SIGKILL)
    before = read_events(path)
    check(before)
    assert len(spans_of(before)) > 1000
    with TraceFile(tmp_path) as file:
        file.add("driver", _harvest("after"))
    events = json.loads(path.read_text())
    check(events)
    assert len(spans_of(events)) >= len(spans_of(before))
    assert len(spans_of(events, "after")) == 1


@given(cut=st.integers(min_value=2, max_value=900))
@settings(max_examples=30, deadline=None)
def test_wherever_the_file_is_torn_the_whole_events_are_kept(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    path = folder / NAME
    with TraceFile(folder) as file:
        file.add("driver", _harvest("a", "b", "c", "d", "e", "f"))
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    kept = [e for e in read_events(path) if e["ph"] == "X"]
    with TraceFile(folder) as file:
        file.add("driver", _harvest("after"))
    events = json.loads(path.read_text())
    names = [e["name"] for e in spans_of(events)]
    # An event without the comma behind it counts as torn, though it may be read.
    assert names in (
        [*(e["name"] for e in kept), "after"],
        [*(e["name"] for e in kept[:-1]), "after"],
    )


def test_a_long_trace_keeps_its_first_and_its_last_two_files(tmp_path: Path) -> None:
    recorder = SpanRecorder()
    with TraceFile(tmp_path, max_bytes=4000) as file:
        for number in range(200):
            with recorder.span(f"span {number}"):
                pass
            file.add("driver", recorder.take())
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert set(found) == {NAME, FIRST_NAME, PREVIOUS_NAME}
    for events in found.values():
        check(events)
    assert [len(spans_of(found[FIRST_NAME], "span 0")), len(spans_of(found[NAME]))] != [0, 0]
    kept = [spans_of(found[name])[0]["name"] for name in (FIRST_NAME, PREVIOUS_NAME)]
    assert kept[0] == "span 0"
    assert spans_of(found[NAME])[-1]["name"] == "span 199" or not spans_of(found[NAME])
    assert all(path.stat().st_size < 5000 for path in tmp_path.iterdir())


@given(
    begins=st.lists(st.integers(min_value=0, max_value=10**6), min_size=2, max_size=8, unique=True)
)
def test_rounding_to_microseconds_keeps_spans_nested(
    begins: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    # Ends mirror begins: the spans lie in one another, nanoseconds apart.
    base, middle = 1_700_000_000_000_000_123, 2 * 10**6
    spans = [
        SpanRecord(str(begin), base + begin, 2 * (middle - begin), 1, {}, is_open=False)
        for begin in sorted(begins, reverse=True)
    ]
    folder = tmp_path_factory.mktemp("nested")
    with TraceFile(folder) as file:
        file.add("driver", SpanBatch(spans, 0, base, 0))
    check(json.loads((folder / NAME).read_text()))


def test_the_validator_refuses_spans_that_overlap() -> None:
    base = {"ph": "X", "name": "a", "pid": 1, "tid": 1, "dur": 10}
    name = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "driver"}}
    check([name, base | {"ts": 0}, base | {"ts": 10}])
    for begin in itertools.chain(range(1, 10)):
        with pytest.raises(AssertionError, match="ends after"):
            check([name, base | {"ts": 0}, base | {"ts": begin}])
