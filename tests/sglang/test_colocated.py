"""Runs whose ranks lend servers of SGLang to the manager, which asks them through the ranks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.end_to_end.small import SMALL, read_metrics
from tests.serving.processes import wait_for_a_busy_process
from tests.sglang.test_run import TIMEOUT_S, processes_of, require_agreement
from tests.sglang.test_topologies import NO_MOONCAKE
from tests.waiting import wait_until

pytestmark = [pytest.mark.timeout(2 * TIMEOUT_S + 20)]

SMALL_RUN = (
    *(override for override in SMALL if override.startswith("model.")),
    *("trainer.num_prompts_per_step=4", "eval.every_num_steps=0", "checkpoint.every_num_steps=0"),
)


COLOCATED = ("serving.colocated=true", "rollout.sleep=true", "rollout.num_slots=64")
HALVES = "a: {num_devices: 1, worker_type: prefill}, b: {num_devices: 1, worker_type: decode}"
WITHOUT_MOONCAKE = pytest.mark.skipif(find_spec("mooncake") is None, reason=NO_MOONCAKE)


@pytest.mark.shows("2.1", "2.2", "4.2", "4.3")
@pytest.mark.parametrize(
    ("groups", "num_devices", "num_ranks"),
    [
        pytest.param(
            "one: {num_devices: 1}, two: {num_devices: 2, devices_per_engine: 2}",
            *(3, 3),
            id="engines of one and of two ranks",
        ),
        pytest.param(HALVES, 2, 2, id="a pair of the ranks", marks=WITHOUT_MOONCAKE),
        pytest.param(
            f"fused: {{num_devices: 1}}, {HALVES}",
            *(3, 1),
            id="a pair beside an engine of a rank",
            marks=[WITHOUT_MOONCAKE, pytest.mark.nightly],
        ),
    ],
)
def test_groups_of_any_kind_sleep_with_the_trainer(
    tmp_path: Path, groups: str, num_devices: int, num_ranks: int
) -> None:
    lines = require_agreement(
        tmp_path,
        *(*COLOCATED, *SMALL_RUN, "trainer.num_prompts_per_step=6"),
        f"serving.models={{policy: {{groups: {{{groups}}}}}}}",
        f"serving.num_devices_per_node={num_devices}",
        f"cluster.num_ranks_per_node={num_ranks}",
        num_steps=3,
        timeout_s=2 * TIMEOUT_S,
    )
    assert [line["rollout/lost_engines"] for line in lines] == [0, 0, 0]
    assert all("time/release_s" in line for line in lines)


@pytest.mark.nightly
@pytest.mark.shows("4.1", "4.3")
@pytest.mark.parametrize("recipe", ["cpu/colocated", "cpu/mixed"])
def test_servers_of_ranks_agree_with_the_trainer(tmp_path: Path, recipe: str) -> None:
    lines = require_agreement(
        tmp_path, f"recipes={recipe}", *SMALL_RUN, num_steps=3, timeout_s=2 * TIMEOUT_S
    )
    assert [line["rollout/repeated_requests"] for line in lines] == [0, 0, 0]


@pytest.mark.nightly
@pytest.mark.shows("4.12", "4.15")
def test_a_killed_server_of_a_rank_restarts_after_the_phase(tmp_path: Path) -> None:
    has_ended = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        killing = thread.submit(kill_one_server, tmp_path, has_ended)
        try:
            lines = require_agreement(
                tmp_path,
                "recipes=cpu/colocated",
                *SMALL_RUN,
                num_steps=6,
                timeout_s=2 * TIMEOUT_S,
            )
        finally:
            has_ended.set()
    killing.result()
    assert sum(line["rollout/lost_engines"] for line in lines) == 1
    assert sum(line["rollout/replaced_engines"] for line in lines) == 1


def kill_one_server(folder: Path, has_ended: threading.Event) -> None:
    """Kill a server while it samples: after the first step, when a scheduler computes again."""

    def has_stepped() -> bool:
        metrics = folder / "run" / "metrics.jsonl"
        return has_ended.is_set() or (metrics.exists() and bool(read_metrics(folder / "run")))

    wait_until(has_stepped, deadline_s=2 * TIMEOUT_S)
    if not has_ended.is_set():
        wait_for_a_busy_process(partial(processes_of, folder, "sglang::scheduler")).kill()
