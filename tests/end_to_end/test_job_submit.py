"""`ray job submit` to a real head, as a user types it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hybridrl
from tests.end_to_end.ray_head import RayHead, ray_head, second_raylet
from tests.end_to_end.small import read_metrics, small_overrides

pytestmark = pytest.mark.nightly
_ROOT = Path(hybridrl.__file__).parents[1]


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    pytest.importorskip("aiohttp", reason="needs ray[default]: pip install 'hybridrl[cluster]'")
    with ray_head(has_dashboard=True) as started:
        yield started


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What --working-dir sends; nodes know no other hybridrl by this path."""
    for name in ("hybridrl", "hydra_configs", "recipes"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(_ROOT / name, tmp_path / "checkout" / name, ignore=ignored)
    return tmp_path / "checkout"


def test_a_submitted_job_trains_on_the_cluster_it_was_submitted_to(
    head: RayHead, checkout: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shown = ("tracking.live=lines", "checkpoint.every_num_steps=3")
    done = _submit(head, checkout, *small_overrides(folder, *shown))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "succeeded" in done.stdout
    assert "ray job submit --working-dir . -- python -m hybridrl.main" in done.stdout
    assert [line["step"] for line in read_metrics(folder)] == [0, 1, 2, 3]
    assert (folder / "hf" / "config.json").is_file()


def test_a_job_on_two_raylets_of_one_machine_uses_a_checkout_that_both_see(
    head: RayHead, checkout: Path, tmp_path: Path
) -> None:
    """They share the folder in which Ray unpacks what is sent along, and one would not find it."""
    folder = tmp_path / "run"
    two = ("cluster.num_nodes=2", "trainer.num_prompts_per_step=4")
    with second_raylet(head):
        done = _submit(head, None, *small_overrides(folder, *two), path=checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["step"] for line in read_metrics(folder)] == [0, 1, 2, 3]


def test_a_job_that_fails_says_why_and_has_failed(
    head: RayHead, checkout: Path, tmp_path: Path
) -> None:
    asked = ("cluster.device=cuda", "cluster.start_timeout_s=2")
    done = _submit(head, checkout, *small_overrides(tmp_path / "run", *asked))
    assert done.returncode != 0
    assert (
        "ResourceError: could not reserve within 2 s: [1] ranks per node, on different"
        in done.stdout
    )
    assert "nodes have 2 CPU" in done.stdout


def _submit(
    head: RayHead, folder: Path | None, *overrides: str, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    sent = [] if folder is None else ["--working-dir", str(folder)]
    found = [] if path is None else ["env", "-C", str(path)]
    command = [
        *(str(Path(sys.executable).with_name("ray")), "job", "submit"),
        *("--address", head.dashboard, *sent, "--", *found),
        *(sys.executable, "-m", "hybridrl.main", *overrides),
    ]
    return subprocess.run(
        command,
        env=dict(head.environment),
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
