"""A Ray cluster of three nodes on this machine, driven by a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_script(tmp_path_factory.mktemp("three-raylets"), "places")


@pytest.fixture(scope="module")
def trained(starter_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_script(tmp_path_factory.mktemp("three-raylets"), "trains")


def run_script(folder: Path, subject: str) -> Any:
    script = [sys.executable, "-m", "tests.end_to_end.three_raylets", str(folder), subject]
    done = subprocess.run(script, capture_output=True, text=True, timeout=270, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_nodes_of_a_run_are_different_nodes_and_ranks_count_node_by_node(seen: Any) -> None:
    # All three entries would have found room on the first node.
    assert seen["3 x 1"]["nodes"] == [0, 1, 2]
    assert seen["3 x 1"]["local_ranks"] == [0, 0, 0]
    assert seen["3 x 2"]["nodes"] == [0, 0, 1, 1, 2, 2]
    assert seen["3 x 2"]["local_ranks"] == [0, 1, 0, 1, 0, 1]
    assert seen["3 x 2"]["local_world_sizes"] == [2] * 6


def test_the_environment_of_a_run_reaches_ranks_on_every_node(seen: Any) -> None:
    assert seen["3 x 1"]["threads"] == ["3"]


def test_it_is_said_which_rank_is_where(seen: Any) -> None:
    first, _, second, _, third, _ = seen["3 x 2"]["node_ids"]
    assert seen["3 x 2"]["described"] == (
        f"ranks 0, 1 on HOST (node {first}); ranks 2, 3 on HOST (node {second}); "
        f"ranks 4, 5 on HOST (node {third})"
    )


@pytest.mark.shows("R11.2")
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("too many nodes", "only 3 of 4 fit"),
        ("too many ranks", "no node has 4 CPU, which 4 ranks need"),
        ("busy", "free in the cluster are 3 CPU; other runs hold the resources"),
    ],
)
def test_what_a_cluster_lacks_is_named(seen: Any, case: str, words: str) -> None:
    assert words in seen[case]
    assert "nodes have 3 CPU; 3 CPU; 3 CPU" in seen[case]
    assert "cluster.num_nodes" in seen[case]


@pytest.mark.shows("R11.1")
def test_a_run_across_three_nodes_trains_what_three_ranks_of_one_node_train(trained: Any) -> None:
    assert "rank 0 on " in trained["across"]["log"]
    assert trained["across"]["metrics"][1]["policy/grad_norm"] > 0
    assert trained["across"]["metrics"] == trained["on one"]["metrics"]
    assert trained["across"]["weights"] == trained["on one"]["weights"]
