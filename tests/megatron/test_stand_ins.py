from __future__ import annotations

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

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
