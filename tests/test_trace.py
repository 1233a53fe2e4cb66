from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.diagnostics.trace import SpanRecorder
from hybridrl.diagnostics.trace_file import FOLDER, NAME, Event, ProcessTrace, join_traces
from tests.trace_events import check, names_of, spans_of
from tests.waiting import wait_until


def _names(recorder: SpanRecorder) -> list[str]:
    return [event["name"] for event in recorder.take()]


def _joined(folder: Path, name: str = NAME) -> list[Event]:
    join_traces(folder)
    events: list[Event] = json.loads((folder / name).read_text())
    check(events)
    return events


def test_spans_lie_in_one_another_on_the_wall_clock() -> None:
    recorder = SpanRecorder()
    before_us = time.time_ns() // 1000
    with recorder.span("outer"), recorder.span("inner"):
        time.sleep(0.001)
    inner, outer = recorder.take()
    assert (inner["name"], outer["name"]) == ("inner", "outer")
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert inner["dur"] >= 1000
    assert abs(outer["ts"] - before_us) < 1_000_000
    assert recorder.take() == []


def test_a_span_ends_when_its_body_raises_and_the_oldest_unwritten_ones_are_forgotten() -> None:
    recorder = SpanRecorder()
    with pytest.raises(ValueError, match="boom"), recorder.span("update"):
        raise ValueError("boom")
    assert _names(recorder) == ["update"]
    recorder = SpanRecorder(capacity=3)
    for number in range(5):
        with recorder.span(str(number)):
            pass
    assert _names(recorder) == ["2", "3", "4"]


def test_each_turn_of_a_loop_is_a_span_and_an_unfinished_one_ends_with_the_span_around_it() -> None:
    recorder = SpanRecorder()
    for step in recorder.each("step", range(5, 9)):
        if step == 7:
            break
    assert [event["args"] for event in recorder.take()] == [{"item": n} for n in (5, 6, 7)]
    with recorder.span("update"):
        turns = recorder.each("microbatch", ["a", "b"])
        next(turns)
    turns.close()  # type: ignore[attr-defined]  # as when the exception that left it is forgotten
    microbatch, update = recorder.take()
    assert (microbatch["name"], update["name"]) == ("microbatch", "update")
    assert microbatch["ts"] + microbatch["dur"] == update["ts"] + update["dur"]


def test_notes_go_to_the_innermost_span_and_numbers_add_up() -> None:
    recorder = SpanRecorder()
    recorder.note(bytes=1)  # outside of any: nothing to show it beside
    with recorder.span("generate"):
        with recorder.span("release"):
            recorder.note(bytes=4, part="weights")
            recorder.note(bytes=3, part="cache")
        recorder.note(rows=2)
    release, generate = recorder.take()
    assert release["args"] == {"bytes": 7, "part": "cache"}
    assert generate["args"] == {"rows": 2}


def test_host_memory_is_noted_beside_all_but_the_shortest_spans() -> None:
    recorder = SpanRecorder()
    with recorder.span("long"):
        time.sleep(0.002)
        recorder.note_host_memory()
    with recorder.span("short") as short:
        short.begin_ns = time.perf_counter_ns() + 10**9  # whatever the machine does meanwhile
        recorder.note_host_memory()
    long_event, short_event = recorder.take()
    assert int(long_event["args"]["host_bytes"]) > 1_000_000
    assert "host_bytes" not in short_event["args"]


@given(
    begins=st.lists(st.integers(min_value=0, max_value=10**6), min_size=2, max_size=8, unique=True)
)
def test_rounding_to_microseconds_keeps_spans_nested(begins: list[int]) -> None:
    recorder = SpanRecorder()
    with ExitStack() as spans:
        base = time.perf_counter_ns() - 10**7
        for begin in sorted(begins):  # they lie in one another, nanoseconds apart
            spans.enter_context(recorder.span("span")).begin_ns = base + begin
    name = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "driver"}}
    check([name, *(event | {"pid": 1} for event in recorder.take())])


def test_a_trace_names_each_process_and_its_threads(tmp_path: Path) -> None:
    for process in ("rank 0 Actor on host-b", "driver on host-a"):
        recorder = SpanRecorder()
        assert recorder.write_to(tmp_path, process, num_processes=2)
        thread = threading.Thread(target=lambda r=recorder: list(r.each("helper", [7])))
        with recorder.span("generate", rows=3):
            thread.start()
            thread.join()
        recorder.count({"reward/mean": 0.5, "nan": float("nan"), "infinite": float("inf")})
        recorder.end()
        with recorder.span("after the end"):
            pass
    events = _joined(tmp_path)
    assert names_of(events) == {1: "driver on host-a", 2: "rank 0 Actor on host-b"}
    spans = {(e["pid"], e["tid"], e["name"]): e["args"] for e in spans_of(events)}
    assert len(spans) == 4
    assert [spans[row, 1, "helper"] for row in (1, 2)] == [{"item": 7}] * 2
    assert [spans[row, 2, "generate"] for row in (1, 2)] == [{"rows": 3}] * 2
    names = [(e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    assert set(names) == {(1, "main"), (2, "thread 2")}
    counters = [(e["name"], e["pid"]) for e in events if e["ph"] == "C"]
    assert set(counters) == {(n, p) for n in ("reward/mean", "host memory, MiB") for p in (1, 2)}
    sizes = [e["args"]["value"] for e in events if e["name"].startswith("host memory")]
    assert all(size > 1 for size in sizes)


def test_a_conversation_has_a_track_and_calls_that_overlap(tmp_path: Path) -> None:
    recorder = SpanRecorder()
    assert recorder.write_to(tmp_path, "rank 0", num_processes=1)
    for track, lane in ((12, 0), (12, 1), (3, 0)):
        recorder.add("tool", 0, track=track, lane=lane)
    recorder.end()
    named = [e for e in _joined(tmp_path) if e["name"] == "thread_name" and e["tid"] > 1]
    names = [event["args"]["name"] for event in sorted(named, key=lambda event: event["tid"])]
    assert names == ["conversation 3", "conversation 12", "conversation 12, further call 1"]


def test_nothing_is_written_in_the_middle_of_a_call(tmp_path: Path) -> None:
    recorder = SpanRecorder()
    recorder.write_to(tmp_path, "rank 0", num_processes=1)
    with recorder.span("update"):
        with recorder.span("microbatch"):
            pass
        assert spans_of(_joined(tmp_path)) == []
    assert [e["name"] for e in spans_of(_joined(tmp_path))] == ["microbatch", "update"]
    recorder.end()


def test_a_process_without_the_run_folder_says_so_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = SpanRecorder()
    assert not recorder.write_to(tmp_path / "of another machine", "rank 1", num_processes=2)
    with recorder.span("update"):
        pass
    assert _names(recorder) == ["update"]
    [message] = caplog.messages
    assert message.startswith("no trace is kept: [Errno 2]")


_WRITE_FOR_EVER = """
import sys
from pathlib import Path
from hybridrl.diagnostics.trace import SpanRecorder
recorder = SpanRecorder()
recorder.write_to(Path(sys.argv[1]), "driver", num_processes=1)
while True:
    for number in range(50):
        with recorder.span("outer"), recorder.span("inner", text="x" * 100):
            pass
    recorder.write()
"""


def test_a_trace_goes_on_after_a_kill_in_the_middle_of_writing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _WRITE_FOR_EVER, str(tmp_path)]) as process:
        path = tmp_path / FOLDER / "driver.jsonl"
        wait_until(lambda: path.exists() and path.stat().st_size > 200_000, process=process)
        assert len(spans_of(_joined(tmp_path))) > 1000  # while it goes on
        os.kill(process.pid, signal.SIGKILL)
    before = spans_of(_joined(tmp_path))
    file = ProcessTrace(tmp_path, "driver")
    file.append([{"ph": "X", "name": "after", "tid": 1, "ts": 2**60, "dur": 1}])
    file.close()
    after = spans_of(_joined(tmp_path))
    assert after[:-1] == before
    assert after[-1]["name"] == "after"


@given(cut=st.integers(min_value=0, max_value=600))
@settings(max_examples=30)
def test_complete_events_are_kept_wherever_a_file_ends(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    file = ProcessTrace(folder, "driver")
    file.append({"ph": "X", "name": n, "tid": 1, "ts": 9, "dur": 0} for n in "abcdef")
    file.close()
    path = folder / FOLDER / "driver.jsonl"
    complete = path.read_bytes()
    path.write_bytes(complete[:cut])
    num_kept = max(0, complete[:cut].count(b"\n") - 2)  # the names of process and thread come first
    for _ in range(2):  # as it was left, and after another process went on
        join_traces(folder)
        events = json.loads((folder / NAME).read_text())
        assert [e["name"] for e in spans_of(events)] == list("abcdef"[:num_kept])
        ProcessTrace(folder, "driver").close()


def test_a_long_trace_keeps_its_first_and_its_last_two_files(tmp_path: Path) -> None:
    file = ProcessTrace(tmp_path, "driver", max_bytes=4000)
    for number in range(400):
        file.append([{"ph": "X", "name": str(number), "tid": 1, "ts": number, "dur": 0}])
    file.close()
    assert all(path.stat().st_size < 5000 for path in (tmp_path / FOLDER).iterdir())
    names = {}
    for part in ("-first", "-previous", ""):
        names[part] = [int(e["name"]) for e in spans_of(_joined(tmp_path, f"trace{part}.json"))]
    assert names["-first"][0] == 0
    last = [*names["-previous"], *names[""]]
    assert last == list(range(last[0], 400))
    assert last[0] > names["-first"][-1] + 1
