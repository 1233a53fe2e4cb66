from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers_share import group_of

ROOT = Path(__file__).parents[1]

WITHOUT = "import sys\nsys.modules.update(sglang_router=None, bm25s=None)\n"


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/end_to_end/test_train.py::test_a[x]", "tests/end_to_end/test_train.py"),
        ("tests/contract/test_scores.py::test_a[fsdp2-2-True]", "fsdp2-2"),
        ("tests/contract/test_scores.py::test_a[fsdp2-2x2-True]", "fsdp2-2x2"),
        ("tests/contract/test_weights.py::test_a[fsdp2-2x2]", "fsdp2-2x2"),
        ("tests/contract/test_weights.py::test_a", "tests/contract/test_weights.py"),
        ("tests/sglang/test_lora.py::test_a[x]", "sglang"),
    ],
)
def test_one_worker_has_what_shares_ranks_or_servers(nodeid: str, group: str) -> None:
    assert group_of(nodeid) == group


@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "1"), marks=pytest.mark.nightly)])
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
