"""Engines of several devices and nodes, and engines in pairs: real servers on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.env import ROOT, python_path
from hybridrl.serving.launching import start_servers
from tests.config.values import config_of
from tests.end_to_end.small import SMALL as SMALL_RUN
from tests.end_to_end.small import read_metrics
from tests.serving.processes import servers_below
from tests.sglang.topologies import GREEDY, PROMPTS, SMALL, assert_as_hugging_face, groups
from tests.tiny_models import make_tiny_model
from tests.waiting import wait_until

pytestmark = pytest.mark.nightly

NO_MOONCAKE = "needs mooncake-transfer-engine-non-cuda, and libibverbs1 and libnl-route-3-200"


def require_hugging_faces_answers(config: ExperimentConfig, folders: Sequence[Path]) -> None:
    """Start servers, and sample twice with the weights of each folder."""
    with start_servers(config, folders[0], variables={}) as servers:
        for version, folder in enumerate(folders):
            servers.update(folder, version=version)
            for _ in range(2):
                samples, _ = servers.sample(PROMPTS, GREEDY, version=version)
                assert_as_hugging_face(samples, folder)
    wait_until(lambda: not servers_below())


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.shows("4.2")
def test_an_engine_of_two_devices_samples_as_one(served_model: Path, tmp_path: Path) -> None:
    config = config_of(
        *SMALL,
        groups(wide="num_devices: 2, devices_per_engine: 2", small="num_devices: 1"),
        "serving.num_devices_per_node=3",
    )
    require_hugging_faces_answers(config, [served_model, make_tiny_model(tmp_path / "b", seed=5)])


@pytest.mark.timeout(420)
@pytest.mark.shows("4.4", "4.7", "4.9")
def test_an_engine_of_two_nodes_answers_on_its_first(served_model: Path, tmp_path: Path) -> None:
    folders = [served_model, make_tiny_model(tmp_path / "other", seed=5)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.sglang.two_node_engine", *map(str, folders)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    by_phase = json.loads(done.stdout.splitlines()[-1])  # the last after a follower was killed
    for answers, folder in zip(by_phase, [*folders, folders[1]], strict=True):
        assert_as_hugging_face(answers, folder)


@pytest.mark.skipif(find_spec("mooncake") is None, reason=NO_MOONCAKE)
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.shows("4.2", "4.7")
def test_a_pair_samples_as_one_engine(served_model: Path, tmp_path: Path) -> None:
    config = config_of(
        *SMALL,
        groups(
            first="num_devices: 1, worker_type: prefill",
            second="num_devices: 1, worker_type: decode",
        ),
        "serving.num_devices_per_node=2",
    )
    require_hugging_faces_answers(config, [served_model, make_tiny_model(tmp_path / "b", seed=5)])


@pytest.mark.skipif(find_spec("mooncake") is None, reason=NO_MOONCAKE)
@pytest.mark.timeout(300)
def test_a_run_on_a_pair_agrees_with_its_trainer(tmp_path: Path) -> None:
    small = [override for override in SMALL_RUN if override.startswith("model.")]
    small += ["trainer.num_prompts_per_step=4", "trainer.num_steps=2", "eval.every_num_steps=0"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "hybridrl.main", "recipes=cpu/prefill_decode"),
            *(*small, "tracking.live=off", f"trainer.run_dir={tmp_path / 'run'}"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = read_metrics(tmp_path / "run")
    mismatch = "policy/sampler_mismatch_nats/max"  # of the first tokens, which prefill engines drew
    assert len([line for line in lines if line.get(mismatch, 1.0) < 1e-3]) == 2
