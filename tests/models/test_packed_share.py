"""Packs whose tokens several ranks share: which have which, and what they attend to."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor

from hybridrl.models.packed import Segment, build_layout
from hybridrl.models.packed_share import (
    ContextParallelRank,
    SharedLayout,
    SharedTokens,
    split_for_context_parallel,
)
from tests.models import flash_on_cpu

CPU = torch.device("cpu")
WHOLE = [Segment(n) for n in (37, 30, 12, 7, 3, 1)]
FAMILIES = [Segment(19), Segment(11), Segment(14, 0), Segment(9, 0), Segment(5, 1), Segment(1, 1)]


def shares(
    segments: list[Segment],
    num_ranks: int,
    *,
    multiple: int = 1,
    kernel: str = "padded",
    gather: Callable[[Tensor], Tensor] = lambda own: own,
) -> list[SharedTokens]:
    return [
        split_for_context_parallel(
            segments,
            ContextParallelRank(rank, num_ranks, gather),
            multiple=multiple,
            kernel=kernel,  # type: ignore[arg-type]
            device=CPU,
        )
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("segments", [WHOLE, FAMILIES])
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


def test_single_token_leaves_only_padding_on_the_other_rank() -> None:
    first, second = shares([Segment(1)], 2, multiple=2)
    assert (first.own_U.tolist(), first.num_padding) == ([0], 1)
    assert (second.own_U.tolist(), second.num_padding) == ([], 2)


@pytest.mark.parametrize("segments", [WHOLE, FAMILIES])
@pytest.mark.parametrize(("num_ranks", "window"), [(2, None), (3, None), (2, 6), (3, 1)])
def test_context_parallel_attention_equals_one_rank(
    segments: list[Segment], num_ranks: int, window: int | None
) -> None:
    num_tokens = sum(segment.num_tokens for segment in segments)
    states = states_of(num_tokens)
    layout = build_layout(segments, kernel="padded", device=CPU)
    expected_TND = layout.attend(*states, scale=None, window=window)
    expected = torch.autograd.grad(expected_TND.square().sum(), states)
    shared = shares(segments, num_ranks)
    output_TND = torch.zeros_like(expected_TND)
    for share, layout in zip(shared, layouts_with_gather(shared, states), strict=True):
        query_UND, key_UJD, value_UJD = (own(state, share) for state in states)
        attended_UND = layout.attend(query_UND, key_UJD, value_UJD, scale=None, window=window)
        # Padding sees itself alone: it stays finite, and is left away.
        assert attended_UND.isfinite().all()
        output_TND = output_TND.index_put((share.own_U,), attended_UND[: len(share.own_U)])
    torch.testing.assert_close(output_TND, expected_TND, atol=1e-6, rtol=0)
    grads = torch.autograd.grad(output_TND.square().sum(), states)
    for grad, wanted in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("segments", [WHOLE, FAMILIES])
@pytest.mark.parametrize(("num_ranks", "window"), [(2, None), (3, None), (2, 6)])
def test_varlen_kernel_gets_the_same_queries_and_keys(
    segments: list[Segment], num_ranks: int, window: int | None
) -> None:
    """The kernel runs on CUDA alone: its formulas stand in for it."""
    flash_on_cpu.install()
    states = states_of(sum(segment.num_tokens for segment in segments))
    padded = shares(segments, num_ranks)
    varlen = shares(segments, num_ranks, kernel="varlen")
    for one, other, layout in zip(padded, varlen, layouts_with_gather(padded, states), strict=True):
        assert torch.equal(one.own_U, other.own_U)
        query_UND, key_UJD, value_UJD = (own(state, one) for state in states)
        expected_UND = layout.attend(query_UND, key_UJD, value_UJD, scale=None, window=window)
        attention = cast("SharedLayout", other.layout).attention
        key_TJD, value_TJD = layout.gather(torch.stack([key_UJD, value_UJD], dim=1)).unbind(1)
        output_UND = attention.attend(query_UND, key_TJD, value_TJD, scale=None, window=window)
        torch.testing.assert_close(output_UND, expected_UND, atol=1e-6, rtol=0)


def states_of(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(num_tokens, heads, 8, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    )
    return query, key, value


def own(states: Tensor, share: SharedTokens) -> Tensor:
    """Take a rank's tokens, and padding after them."""
    padding = states.new_ones(share.num_padding, *states.shape[1:])
    return torch.cat([states[share.own_U], padding])


def layouts_with_gather(
    shared: list[SharedTokens], states: tuple[Tensor, Tensor, Tensor]
) -> list[SharedLayout]:
    """Let every rank's layout gather what all ranks have, which here are in one process."""
    _, key, value = states

    def gather(_: Tensor) -> Tensor:
        return torch.cat([own(torch.stack([key, value], dim=1), share) for share in shared])

    return [SharedLayout(cast("SharedLayout", share.layout).attention, gather) for share in shared]
