"""The last whole step as the trace has it: who did what when, and the memory of each rank."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_TAIL_BYTES = 4 << 20
_HEAD_BYTES = 1 << 20
_MAX_ROWS = 9
_MAX_SPANS = 2000
_MIB = float(1 << 20)
_Event = dict[str, Any]


def read_timeline(path: Path) -> dict[str, Any]:
    """Read the beginning and the end of ``trace.json``, whatever its size.

    Returns:
        ``rows``: for the driver and the first ranks their spans within the last step that ended,
        times in ms after its begin; ``step``: its number. ``memory``: MiB of host memory by rank
        and call, the largest seen near the end. Empty where the trace has none.
    """
    events = _read_events(path)
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    spans = _since_last_start([event for event in events if event.get("ph") == "X"])
    return {**_last_step(spans, names), "memory": _memory(spans, names)}


def _since_last_start(spans: Sequence[_Event]) -> list[_Event]:
    """Leave out groups of ranks that are gone: those that made the starter model, or that died."""
    starts = [span["ts"] for span in spans if span["name"] == "start workers"]
    return [span for span in spans if span["ts"] >= max(starts, default=0)]


def _last_step(spans: Sequence[_Event], names: dict[int, str]) -> dict[str, Any]:
    # The ranks' spans of a step come later than the driver's, so the very last may lack them.
    steps = [span for span in spans if span["name"] == "step" and span["pid"] == 1]
    for step in sorted(steps, key=lambda span: -int(span["ts"])):
        begin, end = step["ts"], step["ts"] + step["dur"]
        inside = [s for s in spans if begin <= s["ts"] and s["ts"] + s["dur"] <= end]
        rows = _rows([span for span in inside if span is not step], names, begin_us=begin)
        if len(rows) > 1:
            number = step.get("args", {}).get("item")
            return {"step": number, "duration_ms": step["dur"] / 1000, "rows": rows}
    return {"step": None, "duration_ms": 0, "rows": []}


def _rows(spans: Sequence[_Event], names: dict[int, str], *, begin_us: int) -> list[dict[str, Any]]:
    by_row: dict[int, list[_Event]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: (s["ts"], -s["dur"])):
        by_row[span["pid"]].append(span)
    return [
        {
            "name": names.get(row, f"process {row}"),
            "spans": [
                {
                    "name": span["name"],
                    "begin_ms": (span["ts"] - begin_us) / 1000,
                    "ms": span["dur"] / 1000,
                    "depth": depth,
                    "args": span.get("args", {}),
                }
                for span, depth in _with_depth(by_row[row][:_MAX_SPANS])
            ],
        }
        for row in sorted(by_row)[:_MAX_ROWS]
    ]


def _with_depth(spans: Iterable[_Event]) -> Iterable[tuple[_Event, int]]:
    """Say how many spans lie around each; they come sorted by begin, longest first."""
    ends: list[int] = []
    for span in spans:
        while ends and ends[-1] <= span["ts"]:
            ends.pop()
        yield span, len(ends)
        ends.append(span["ts"] + span["dur"])


def _memory(spans: Iterable[_Event], names: dict[int, str]) -> list[dict[str, Any]]:
    most: dict[str, dict[str, float]] = defaultdict(dict)
    for span in spans:
        num_bytes = span.get("args", {}).get("host_bytes")
        if num_bytes:
            rank = names.get(span["pid"], f"process {span['pid']}")
            before = most[rank].get(span["name"], 0.0)
            most[rank][span["name"]] = max(before, round(num_bytes / _MIB, 1))
    return [{"rank": rank, "calls": calls} for rank, calls in most.items()]


def _read_events(path: Path) -> list[_Event]:
    if not path.is_file():
        return []
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        end = file.seek(0, 2)
        start = file.seek(max(len(head), end - _TAIL_BYTES))
        tail = file.read()
    # Where the two do not meet, the cut line at either side of the gap is no JSON and falls out.
    lines = (
        [*head.split(b"\n"), *tail.split(b"\n")]
        if start > len(head)
        else (head + tail).split(b"\n")
    )
    events = (_parse(line) for line in lines)
    return [event for event in events if event is not None]


def _parse(line: bytes) -> _Event | None:
    try:
        event = json.loads(line.rstrip(b","))
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
