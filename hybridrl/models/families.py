"""The model families: values of transformers' classes that config.json may lack, and differences.

A family is one entry here, and its ``model_type`` among those of the engines that compute it
(``hybridrl/config/model.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a mixture of experts in a model's files: ``BLOCK.experts.3.GATE.weight``."""

    block: str = "mlp"
    """Module of a layer that holds the router (``gate``) and the experts."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class Family:
    """Differences from Llama, and values for fields that config.json lacks.

    ``Architecture`` and ``MoEConfig`` explain the fields that they have, too.
    """

    defaults: Mapping[str, Any]
    has_head_norms: bool = False
    norms_all_heads: bool = False
    num_norms: int = 2
    has_router_bias: bool = False  # GLM's is a buffer
    has_shared_gate: bool = False
    fused: tuple[str, ...] = ()

    renames: Mapping[str, str] = field(default_factory=dict)
    """Parts of transformers' names, and what stands for them in files."""

    always_has_qkv_bias: bool = False
    has_output_bias: bool = True

    bias_setting: str = "attention_bias"
    """Setting of config.json that gives the attention's linear layers a bias."""

    expert_names: ExpertNames = ExpertNames()

    ropes: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    """Kinds of rotary scaling whose angles depend on the position alone."""

    off: tuple[str, ...] = ()
    """Settings of config.json that must be off: no engine computes them."""


_QWEN = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
_MISTRAL = {
    **_LLAMA,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN_MOE = {
    **_QWEN,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
}
_QWEN2_MOE = {
    **_QWEN_MOE,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "qkv_bias": True,
}
_MIXTRAL = {
    **_MISTRAL,
    "sliding_window": None,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
_GEMMA = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
_OLMO = {**_LLAMA, "vocab_size": 50304, "rms_norm_eps": 1e-5}
_PHI = {
    **_LLAMA,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "vocab_size": 32064,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
_SMOL = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 128256,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "rope_theta": 2_000_000.0,
}
_COHERE = {
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_ERNIE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 103424,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}
_ERNIE_MOE = {
    **_ERNIE,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_intermediate_size": 1536,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
}
_EXAONE = {
    **_LLAMA,
    "intermediate_size": 16384,
    "vocab_size": 102400,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
}
_GLM = {
    **_LLAMA,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
}
_GLM_MOE = {
    **_LLAMA,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
_MINISTRAL = {
    **_LLAMA,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
}
_SEED = {
    **_LLAMA,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 155136,
    "max_position_embeddings": 524288,
    "attention_bias": True,
}
_ATTENTIONS = ("full_attention", "sliding_attention")
FAMILIES = {
    "cohere2": Family(_COHERE, num_norms=1),
    "ernie4_5": Family(_ERNIE, bias_setting="use_bias"),
    "ernie4_5_moe": Family(
        _ERNIE_MOE,
        bias_setting="use_bias",
        has_router_bias=True,
        renames={".gate.moe_statics.": ".moe_statics."},
    ),
    "exaone4": Family(_EXAONE, has_head_norms=True),
    "gemma3_text": Family(
        _GEMMA,
        has_head_norms=True,
        num_norms=4,
        off=("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"),
    ),
    "glm4": Family(_GLM, num_norms=4, has_output_bias=False, fused=("gate_up_proj",)),
    "glm4_moe": Family(_GLM_MOE, has_output_bias=False),
    "granite": Family(_LLAMA),
    "hunyuan_v1_dense": Family({**_LLAMA, "vocab_size": 290943}, has_head_norms=True),
    "llama": Family(_LLAMA),
    "ministral3": Family(_MINISTRAL),
    "mistral": Family(_MISTRAL, off=("layer_types",)),
    "mixtral": Family(
        _MIXTRAL,
        expert_names=ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
        off=("layer_types", "router_jitter_noise"),
    ),
    "olmo2": Family(_OLMO, norms_all_heads=True),
    "olmo3": Family({**_OLMO, "sliding_window": 4096}, norms_all_heads=True),
    "phi3": Family(
        _PHI,
        fused=("qkv_proj", "gate_up_proj"),
        ropes=("default", "longrope"),
    ),
    "qwen2": Family(_QWEN, always_has_qkv_bias=True, has_output_bias=False),
    "qwen2_moe": Family(
        _QWEN2_MOE,
        has_output_bias=False,
        has_shared_gate=True,
        bias_setting="qkv_bias",
        off=("use_sliding_window",),
    ),
    "qwen3": Family({**_QWEN, "head_dim": 128}, has_head_norms=True),
    "qwen3_moe": Family(_QWEN_MOE, has_head_norms=True),
    "seed_oss": Family(_SEED, has_output_bias=False),
    "smollm3": Family(_SMOL),
}


def rope_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of config.json, as transformers 5 or an older one wrote them."""
    rope = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    # Of layers with different angles (Gemma 3) both are null here.
    rope["rope_theta"] = rope.get("rope_theta") or values.get("rope_theta") or 10_000.0
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    if rope["rope_type"] == "su" or (rope["rope_type"], "short_factor" in rope) == ("yarn", True):
        rope["rope_type"] = "longrope"  # as the first Phi-3 spelled it
    return rope


def unsupported_settings(values: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Describe settings of config.json that no engine would compute."""
    for name in family.off:
        if values.get(name):
            yield f"{name}={values[name]!r} is not supported; only a model without it is"
    yield from _unsupported_layers(values)
    for name in ("rope_scaling", "rope_parameters"):
        if values.get(name) and not isinstance(values[name], Mapping):
            yield f"{name}={values[name]!r} is not a JSON object"
            return
    rope = rope_of(values)
    of_layers = [rope, *(kind for kind in rope.values() if isinstance(kind, Mapping))]
    for kind in dict.fromkeys(str(each.get("rope_type", "default")) for each in of_layers):
        if kind not in family.ropes:
            yield (
                f"rope_type={kind!r} is not supported: rotary angles must not depend on the "
                f"longest row of a batch; supported are {', '.join(family.ropes)}"
            )


def _unsupported_layers(values: Mapping[str, Any]) -> Iterator[str]:
    kinds = values.get("layer_types") or []
    if not isinstance(kinds, list):
        yield f"layer_types={kinds!r} is not a JSON list"
        return
    for kind in dict.fromkeys(map(str, kinds)):
        if kind not in _ATTENTIONS:
            yield f"layer_types has {kind!r}; supported are {', '.join(_ATTENTIONS)}"
    if "sliding_attention" in kinds and values.get("sliding_window", 1) is None:
        yield "layer_types has 'sliding_attention', and sliding_window is null"
