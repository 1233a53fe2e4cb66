"""Tests that could not run, printed at the end of a run: what is missing, and what it cost."""

from __future__ import annotations

from collections import Counter

import pytest

_SKIPPED = "Skipped: "


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write a line for each reason; a file that cannot be imported does not say how many it has."""
    costs: Counter[tuple[str, str]] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        reason = str(report.longrepr[2]).removeprefix(_SKIPPED)
        is_file = isinstance(report, pytest.CollectReport)
        costs[reason, report.nodeid if is_file else ""] += 1
    if costs:
        terminalreporter.section("not run")
    for (reason, file), count in sorted(costs.items()):
        cost = f"all of {file}" if file else f"{count} tests"
        terminalreporter.write_line(f"{cost}: {reason}")
