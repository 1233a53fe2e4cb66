"""Which of torch's kernels padded attention may take, and where its masks are made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.models.packed import Segment, build_layout, fused_attention


class _Call(TorchFunctionMode):
    """Stands in for torch's attention, and notes what it was asked and allowed."""

    heads: tuple[int, int]
    allowed: set[str]
    shares_heads: bool

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, _ = args
        cuda = torch.backends.cuda
        enabled = {
            "flash": cuda.flash_sdp_enabled(),
            "efficient": cuda.mem_efficient_sdp_enabled(),
            "math": cuda.math_sdp_enabled(),
        }
        self.heads = (query.shape[1], key.shape[1])
        self.allowed = {name for name, is_on in enabled.items() if is_on}
        self.shares_heads = kwargs["enable_gqa"]
        return torch.empty_like(query)


def _ask_on(device: str, mask: Tensor | None) -> _Call:
    query, key = torch.empty(2, 4, 6, 8, device=device), torch.empty(2, 2, 6, 8, device=device)
    with _Call() as call:
        fused_attention(query, key, key, is_visible_R1LK=mask, scale=None)
    return call


@pytest.mark.parametrize("has_mask", [False, True])
def test_cuda_never_uses_the_kernel_that_writes_all_scores(*, has_mask: bool) -> None:
    # float32: sdp_utils.cpp leaves the memory-efficient kernel alone, if heads are not shared.
    with FakeTensorMode():
        mask = torch.ones(2, 1, 6, 6, dtype=torch.bool, device="cuda") if has_mask else None
        call = _ask_on("cuda", mask)
    assert call.heads == (4, 4)
    assert not call.shares_heads
    assert "efficient" in call.allowed
    assert "math" not in call.allowed


def test_on_a_cpu_heads_are_shared_and_torch_chooses() -> None:
    call = _ask_on("cpu", None)
    assert call.heads == (4, 2)
    assert call.shares_heads
    assert "math" in call.allowed


class _LargestOnHost(TorchDispatchMode):
    """Records the largest tensor that is made on the host."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.device.type == "cpu":
            self.num_bytes = max(self.num_bytes, made.nbytes)
        return made


def test_masks_are_made_where_the_model_computes() -> None:
    segments = [Segment(500), *[Segment(400, 0)] * 4]
    with _LargestOnHost() as host:
        layout = build_layout(segments, kernel="padded", device=torch.device("meta"))
    # Indices are 8 bytes a key slot; the masks alone have 4 * 400 * 900 numbers.
    assert host.num_bytes < 8 * (500 + 4 * 900) + 4096
    masks = [bucket.is_visible_R1LK for bucket in layout.buckets]  # type: ignore[attr-defined]
    assert [None if mask is None else mask.shape for mask in masks] == [None, (4, 1, 400, 900)]
