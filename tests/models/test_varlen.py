"""The varlen kernel's calls: shared prompts computed once, heads as they are, true gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.models.packed import AttentionKernel, Segment, build_layout
from hybridrl.models.packed_model import PolicyModel
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.fsdp2 import recompute_blocks
from hybridrl.workers.train.microbatcher import lay_out
from hybridrl.workers.train.shards import build_model
from tests.models import flash_on_cpu
from tests.tiny_models import WINDOWED, Family, make_tiny_model
from tests.workers.train.engines import ACTOR, CPU, MODEL, make_rows
from tests.workers.train.microbatchers import make_batcher

# Two families and a row of its own. One sibling of the first has a response of one token, which
# the end of the prompt predicts: nothing of it is computed behind the prompt.
SEGMENTS = [
    Segment(5),
    Segment(3),
    Segment(7),
    *[Segment(4, 0), Segment(1, 0), Segment(6, 0)],
    *[Segment(2, 1), Segment(5, 1)],
]


@pytest.fixture(autouse=True)
def _flash() -> None:
    flash_on_cpu.install()


def _attend(
    kernel: AttentionKernel,
    segments: list[Segment],
    scale: float | None,
    window: int | None = None,
    value_size: int = 8,
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    num_tokens = sum(segment.num_tokens for segment in segments)
    states = [
        torch.randn(num_tokens, heads, size, generator=generator, requires_grad=True)
        for heads, size in ((4, 8), (2, 8), (2, value_size))
    ]
    layout = build_layout(segments, kernel=kernel, device=CPU)
    output = layout.attend(states[0], states[1], states[2], scale=scale, window=window)
    weights = torch.randn(output.shape, generator=generator)
    return output, *torch.autograd.grad((output * weights).sum(), states)


@pytest.mark.parametrize("window", [None, 2, 6, 12])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("segments", [SEGMENTS, SEGMENTS[:3]], ids=["shared", "apart"])
def test_values_and_gradients_are_those_of_the_padded_kernel(
    segments: list[Segment], scale: float | None, window: int | None
) -> None:
    varlen, padded = (_attend(k, segments, scale, window) for k in ("varlen", "padded"))
    for one, other in zip(varlen, padded, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_values_may_be_smaller_than_keys() -> None:
    varlen, padded = (_attend(k, SEGMENTS, None, value_size=5) for k in ("varlen", "padded"))
    for one, other in zip(varlen, padded, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_prefixes_that_do_not_come_first_are_refused() -> None:
    for segments in ([Segment(3), Segment(5), Segment(2, 1)], [Segment(3), Segment(2, 0)] * 2):
        with pytest.raises(ValueError, match="prefixes first"):
            build_layout(segments, kernel="varlen", device=CPU)


class _Heads(TorchDispatchMode):
    """Records with how many heads of queries and keys the kernel is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._flash_attention_forward.default:
            self.seen.append((args[0].shape[1], args[1].shape[1]))
        return func(*args, **(kwargs or {}))


def test_varlen_kernel_does_not_repeat_shared_heads() -> None:
    with _Heads() as heads:
        _attend("varlen", SEGMENTS, None)
    assert heads.seen == [(4, 2), (4, 2)]  # the rows' own tokens, and what siblings see besides


def _learn(
    policy: PolicyModel, kernel: AttentionKernel, groups: list[list[int]]
) -> tuple[int, Tensor, dict[str, Tensor]]:
    """Score rows in packs of the given ones; return tokens computed, log-probs and gradients."""
    batch = make_rows(12, num_siblings=4, seed=3)
    batcher = make_batcher(kernel)
    batch_rows = batcher.read(batch.token_ids_BL, batch.response_mask_BL)
    weights = torch.randn(len(batch.token_ids_BL.values()), generator=torch.Generator())
    logprobs = torch.zeros(len(weights))
    num_tokens = 0
    policy.zero_grad()
    for rows in groups:
        microbatch = lay_out(batch_rows, rows, batcher)
        scored_S, _ = policy(microbatch.tokens, 1.0)
        (scored_S * weights[microbatch.token_index_S]).sum().backward()
        logprobs[microbatch.token_index_S] = scored_S.detach()
        num_tokens += microbatch.num_tokens
    grads = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    return num_tokens, logprobs, grads


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", ["qwen3", *WINDOWED])
def test_responses_share_a_prompt_and_learn_as_single_rows(
    family: Family,
    recomputes: bool,
    tmp_path: Path,
) -> None:
    policy = build_model(
        make_tiny_model(tmp_path, family),
        config=ACTOR,
        model_config=MODEL,
        ranks=Ranks(CPU),
        is_trainable=True,
    )
    assert isinstance(policy, PolicyModel)
    if recomputes:
        recompute_blocks(policy.train().hf)
    # The second pack has a lone row between two families.
    groups = [[0, 1, 2, 3], [4, 5, 6, 8, 9], [7, 10, 11]]
    alone = _learn(policy, "padded", [[row] for group in groups for row in group])
    shared, padded = _learn(policy, "varlen", groups), _learn(policy, "padded", groups)
    assert shared[0] == padded[0] < alone[0]
    torch.testing.assert_close(shared[1], alone[1], atol=1e-5, rtol=0)
    assert shared[2].keys() == alone[2].keys()
    for name, grad in shared[2].items():
        torch.testing.assert_close(grad, alone[2][name], atol=2e-5, rtol=1e-4, msg=name)
