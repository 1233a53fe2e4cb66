from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import not_run
from tests.workers_share import group_of

ROOT = Path(__file__).parents[1]


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
    tmp_path: Path, workers: tuple[str, ...], pytestconfig: pytest.Config
) -> None:
    assert pytestconfig.pluginmanager.is_registered(not_run)
    skips = "import pytest\npytest.importorskip('nowhere', reason='the extra is not installed')\n"
    (tmp_path / "test_file.py").write_text(skips)
    each = "@pytest.mark.skip('needs a device')\n@pytest.mark.parametrize('n', range(3))\n"
    (tmp_path / "test_each.py").write_text(f"import pytest\n{each}def test_it(n): ...\n")
    plugins = ("-p", "no:cacheprovider", "-p", "tests.not_run")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, *workers, "test_file.py", "test_each.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert "all of test_file.py: the extra is not installed" in lines
    assert "3 tests: needs a device" in lines
    assert "4 skipped" in lines[-1]
