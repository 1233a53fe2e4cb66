"""Whole runs on SGLang behind its router, in which servers or their manager are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.small import SMALL, VARIED
from tests.sglang.test_run import require_agreement

NUM_STEPS = 20
TIMEOUT_S = 1500
"""For 6 kills, after each of which a server starts beside one that samples, on two cores."""


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.shows("4.15")
@pytest.mark.parametrize(("kind", "num_kills"), [("kill", 6), ("kill_manager", 1)])
def test_a_run_loses_no_sample_to_killed_servers(tmp_path: Path, kind: str, num_kills: int) -> None:
    every = 3 if kind == "kill" else NUM_STEPS - 5  # a new manager counts its phases anew
    faults = f"{{it: {{kind: {kind}, every_num_phases: {every}, within_requests: 4}}}}"
    lines = require_agreement(
        tmp_path,
        *("serving=own", *SMALL, VARIED, f"serving.faults={faults}", "eval.every_num_steps=0"),
        *("checkpoint.every_num_steps=1", "cluster.call_timeout_s=300"),
        num_steps=NUM_STEPS,
        timeout_s=TIMEOUT_S,
    )
    assert [line["data/prompts"] for line in lines] == [4 * (n + 1) for n in range(NUM_STEPS)]
    lost = sum(line["rollout/lost_engines"] for line in lines)
    replaced = sum(line["rollout/replaced_engines"] for line in lines)
    if kind == "kill":
        assert lost == num_kills
        assert num_kills - 1 <= replaced <= num_kills  # the last may come after the end
        assert sum(line["rollout/repeated_requests"] for line in lines) >= num_kills
    else:
        log = (tmp_path / "run" / "log.txt").read_text()
        assert log.count("workers are started again") == num_kills
