from __future__ import annotations

import threading
import time

import pytest

from hybridrl.diagnostics.trace import SpanRecorder


def test_spans_nest_and_end_inside_one_another() -> None:
    recorder = SpanRecorder()
    with recorder.span("outer"), recorder.span("inner"):
        time.sleep(0.001)
    inner, outer = recorder.take().spans
    assert (inner.name, outer.name) == ("inner", "outer")
    assert outer.begin_ns <= inner.begin_ns
    assert inner.begin_ns + inner.duration_ns <= outer.begin_ns + outer.duration_ns
    assert inner.duration_ns >= 1_000_000


def test_times_are_on_the_wall_clock() -> None:
    recorder = SpanRecorder()
    before_ns = time.time_ns()
    with recorder.span("now"):
        pass
    (span,) = recorder.take().spans
    assert abs(span.begin_ns - before_ns) < 1_000_000_000


def test_a_span_is_taken_once_and_stays_among_the_recent() -> None:
    recorder = SpanRecorder()
    with recorder.span("sync", version=3):
        pass
    assert [span.name for span in recorder.take().spans] == ["sync"]
    assert recorder.take().spans == []
    assert [(span.name, span.args) for span in recorder.recent()] == [("sync", {"version": 3})]


def test_the_oldest_spans_are_dropped_and_counted() -> None:
    recorder = SpanRecorder(capacity=3, num_recent=2)
    for number in range(5):
        with recorder.span(str(number)):
            pass
    harvest = recorder.take()
    assert [span.name for span in harvest.spans] == ["2", "3", "4"]
    assert harvest.num_dropped == 2
    assert recorder.take().num_dropped == 0
    assert [span.name for span in recorder.recent()] == ["3", "4"]


def test_recent_names_what_each_thread_is_in_the_middle_of() -> None:
    recorder = SpanRecorder()
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with recorder.span("drain"):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(10)
    with recorder.span("generate"), recorder.span("sample"):
        stuck = [span.name for span in recorder.recent() if span.is_open]
    leave.set()
    thread.join()
    assert stuck == ["drain", "generate", "sample"]
    assert not any(span.is_open for span in recorder.recent())


def test_a_span_ends_when_its_body_raises() -> None:
    recorder = SpanRecorder()
    with pytest.raises(ValueError, match="boom"), recorder.span("update"):
        raise ValueError("boom")
    assert [span.is_open for span in recorder.recent()] == [False]


def test_each_turn_of_a_loop_is_a_span_also_the_one_it_is_left_in() -> None:
    recorder = SpanRecorder()
    for step in recorder.each("step", range(5, 9)):
        if step == 7:
            break
    assert [span.args for span in recorder.take().spans] == [{"item": n} for n in (5, 6, 7)]


def test_a_loop_that_is_never_finished_ends_with_the_span_around_it() -> None:
    recorder = SpanRecorder()
    with recorder.span("update"):
        turns = recorder.each("microbatch", ["a", "b"])
        next(turns)
    turns.close()  # type: ignore[attr-defined]  # as when the exception that left it is forgotten
    microbatch, update = recorder.take().spans
    assert (microbatch.name, update.name) == ("microbatch", "update")
    assert microbatch.begin_ns + microbatch.duration_ns == update.begin_ns + update.duration_ns


def test_notes_go_to_the_innermost_span_and_numbers_add_up() -> None:
    recorder = SpanRecorder()
    recorder.note(bytes=1)  # outside of any: nothing to show it beside
    with recorder.span("generate"):
        with recorder.span("release"):
            recorder.note(bytes=4, part="weights")
            recorder.note(bytes=3, part="cache")
        recorder.note(rows=2)
    release, generate = recorder.take().spans
    assert release.args == {"bytes": 7, "part": "cache"}
    assert generate.args == {"rows": 2}


def test_a_harvest_tells_the_memory_of_the_process() -> None:
    assert SpanRecorder().take().host_bytes > 1_000_000
