"""The files of recipes/cluster: their shells parse, and the overrides in them pass every check."""

from __future__ import annotations

import re
import shlex
import subprocess
from importlib.metadata import metadata
from pathlib import Path

import pytest
import yaml

import hybridrl
from hybridrl.config.load import load_config
from hybridrl.main import compose

FOLDER = Path(hybridrl.__file__).parents[1] / "recipes" / "cluster"
SHELLS = sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".sh", ".sbatch"))
IMAGES = "Dockerfile"
DRIVERS = sorted(
    path.name
    for path in FOLDER.iterdir()
    if path.name != IMAGES and "hybridrl.main" in path.read_text()
)
VARIABLES = {
    "DEVICE": "one_gpu",
    "PORT": "6379",
    "NUM_NODES": "2",
    "NUM_RANKS_PER_NODE": "8",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_ID": "17",
    "num_gpus": "8",
    "address": "10.0.0.1",
    "port": "6379",
}


def overrides_of(name: str, shared: Path) -> list[str]:
    """What the file hands to ``python -m hybridrl.main``, with its variables filled in."""
    text = (FOLDER / name).read_text()
    if name.endswith(".yaml"):
        command = yaml.safe_load(text)["spec"]["entrypoint"].replace("/shared", str(shared))
    else:
        joined = text.replace("\\\n", " ")
        (command,) = re.findall(r"^python -m hybridrl\.main .*$", joined, re.MULTILINE)
        command = command.replace("$(date +%Y-%m-%d_%H-%M-%S)", "now").replace('"$@"', "")
        for variable, value in {**VARIABLES, "SHARED": str(shared)}.items():
            command = re.sub(rf"\$({variable}\b|{{{variable}}})", value, command)
    assert "$" not in command
    return shlex.split(command)[3:]


@pytest.mark.parametrize("name", SHELLS)
def test_a_shell_script_parses_and_stops_at_the_first_error(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text
    done = subprocess.run(
        ["bash", "-n", str(FOLDER / name)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_no_file_ends_the_clusters_of_others_or_runs_one_without_a_token() -> None:
    for path in FOLDER.iterdir():
        commands = "\n".join(line.partition("#")[0] for line in path.read_text().splitlines())
        assert "ray stop" not in commands
        assert "ray start" not in commands or "RAY_AUTH_MODE=token" in commands


@pytest.mark.parametrize("name", DRIVERS)
def test_the_overrides_of_a_file_pass_every_check(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # as in a submitted job
    config = load_config(compose(overrides_of(name, tmp_path)))
    assert config.cluster.num_ranks == 16
    assert config.cluster.device == "cuda"
    assert config.cluster.address == "10.0.0.1:6379" or name == "ray_head.sh"
    assert str(tmp_path) in config.trainer.run_dir


def test_there_is_a_file_for_each_way_to_a_cluster() -> None:
    assert DRIVERS == ["kuberay.yaml", "ray_head.sh", "slurm.sbatch"]


def test_the_job_of_kuberay_has_as_many_workers_as_it_asks_for() -> None:
    job = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert f"cluster.num_nodes={workers['replicas']}" in job["spec"]["entrypoint"]
    assert f"cluster.num_ranks_per_node={limits['nvidia.com/gpu']}" in job["spec"]["entrypoint"]


def test_the_images_have_extras_that_exist_and_the_tag_that_kuberay_asks_for() -> None:
    text = (FOLDER / IMAGES).read_text()
    known = metadata("hybridrl").get_all("Provides-Extra")
    for extras in re.findall(r"\.\[([a-z,-]+)\]", text):
        assert set(extras.split(",")) <= set(known or ())
    stages = re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE)
    assert stages == re.findall(r"--target (\w+)", text) == ["cpu", "gpu"]
    assert "--target gpu -t hybridrl:0.1.0" in text
    assert "image: &image hybridrl:0.1.0" in (FOLDER / "kuberay.yaml").read_text()
    assert (FOLDER.parents[1] / "constraints.txt").is_file()
