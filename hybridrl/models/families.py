"""The model families: values of transformers' classes that config.json may lack, and differences.

A family is one entry here with a row in ``_TABLE``, and its ``model_type`` among those of the
engines that compute it (``hybridrl/config/model.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a mixture of experts in a model's files: ``BLOCK.experts.3.GATE.weight``."""

    block: str = "mlp"  # module of a layer that holds the router (`gate`) and the experts
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
    has_sinks: bool = False
    fused: tuple[str, ...] = ()
    # whether files, too, have all experts of a layer in one tensor; such experts have biases
    has_fused_experts: bool = False
    # likewise, with each matrix transposed, and without biases (Qwen3-VL as published)
    has_transposed_experts: bool = False
    # parts of transformers' names, and what stands for them in files
    renames: Mapping[str, str] = field(default_factory=dict)
    always_has_qkv_bias: bool = False
    has_output_bias: bool = True
    # setting of config.json that gives the attention's linear layers a bias
    bias_setting: str = "attention_bias"
    expert_names: ExpertNames = ExpertNames()
    # kinds of rotary scaling whose angles depend on the position alone
    ropes: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    off: tuple[str, ...] = ()  # settings of config.json that must be off: no engine computes them
    # where config.json has no `layer_types`: each layer of this number attends, others are
    # recurrent (gated delta rules: arXiv:2412.06464)
    attends_every: int = 1
    has_output_gate: bool = False  # whether `q_proj` also gives a gate of the attention's output
    # settings that SGLang needs, and transformers does not write
    for_sglang: Mapping[str, Any] = field(default_factory=dict)
    # whether keys and values are made of fewer numbers (latent attention: arXiv:2405.04434)
    has_latents: bool = False


_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
)
_TABLE = """
cohere2            8192  22528     40     64      - 256000   8192
deepseek_v3        7168  18432     61    128    128 129280   4096
ernie4_5           1024   3072     18     16      2 103424 131072
ernie4_5_moe       2560  12288     28     20      4 103424 131072
exaone4            4096  16384     32     32      - 102400   2048
gemma3_text        2304   9216     26      8      4 262208 131072
glm4               4096  13696     40     32      2 151552 131072
glm4_moe           4096  10944     46     96      8 151552 131072
glm4_moe_lite      2048  10240     47     20     20 154880 202752
gpt_oss            2880   2880     36     64      8 201088 131072
granite            4096  11008     32     32      -  32000   2048
hunyuan_v1_dense   4096  11008     32     32      - 290943   2048
llama              4096  11008     32     32      -  32000   2048
minimax_m2         3072   1536     62     48      8 200064 196608
ministral3         4096  14336     34     32      8 131072 262144
mistral            4096  14336     32     32      8  32000 131072
mixtral            4096  14336     32     32      8  32000 131072
olmo2              4096  11008     32     32      -  50304   2048
olmo3              4096  11008     32     32      -  50304   2048
phi3               3072   8192     32     32      -  32064   4096
qwen2              4096  22016     32     32     32 151936  32768
qwen2_5_vl_text    8192  29568     80     64      8 152064  32768
qwen2_moe          2048   5632     24     16     16 151936  32768
qwen3              4096  22016     32     32     32 151936  32768
qwen3_5_moe_text   2048    512     40     16      2 248320  32768
qwen3_5_text       4096  12288     32     16      4 248320  32768
qwen3_moe          2048   6144     24     32      4 151936  32768
qwen3_next         2048   5632     48     16      2 151936  32768
qwen3_vl_moe_text  2048   5632     24     16     16 151936 128000
qwen3_vl_text      4096  22016     32     32     32 151936 128000
seed_oss           4096  27648     64     80      8 155136 524288
smollm3            2048  11008     36     16      4 128256  32768
"""
"""By family the ``_SIZES`` that config.json may lack; without one the keys have as many heads."""


def _defaults(model_type: str, **others: object) -> Mapping[str, Any]:
    (row,) = [row for row in map(str.split, _TABLE.splitlines()) if row[:1] == [model_type]]
    sizes = zip(_SIZES, row[1:], strict=True)
    return {name: int(size) for name, size in sizes if size != "-"} | others


_ATTENTIONS = ("full_attention", "sliding_attention")
_RECURRENT = "linear_attention"
_DELTA_NET = {
    **{"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
}
_SEEN_ROPES = ("default", "mrope")  # angles of time, row and column
FAMILIES = {
    "cohere2": Family(_defaults("cohere2", tie_word_embeddings=True), num_norms=1),
    "deepseek_v3": Family(
        _defaults(
            "deepseek_v3",
            **{"q_lora_rank": 1536, "kv_lora_rank": 512, "v_head_dim": 128},
            **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "num_experts_per_tok": 8},
            **{"n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048},
            **{"first_k_dense_replace": 3, "norm_topk_prob": True},
        ),
        has_latents=True,
        for_sglang={"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "ernie4_5": Family(
        _defaults("ernie4_5", head_dim=128, tie_word_embeddings=True, rms_norm_eps=1e-5),
        bias_setting="use_bias",
    ),
    "ernie4_5_moe": Family(
        _defaults(
            "ernie4_5_moe",
            **{"head_dim": 128, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
            **{"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536},
            **{"moe_num_shared_experts": 2, "moe_layer_start_index": 1},
        ),
        bias_setting="use_bias",
        has_router_bias=True,
        renames={".gate.moe_statics.": ".moe_statics."},
    ),
    "exaone4": Family(
        _defaults("exaone4", rms_norm_eps=1e-5, sliding_window=4096), has_head_norms=True
    ),
    "gemma3_text": Family(
        _defaults("gemma3_text", head_dim=256, tie_word_embeddings=True),
        has_head_norms=True,
        num_norms=4,
        off=("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"),
    ),
    "glm4": Family(
        _defaults("glm4", head_dim=128, rms_norm_eps=1.5625e-07, attention_bias=True),
        num_norms=4,
        has_output_bias=False,
        fused=("gate_up_proj",),
    ),
    "glm4_moe": Family(
        _defaults(
            "glm4_moe",
            **{"rms_norm_eps": 1e-5, "n_routed_experts": 128, "num_experts_per_tok": 8},
            **{"moe_intermediate_size": 1408, "n_shared_experts": 1},
            **{"first_k_dense_replace": 1, "norm_topk_prob": True},
        ),
        has_output_bias=False,
    ),
    "glm4_moe_lite": Family(
        _defaults(
            "glm4_moe_lite",
            **{"q_lora_rank": 768, "kv_lora_rank": 512, "v_head_dim": 256, "rms_norm_eps": 1e-5},
            **{"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "num_experts_per_tok": 4},
            **{"n_routed_experts": 64, "n_shared_experts": 1, "moe_intermediate_size": 1536},
            **{"first_k_dense_replace": 1, "norm_topk_prob": True},
        ),
        has_latents=True,
    ),
    "gpt_oss": Family(
        _defaults(
            "gpt_oss",
            **{"head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0},
            **{"num_local_experts": 128, "num_experts_per_tok": 4, "norm_topk_prob": True},
            attention_bias=True,
        ),
        has_sinks=True,
        has_fused_experts=True,
        has_router_bias=True,
        for_sglang={"swiglu_limit": 7.0},  # not written by transformers 5.12
    ),
    "granite": Family(_defaults("granite")),
    "hunyuan_v1_dense": Family(_defaults("hunyuan_v1_dense"), has_head_norms=True),
    "llama": Family(_defaults("llama")),
    "minimax_m2": Family(
        _defaults(
            "minimax_m2",
            **{"head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8},
            **{"norm_topk_prob": True, "decoder_sparse_step": 1},
        ),
        norms_all_heads=True,
        expert_names=ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
        off=("router_jitter_noise",),
    ),
    "ministral3": Family(_defaults("ministral3", head_dim=128, rms_norm_eps=1e-5)),
    "mistral": Family(_defaults("mistral", sliding_window=4096), off=("layer_types",)),
    "mixtral": Family(
        _defaults(
            "mixtral",
            **{"sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
            **{"num_local_experts": 8, "num_experts_per_tok": 2},
            **{"norm_topk_prob": True, "decoder_sparse_step": 1},
        ),
        expert_names=ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
        off=("layer_types", "router_jitter_noise"),
    ),
    "olmo2": Family(_defaults("olmo2", rms_norm_eps=1e-5), norms_all_heads=True),
    "olmo3": Family(
        _defaults("olmo3", rms_norm_eps=1e-5, sliding_window=4096), norms_all_heads=True
    ),
    "phi3": Family(
        _defaults("phi3", original_max_position_embeddings=4096, rms_norm_eps=1e-5),
        fused=("qkv_proj", "gate_up_proj"),
        ropes=("default", "longrope"),
    ),
    "qwen2": Family(_defaults("qwen2"), always_has_qkv_bias=True, has_output_bias=False),
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text"),
        Family(
            _defaults("qwen2_5_vl_text", rms_norm_eps=1e-5),
            always_has_qkv_bias=True,
            has_output_bias=False,
            ropes=_SEEN_ROPES,
            off=("use_sliding_window",),
        ),
    ),
    "qwen2_moe": Family(
        _defaults(
            "qwen2_moe",
            **{"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
            **{"decoder_sparse_step": 1, "shared_expert_intermediate_size": 5632, "qkv_bias": True},
        ),
        has_output_bias=False,
        has_shared_gate=True,
        bias_setting="qkv_bias",
        off=("use_sliding_window",),
    ),
    "qwen3": Family(_defaults("qwen3", head_dim=128), has_head_norms=True),
    "qwen3_5_moe_text": Family(
        _defaults(
            "qwen3_5_moe_text",
            **_DELTA_NET,
            **{"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512},
            **{"decoder_sparse_step": 1, "shared_expert_intermediate_size": 512},
            norm_topk_prob=True,
        ),
        has_head_norms=True,
        has_shared_gate=True,
        has_output_gate=True,
        attends_every=4,
    ),
    "qwen3_5_text": Family(
        _defaults("qwen3_5_text", **_DELTA_NET),
        has_head_norms=True,
        has_output_gate=True,
        attends_every=4,
    ),
    "qwen3_moe": Family(
        _defaults(
            "qwen3_moe",
            **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
            decoder_sparse_step=1,
        ),
        has_head_norms=True,
    ),
    "qwen3_next": Family(
        _defaults(
            "qwen3_next",
            **_DELTA_NET,
            **{"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512},
            **{"decoder_sparse_step": 1, "shared_expert_intermediate_size": 512},
            norm_topk_prob=True,
        ),
        has_head_norms=True,
        has_shared_gate=True,
        has_output_gate=True,
        attends_every=4,
    ),
    "qwen3_vl_text": Family(
        _defaults("qwen3_vl_text", head_dim=128), has_head_norms=True, ropes=_SEEN_ROPES
    ),
    "qwen3_vl_moe_text": Family(
        _defaults(
            "qwen3_vl_moe_text",
            **{"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
            **{"decoder_sparse_step": 1, "norm_topk_prob": True, "tie_word_embeddings": True},
        ),
        has_head_norms=True,
        ropes=_SEEN_ROPES,
        has_transposed_experts=True,
    ),
    "seed_oss": Family(
        _defaults("seed_oss", head_dim=128, attention_bias=True), has_output_bias=False
    ),
    "smollm3": Family(_defaults("smollm3", tie_word_embeddings=True, rope_theta=2_000_000.0)),
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
    yield from _unsupported_layers(values, family)
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


def layer_kinds(values: Mapping[str, Any], family: Family) -> list[str]:
    """Return the kind of each layer, as transformers names it; without any, all attend."""
    if values.get("layer_types") or family.attends_every == 1:
        return list(values.get("layer_types") or ())
    every = int(values.get("full_attention_interval") or family.attends_every)
    numbers = range(1, int(values["num_hidden_layers"]) + 1)
    return [_RECURRENT if number % every else _ATTENTIONS[0] for number in numbers]


def is_recurrent_kind(kind: str) -> bool:
    """Whether a layer of this kind has a state instead of keys and values."""
    return kind == _RECURRENT


def _unsupported_layers(values: Mapping[str, Any], family: Family) -> Iterator[str]:
    known = _ATTENTIONS if family.attends_every == 1 else (*_ATTENTIONS, _RECURRENT)
    kinds = values.get("layer_types") or []
    if not isinstance(kinds, list):
        yield f"layer_types={kinds!r} is not a JSON list"
        return
    for kind in dict.fromkeys(map(str, kinds)):
        if kind not in known:
            yield f"layer_types has {kind!r}; supported are {', '.join(known)}"
    if "sliding_attention" in kinds and values.get("sliding_window", 1) is None:
        yield "layer_types has 'sliding_attention', and sliding_window is null"
