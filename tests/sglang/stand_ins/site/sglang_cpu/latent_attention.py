"""Latent attention (DeepSeek) in the one attention that a CPU has."""

from __future__ import annotations

from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)


def install() -> None:
    """Let torch's attention read keys and values as they lie in the cache."""
    AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)
