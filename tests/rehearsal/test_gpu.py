"""Memory of operators on fake CUDA tensors: it is that of CUDA's kernels on any build of torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from hybridrl.models.packed_attention import Segment, build_layout, fused_attention
from hybridrl.rehearsal.device import GPU
from hybridrl.rehearsal.gpu import FakeGpu
from tests.ranks import FORKSERVER

N, L, D = 4, 1024, 64
SCORES = N * L * L * 4
MIB = 2**20


def attention_with_a_mask() -> Tensor:
    query, key, value = (torch.empty(1, N, L, D, device="cuda").requires_grad_() for _ in range(3))
    is_visible = torch.empty(1, 1, L, L, dtype=torch.bool, device="cuda")
    return fused_attention(query, key, value, is_visible_R1LK=is_visible, scale=None)


TREE = [
    *(Segment(L), Segment(L, (range(L),))),
    *[Segment(8, (range(L), range(L, 2 * L)))] * 16,
]
COPIED = N * D * 2 * (2 * L + 16 * (L + 8))
"""Bytes of the keys that the segments of the tree see behind the prompt."""


def attention_over_a_tree() -> Tensor:
    num_tokens = sum(segment.num_tokens for segment in TREE)
    query, key, value = (
        torch.empty(num_tokens, N, D, dtype=torch.bfloat16, device="cuda").requires_grad_()
        for _ in range(3)
    )
    layout = build_layout(TREE, kernel="varlen", device=GPU)
    return layout.attend(query, key, value, scale=None)


def silu() -> Tensor:
    return nn.functional.silu(torch.empty(MIB // 4, device="cuda").requires_grad_())


def rms_norm() -> Tensor:
    states = torch.empty(256, L, device="cuda").requires_grad_()
    return nn.functional.rms_norm(states, (L,), torch.empty(L, device="cuda").requires_grad_())


OPERATORS: dict[str, Callable[[], Tensor]] = {
    "attention": attention_with_a_mask,
    "tree": attention_over_a_tree,
    "silu": silu,
    "RMSNorm": rms_norm,
}


MOST = {
    "attention": SCORES,  # less than one tensor of scores; torch's own formula writes three
    "tree": 8 * COPIED,  # keys, values and gradients, of which two at a time in float32
    "silu": 4 * MIB,  # input, output, and a gradient of each
    "RMSNorm": 4 * MIB + 2**14,  # and its weight, its gradient, and a number of each row
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_takes_the_memory_of_its_kernel_on_cuda(name: str) -> None:
    # Fake GPUs change a process for good.
    with ProcessPoolExecutor(1, mp_context=FORKSERVER) as pool:
        assert 0 < pool.submit(peak_of, name).result() <= MOST[name]


def peak_of(name: str) -> int:
    """Bytes at the peak of an operator and its gradient."""
    gpu = FakeGpu(num_bytes=2**34)
    with gpu:
        out = OPERATORS[name]()
        out.backward(torch.empty_like(out))
        return gpu.torch.peak
