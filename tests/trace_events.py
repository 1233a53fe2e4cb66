"""A validator for the Chrome trace-event format, array form, as far as hybridrl writes it.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

Event = dict[str, Any]

_NEEDS = {
    "X": {"name": str, "ts": int, "dur": int, "pid": int, "tid": int},
    "C": {"name": str, "ts": int, "pid": int, "args": dict},
    "M": {"name": str, "pid": int, "args": dict},
    "i": {"name": str, "ts": int, "pid": int, "tid": int, "s": str},
}


def check(events: list[Event]) -> None:
    """Every event has its fields, processes have names, and spans of a thread nest."""
    for event in events:
        for field, kind in _NEEDS[event["ph"]].items():
            assert isinstance(event[field], kind), f"{field} of {event}"
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values()), event
    named = {e["pid"] for e in events if e["name"] == "process_name"}
    assert {e["pid"] for e in events} <= named
    threads: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in spans_of(events):
        threads[event["pid"], event["tid"]].append(event)
    for spans in threads.values():
        check_nesting(spans)


def check_nesting(spans: list[Event]) -> None:
    """Of two spans of a thread one holds the other, or they do not touch."""
    ends: list[int] = []
    for span in sorted(spans, key=lambda s: (s["ts"], -s["dur"])):
        while ends and ends[-1] <= span["ts"]:
            ends.pop()
        end = span["ts"] + span["dur"]
        assert not ends or end <= ends[-1], f"{span} ends after the span around it"
        ends.append(end)


def spans_of(events: list[Event], name: str | None = None) -> list[Event]:
    return [e for e in events if e["ph"] == "X" and name in (None, e["name"])]


def names_of(events: list[Event]) -> dict[int, str]:
    return {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
