"""The sections ``model`` and ``lora``: the weights, and low-rank adapters beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from hybridrl.config.limits import CountOrZero, Layers, Width

TRANSFORMERS_MODEL_TYPES = (
    *("llama", "qwen2", "qwen3"),
    *("cohere2", "ernie4_5", "exaone4", "gemma3_text", "glm4", "granite", "hunyuan_v1_dense"),
    *("ministral3", "mistral", "olmo2", "olmo3", "phi3", "seed_oss", "smollm3"),
    *("ernie4_5_moe", "glm4_moe", "qwen3_moe", "mixtral", "qwen2_moe"),
    *("gpt_oss", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
    *("deepseek_v3", "glm4_moe_lite", "minimax_m2"),
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
)
"""Architectures of the engines that run transformers' own code, ``fsdp2`` and ``hf``: those
whose packed forward pass is shown equal to a pass of single rows."""

LIGER_MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""Those of them whose norms and MLPs Liger's kernels replace."""

MEGATRON_MODEL_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3"),
    *("mixtral", "qwen2_moe", "qwen3_moe"),
)
"""Architectures that are converted to megatron-core and back."""

SGLANG_MODEL_TYPES = (
    *MEGATRON_MODEL_TYPES,
    *("ernie4_5", "gemma3_text", "glm4", "granite", "ministral3", "olmo2", "seed_oss", "smollm3"),
    *("ernie4_5_moe", "glm4_moe", "gpt_oss"),
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "deepseek_v3", "glm4_moe_lite"),
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
)
"""Architectures whose samples from SGLang are shown to have the trainer's log-probs."""


STARTER_SIDE = 28
"""Pixels of the square that a token of a made model sees: one digit of a drawn number. Patches are
14 pixels wide, as those of Qwen2.5-VL: SGLang knows no others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StarterConfig:
    """A small model made locally, so that a first run needs no download.

    It has the shape of Qwen3, or with a vision tower that of Qwen2.5-VL.
    """

    hidden_size: Width
    """Width of the residual stream; heads and MLPs follow from it."""

    num_layers: Layers
    """Transformer blocks."""

    num_vision_layers: Annotated[int, Field(ge=0, le=10_000)]
    """Blocks of its vision tower, as wide as the others; 0: it sees nothing."""

    num_warmup_steps: CountOrZero
    """Supervised steps before the run; the warmed-up model is cached and made once."""

    @property
    def num_attention_heads(self) -> int:
        """Query heads of about 32 numbers; an even number of them, for two key-value heads."""
        return max(2, self.hidden_size // 64 * 2)

    @property
    def num_key_value_heads(self) -> int:
        """Key and value heads."""
        return 2

    @property
    def intermediate_size(self) -> int:
        """Width inside the MLP: a power of two, at most 8/3 of the width."""
        return 1 << (8 * self.hidden_size // 3).bit_length() - 1

    @property
    def vocab_size(self) -> int:
        """Rows of the (tied) embedding; the tokenizer uses 258: 256 bytes and two special ones."""
        return 512

    @property
    def max_position_embeddings(self) -> int:
        """Context length, in tokens: longer than any row that a small model is tried with."""
        return 2**16


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

    freeze_vision: bool
    """Keep the vision tower of a model that sees as it is; false trains it, too."""


ALL_LINEAR = "all-linear"
ATTENTION_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR_MODULES = (*ATTENTION_LINEAR, *("gate_proj", "up_proj", "down_proj"))
"""Linear layers of every block of every supported architecture but Phi-3. The output embedding is
not among them: it is applied to scored tokens only, without any adapter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """LoRA (arXiv:2106.09685): W x + scaling B A x, where only A and B learn."""

    enabled: bool
    """Train adapters and freeze the model. False ignores all other keys of the section."""

    rank: Width
    """Rows of A and columns of B; at most the smaller side of each adapted layer."""

    alpha: Annotated[float, Field(gt=0.0, le=1e6, examples=[16.0])]
    """Scaling of the adapter is alpha / rank, or alpha / sqrt(rank) with ``use_rslora``."""

    use_rslora: bool
    """Scale by alpha / sqrt(rank) (arXiv:2312.03732), so that high ranks learn as fast."""

    target_modules: tuple[str, ...]
    """Adapted layers by the last word of their name, as q_proj; [all-linear] is all seven. Those of
    Phi-3 are qkv_proj, o_proj, gate_up_proj and down_proj. Only ``actor.engine=megatron`` adapts
    experts: for FSDP2 name q_proj, k_proj, v_proj and o_proj."""

    sync: Literal["adapter", "merged"]
    """Weights sent to rollout engines. ``adapter``: the frozen weights once, then A and B alone.
    ``merged``: W + scaling B A under W's name, every time."""

    base: Literal["resident", "backup", "resend"]
    """Frozen weights of a sleeping engine under ``sync=adapter``: ``resident`` keeps them on the
    device, ``backup`` on the host, ``resend`` drops them and sends them again. ``mode=plan`` says
    whether they fit."""

    init_from: str | None
    """A peft adapter folder to start from; null draws A from the seed and sets B to 0. A KL penalty
    compares with the model without any adapter."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the adapted layers, with ``all-linear`` expanded, each once."""
        spelled = [
            name
            for entry in self.target_modules
            for name in (LINEAR_MODULES if entry == ALL_LINEAR else (entry,))
        ]
        return tuple(dict.fromkeys(spelled))

    @property
    def scaling(self) -> float:
        """Factor on B A x."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def sends_adapters(self) -> bool:
        """Whether rollout engines apply adapters themselves."""
        return self.enabled and self.sync == "adapter"
