from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import hybridrl
from tests.end_to_end.ray_head import RayHead, ray_head, second_raylet
from tests.end_to_end.small import read_metrics, small_overrides
from tests.end_to_end.two_machines import ADDRESSES, Machines, Started, can_be_made, two_machines
from tests.waiting import wait_until

pytestmark = pytest.mark.nightly


@pytest.mark.shows("R11.3")
@pytest.mark.parametrize("way", ["", "ray://", "RAY_ADDRESS"])
def test_an_address_where_nobody_listens_is_named_at_once(tmp_path: Path, way: str) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, and not listening
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        given, environment = f"cluster.ray_address={way}{address}", dict(os.environ)
        if way == "RAY_ADDRESS":  # which is what null means
            given, environment["RAY_ADDRESS"] = "cluster.num_nodes=2", address
        done = _run(tmp_path, given, environment=environment)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"nothing listens at {address}" in done.stderr
    assert way == "RAY_ADDRESS" or f"{given}: nothing listens" in done.stderr
    assert "cluster.ray_address=null" in done.stderr


def test_a_cluster_with_another_token_is_named(tmp_path: Path) -> None:
    with ray_head() as head:
        environment = {**head.environment, "RAY_AUTH_TOKEN": "0" * 32}
        done = _run(tmp_path, f"cluster.ray_address={head.address}", environment=environment)
    assert done.returncode == 1
    assert "ResourceError: no Ray cluster takes this driver" in done.stderr
    assert "RAY_AUTH_MODE=token" in done.stderr


@pytest.mark.shows("R11.3")
def test_a_killed_head_ends_the_run_with_one_named_error(tmp_path: Path) -> None:
    with ray_head() as head:
        folder = tmp_path / "run"
        overrides = small_overrides(
            folder, f"cluster.ray_address={head.address}", "trainer.num_steps=100000"
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "hybridrl.main", *overrides],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=head.environment,
        )
        try:
            metrics = folder / "metrics.jsonl"
            wait_until(
                lambda: metrics.is_file() and len(read_metrics(folder)) >= 3,
                deadline_s=200,
                process=process,
            )
            head.kill()
            _, errors = process.communicate(timeout=55)  # Ray itself would end it after 60 s
        finally:
            process.kill()
            process.wait(timeout=60)
    assert process.returncode == 1, errors
    # Whether the driver still lives to say it itself depends on what it did at that moment.
    assert errors.count("ClusterLostError: ") == 1
    assert "ClusterLostError" in (folder / "log.txt").read_text()


def _run(
    folder: Path, *overrides: str, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hybridrl.main", *small_overrides(folder / "run", *overrides)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


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
    told = "ResourceError: could not reserve within 2 s: [1] ranks per node, on different"
    assert told in done.stdout
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
        command, env=head.environment, capture_output=True, text=True, timeout=170, check=False
    )


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


@pytest.mark.skipif(not can_be_made(), reason="may not make network namespaces")
@pytest.mark.timeout(600)
def test_the_scripts_train_across_two_machines(machines: Machines) -> None:
    head, worker = start_run(machines, "trainer.num_steps=3")
    assert head.process.wait(timeout=180) == 0, head.text()
    assert "step 3/3" in head.text()
    assert (machines.folder / "runs").is_dir()
    assert worker.process.wait(timeout=120) is not None  # the head has ended: so does the worker


@pytest.mark.skipif(not can_be_made(), reason="may not make network namespaces")
@pytest.mark.timeout(600)
def test_a_machine_that_falls_silent_is_named(machines: Machines) -> None:
    head, _ = start_run(machines, "trainer.num_steps=1000")
    head.wait_for("step 2/1000", 120)
    machines.unplug()
    head.wait_for(f"WorkerDiedError: rank 1 on {ADDRESSES[1]}", 180)
    head.wait_for("its node was lost", 10)
    head.wait_for("workers are started again", 30)
    head.process.send_signal(signal.SIGTERM)


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


def test_nodes_of_a_run_are_different_nodes_whose_ranks_are_told_and_have_its_environment(
    seen: Any,
) -> None:
    # All three entries would have found room on the first node.
    assert seen["3 x 1"]["nodes"] == [0, 1, 2]
    assert seen["3 x 1"]["local_ranks"] == [0, 0, 0]
    assert seen["3 x 2"]["nodes"] == [0, 0, 1, 1, 2, 2]
    assert seen["3 x 2"]["local_ranks"] == [0, 1, 0, 1, 0, 1]
    assert seen["3 x 2"]["local_world_sizes"] == [2] * 6
    assert seen["3 x 1"]["threads"] == ["3"]
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
