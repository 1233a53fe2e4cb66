"""The ``model`` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from hybridrl.config.limits import CountOrZero, Heads, Layers, Rows, Width

TRANSFORMERS_MODEL_TYPES = (
    *("llama", "qwen2", "qwen3"),
    *("cohere2", "ernie4_5", "exaone4", "gemma3_text", "glm4", "granite", "hunyuan_v1_dense"),
    *("ministral3", "mistral", "olmo2", "olmo3", "phi3", "seed_oss", "smollm3"),
    *("ernie4_5_moe", "glm4_moe", "qwen3_moe", "mixtral", "qwen2_moe"),
    "gpt_oss",
)
"""Architectures of the engines that run transformers' own code, ``fsdp2`` and ``hf``: those
whose packed forward pass is shown equal to a pass of single rows."""

LIGER_MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""Those of them whose norms and MLPs Liger's kernels replace."""

_WITHOUT_CLASSIFIER = ("cohere2", "ernie4_5", "ernie4_5_moe", "glm4_moe", "granite")
_WITHOUT_VALUE_HEAD = ("gemma3_text", "hunyuan_v1_dense", "olmo2", "olmo3", *_WITHOUT_CLASSIFIER)

REWARD_MODEL_TYPES = tuple(t for t in TRANSFORMERS_MODEL_TYPES if t not in _WITHOUT_CLASSIFIER)
"""Those of them that transformers has with one score (``...ForSequenceClassification``)."""

CRITIC_MODEL_TYPES = tuple(t for t in TRANSFORMERS_MODEL_TYPES if t not in _WITHOUT_VALUE_HEAD)
"""Those of them that transformers has with a value head (``...ForTokenClassification``)."""

MEGATRON_MODEL_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3"),
    *("mixtral", "qwen2_moe", "qwen3_moe"),
)
"""Architectures that are converted to megatron-core and back."""

SGLANG_MODEL_TYPES = (
    *MEGATRON_MODEL_TYPES,
    *("ernie4_5", "gemma3_text", "glm4", "granite", "ministral3", "olmo2", "seed_oss", "smollm3"),
    *("ernie4_5_moe", "glm4_moe", "gpt_oss"),
)
"""Architectures whose samples from SGLang are shown to have the trainer's log-probs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StarterConfig:
    """A small Qwen3-shaped model made locally, so that a first run needs no download."""

    hidden_size: Width
    """Width of the residual stream."""

    num_layers: Layers
    """Transformer blocks."""

    num_attention_heads: Heads
    """Query heads; hidden_size / num_attention_heads is the size of a head, an even number."""

    num_key_value_heads: Heads
    """Key and value heads; divides num_attention_heads."""

    intermediate_size: Width
    """Width inside the MLP."""

    vocab_size: Annotated[int, Field(ge=258, le=2**24, description="no tokenizer has more")]
    """Rows of the (tied) embedding; the tokenizer uses 258: 256 bytes and two special tokens."""

    max_position_embeddings: Annotated[
        int, Field(ge=1, le=2**25, description="the longest prompt and response together")
    ]
    """Context length, in tokens."""

    num_warmup_steps: CountOrZero
    """Supervised steps before the run; the warmed-up model is cached and made once."""

    warmup_batch_size: Rows
    """Rows per supervised warm-up step."""

    warmup_lr: Annotated[float, Field(gt=0.0, le=1.0, examples=[1e-3])]
    """Peak learning rate of the warm-up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The weights and tokenizer that a run starts from. Mirrors hydra_configs/model/*.yaml."""

    path: str | None
    """A Hugging Face model folder. Null makes the model that ``model.starter`` describes."""

    starter: StarterConfig | None
    """Shape and warm-up of the made model; used if and only if ``model.path`` is null."""

    dtype: Literal["float32", "bfloat16"]
    """Storage type of the training weights: float32 or bfloat16."""

    attention: Literal["auto", "varlen", "padded"]
    """Attention over packed rows: ``auto`` (varlen on CUDA, padded on CPU), ``varlen`` or
    ``padded``."""
