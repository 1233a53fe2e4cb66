"""The only reader of a model's config.json: plan, checks, megatron-core and rollout engines use it.

Legend: H hidden, L layers, N query heads, J key-value heads, D size of a head, I inside the MLP, V
vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hybridrl.config.model import STARTER_SIDE, ModelConfig, StarterConfig
from hybridrl.errors import ModelError, shown, suggest_name
from hybridrl.models.families import (
    FAMILIES,
    ExpertNames,
    Family,
    is_recurrent_kind,
    layer_kinds,
    rope_of,
    unsupported_settings,
)
from hybridrl.models.model_folder import SEEING, read_settings

MLP_MODULES = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How Llama 3.1 scales its rotary embedding (arXiv:2407.21783, 3.4.2)."""

    factor: float  # long wavelengths grow by this factor
    # wavelengths over `original_max_positions / low_frequency_factor` are long
    low_frequency_factor: float
    # wavelengths under `original_max_positions / high_frequency_factor` are not changed
    high_frequency_factor: float
    original_max_positions: int  # context of the pre-training, in tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """The mixture-of-experts layers of a model."""

    num_experts: int  # experts of one layer, over all ranks
    num_per_token: int
    intermediate_size: int  # width inside one expert
    normalizes_weights: bool  # whether the weights of a token's experts are divided by their sum
    # layers, from 0, that have experts; the others have one dense MLP
    sparse_layers: tuple[int, ...]
    shared_size: int = 0  # width inside the expert that takes every token; 0: there is none
    # whether it is weighed by the sigmoid of one more linear layer (Qwen2-MoE)
    has_shared_gate: bool = False
    has_router_bias: bool = False  # whether routers have a bias that is a parameter in transformers
    has_biases: bool = False  # whether each matrix of an expert has a bias (gpt-oss)
    names: ExpertNames = field(default_factory=ExpertNames)  # names in the model's files


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaNet:
    """The layers that have a state instead of attention (gated delta rules: arXiv:2412.06464)."""

    layers: tuple[int, ...]  # their numbers, from 0
    num_key_heads: int
    key_head_size: int
    num_value_heads: int
    value_head_size: int
    kernel_size: int  # newest tokens that the convolution before it sees

    @property
    def _widths(self) -> tuple[int, int]:
        """Of the convolution, over queries, keys and values; and of the values."""
        values = self.num_value_heads * self.value_head_size
        return 2 * self.num_key_heads * self.key_head_size + values, values

    @property
    def state_size(self) -> int:
        """Numbers of one layer's state of a row."""
        of_heads = self.num_value_heads * self.key_head_size * self.value_head_size
        return of_heads + self._widths[0] * self.kernel_size

    def count_parameters(self, hidden_size: int) -> int:
        """Count the parameters of one layer, without MLP and the norms around it."""
        convolved, values = self._widths
        projections = hidden_size * (convolved + 2 * values + 2 * self.num_value_heads)
        of_heads = 2 * self.num_value_heads + self.value_head_size
        return projections + convolved * self.kernel_size + of_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Keys and values made of fewer numbers (arXiv:2405.04434, 2.1)."""

    query_rank: int  # numbers of which a token's queries are made; 0: of all
    rank: int  # numbers of which keys, but for their rotary part, and values of all heads are made
    plain_size: int  # of a head's key without rotary embedding
    rotary_size: int  # of the part with it, which all heads share
    value_size: int

    @property
    def cached_size(self) -> int:
        """Numbers that a server keeps of a token in each layer."""
        return self.rank + self.rotary_size

    def linear_sizes(self, hidden_size: int, num_heads: int) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of each linear layer of one layer's attention."""
        queries = num_heads * (self.plain_size + self.rotary_size)
        of_queries = {"q_proj": (queries, hidden_size)}
        if self.query_rank:
            of_queries = {
                "q_a_proj": (self.query_rank, hidden_size),
                "q_b_proj": (queries, self.query_rank),
            }
        return of_queries | {
            "kv_a_proj_with_mqa": (self.cached_size, hidden_size),
            "kv_b_proj": (num_heads * (self.plain_size + self.value_size), self.rank),
            "o_proj": (hidden_size, num_heads * self.value_size),
        }

    def count_parameters(self, hidden_size: int, num_heads: int) -> int:
        """Count those of one layer's attention."""
        sizes = self.linear_sizes(hidden_size, num_heads).values()
        return sum(outputs * inputs for outputs, inputs in sizes) + self.query_rank + self.rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Tower:
    """The part that sees: blocks over patches, then layers that make patches features of tokens."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    output_size: int  # of a token's feature
    patch_size: int  # numbers of a patch, of all frames and colours
    num_merged: int  # patches of a token
    num_positions: int  # rows of a learned embedding of positions, as in Qwen3-VL; 0: it has none
    is_gated: bool  # whether MLPs have a gate, and norms no bias (Qwen2.5-VL)
    # layers of the language model that get features of the tower's middle, too (Qwen3)
    num_deeper: int

    def count_parameters(self) -> int:
        """Count all."""
        width, inner, merged = self.hidden_size, self.intermediate_size, self.num_merged
        norm = width if self.is_gated else 2 * width  # without and with a bias
        block = 2 * norm + 4 * width * (width + 1) + 2 * width * inner + inner + width
        block += self.is_gated * (width * inner + inner)
        wide = merged * width
        merger = wide * (wide + 1) + (wide + 1) * self.output_size
        deeper = self.num_deeper * (merger + merged * norm)
        patches = width * (self.patch_size + (self.num_positions > 0) + self.num_positions)
        return patches + self.num_layers * block + norm + merger + deeper


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A decoder of the llama family: grouped queries, gated MLPs, RMS norms, rotary.

    Layers of ``delta_net`` have it in place of attention.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_key_value_heads: int
    head_size: int
    intermediate_size: int  # width inside the dense MLPs
    vocab_size: int  # rows of the embedding in the files, without padding
    max_positions: int  # longest sequence that the model was made for, in tokens
    is_tied: bool  # whether the output embedding is the input embedding
    has_qkv_bias: bool
    has_output_bias: bool  # whether the attention's last projection has a bias
    has_mlp_bias: bool
    has_head_norms: bool  # whether queries and keys are normalised head by head (Qwen3)
    # whether all queries of a token are normalised together, and all keys (OLMo 2)
    norms_all_heads: bool = False
    num_norms: int = 2  # norms of the residual stream in a block
    # whether each head has a sink: a score that takes its share of the attention (gpt-oss)
    has_sinks: bool = False
    # linear layers that stand for several: `qkv_proj`, `gate_up_proj` (Phi-3)
    fused: tuple[str, ...] = ()
    norm_eps: float = 1e-6  # added to the mean square in RMS norms
    rope_theta: float = 10_000.0  # base of the rotary wavelengths
    rope_scaling: RopeScaling | None = None
    # tokens back to which attention reaches in Mistral and Mixtral; None: to the row's begin
    window: int | None = None
    experts: MoEConfig | None = None  # None in a dense model
    latent: LatentAttention | None = None  # None where heads have keys and values of their own
    delta_net: DeltaNet | None = None  # None where every layer attends
    # whether `q_proj` gives twice as many numbers: a gate of the attention's output
    has_output_gate: bool = False
    tower: Tower | None = None  # None in a model of text alone
    # a classifier gives scores to a sequence, or to its tokens. None predicts the next token.
    classifier: Literal["sequence", "token"] | None = None

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        return self.experts is not None and layer in self.experts.sparse_layers

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has a state in place of keys and values."""
        return self.delta_net is not None and layer in self.delta_net.layers

    @property
    def has_dense_layers(self) -> bool:
        """Whether a layer has a dense MLP."""
        return self.experts is None or len(self.experts.sparse_layers) < self.num_layers

    @property
    def num_attention_layers(self) -> int:
        """Layers that have keys and values."""
        return self.num_layers - (0 if self.delta_net is None else len(self.delta_net.layers))

    @property
    def query_size(self) -> int:
        """Width of all query heads, N D."""
        return self.num_heads * self.head_size

    @property
    def key_size(self) -> int:
        """Width of all key heads, J D; the values have the same."""
        return self.num_key_value_heads * self.head_size

    @property
    def linear_sizes(self) -> Mapping[str, tuple[int, int]]:
        """(outputs, inputs) of each linear layer of a dense block, by the end of its name."""
        hidden, query, inner = self.hidden_size, self.query_size, self.intermediate_size
        attention: dict[str, tuple[int, int]] = {
            "q_proj": (query * (1 + self.has_output_gate), hidden),
            "k_proj": (self.key_size, hidden),
            "v_proj": (self.key_size, hidden),
            "o_proj": (hidden, query),
        }
        if "qkv_proj" in self.fused:
            attention = {"qkv_proj": (query + 2 * self.key_size, hidden), "o_proj": (hidden, query)}
        if self.latent is not None:
            attention = self.latent.linear_sizes(hidden, self.num_heads)
        experts = self.experts
        if experts is not None and (experts.has_biases or experts.names.gate not in MLP_MODULES):
            return attention  # rollout engines adapt no layers of these names, nor fused ones
        mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
        if "gate_up_proj" in self.fused:
            mlp = {"gate_up_proj": (2 * inner, hidden)}
        return attention | mlp | {"down_proj": (hidden, inner)}


_POSITIONS = ("max_position_embeddings", "original_max_position_embeddings")
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "moe_k")
_MOST = {"num_hidden_layers": 10_000, **dict.fromkeys(_POSITIONS, 2**40)}


def architecture_of(model: ModelConfig) -> Architecture:
    """Return the architecture of the model from which a run starts; see ``read_architecture``."""
    if model.path is not None:
        return read_architecture(Path(model.path))
    if (starter := model.starter) is None:
        raise ModelError("there is no model to plan for; set model.path=FOLDER, or model=starter")
    settings = starter_settings(starter)
    return _of_values(settings, FAMILIES[settings["model_type"]])


def starter_settings(starter: StarterConfig) -> dict[str, Any]:
    """Return the settings that are read of config.json; run/starter.py makes the real model."""
    same = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    sees = starter.num_vision_layers > 0
    quarter = starter.hidden_size // starter.num_attention_heads // 2 // 4
    # Angles of time, and of rows and columns.
    sections = [quarter * 2, quarter, quarter]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    return {
        **{name: getattr(starter, name) for name in same},
        **({"rope_parameters": rope, "vision_config": starter_tower(starter)} if sees else {}),
        "architectures": [SEEING["qwen2_5_vl"] if sees else "Qwen3ForCausalLM"],
        "model_type": "qwen2_5_vl_text" if sees else "qwen3",
        "num_hidden_layers": starter.num_layers,
        "head_dim": starter.hidden_size // starter.num_attention_heads,
        "vocab_size": starter.vocab_size,
        "max_position_embeddings": starter.max_position_embeddings,
        "tie_word_embeddings": True,
    }


def starter_tower(starter: StarterConfig) -> dict[str, Any]:
    """Return ``vision_config`` of a made model's config.json; empty: it sees nothing."""
    if not starter.num_vision_layers:
        return {}
    return {
        "depth": starter.num_vision_layers,
        "hidden_size": starter.hidden_size,
        "intermediate_size": starter.intermediate_size,
        "num_heads": starter.num_attention_heads,
        "out_hidden_size": starter.hidden_size,
        "patch_size": STARTER_SIDE // 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 64 * STARTER_SIDE,
        "fullatt_block_indexes": [*range(starter.num_vision_layers)],
    }


def find_architecture(model: ModelConfig) -> Architecture | None:
    """Return the architecture for the rules to check; None where it cannot be read.

    ``check_model_folder`` and ``check_engines_know_the_model`` report the reason.
    """
    try:
        return architecture_of(model)
    except (ModelError, ArithmeticError):  # a made model without heads
        return None


def read_architecture(folder: Path) -> Architecture:
    """Read the architecture of a Hugging Face folder.

    ModelError if config.json cannot be read, holds an illegal size, or names an unknown family.
    """
    file = folder / "config.json"
    values = read_settings(folder)
    model_type = values["model_type"]
    if model_type not in FAMILIES:
        raise ModelError(
            f"{file}: model_type={model_type!r} is not supported: "
            f"{suggest_name(model_type, list(FAMILIES))} Set model.path to such a model"
        )
    family = FAMILIES[model_type]
    for problem in unsupported_settings(values, family):
        raise ModelError(f"{file}: {problem}. Set model.path to another model")
    try:
        return _of_values({**family.defaults, **values}, family)
    except (ValueError, TypeError, KeyError, ArithmeticError) as err:
        raise ModelError(
            f"{file}: a size is not an integer above 0 ({err}); download the folder again"
        ) from err


@dataclass(frozen=True, slots=True)
class _SizeReader:
    """Integers of config.json, or of the family where config.json has none."""

    values: Mapping[str, Any]
    family: Family

    def __call__(self, name: str, otherwise: int = 0) -> int:
        value = self.values.get(name)
        number = self.family.defaults.get(name, otherwise) if value is None else int(str(value))
        if not 0 <= number <= _MOST.get(name, 2**24):
            raise ValueError(f"{name}={shown(number)} is beyond any model")
        return number

    def first(self, *names: str) -> int:
        """Return the first that is not 0 of what families name differently; 0 if all are."""
        return next(filter(None, map(self, names)), 0)


def _of_values(values: Mapping[str, Any], family: Family) -> Architecture:
    size = _SizeReader(values, family)
    num_heads, hidden_size = size("num_attention_heads"), size("hidden_size")
    latent = _latent(size) if family.has_latents else None
    head_size = size("head_dim", hidden_size // num_heads)
    if latent is not None:
        head_size = latent.plain_size + latent.rotary_size
    has_bias = bool(values.get(family.bias_setting))
    rope = rope_of(values)
    return Architecture(
        model_type=values["model_type"],
        hidden_size=hidden_size,
        num_layers=size("num_hidden_layers"),
        num_heads=num_heads,
        num_key_value_heads=size("num_key_value_heads", num_heads),
        head_size=head_size,
        intermediate_size=size("intermediate_size"),
        vocab_size=size("vocab_size"),
        max_positions=_max_positions(rope, size),
        is_tied=bool(values.get("tie_word_embeddings")),
        has_qkv_bias=has_bias or family.always_has_qkv_bias,
        has_output_bias=has_bias and family.has_output_bias,
        has_mlp_bias=bool(values.get("mlp_bias")),
        has_head_norms=family.has_head_norms or bool(values.get("use_qk_norm")),
        norms_all_heads=family.norms_all_heads,
        num_norms=family.num_norms,
        has_sinks=family.has_sinks,
        fused=family.fused,
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=_scaling(rope, size) if rope["rope_type"] == "llama3" else None,
        window=_window(values, size) if "sliding_window" in family.defaults else None,
        experts=_experts(values, size) if {*_PER_TOKEN} & family.defaults.keys() else None,
        latent=latent,
        delta_net=_delta_net(values, size),
        has_output_gate=family.has_output_gate,
        tower=_tower(values["vision_config"]) if values.get("vision_config") else None,
        classifier=_classifier(values),
    )


def _tower(values: Mapping[str, Any]) -> Tower:
    side, frames = int(values["patch_size"]), int(values.get("temporal_patch_size", 2))
    width = int(values.get("embed_dim") or values["hidden_size"])  # the first: Qwen2-VL
    return Tower(
        num_layers=int(values["depth"]),
        hidden_size=width,
        intermediate_size=int(values.get("intermediate_size") or width * values["mlp_ratio"]),
        output_size=int(values.get("out_hidden_size") or values["hidden_size"]),
        patch_size=3 * frames * side**2,
        num_merged=int(values.get("spatial_merge_size", 2)) ** 2,
        num_positions=int(values.get("num_position_embeddings", 0)),
        is_gated=not {"embed_dim", "num_position_embeddings"} & values.keys(),
        num_deeper=len(values.get("deepstack_visual_indexes", ())),
    )


def _window(values: Mapping[str, Any], size: _SizeReader) -> int | None:
    """Return the window of all layers; one as long as the context hides nothing."""
    if values["sliding_window"] is None:
        return None
    width = size("sliding_window")
    return width if width < size("max_position_embeddings") else None


def _classifier(values: Mapping[str, Any]) -> Literal["sequence", "token"] | None:
    names = values.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if name.endswith("ForSequenceClassification"):
        return "sequence"
    return "token" if name.endswith("ForTokenClassification") else None


def _max_positions(rope: Mapping[str, Any], size: _SizeReader) -> int:
    """Return the context; with longrope that of the pre-training.

    Longer rows have other angles, which a shorter row would get from a neighbour in its batch.
    """
    longest = size("max_position_embeddings")
    if rope["rope_type"] != "longrope":
        return longest
    given = rope.get("original_max_position_embeddings")
    return min(longest, int(given or size("original_max_position_embeddings")))


def _scaling(rope: Mapping[str, Any], size: _SizeReader) -> RopeScaling:
    return RopeScaling(
        factor=float(rope["factor"]),
        low_frequency_factor=float(rope["low_freq_factor"]),
        high_frequency_factor=float(rope["high_freq_factor"]),
        original_max_positions=int(
            rope.get("original_max_position_embeddings") or size("max_position_embeddings")
        ),
    )


def _latent(size: _SizeReader) -> LatentAttention:
    has_query_rank = size.values.get("q_lora_rank", 1) is not None
    return LatentAttention(
        query_rank=size("q_lora_rank") if has_query_rank else 0,
        rank=size("kv_lora_rank"),
        plain_size=size("qk_nope_head_dim"),
        rotary_size=size("qk_rope_head_dim"),
        value_size=size("v_head_dim"),
    )


def _delta_net(values: Mapping[str, Any], size: _SizeReader) -> DeltaNet | None:
    kinds = layer_kinds(values, size.family)
    layers = tuple(number for number, kind in enumerate(kinds) if is_recurrent_kind(kind))
    if not layers:
        return None
    return DeltaNet(
        layers=layers,
        num_key_heads=size("linear_num_key_heads"),
        key_head_size=size("linear_key_head_dim"),
        num_value_heads=size("linear_num_value_heads"),
        value_head_size=size("linear_value_head_dim"),
        kernel_size=size("linear_conv_kernel_dim"),
    )


def _experts(values: Mapping[str, Any], size: _SizeReader) -> MoEConfig | None:
    """Read which layers have experts, by the rule of transformers' Qwen3-MoE."""
    num_experts = size.first(*_NUM_EXPERTS)
    dense = {n for n in values.get("mlp_only_layers") or () if isinstance(n, int)}
    dense |= {*range(size.first("first_k_dense_replace", "moe_layer_start_index"))}
    every = size("decoder_sparse_step", size("moe_layer_interval", 1))
    layers = tuple(
        n for n in range(size("num_hidden_layers")) if n not in dense and (n + 1) % every == 0
    )
    if not (num_experts and layers):
        return None
    width = size("moe_intermediate_size", size("intermediate_size"))
    num_shared = size.first("n_shared_experts", "moe_num_shared_experts")
    return MoEConfig(
        num_experts=num_experts,
        num_per_token=size.first(*_PER_TOKEN),
        intermediate_size=width,
        normalizes_weights=bool(values.get("norm_topk_prob")),
        sparse_layers=layers,
        shared_size=size("shared_expert_intermediate_size") or num_shared * width,
        has_shared_gate=size.family.has_shared_gate,
        has_router_bias=size.family.has_router_bias,
        has_biases=size.family.has_fused_experts,
        names=size.family.expert_names,
    )
