"""Operators of the gated delta rule (Qwen3.5, Qwen3-Next), in plain torch; names are SGLang's.

Legend: T tokens of all requests, B requests, N heads of values, K, V sizes of a head's keys and
values, C channels of the convolution, W its width.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """Multiply ``x`` by the sigmoid of its gate, in place."""
    x.mul_(torch.sigmoid(gate.float()).to(x.dtype).view(x.shape))


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Normalise each head of queries and of keys."""
    heads = q.reshape(-1, head_dim), k.reshape(-1, head_dim)
    return _gemma_norm(heads[0], q_weight, eps), _gemma_norm(heads[1], k_weight, eps)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    head_dim: int,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, where each head's gate lies behind its query."""
    q, gate = q_gate.reshape(len(q_gate), -1, 2 * head_dim).split(head_dim, dim=-1)
    k = k.reshape(len(k), -1, head_dim)
    normed = _gemma_norm(q, q_weight, eps), _gemma_norm(k, k_weight, eps)
    return normed[0].flatten(1), normed[1].flatten(1), gate.flatten(1).contiguous()


def _gemma_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (F.rms_norm(x.float(), x.shape[-1:], None, eps) * (1 + weight.float())).to(x.dtype)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, num_k: int, num_v: int, head_k: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split what Qwen3.5 projects: queries, keys and values; gate; beta; decay."""
    values = num_v * head_v
    qkv, z = qkvz.split([2 * num_k * head_k + values, values], dim=-1)
    b, a = ba.split([num_v, num_v], dim=-1)
    return qkv.contiguous(), z.reshape(-1, num_v, head_v), b.contiguous(), a.contiguous()


def fused_qkvzba_split_reshape_cat_cpu(
    qkvz: Tensor, ba: Tensor, num_k: int, num_v: int, head_k: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split what Qwen3-Next projects, where all parts of a key head lie together."""
    shared = num_v // num_k
    sizes = [head_k, head_k, shared * head_v, shared * head_v]
    q, k, v, z = qkvz.view(-1, num_k, sum(sizes)).split(sizes, dim=-1)
    b, a = ba.view(-1, num_k, 2 * shared).split([shared, shared], dim=-1)
    mixed = torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1)
    return mixed, z.reshape(-1, num_v, head_v), b.reshape(-1, num_v), a.reshape(-1, num_v)


def fused_gdn_gating_cpu(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the logarithm of each head's decay, and its step size: [1, T, N]."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def fused_rmsnorm_gated_cpu(x: Tensor, weight: Tensor, z: Tensor, eps: float) -> Tensor:
    """Normalise, and multiply by the gate's SiLU."""
    normed = F.rms_norm(x.float(), x.shape[-1:], None, eps) * weight.float()
    return (normed * F.silu(z.float())).to(x.dtype)


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    conv_states: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cache_indices: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    seq_lens_cpu: object = None,
    **_: object,
) -> Tensor:
    """Convolve [C, T] request by request behind its state [C, W - 1], which is updated."""
    assert conv_states is not None and has_initial_state is not None
    assert cache_indices is not None and query_start_loc is not None
    out, before = torch.empty_like(x), weight.shape[-1] - 1
    bounds = query_start_loc.tolist()
    for number, (begin, end) in enumerate(pairwise(bounds)):
        state = conv_states[int(cache_indices[number])][..., -before:]
        known = state if has_initial_state[number] else torch.zeros_like(state)
        row = torch.cat([known.to(x.dtype), x[:, begin:end]], dim=1)
        convolved = F.conv1d(row[None], weight[:, None], bias, groups=len(x))[0]
        out[:, begin:end] = F.silu(convolved) if activation else convolved
        state.copy_(row[:, -before:])
    return out


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    conv_state_indices: Tensor | None = None,
    **_: object,
) -> Tensor:
    """The same for one token of each request, [B, C]."""
    assert conv_state_indices is not None
    slots, before = conv_state_indices.long(), weight.shape[-1] - 1
    row = torch.cat([conv_states[slots][..., -before:].to(x.dtype), x[..., None]], dim=-1)
    convolved = (row * weight).sum(-1) + (0 if bias is None else bias)
    conv_states[slots] = row[..., 1:].to(conv_states.dtype)
    return F.silu(convolved) if activation else convolved


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    initial_state_indices: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None, None]:
    """Run the rule over each request's new tokens, behind its state, which is updated."""
    assert initial_state_indices is not None
    out = _run_rule(q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens.tolist())
    return out.to(q.dtype), None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: object,
) -> Tensor:
    """The same in decode, from what was projected."""
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    states, slots = initial_state_source, initial_state_indices
    return _run_rule(q, k, v, g, beta, states, slots, cu_seqlens.tolist()).to(q.dtype)


def _run_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    bounds: list[int],
) -> Tensor:
    q, k, v = (part.reshape(-1, *part.shape[-2:]).float() for part in (q, k, v))
    num_heads = v.shape[1]
    q, k = (_unit(part).repeat_interleave(num_heads // part.shape[1], 1) for part in (q, k))
    q = q * q.shape[-1] ** -0.5
    g, beta = g.reshape(-1, num_heads), beta.reshape(-1, num_heads)
    out = torch.empty_like(v)
    for number, (begin, end) in enumerate(pairwise(bounds)):
        slot = int(slots[number])
        state_NVK = states[slot].float()
        for t in range(begin, end):
            state_NVK = state_NVK * g[t].exp()[:, None, None]
            seen_NV = torch.einsum("nk,nvk->nv", k[t], state_NVK)
            change_NV = (v[t] - seen_NV) * beta[t][:, None]
            state_NVK = state_NVK + change_NV[:, :, None] * k[t][:, None]
            out[t] = torch.einsum("nk,nvk->nv", q[t], state_NVK)
        states[slot] = state_NVK.to(states.dtype)
    return out[None]


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
