"""Tiny language models and classifiers made from a configuration: weights on disk, no tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

Family = Literal[
    "qwen3",
    "qwen2",
    "llama",
    "qwen3_moe",
    "mistral",
    "gemma3_text",
    "phi3",
    "smollm3",
    "olmo2",
    "mixtral",
    "qwen2_moe",
    "cohere2",
    "deepseek_v3",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granite",
    "hunyuan_v1_dense",
    "minimax_m2",
    "ministral3",
    "olmo3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "seed_oss",
]
DENSE: tuple[Family, ...] = (
    *("qwen3", "qwen2", "llama", "mistral", "gemma3_text", "phi3", "smollm3", "olmo2", "cohere2"),
    *("ernie4_5", "exaone4", "glm4", "granite", "hunyuan_v1_dense", "ministral3", "olmo3"),
    *("qwen3_5_text", "seed_oss"),
)
"""Families without experts."""

SPARSE: tuple[Family, ...] = (
    *("qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe", "ernie4_5_moe"),
    *("gpt_oss", "qwen3_5_moe_text", "qwen3_next"),
    *("deepseek_v3", "glm4_moe_lite", "minimax_m2"),
)
"""Mixtures of experts."""

TRAINED = (*DENSE, *SPARSE)
"""Families that FSDP2 trains."""

WINDOWED: tuple[Family, ...] = (
    *("mistral", "gemma3_text", "phi3", "olmo3", "exaone4", "cohere2"),
    "gpt_oss",
)
"""Families with windows; those of the tiny models are as long as ``WINDOW``."""

WINDOW = 6

RECURRENT: tuple[Family, ...] = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Families with layers whose state goes from token to token."""

_DELTA_NET: dict[str, object] = {
    "layer_types": ["linear_attention", "full_attention"] * 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
_SHARED_EXPERT: dict[str, object] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}

_LATENT: dict[str, object] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "pad_token_id": None,
}

_WINDOW_EVERY_SECOND: dict[str, object] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
}

_OF_FAMILY: dict[Family, dict[str, object]] = {
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_SHARED_EXPERT, "mlp_only_layers": [1]},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "use_qk_norm": True,
        "pad_token_id": None,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "pad_token_id": None,
    },
    "gpt_oss": {
        **_WINDOW_EVERY_SECOND,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "pad_token_id": None,
    },
    "mistral": {"sliding_window": WINDOW},
    # Layers with and without a window, each with a rotary base of its own.
    "gemma3_text": {**_WINDOW_EVERY_SECOND, "query_pre_attn_scalar": 12},
    "phi3": {"sliding_window": WINDOW, "pad_token_id": None, "partial_rotary_factor": 0.75},
    "smollm3": {"no_rope_layer_interval": 2, "pad_token_id": None},
    "olmo2": {"pad_token_id": None},
    "olmo3": {**_WINDOW_EVERY_SECOND, "pad_token_id": None},
    "exaone4": {**_WINDOW_EVERY_SECOND, "pad_token_id": None},
    "glm4": {"pad_token_id": None},
    "cohere2": {**_WINDOW_EVERY_SECOND, "pad_token_id": None, "logit_scale": 0.25},
    "granite": {
        "logits_scaling": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
        "embedding_multiplier": 2.0,
    },
    "ernie4_5": {"pad_token_id": None},
    "hunyuan_v1_dense": {"pad_token_id": None},
    "ministral3": {"pad_token_id": None, "sliding_window": None},
    "seed_oss": {"pad_token_id": None},
    "deepseek_v3": {
        **_LATENT,
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32},
            **{"beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
            "original_max_position_embeddings": 32,
        },
    },
    "glm4_moe_lite": _LATENT,
    "minimax_m2": {
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None},
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
    },
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": {**_DELTA_NET, **_SHARED_EXPERT},
    "qwen3_next": {**_DELTA_NET, **_SHARED_EXPERT},
}


_PLAIN_NORMS: tuple[Family, ...] = ("qwen3", "qwen2", "llama", "qwen3_moe")
"""Families whose norms keep the weights of 1 that transformers gives them."""


def make_tiny_model(
    folder: Path,
    family: Family = "qwen3",
    *,
    initializer_range: float = 0.15,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Save a float32 model of some 20 k parameters in ``folder`` and return the folder.

    Equal arguments give equal weights. The large ``initializer_range`` makes next-token
    distributions far from uniform, so that a test can tell a right token from a wrong one. Biases
    (qwen2) are random too: transformers would make them 0, and a lost bias would not be noticed.
    ``changes`` go to ``tiny_config``.
    """
    config = tiny_config(family, initializer_range=initializer_range, **changes)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=initializer_range)
                elif name.endswith("sinks"):  # SGLang keeps no more digits of them
                    parameter.copy_(torch.randn_like(parameter).bfloat16())
                elif family not in _PLAIN_NORMS and name.endswith("norm.weight"):
                    parameter.add_(torch.randn_like(parameter), alpha=initializer_range)
            for name, buffer in model.named_buffers():
                if name.endswith("bias"):  # of a router
                    buffer.normal_(std=initializer_range)
    model.save_pretrained(folder)
    return folder


SEEING: dict[str, Family] = {
    "gemma3": "gemma3_text",
    "mistral3": "ministral3",
    "qwen3_5": "qwen3_5_text",
}
"""Models that also see, and the families of their language models."""


def make_seeing_model(folder: Path, kind: str) -> Path:
    """Save a tiny model of images and text, as such are published."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 4}
    vision: dict[str, object] = {
        **{"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
    }
    if kind == "qwen3_5":
        vision = {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}
    text = tiny_config(SEEING[kind], tie_embeddings=True).to_dict()
    config = AutoConfig.for_model(
        kind, text_config=text, vision_config=sizes | vision, tie_word_embeddings=True
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    return folder


def make_mxfp4_model(folder: Path) -> Path:
    """Save a gpt-oss whose experts are blocks of 32 numbers with a scale each, as openai does."""
    make_tiny_model(folder, "gpt_oss", hidden_size=64, tie_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)

    def random(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    for name in [n for n in weights if n.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_inputs, num_outputs = weights.pop(name).shape
        packed = (num_experts, num_outputs, num_inputs // 32)
        weights[f"{name}_blocks"] = random(0, 256, *packed, 16)
        weights[f"{name}_scales"] = random(120, 128, *packed)
    floats = {n: t if t.dtype == torch.uint8 else t.bfloat16() for n, t in weights.items()}
    save_file(floats, folder / "model.safetensors", metadata={"format": "pt"})
    config = folder / "config.json"
    kept = [f"model.layers.*.{part}" for part in ("self_attn", "mlp.router")]
    kept += ["model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    values = json.loads(config.read_text()) | {"quantization_config": quantization}
    config.write_text(json.dumps(values))
    return folder


def tiny_config(
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
    **changes: object,
) -> PretrainedConfig:
    """Return the configuration of a tiny model.

    ``changes`` go into it under transformers' names.
    """
    settings = _OF_FAMILY.get(family, {}) | changes
    if isinstance(kinds := settings.get("layer_types"), list):
        settings["layer_types"] = kinds[:num_layers]
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "head_dim": hidden_size // num_attention_heads,
        "max_position_embeddings": max_position_embeddings,
        "initializer_range": initializer_range,
        "tie_word_embeddings": tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config: PretrainedConfig = AutoConfig.for_model(family, **sizes | settings)
    return config


def make_tiny_classifier(
    folder: Path,
    family: Family = "qwen3",
    *,
    kind: Literal["sequence", "token"] = "sequence",
    num_labels: int = 1,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Save the body of ``make_tiny_model`` with a random head of ``num_labels`` numbers.

    Where transformers has no such class, as hybridrl writes one.
    """
    body = make_tiny_model(folder.with_name(f"{folder.name}-body"), family, seed=seed, **changes)
    config = AutoConfig.from_pretrained(body, num_labels=num_labels)
    classes = {
        "sequence": AutoModelForSequenceClassification,
        "token": AutoModelForTokenClassification,
    }
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        whole = AutoModelForCausalLM.from_pretrained(body)
        if type(config) in classes[kind]._model_mapping:
            model = classes[kind].from_config(config)
            model.model.load_state_dict(whole.model.state_dict())
        else:
            model = whole
            del model.lm_head
            model.score = torch.nn.Linear(config.hidden_size, num_labels, bias=kind == "token")
        with torch.no_grad():
            for parameter in model.score.parameters():
                parameter.normal_()
    model.save_pretrained(folder)
    return folder


def save_tiny_tokenizer(folder: Path) -> None:
    """Save a tokenizer whose ids are within any vocabulary; it has no padding."""
    words = Tokenizer(WordLevel({"<end>": 0, "word": 1}, unk_token="word"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)
