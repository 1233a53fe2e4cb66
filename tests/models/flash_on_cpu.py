"""The flash operators of torch on a CPU, where torch has none: the formulas of FlashAttention-2.

Written from ``_flash_attention_forward`` and ``_flash_attention_backward`` in torch's
``native/transformers/cuda`` (2.11 to 2.13): offsets of stretches, heads that queries share, a
causal mask that ends at the last key, log-sum-exps [N, T]; the gradient takes probabilities from
the log-sum-exps and the output that it is given (arXiv:2307.08691, algorithm 2).

Legend: L queries and K keys of a stretch, T of all stretches, N heads, J key-value heads, D size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor


@cache
def install() -> None:
    """Give torch the operators on a CPU, for the life of the process."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    _LIBRARIES.append(library)


_LIBRARIES: list[torch.library.Library] = []
"""An implementation lasts as long as its library."""


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    max_query: int,
    max_key: int,
    dropout: float,
    is_causal: bool,
    returns_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **_: object,
) -> tuple[Tensor, ...]:
    assert (dropout, returns_mask) == (0.0, False)
    assert window_size_right == (0 if is_causal else -1)
    output, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
    for here, seen in _spans(query_offsets, key_offsets, max_query, max_key):
        scores_NLK = _scores(query[here], key[seen], scale, is_causal, window_size_left)
        lse[:, here] = scores_NLK.logsumexp(-1)
        probs_NLK = (scores_NLK - lse[:, here, None]).exp()
        output[here] = torch.einsum("nlk,knd->lnd", probs_NLK, _repeat(value[seen], query))
    nothing = torch.empty(0)
    return output, lse, nothing, nothing.clone(), nothing.clone()


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    max_query: int,
    max_key: int,
    dropout: float,
    is_causal: bool,
    random: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert dropout == 0.0
    assert window_size_right == (0 if is_causal else -1)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    query_grad, key_grad, value_grad = map(torch.zeros_like, (query, key, value))
    for here, seen in _spans(query_offsets, key_offsets, max_query, max_key):
        keys, values = _repeat(key[seen], query), _repeat(value[seen], query)
        scores_NLK = _scores(query[here], key[seen], scale, is_causal, window_size_left)
        probs_NLK = (scores_NLK - lse[:, here, None]).exp()
        slopes_NLK = torch.einsum("lnd,knd->nlk", grad[here], values)
        rows_NL1 = torch.linalg.vecdot(grad[here], output[here]).T[..., None]
        slopes_NLK = probs_NLK * (slopes_NLK - rows_NL1) * factor
        query_grad[here] = torch.einsum("nlk,knd->lnd", slopes_NLK, keys)
        key_grad[seen] += _sum_groups(torch.einsum("nlk,lnd->knd", slopes_NLK, query[here]), key)
        value_grad[seen] += _sum_groups(torch.einsum("nlk,lnd->knd", probs_NLK, grad[here]), key)
    return query_grad, key_grad, value_grad


def _spans(
    query_offsets: Tensor, key_offsets: Tensor, max_query: int, max_key: int
) -> Iterator[tuple[slice, slice]]:
    assert query_offsets.dtype == key_offsets.dtype == torch.int32
    assert len(query_offsets) == len(key_offsets)
    assert int(query_offsets.diff().max()) <= max_query
    assert int(key_offsets.diff().max()) <= max_key
    edges = zip(query_offsets.tolist(), key_offsets.tolist(), strict=True)
    begin = next(edges)
    for end in edges:
        yield slice(begin[0], end[0]), slice(begin[1], end[1])
        begin = end


def _scores(
    query: Tensor, key: Tensor, scale: float | None, is_causal: bool, left: int | None
) -> Tensor:
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores_NLK = torch.einsum("lnd,knd->nlk", query, _repeat(key, query)) * factor
    if is_causal:
        visible_LK = torch.ones(scores_NLK.shape[1:], dtype=torch.bool)
        last = len(key) - len(query)
        hidden_LK = ~visible_LK.tril(last)
        if left is not None and left >= 0:
            hidden_LK |= visible_LK.tril(last - left - 1)
        scores_NLK = scores_NLK.masked_fill(hidden_LK, -torch.inf)
    return scores_NLK


def _repeat(states: Tensor, query: Tensor) -> Tensor:
    return states.repeat_interleave(query.shape[1] // states.shape[1], dim=1)


def _sum_groups(grad_KND: Tensor, key_KJD: Tensor) -> Tensor:
    return grad_KND.unflatten(1, (key_KJD.shape[1], -1)).sum(2)
