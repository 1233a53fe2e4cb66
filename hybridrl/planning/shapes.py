"""The sizes of a model, read from its config.json or from the section that describes a made one.

Legend: H hidden, Y layers, N query heads, J key-value heads, D size of a head, I inside the MLP, V
vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridrl.config.model import ModelConfig, StarterConfig
from hybridrl.config.model_folder import read_settings
from hybridrl.errors import ModelError, shown, suggest_name


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSizes:
    """The mixture of experts that some layers have."""

    num_experts: int
    num_per_token: int
    """Experts that each token goes through."""

    intermediate_size: int
    """Inside one expert."""

    layers: frozenset[int]
    """Which layers have them, counted from 0; the others have a dense MLP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder of the llama family: grouped queries, a gated MLP, RMS norms."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int

    is_tied: bool
    """The output embedding is the input embedding."""

    has_qkv_bias: bool
    has_output_bias: bool
    """Of the attention's last projection."""

    has_mlp_bias: bool

    has_head_norms: bool
    """Queries and keys are normalised head by head (Qwen3)."""

    experts: ExpertSizes | None = None
    """In place of the MLP, in some of the layers."""

    @property
    def query_size(self) -> int:
        """Width of all query heads, N D."""
        return self.num_heads * self.head_size

    @property
    def key_size(self) -> int:
        """Width of all key heads, J D; the values have it too."""
        return self.num_key_value_heads * self.head_size

    @property
    def linear_sizes(self) -> Mapping[str, tuple[int, int]]:
        """(outputs, inputs) of each linear layer of a block, by the last part of its name."""
        hidden, query, key, inner = (
            self.hidden_size,
            self.query_size,
            self.key_size,
            self.intermediate_size,
        )
        return {
            "q_proj": (query, hidden),
            "k_proj": (key, hidden),
            "v_proj": (key, hidden),
            "o_proj": (hidden, query),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }

    @property
    def num_block_parameters(self) -> int:
        """Parameters of one transformer block with a dense MLP."""
        hidden, inner = self.hidden_size, self.intermediate_size
        linear = sum(outputs * inputs for outputs, inputs in self.linear_sizes.values())
        biases = self.has_qkv_bias * (self.query_size + 2 * self.key_size)
        biases += self.has_output_bias * hidden + self.has_mlp_bias * (2 * inner + hidden)
        head_norms = self.has_head_norms * 2 * self.head_size
        return linear + biases + head_norms + 2 * hidden

    @property
    def num_layers_with_experts(self) -> int:
        """How many layers have experts in place of the MLP."""
        return len(self.experts.layers) if self.experts else 0

    @property
    def num_extra_parameters(self) -> int:
        """Parameters that a layer has more with experts than with a dense MLP, router included."""
        if self.experts is None:
            return 0
        dense, inner = 3 * self.intermediate_size, 3 * self.experts.intermediate_size
        return self.hidden_size * (self.experts.num_experts * (inner + 1) - dense)

    @property
    def num_embedding_parameters(self) -> int:
        """Parameters of one embedding, V H."""
        return self.vocab_size * self.hidden_size

    @property
    def num_root_parameters(self) -> int:
        """Parameters outside the blocks: one embedding or two, and the last norm."""
        return (1 if self.is_tied else 2) * self.num_embedding_parameters + self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All parameters, tied ones once: what transformers counts."""
        blocks = self.num_layers * self.num_block_parameters
        blocks += self.num_layers_with_experts * self.num_extra_parameters
        return blocks + self.num_root_parameters


@dataclass(frozen=True, slots=True)
class _Family:
    """What a config.json leaves out is what transformers' class of that family says."""

    sizes: Mapping[str, int]
    has_head_norms: bool = False
    always_has_qkv_bias: bool = False
    has_output_bias: bool = True


_QWEN = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 151936,
}
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
_QWEN_MOE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
}
_HIGHEST = {"num_hidden_layers": 10_000}  # layers are counted one by one
_FAMILIES = {
    "llama": _Family(_LLAMA),
    "qwen2": _Family(_QWEN, always_has_qkv_bias=True, has_output_bias=False),
    "qwen3": _Family({**_QWEN, "head_dim": 128}, has_head_norms=True),
    "qwen3_moe": _Family(_QWEN_MOE, has_head_norms=True),
}


def shape_of(model: ModelConfig) -> ModelShape:
    """Return the sizes of the model that a run starts from.

    Raises:
        ModelError: there is none, or its config.json cannot be read or is of an unknown family.
    """
    if model.path is not None:
        return read_shape(Path(model.path))
    if model.starter is None:
        raise ModelError("there is no model to plan for; set model.path=FOLDER, or model=starter")
    return _starter_shape(model.starter)


def read_shape(folder: Path) -> ModelShape:
    """Read the sizes from a Hugging Face folder.

    Raises:
        ModelError: config.json cannot be read, holds an odd size, or is of an unknown family.
    """
    file = folder / "config.json"
    values = read_settings(folder)
    model_type = values["model_type"]
    if model_type not in _FAMILIES:
        raise ModelError(
            f"{file}: there is no plan for model_type={model_type!r}: "
            f"{suggest_name(model_type, list(_FAMILIES))} Set model.path to such a model"
        )
    try:
        return _from_values(values, _FAMILIES[model_type])
    except (ValueError, TypeError, ZeroDivisionError) as err:
        raise ModelError(
            f"{file}: a size is no whole number above 0 ({err}); download the folder again"
        ) from err


def _from_values(values: Mapping[str, object], family: _Family) -> ModelShape:
    def size(name: str, otherwise: int = 0) -> int:
        value = values.get(name, family.sizes.get(name))
        number = otherwise if value is None else int(str(value))
        if not 0 <= number <= _HIGHEST.get(name, 2**24):
            raise ValueError(f"{name}={shown(number)} is beyond any model")
        return number

    num_heads, hidden_size = size("num_attention_heads"), size("hidden_size")
    has_bias = bool(values.get("attention_bias"))
    return ModelShape(
        hidden_size=hidden_size,
        num_layers=size("num_hidden_layers"),
        num_heads=num_heads,
        num_key_value_heads=size("num_key_value_heads", num_heads),
        head_size=size("head_dim", hidden_size // num_heads),
        intermediate_size=size("intermediate_size"),
        vocab_size=size("vocab_size"),
        is_tied=bool(values.get("tie_word_embeddings")),
        has_qkv_bias=has_bias or family.always_has_qkv_bias,
        has_output_bias=has_bias and family.has_output_bias,
        has_mlp_bias=bool(values.get("mlp_bias")),
        has_head_norms=family.has_head_norms,
        experts=_experts(values, size) if "num_experts" in family.sizes else None,
    )


def _experts(values: Mapping[str, object], size: Callable[[str], int]) -> ExpertSizes | None:
    """Read which layers have experts, as transformers' Qwen3-MoE decides it."""
    num_experts = size("num_local_experts") or size("num_experts")  # as transformers 5 writes it
    listed = values.get("mlp_only_layers") or []
    dense = set(listed) if isinstance(listed, list) else set()
    every = size("decoder_sparse_step")
    layers = {
        n for n in range(size("num_hidden_layers")) if n not in dense and (n + 1) % every == 0
    }
    if not (num_experts and layers):
        return None
    return ExpertSizes(
        num_experts=num_experts,
        num_per_token=size("num_experts_per_tok"),
        intermediate_size=size("moe_intermediate_size"),
        layers=frozenset(layers),
    )


def _starter_shape(starter: StarterConfig) -> ModelShape:
    return ModelShape(
        hidden_size=starter.hidden_size,
        num_layers=starter.num_layers,
        num_heads=starter.num_attention_heads,
        num_key_value_heads=starter.num_key_value_heads,
        head_size=starter.hidden_size // starter.num_attention_heads,
        intermediate_size=starter.intermediate_size,
        vocab_size=starter.vocab_size,
        is_tied=True,
        has_qkv_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        has_head_norms=True,
    )
