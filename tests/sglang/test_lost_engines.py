"""Whole runs on SGLang behind its router, in which servers or their manager are killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.env import ROOT
from tests.end_to_end.small import SMALL, VARIED, read_metrics
from tests.sglang.test_run import servers_started_in

NUM_STEPS = 20
TIMEOUT_S = 1500
"""For 6 kills, after each of which a server starts beside one that samples, on two cores."""


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.shows("4.15")
@pytest.mark.parametrize(("kind", "num_kills"), [("kill", 6), ("kill_manager", 1)])
def test_a_run_loses_no_sample_to_killed_servers(tmp_path: Path, kind: str, num_kills: int) -> None:
    every = 3 if kind == "kill" else NUM_STEPS - 5  # a new manager counts its phases anew
    folder = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "hybridrl.main", "serving=own", "rollout=sglang", *SMALL, VARIED),
        *("rollout.start_timeout_s=150", "cluster.start_timeout_s=160", "eval.every_num_steps=0"),
        *(f"trainer.run_dir={folder}", f"trainer.num_steps={NUM_STEPS}"),
        *("checkpoint.every_num_steps=1", "cluster.call_timeout_s=300"),
        f"serving.faults={{it: {{kind: {kind}, every_num_phases: {every}, within_requests: 4}}}}",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = read_metrics(folder)
    assert [line["data/prompts"] for line in lines] == [4 * (n + 1) for n in range(NUM_STEPS)]
    assert all(line["policy/sampler_mismatch_nats/max"] < 1e-3 for line in lines)
    lost = sum(line["rollout/lost_engines"] for line in lines)
    replaced = sum(line["rollout/replaced_engines"] for line in lines)
    if kind == "kill":
        assert lost == num_kills
        assert num_kills - 1 <= replaced <= num_kills  # the last may come after the end
        assert sum(line["rollout/repeated_requests"] for line in lines) >= num_kills
    else:
        assert (folder / "log.txt").read_text().count("workers are started again") == num_kills
    assert servers_started_in(tmp_path) == []
