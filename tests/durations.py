"""Seconds of tests by folder, printed at the end of a run: where a suite that grows has grown."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

_MIN_TOTAL_S = 60.0
"""Below that nobody asks where the time went."""

_RECORD = "RECORD_DURATIONS"
"""Variable that names a JSON file: each run puts its folders' tests and seconds into it."""


class DurationsByFolder:
    """Counts set-up, call and tear-down of each test towards the folder of its file."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._tests: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = folder_of(report.nodeid)
        self._seconds[folder] += report.duration
        self._tests[folder].add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total_s = sum(self._seconds.values())
        if total_s < _MIN_TOTAL_S:
            return
        terminalreporter.section("seconds of tests by folder")
        for folder, seconds in sorted(self._seconds.items(), key=lambda item: -item[1]):
            terminalreporter.write_line(
                f"{seconds:8.1f} s  {len(self._tests[folder]):5} tests  {folder}"
            )
        num_tests = sum(map(len, self._tests.values()))
        terminalreporter.write_line(f"{total_s:8.1f} s  {num_tests:5} tests  in all")
        if os.environ.get(_RECORD):
            self._record(Path(os.environ[_RECORD]))

    def _record(self, path: Path) -> None:
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for folder, seconds in self._seconds.items():
            known[folder] = [len(self._tests[folder]), round(seconds, 1)]
        path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def folder_of(nodeid: str) -> str:
    """Return the folder of a test's file, or the file where it lies in tests/ itself."""
    file = nodeid.partition("::")[0]
    folder = file.rpartition("/")[0]
    return file if folder == "tests" else folder
