from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.models.packed_attention import AttentionKernel, Segment, build_layout, fused_attention
from hybridrl.models.packed_share import (
    ContextParallelRank,
    SharedTokens,
    deal_out,
    split_for_context_parallel,
)
from hybridrl.workers.train.context_parallel import start_context_parallel
from hybridrl.workers.train.fsdp2 import recompute_blocks
from tests.models import flash_on_cpu
from tests.ranks import run_ranks
from tests.tiny_models import WINDOWED, Family
from tests.workers.train.engines import CPU, make_batcher, make_rows
from tests.workers.train.packs import learn, tiny_policy

# Two families and a row of its own. One sibling of the first has a response of one token, which
# the end of the prompt predicts: nothing of it is computed behind the prompt.
SEGMENTS = [
    Segment(5),
    Segment(3),
    Segment(7),
    *[Segment(n, (range(5),)) for n in (4, 1, 6)],
    *[Segment(n, (range(5, 8),)) for n in (2, 5)],
]


# The first two share five more tokens behind the first prompt, the last two one more.
TREE = [
    *(Segment(5), Segment(3), Segment(7)),
    *(Segment(5, (range(5),)), Segment(4, (range(5), range(15, 20)))),
    *(Segment(3, (range(5), range(15, 18))), Segment(6, (range(5), range(15, 18), range(24, 26)))),
    *(Segment(2, (range(5, 8),)), Segment(5, (range(5, 8), range(33, 34)))),
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
@pytest.mark.parametrize(("scale", "value_size"), [(None, 8), (0.7, 5)])
@pytest.mark.parametrize(
    "segments", [SEGMENTS, SEGMENTS[:3], TREE], ids=["shared", "apart", "tree"]
)
def test_values_and_gradients_are_those_of_the_padded_kernel(
    segments: list[Segment], value_size: int, scale: float | None, window: int | None
) -> None:
    varlen, padded = (
        _attend(kernel, segments, scale, window, value_size) for kernel in ("varlen", "padded")
    )
    for one, other in zip(varlen, padded, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_prefixes_that_do_not_come_first_are_refused() -> None:
    shared = [Segment(3), Segment(2, (range(3),))]
    for segments in ([Segment(3), Segment(5), Segment(2, (range(3, 8),))], shared * 2):
        with pytest.raises(ValueError, match="prefixes first"):
            build_layout(segments, kernel="varlen", device=CPU)


class _Heads(TorchDispatchMode):
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


SHARED_BY_DAY = (("qwen3", True), ("gemma3_text", False), ("gpt_oss", True))


@pytest.mark.parametrize(
    ("family", "recomputes"),
    [
        case if case in SHARED_BY_DAY else pytest.param(*case, marks=pytest.mark.nightly)
        for case in product(("qwen3", *WINDOWED), (False, True))
    ],
)
def test_responses_share_a_prompt_and_learn_as_single_rows(
    family: Family, recomputes: bool, tmp_path: Path
) -> None:
    policy = tiny_policy(tmp_path, family)
    batch = make_rows(12, num_siblings=4, seed=3)
    rows = make_batcher().read(batch.token_ids_BL, batch.response_mask_BL)
    if recomputes:
        recompute_blocks(policy.train().hf)
    # The second pack has a lone row between two families.
    groups = [[0, 1, 2, 3], [4, 5, 6, 8, 9], [7, 10, 11]]
    alone = learn(policy, rows, [[row] for group in groups for row in group], "padded")
    shared, padded = (learn(policy, rows, groups, kernel) for kernel in ("varlen", "padded"))
    assert shared[0] == padded[0] < alone[0]
    torch.testing.assert_close(shared[1], alone[1], atol=1e-5, rtol=0)
    assert shared[2].keys() == alone[2].keys()
    for name, grad in shared[2].items():
        torch.testing.assert_close(grad, alone[2][name], atol=2e-5, rtol=1e-4, msg=name)


WHOLE = [Segment(n) for n in (37, 30, 12, 7, 3, 1)]
FAMILIES = [
    *(Segment(19), Segment(11)),
    *[Segment(n, (range(19),)) for n in (14, 9)],
    *[Segment(n, (range(19, 30),)) for n in (5, 1)],
]


def shares(segments: list[Segment], num_ranks: int, *, multiple: int = 1) -> list[SharedTokens]:
    ranks = [ContextParallelRank(rank, num_ranks, torch.clone) for rank in range(num_ranks)]
    return [
        split_for_context_parallel(segments, rank, multiple=multiple, kernel="padded", device=CPU)
        for rank in ranks
    ]


@pytest.mark.parametrize("segments", [WHOLE, FAMILIES, TREE])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_each_token_is_on_one_rank_and_all_ranks_have_as_many(
    segments: list[Segment], num_ranks: int
) -> None:
    shared = shares(segments, num_ranks, multiple=4)
    tokens = torch.cat([share.own_U for share in shared]).tolist()
    assert sorted(tokens) == list(range(sum(segment.num_tokens for segment in segments)))
    sizes = {len(share.own_U) + share.num_padding for share in shared}
    assert len(sizes) == 1
    assert sizes.pop() % 4 == 0


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_attend_to_as_many_tokens_as_each_other(num_ranks: int) -> None:
    lengths = torch.randint(100, 1000, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    seen_T = torch.cat([torch.arange(length) + 1 for length in lengths])
    work = [
        int(seen_T[share.own_U].sum()) for share in shares([Segment(n) for n in lengths], num_ranks)
    ]
    assert max(work) < 1.01 * min(work)
    first, second = shares([Segment(1)], 2, multiple=2)  # a single token, and padding alone
    assert (first.own_U.tolist(), first.num_padding) == ([0], 1)
    assert (second.own_U.tolist(), second.num_padding) == ([], 2)


def _attend_from_own_tokens(
    rank: int,
    segments: list[Segment],
    num_ranks: int,
    kernel: AttentionKernel,
    window: int | None,
    *sizes: int,
) -> list[Tensor]:
    """Attend from this rank's tokens; return output and gradients of all, whoever has them."""
    flash_on_cpu.install()
    context = start_context_parallel(num_ranks, CPU, timeout_s=60.0)
    assert context is not None
    states, sink_N, weights = _of_all_tokens(segments, *sizes)
    share = context.share(num_heads=4)
    num_tokens = len(states[0])
    num_padding = -num_tokens % num_ranks
    prefix = segments[-1].prefix if kernel == "varlen" else ()
    padding = [Segment(num_padding, prefix)] if num_padding else []
    attention = build_layout([*segments, *padding], kernel=kernel, device=CPU)
    shared = (
        deal_out(num_tokens, num_padding, attention, share)
        if share.exchange is not None
        else split_for_context_parallel(segments, share, multiple=1, kernel=kernel, device=CPU)
    )
    output_UND = shared.layout.attend(
        *(own(state, shared) for state in states), scale=None, window=window, sink_N=sink_N
    )
    assert output_UND.isfinite().all()  # of padding, which is left away, too
    if share.exchange is None and sink_N is None:  # padding sees itself alone: values of 1
        of_padding = output_UND[len(shared.own_U) :]
        torch.testing.assert_close(of_padding, torch.ones_like(of_padding))
    output_TND = torch.zeros_like(weights)
    output_TND[shared.own_U] = output_UND[: len(shared.own_U)]
    found = [output_TND, *_gradients(output_TND, weights, states, sink_N)]
    return [context.tokens.sum(each.detach().clone()) for each in found]


def _gradients(
    output_TND: Tensor, weights: Tensor, states: list[Tensor], sink_N: Tensor | None
) -> tuple[Tensor, ...]:
    inputs = [*states, *([] if sink_N is None else [sink_N])]
    return torch.autograd.grad((output_TND * weights).sum(), inputs)


def _of_all_tokens(
    segments: list[Segment], num_kv_heads: int, value_size: int
) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Return queries, keys and values, sinks if values are as wide, and weights of the output."""
    generator = torch.Generator().manual_seed(1)
    num_tokens = sum(segment.num_tokens for segment in segments)
    query, key, value = (
        torch.randn(num_tokens, heads, size, generator=generator).requires_grad_()
        for heads, size in ((4, 8), (num_kv_heads, 8), (num_kv_heads, value_size))
    )
    sink_N = torch.randn(4, generator=generator).requires_grad_() if value_size == 8 else None
    return [query, key, value], sink_N, torch.randn(num_tokens, 4, value_size, generator=generator)


@pytest.mark.parametrize("kernel", ["padded", "varlen"])
@pytest.mark.parametrize(
    ("segments", "num_ranks", "window", "num_kv_heads", "value_size"),
    [
        *((FAMILIES, 2, None, 2, 8), (TREE, 4, None, 2, 5)),
        *((WHOLE, 2, 6, 1, 8), (FAMILIES, 4, 6, 4, 5)),
        # Three ranks cannot share four heads, and gather keys.
        *((TREE, 3, None, 2, 5), (WHOLE, 3, 6, 2, 8), (FAMILIES, 3, 1, 2, 5)),
    ],
)
def test_ranks_that_share_tokens_attend_as_one_also_to_shared_prompts(
    segments: list[Segment],
    num_ranks: int,
    window: int | None,
    num_kv_heads: int,
    value_size: int,
    kernel: AttentionKernel,
) -> None:
    states, sink_N, weights = _of_all_tokens(segments, num_kv_heads, value_size)
    layout = build_layout(segments, kernel="padded", device=CPU)
    output = layout.attend(
        states[0], states[1], states[2], scale=None, window=window, sink_N=sink_N
    )
    expected = [output, *_gradients(output, weights, states, sink_N)]
    args = (segments, num_ranks, kernel, window, num_kv_heads, value_size)
    for found in run_ranks(num_ranks, _attend_from_own_tokens, *args):
        for tensor, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(tensor, wanted.detach(), atol=1e-5, rtol=0)


def own(states: Tensor, share: SharedTokens) -> Tensor:
    """Take a rank's tokens, and padding after them."""
    padding = states.new_ones(share.num_padding, *states.shape[1:])
    return torch.cat([states[share.own_U], padding])


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
    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.device.type == "cpu":
            self.num_bytes = max(self.num_bytes, made.nbytes)
        return made


def test_masks_are_made_where_the_model_computes() -> None:
    segments = [Segment(500), *[Segment(400, (range(500),))] * 4]
    with _LargestOnHost() as host:
        layout = build_layout(segments, kernel="padded", device=torch.device("meta"))
    # Indices are 8 bytes a key slot; the masks alone have 4 * 400 * 900 numbers.
    assert host.num_bytes < 8 * (500 + 4 * 900) + 4096
    masks = [bucket.is_visible_R1LK for bucket in layout.buckets]  # type: ignore[attr-defined]
    assert [None if mask is None else mask.shape for mask in masks] == [None, (4, 1, 400, 900)]
