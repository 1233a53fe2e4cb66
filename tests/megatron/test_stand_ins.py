from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from hybridrl.env import ROOT
from tests.megatron.stand_ins import install
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is nothing to stand in")


def _see_torch_from_both_sides(_rank: int) -> None:
    from megatron.core.optimizer import clip_grads
    from megatron.core.tensor_parallel import mappings

    for _again in range(2):
        install()
        assert mappings.torch.cuda.current_device() == torch.device("cpu")
        assert clip_grads.torch.zeros(1, device="cuda").device.type == "cpu"
        assert clip_grads.torch.nn is torch.nn
        for touch in (torch.cuda.current_device, torch.zeros(1).cuda):
            with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
                touch()
        assert torch.zeros(1).type() == "torch.FloatTensor"
        assert _get_current_function_mode_stack() == []


def test_only_megatron_sees_the_stand_in_device() -> None:
    run_ranks(1, _see_torch_from_both_sides)


def test_importing_megatron_is_quiet_where_warnings_are_errors() -> None:
    code = "from tests.megatron.stand_ins import install; install()"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


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


def test_without_them_a_start_names_the_key_to_set_and_keeps_megatrons_warnings() -> None:
    command = [sys.executable, "-c", _PROGRAM]
    started = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert started.returncode == 1
    last = started.stderr.strip().splitlines()[-1]
    assert "hybridrl.errors.ResourceError: megatron-core asks for CUDA" in last
    assert "cluster.worker_setup_hook=tests.megatron.stand_ins.install" in last
    assert "Transformer Engine and Apex are not installed" in started.stdout
