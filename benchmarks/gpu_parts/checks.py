"""The tests that need a GPU, as one part: ``pytest -m gpu``."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from benchmarks.gpu_parts.bench import Bench

_ROOT = Path(__file__).resolve().parents[2]
_FORGIVING = ("-W", "default", "--continue-on-collection-errors", "-p", "no:cacheprovider")
"""Another machine's versions warn of other things: a warning is no reason to prove nothing."""

_DIED = (2, 3, 4)
"""Exit codes of pytest for: interrupted, internal error, wrong usage."""


def run(bench: Bench) -> None:
    """Run them all, and keep how each went."""
    report = bench.record.path.with_name("checks.xml")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", "tests"]
    command += _FORGIVING
    if bench.is_dry:
        command.append("--collect-only")
    environment = {**os.environ, "HYBRIDRL_TEST_ENGINE_ARGS": ",".join(bench.engine_args)}
    done = subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode in _DIED:
        raise RuntimeError(f"pytest did not run: {done.stdout[-2000:]}{done.stderr[-1000:]}")
    if bench.is_dry:
        bench.record.note(done.stdout.strip().splitlines()[-1])
        bench.record.not_exercised("the tests: they were collected alone")
        return
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = [child for child in case if child.tag in ("failure", "error")]
        outcome = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        counts[outcome] += 1
        detail = (bad[0].get("message") or "")[:300] if bad else ""
        bench.record.note(f"{outcome} {name} {detail}".strip())
    bench.record.figures({name: float(n) for name, n in counts.items()}, "1")
    is_good = counts["passed"] > 0 and counts["failed"] == 0
    bench.record.figure("all_passed", float(is_good), "yes")
    if counts["failed"]:
        bench.record.note(done.stdout[-4000:])
