"""The scripts of recipes/cluster, run on two machines that a network of their own connects."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.two_machines import ADDRESSES, Machines, Started, can_be_made, two_machines

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not can_be_made(), reason="may not make network namespaces"),
]
TOKEN = {"RAY_AUTH_TOKEN": "0123456789abcdef"}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with two_machines(tmp_path) as both:
        yield both


def start_run(machines: Machines, *overrides: str) -> tuple[Started, Started]:
    """Start the worker's script, which waits for a head, then the head's with a run."""
    worker = machines.start(1, "recipes/cluster/ray_worker.sh", HEAD=ADDRESSES[0], **TOKEN)
    worker.wait_for("waiting for the Ray head", 60)
    variables = {"SHARED": str(machines.folder), "NUM_RANKS_PER_NODE": "1", "DEVICE": "cpu"}
    head = machines.start(0, "recipes/cluster/ray_head.sh", *overrides, **variables, **TOKEN)
    head.wait_for(f"rank 1 on {ADDRESSES[1]}", 240)
    assert f"rank 0 on {ADDRESSES[0]}" in head.text()
    return head, worker


@pytest.mark.timeout(600)
def test_the_scripts_train_across_two_machines(machines: Machines) -> None:
    head, worker = start_run(machines, "trainer.num_steps=3")
    assert head.process.wait(timeout=180) == 0, head.text()
    assert "step 3/3" in head.text()
    assert (machines.folder / "runs").is_dir()
    assert worker.process.wait(timeout=120) is not None  # the head has ended: so does the worker


@pytest.mark.timeout(600)
def test_a_machine_that_falls_silent_is_named(machines: Machines) -> None:
    head, _ = start_run(machines, "trainer.num_steps=1000")
    head.wait_for("step 2/1000", 120)
    machines.unplug()
    head.wait_for(f"WorkerDiedError: rank 1 on {ADDRESSES[1]}", 180)
    head.wait_for("its node was lost", 10)
    head.wait_for("workers are started again", 30)
    head.process.send_signal(signal.SIGTERM)
