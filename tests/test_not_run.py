"""A suite in an environment without an optional package says what it could not run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

WITHOUT = "import sys\nsys.modules.update(sglang_router=None, bm25s=None)\n"


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["one process", "workers"])
def test_what_is_missing_is_told_with_the_tests_that_it_cost(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    (tmp_path / "without.py").write_text(WITHOUT)
    files = ("tests/agents/test_search.py", "tests/serving/test_router.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "without"]
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [*command, *workers, *files],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert "all of tests/agents/test_search.py: the extra search is not installed" in lines
    (of_router,) = (line for line in lines if " tests: could not import 'sglang_router'" in line)
    num_tests = int(of_router.partition(" tests: ")[0])
    assert f"{num_tests + 1} skipped" in lines[-1]
    assert num_tests > 5
