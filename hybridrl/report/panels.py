"""From metrics to plots as plain data. A plot without metrics does not exist.

A metric that no panel names gets a plot of its own under "Everything else", so nothing that is
logged is hidden.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hybridrl.metrics import find_declaration
from hybridrl.report.history import History, Series
from hybridrl.report.panel_table import PANELS, REST, Panel
from hybridrl.report.settings import Settings
from hybridrl.report.thinning import average, thin

_SIGNIFICANT_DIGITS = 5
_VISIBLE_SHARE = 0.01
_LOG_SPAN = 50.0


_SAME_VALUE_IS_NO_NEWS = (
    "policy/skipped_updates",
    "reward/failed_fraction",
    "rollout/empty_fraction",
)


_NAMED = frozenset(name for panel in PANELS for name, _ in panel.lines if "*" not in name)


def build_panels(history: History, settings: Settings) -> list[dict[str, Any]]:
    """Return the plots of a run as plain data for the page."""
    found: list[dict[str, Any]] = []
    shown: set[str] = set()
    for panel in PANELS:
        lines = [line for line in _matching(panel, history) if not _is_dull(line[0], history)]
        shown |= {name for name, _ in _matching(panel, history)} | set(panel.band or ())
        if lines:
            found.append(_draw(replace(panel, lines=tuple(lines)), history, settings))
    for name in history.names:
        if name not in shown and history.get(name).last is not None:
            panel = Panel(section=REST, title=name, lines=((name, name),))
            found.append(_draw(panel, history, settings))
    return found


def _matching(panel: Panel, history: History) -> Iterator[tuple[str, str]]:
    """Yield the metrics that were logged with the labels of their lines."""
    for pattern, label in panel.lines:
        expression = re.compile(re.escape(pattern).replace(r"\*", r"([^/]+)"))
        for name in history.names:
            match = expression.fullmatch(name)
            is_anothers = "*" in pattern and name in _NAMED
            if match and not is_anothers and history.get(name).last is not None:
                words = [*match.groups(), ""]
                yield name, label.replace("*", words[0].replace("_", " "))


def _is_dull(name: str, history: History) -> bool:
    return name in _SAME_VALUE_IS_NO_NEWS and not any(history.get(name).finite)


def _draw(panel: Panel, history: History, settings: Settings) -> dict[str, Any]:
    names = [name for name, _ in panel.lines]
    main = find_declaration(names[0])
    unit = main.unit if main and main.unit != "1" else ""
    columns = [history.get(name) for name in names]
    if unit == "bytes":
        unit, columns = _in_binary_units(columns)
    if panel.kind == "stack":
        lines = _stack(panel, average(columns))
    else:
        lines = [
            _line(label, name, thin(column))
            for (name, label), column in zip(panel.lines, columns, strict=True)
        ]
    return {
        "section": panel.section,
        "title": panel.title,
        "kind": panel.kind,
        "unit": (panel.unit or unit).strip(),
        "about": panel.about,
        "log": panel.is_log and _spans_decades([v for c in columns for v in c.finite]),
        "band": _band(panel, history),
        "limit": _limit(panel, settings),
        "lines": lines,
        "constants": [column.last for column in columns] if _all_constant(columns) else None,
    }


def _in_binary_units(columns: Sequence[Series]) -> tuple[str, list[Series]]:
    most = max((value for column in columns for value in column.finite), default=0.0)
    unit, size = ("GiB", 2.0**30) if most >= 2.0**30 else ("MiB", 2.0**20)
    return unit, [
        Series(column.steps, [None if v is None else v / size for v in column.values])
        for column in columns
    ]


def _line(label: str, name: str, series: Series) -> dict[str, Any]:
    return {"label": label, "name": name, "meaning": _meaning(name), **_points(series)}


def _stack(panel: Panel, columns: Sequence[Series]) -> list[dict[str, Any]]:
    """Draw the areas that can be seen, and the rest as one."""
    heights = [sum(column.finite) for column in columns]
    lines: list[dict[str, Any]] = []
    small: list[tuple[str, Series]] = []
    for (name, label), column, height in zip(panel.lines, columns, heights, strict=True):
        if height >= _VISIBLE_SHARE * sum(heights):
            lines.append(_line(label, name, column))
        else:
            small.append((label, column))
    if small:
        values = zip(*(column.values for _, column in small), strict=True)
        rest = Series(columns[0].steps, [sum(v or 0.0 for v in at_step) for at_step in values])
        meaning = "together: " + ", ".join(label for label, _ in small)
        lines.append(_line("the rest", "", rest) | {"meaning": meaning})
    return lines


def _all_constant(columns: Sequence[Series]) -> bool:
    return all(len(c.steps) > 2 and len(set(c.values)) == 1 for c in columns)


def _spans_decades(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) > _LOG_SPAN * min(values)


def _band(panel: Panel, history: History) -> dict[str, Any] | None:
    if panel.band is None or any(name not in history for name in panel.band):
        return None
    low, high = average([history.get(name) for name in panel.band])
    return {"low": _points(low), "high": _points(high), "label": "shortest to longest"}


def _limit(panel: Panel, settings: Settings) -> dict[str, Any] | None:
    value = settings.number(panel.limit) if panel.limit else None
    return {"value": value, "label": panel.limit} if value else None


def _points(series: Series) -> dict[str, Sequence[float | None]]:
    return {"x": series.steps, "y": [_short(value) for value in series.values]}


def _short(value: float | None) -> float | None:
    """Round to what a screen shows: a third of the bytes."""
    return None if value is None else float(f"{value:.{_SIGNIFICANT_DIGITS}g}")


def _meaning(name: str) -> str:
    declaration = find_declaration(name)
    return declaration.meaning if declaration else ""
