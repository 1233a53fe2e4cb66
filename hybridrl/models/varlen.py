"""Attention over packed rows through torch's variable-length flash kernel.

A prompt that several responses share is computed once. Each response attends causally to its own
tokens, all responses together attend to the prompt's keys, and the log-sum-exps merge both results
(arXiv:2205.14135, B.3). Behind the prompt some of them may share more: copies of its keys then lie
before the own ones.

Legend: T packed tokens, S tokens of keys, U tokens behind a shared prompt, N heads, J key-value
heads, D size of a head, K spans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from hybridrl.models.recurrent import Mix, RowsOfTokens


@dataclass(frozen=True, slots=True)
class VarlenCall:
    """One call of the kernel: spans of queries, and the keys that each span sees."""

    query_offsets: Tensor  # int32 [K + 1], begin of each span among the queries
    key_offsets: Tensor  # int32 [K + 1], begin of its keys
    longest: tuple[int, int]  # queries and keys of the longest span
    is_causal: bool = True  # the last query of a span sees all its keys; else all queries do
    window: int | None = None  # newest keys that a query of a causal call sees; None: all
    key_token: Tensor | None = None  # int64, indices of the keys; None: keys lie in this order

    def seen(self, key_SJD: Tensor, value_SJD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys that spans see and their values, span by span, [., J, D]."""
        if self.key_token is None:
            return key_SJD, value_SJD
        return key_SJD.index_select(0, self.key_token), value_SJD.index_select(0, self.key_token)


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """The call for tokens after prompts that several rows share."""

    call: VarlenCall  # a span is all responses of a prompt, and its keys are the prompt's
    first_query: int  # first packed token after which all tokens follow a shared prompt
    num_keys: int  # packed tokens of the shared prompts, which come first in the micro-batch


@dataclass(frozen=True, slots=True)
class VarlenLayout:
    """Attention through torch's variable-length flash kernel: CUDA, 16-bit types, no padding."""

    own: VarlenCall  # each segment of the micro-batch sees itself
    longest_row: int
    padded: Callable[[], RowsOfTokens]  # the same rows with padding, for recurrent layers
    prompts: SharedPrompts | None = None
    # the same rows, each with all its keys; set if rows share a prompt
    in_rows: Callable[[], VarlenCall] | None = None

    def attend(
        self,
        query_TND: Tensor,
        key_TJD: Tensor,
        value_TJD: Tensor,
        *,
        scale: float | None,
        window: int | None = None,
        sink_N: Tensor | None = None,
    ) -> Tensor:
        """Attend causally within each row; see ``RowAttention.attend``."""
        own, prompts = self.own, self.prompts
        if window is not None and self.in_rows is not None:
            # A window ends at another token of the prompt for each token of its responses.
            own, prompts = self.in_rows(), None
        own = replace(own, window=window)
        return attend_in_spans(
            query_TND, key_TJD, value_TJD, own=own, prompts=prompts, scale=scale, sink_N=sink_N
        )

    def mix(self, mix: Mix, hidden_TH: Tensor) -> Tensor:
        """See ``RowsOfTokens``."""
        return self.padded().mix(mix, hidden_TH)


def attend_in_spans(
    query_TND: Tensor,
    key_SJD: Tensor,
    value_SJD: Tensor,
    *,
    own: VarlenCall,
    scale: float | None,
    prompts: SharedPrompts | None = None,
    sink_N: Tensor | None = None,
) -> Tensor:
    """Attend in each span as ``RowAttention.attend``; J divides N.

    Some queries see ``prompts``, too; keys are then those of the queries' tokens.
    """
    value_size = value_SJD.shape[-1]
    value_SJD = as_wide_as_keys(value_SJD, key_SJD)  # the kernel refuses others
    attended = _Attention.apply(query_TND, key_SJD, value_SJD, sink_N, own, prompts, scale)  # type: ignore[no-untyped-call]
    return cast("Tensor", attended)[..., :value_size]


def as_wide_as_keys(values: Tensor, keys: Tensor) -> Tensor:
    """Fill up with zeros the values of latent attention (DeepSeek), whose heads are smaller."""
    missing = keys.shape[-1] - values.shape[-1]
    return pad(values, (0, missing)) if missing else values  # a pad of nothing is a copy


class _Attention(torch.autograd.Function):
    """The operators behind ``torch.nn.attention.varlen.varlen_attn``, and their gradient.

    Not varlen_attn itself, because its gradient omits that of the returned log-sum-exp. Its flag
    for shared heads is in torch 2.13 and not in 2.11; the operators support both.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd sees no tensors within an argument
        ctx: Any,  # noqa: ANN401
        query_TND: Tensor,
        key_SJD: Tensor,
        value_SJD: Tensor,
        sink_N: Tensor | None,
        own: VarlenCall,
        prompts: SharedPrompts | None,
        scale: float | None,
    ) -> Tensor:
        output_TND, lse_NT = _forward(query_TND, key_SJD, value_SJD, own, scale)
        if prompts is not None:
            own_rows, seen = slice(prompts.first_query, None), slice(prompts.num_keys)
            other_UND, other_lse_NU = _forward(
                query_TND[own_rows], key_SJD[seen], value_SJD[seen], prompts.call, scale
            )
            merged_NU = torch.logaddexp(lse_NT[:, own_rows], other_lse_NU)
            share_UN1 = (lse_NT[:, own_rows] - merged_NU).exp().T[..., None]
            other_share_UN1 = (other_lse_NU - merged_NU).exp().T[..., None]
            output_TND[own_rows] = (
                share_UN1 * output_TND[own_rows] + other_share_UN1 * other_UND
            ).to(output_TND.dtype)
            lse_NT[:, own_rows] = merged_NU
        if sink_N is not None:  # one more key of value 0
            merged_NT = torch.logaddexp(lse_NT, sink_N.float()[:, None])
            share_TN1 = (lse_NT - merged_NT).exp().T[..., None]
            output_TND = (share_TN1 * output_TND).to(output_TND.dtype)
            lse_NT = merged_NT
        ctx.save_for_backward(query_TND, key_SJD, value_SJD, output_TND, lse_NT, sink_N)
        ctx.own, ctx.prompts, ctx.scale = own, prompts, scale
        return output_TND

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        # Read once: non-reentrant checkpointing recomputes at the first read and refuses a second.
        *saved, sink_N = ctx.saved_tensors
        query_TND, key_SJD, value_SJD, output_TND, lse_NT = saved
        grad_TND = grads[0].contiguous()
        # The kernel recomputes probabilities from scores and log-sum-exps. With those of the full
        # row its result is this call's part of the full row's gradient.
        query_grad, key_grad, value_grad = _backward(grad_TND, saved, ctx.own, ctx.scale)
        if ctx.prompts is not None:
            own_rows, seen = slice(ctx.prompts.first_query, None), slice(ctx.prompts.num_keys)
            parts = (query_TND[own_rows], key_SJD[seen], value_SJD[seen], output_TND[own_rows])
            others = _backward(
                grad_TND[own_rows],
                (*parts, lse_NT[:, own_rows].contiguous()),
                ctx.prompts.call,
                ctx.scale,
            )
            query_grad[own_rows] += others[0]
            key_grad[seen] += others[1]
            value_grad[seen] += others[2]
        sink_grad = None
        if sink_N is not None:  # its value is 0, so its share only takes from the others'
            share_NT = (sink_N.float()[:, None] - lse_NT).exp()
            product_NT = (grad_TND.float() * output_TND.float()).sum(-1).T
            sink_grad = -(share_NT * product_NT).sum(1).to(sink_N.dtype)
        return query_grad, key_grad, value_grad, sink_grad, None, None, None


def _forward(
    query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return output [T, N, D] and log-sum-exps float32 [N, T]."""
    key, value = call.seen(key, value)
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        call.query_offsets,
        call.key_offsets,
        *call.longest,
        0.0,
        call.is_causal,
        False,  # noqa: FBT003 - the operator's own order: no mask is returned
        scale=scale,
        window_size_left=-1 if call.window is None else call.window - 1,
        window_size_right=0 if call.is_causal else -1,
    )
    return output, lse


def _backward(
    grad: Tensor, saved: Sequence[Tensor], call: VarlenCall, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    query, key, value, output, lse = saved
    key, value = call.seen(key, value)  # copied again, not kept: it can be many times the keys
    # Without dropout the kernel draws no random numbers; varlen_attn passes the same.
    random = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused = torch.empty(0, device=query.device)
    gradients = torch.ops.aten._flash_attention_backward(
        grad,
        query,
        key,
        value,
        output,
        lse,
        call.query_offsets,
        call.key_offsets,
        *call.longest,
        0.0,
        call.is_causal,
        random,
        unused,
        scale=scale,
        window_size_left=-1 if call.window is None else call.window - 1,
        window_size_right=0 if call.is_causal else -1,
    )
    query_grad, key_grad, value_grad = gradients
    if call.key_token is not None:
        shape, token = saved[1].shape, call.key_token  # many copies add up: in float32
        key_grad, value_grad = (
            grad.new_zeros(shape, dtype=torch.float32).index_add_(0, token, grad.float()).to(grad)
            for grad in (key_grad, value_grad)
        )
    return query_grad, key_grad, value_grad
