"""The embedded engine's model: built without weights, its KV cache, one forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from hybridrl.errors import EngineError, ModelError
from hybridrl.models.architecture import read_architecture
from hybridrl.models.load import load_model_config, read_model_type
from hybridrl.workers.rollout.embedded.kv_slots import ATTENTION_NAME, KVStep


def load_config(folder: Path, *, max_context_tokens: int) -> PretrainedConfig:
    """Read and check config.json.

    Raises:
        ModelError: it is not usable, the architecture is not supported, or its context is shorter
            than ``max_context_tokens``.
    """
    read_model_type(folder)  # names the errors that transformers would raise without a cause
    config = load_model_config(folder)
    context = read_architecture(folder).max_positions
    if max_context_tokens > context:
        raise ModelError(
            f"prompt + response may take {max_context_tokens} tokens, the model in {folder} takes "
            f"{context}; lower data.max_prompt_tokens or "
            "rollout.max_response_tokens"
        )
    return config


def build_model(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Build on the device with empty parameters and the right buffers."""
    with no_init_weights(), device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    model.tie_weights()  # a step of the initialisation that was left out
    return model.to(device).eval().requires_grad_(requires_grad=False)


def allocate_kv(model: PreTrainedModel, num_slots: int, max_context_tokens: int) -> Tensor:
    """Return zeros for ``KVSlots``: [layers, 2, slots, key-value heads, tokens, head size]."""
    config = model.config
    head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    return torch.zeros(
        config.num_hidden_layers,
        2,
        num_slots,
        config.num_key_value_heads,
        max_context_tokens,
        head_dim,
        dtype=model.dtype,
        device=model.device,
    )


class Forward(Protocol):
    """Runs T tokens through a model, which reads and writes keys and values through ``kv_step``."""

    def __call__(
        self, token_T: Tensor, kv_step: KVStep, *, logits_at: Tensor | None = None
    ) -> Tensor:
        """Run a pass.

        Args:
            token_T: int64 [T].
            kv_step: rows and positions of the tokens.
            logits_at: int64 [N], the tokens whose next-token logits are wanted; None: all.

        Returns:
            [N, V] in the model's type.
        """
        ...


@dataclass(frozen=True, slots=True)
class TransformersForward:
    """The model's own pass, for any architecture."""

    model: PreTrainedModel
    """Built with ``kv_slots.ATTENTION_NAME``."""

    def __call__(
        self, token_T: Tensor, kv_step: KVStep, *, logits_at: Tensor | None = None
    ) -> Tensor:
        """Run a pass; see ``Forward``."""
        output = self.model(
            input_ids=token_T[None],
            position_ids=kv_step.position_T[None],
            use_cache=False,
            kv_step=kv_step,
            logits_to_keep=0 if logits_at is None else logits_at,
        )
        logits_NV: Tensor = output.logits[0]
        return logits_NV


def require_finite(values: Tensor) -> None:
    """Raise EngineError if a logit or log-prob, of any shape, is infinite or NaN."""
    if not bool(values.isfinite().all()):
        raise EngineError(
            "the rollout model's logits are not finite: its weights were never sent, were lost in "
            "a release, or have diverged; sync weights before generate, and lower "
            "actor.optimizer.lr if they were synced"
        )
