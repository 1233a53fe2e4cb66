"""``mode=certify``, in processes of its own that are really killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.checkpoint.compare import compare_runs
from tests.end_to_end.small import change_one_bit, small_overrides

ROOT = Path(__file__).parents[2]
GRPO = ("rollout.sleep=true", "algorithm.num_minibatches=2", "algorithm.old_logprobs=recompute")


@pytest.mark.shows("R6.1")
@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_certificate_is_printed_and_its_comparison_sees_one_bit(tmp_path: Path) -> None:
    folder = tmp_path / "certificate"
    overrides = small_overrides(
        folder, *GRPO, "mode=certify", "certify.num_steps=3", "actor.optimizer.lr=1e-2"
    )
    result = subprocess.run(
        [sys.executable, "-m", "hybridrl.main", *overrides],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert result.returncode == 0, result.stderr
    assert "# Certificate: resumed, bitwise identical" in result.stdout
    assert "same: optimizer" in (folder / "certificate.md").read_text()
    report = json.loads((folder / "certificate.json").read_text())
    assert all(not finding["differences"] for finding in report["findings"])
    for what, path in (
        ("weights", max((folder / "interrupted" / "checkpoints").glob("step-*/actor/*"))),
        ("samples", folder / "interrupted" / "samples.jsonl"),
        ("metrics", folder / "interrupted" / "metrics.jsonl"),
    ):
        change_one_bit(path)
        findings = compare_runs(folder / "uninterrupted", folder / "interrupted")
        assert what in {finding.what for finding in findings if finding.differences}


@pytest.mark.shows("R6.2")
@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_fifty_random_kills_in_a_row_end_bit_by_bit_or_with_a_named_error() -> None:
    command = [sys.executable, "-m", "benchmarks.kills", "--kills", "50", "--seed", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2900)
    assert result.returncode == 0, result.stdout + result.stderr
