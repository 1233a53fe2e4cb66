"""Tiny causal language models, made from a configuration: weights on disk, no tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Family = Literal["qwen3", "qwen2", "llama", "qwen3_moe"]

_FAMILIES: dict[Family, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}

_OF_FAMILY: dict[Family, dict[str, int | bool]] = {
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }
}


def make_tiny_model(
    folder: Path,
    family: Family = "qwen3",
    *,
    tie_embeddings: bool = True,
    vocab_size: int = 64,
    hidden_size: int = 32,
    num_layers: int = 2,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    max_position_embeddings: int = 128,
    initializer_range: float = 0.15,
    seed: int = 0,
    **changes: object,
) -> Path:
    """Save a float32 model of some 20 k parameters in ``folder`` and return the folder.

    Equal arguments give equal weights. The large ``initializer_range`` makes next-token
    distributions far from uniform, so that a test can tell a right token from a wrong one. Biases
    (qwen2) are random too: transformers would make them 0, and a lost bias would not be noticed.
    ``changes`` go into the configuration under transformers' names.
    """
    config_class, model_class = _FAMILIES[family]
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=hidden_size // num_attention_heads,
        max_position_embeddings=max_position_embeddings,
        initializer_range=initializer_range,
        tie_word_embeddings=tie_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        **_OF_FAMILY.get(family, {}) | changes,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = model_class(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=initializer_range)
    model.save_pretrained(folder)
    return folder
