"""Process groups of megatron-core, and what is said where it cannot start."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hybridrl.env import ROOT

_PROGRAM = """
import torch, torch.distributed as dist
from hybridrl.workers.train.megatron import megatron_core
from hybridrl.workers.train.megatron.context import MegatronContext
from hybridrl.workers.train.megatron.parallel import start_parallel
from tests.config.values import config_of

print(megatron_core.IMPORT_WARNINGS)
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
config = config_of("actor=megatron")
sizes = dict(megatron=config.megatron, model=config.model, device=torch.device("cpu"))
start_parallel(MegatronContext(**sizes, seed=0, timeout_s=60.0))
"""


@pytest.fixture(scope="module")
def started() -> subprocess.CompletedProcess[str]:
    """A process without CUDA and without its stand-ins that was to start megatron-core."""
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_missing_cuda_names_the_key_to_set(started: subprocess.CompletedProcess[str]) -> None:
    assert started.returncode == 1
    last = started.stderr.strip().splitlines()[-1]
    assert "hybridrl.errors.ResourceError: megatron-core asks for CUDA" in last
    assert "cluster.worker_setup_hook=tests.megatron.stand_ins.install" in last


def test_import_warnings_of_megatron_are_kept(started: subprocess.CompletedProcess[str]) -> None:
    assert "Transformer Engine and Apex are not installed" in started.stdout
