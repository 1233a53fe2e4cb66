"""Sinks of gpt-oss in the one attention that a CPU has: SGLang's own takes none there."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import sglang.srt.arg_groups.model_hook as model_hook
import sglang.srt.layers.attention.torch_native_backend as torch_native
import torch
from torch.nn.functional import pad

_sinks: ContextVar[torch.Tensor | None] = ContextVar("sinks", default=None)


def install() -> None:
    """Let SGLang take torch's attention for gpt-oss, and give it the sinks of each layer."""
    backends_of = model_hook.attention_backends_of
    model_hook.attention_backends_of = lambda *args, **kwargs: tuple(
        "intel_amx" if name == "torch_native" else name for name in backends_of(*args, **kwargs)
    )
    torch_native.scaled_dot_product_attention = _attending(
        torch_native.scaled_dot_product_attention
    )
    backend = torch_native.TorchNativeAttnBackend
    for name in ("forward_extend", "forward_decode"):
        setattr(backend, name, _with_sinks(getattr(backend, name)))


def _with_sinks(forward: Callable[..., Any]) -> Callable[..., Any]:
    def forward_of_layer(
        self: object, *args: object, sinks: torch.Tensor | None = None, **kwargs: object
    ) -> object:
        token = _sinks.set(sinks)
        try:
            return forward(self, *args, **kwargs)
        finally:
            _sinks.reset(token)

    return forward_of_layer


def _attending(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def attend_with_sinks(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        sinks = _sinks.get()
        if sinks is None:
            return attend(
                query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, **kwargs
            )
        num_queries, num_keys = query.shape[2], key.shape[2]
        mask = attn_mask
        if mask is None:
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool)
            mask = mask.tril(num_keys - num_queries) if is_causal else mask
        # One more key, of value 0, whose product with a query is the sink of its head.
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        score = (sinks.float() / scale).to(query.dtype)[None, :, None, None]
        query = torch.cat([query, score.expand(*query.shape[:3], 1)], dim=-1)
        key, value = (pad(states, (0, 1, 1, 0)) for states in (key, value))
        key[:, :, 0, -1] = 1
        mask = pad(mask, (1, 0), value=True)
        return attend(query, key, value, attn_mask=mask, scale=scale, **kwargs)[..., :-1]

    return attend_with_sinks
