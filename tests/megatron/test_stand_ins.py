"""The stand-ins make megatron-core work and change nothing outside it. Each check has a process."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from tests.megatron.stand_ins import import_megatron, install
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


def _clip_in_another_thread(_rank: int) -> float:
    from megatron.core.optimizer.optimizer import clip_grad_by_total_norm_fp32

    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    thread = threading.Thread(target=clip_grad_by_total_norm_fp32, args=([parameter], 1.0, 5.0))
    thread.start()
    thread.join()
    return float(parameter.grad.norm())


def test_a_method_that_runs_in_another_thread_finds_them_too() -> None:
    assert run_ranks(1, _clip_in_another_thread) == [pytest.approx(1.0, abs=1e-5)]


def _draw_in_forks(_rank: int) -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("weights", 3)
    torch.manual_seed(7)
    plain = torch.rand(2)
    drawn = []
    torch.manual_seed(7)
    for _cycle in range(2):
        with tracker.fork("weights"):
            drawn.append(torch.rand(1))
    assert torch.equal(torch.rand(2), plain)  # as if nothing had been drawn in between
    torch.manual_seed(3)
    assert torch.equal(torch.cat(drawn), torch.rand(2))  # each fork goes on where the last ended


def test_forked_random_state_keeps_the_outer_one() -> None:
    run_ranks(1, _draw_in_forks)


def _warn_of_what_is_ours(_rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import_megatron()
        warnings.warn("ours", UserWarning, stacklevel=1)
    return [str(warning.message) for warning in caught]


def test_importing_megatron_is_quiet_where_warnings_are_errors() -> None:
    code = "from tests.megatron.stand_ins import install; install()"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_warnings_of_others_are_still_heard() -> None:
    assert run_ranks(1, _warn_of_what_is_ours) == [["ours"]]
