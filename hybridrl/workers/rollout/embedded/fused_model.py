"""A forward pass of Llama's family in few operations, over the weights of a transformers model.

Transformers' own pass takes 300 small operations a layer, most of which cost more than they
compute when 128 rows of one token go through. Here matrices that read the same inputs are one
matrix in memory, and the model's parameters are views of it: a write to a parameter is a write to
the matrix. So nothing is derived from weights, and nothing becomes stale.

Legend: T tokens, W width of the hidden state, H query heads, J key-value heads, D size of a head, C
tokens of a slot, N tokens whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridrl.models.onednn import linear
from hybridrl.workers.rollout.embedded.kv_slots import KVStep
from hybridrl.workers.rollout.embedded.model import AdaptedLinear

_MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen2_moe", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """Linear layers of the same inputs as one, with their adapters."""

    weight_OI: Tensor
    bias_O: Tensor | None
    adapters: tuple[tuple[int, AdaptedLinear], ...]
    """Adapted layers, each with the index of its first output."""

    @classmethod
    def of(cls, layers: Sequence[nn.Module]) -> FusedLinear:
        """Move the layers' parameters next to each other."""
        bases = [layer.base if isinstance(layer, AdaptedLinear) else layer for layer in layers]
        weight_OI = _join([base.weight for base in bases])  # type: ignore[misc]
        biases = [base.bias for base in bases if base.bias is not None]
        bias_O = _join(biases) if biases else None  # type: ignore[arg-type]
        ends = torch.tensor([len(base.weight) for base in bases]).cumsum(0).tolist()  # type: ignore[arg-type]
        adapters = tuple(
            (end - len(layer.base.weight), layer)
            for end, layer in zip(ends, layers, strict=True)
            if isinstance(layer, AdaptedLinear)
        )
        return cls(weight_OI, bias_O, adapters)

    def __call__(self, inputs_TI: Tensor) -> Tensor:
        """Apply all: [T, I] to [T, O], outputs in the order of the layers."""
        outputs_TO = linear(inputs_TI, self.weight_OI, self.bias_O)
        for begin, layer in self.adapters:
            layer.add_adapter(inputs_TI, outputs_TO[:, begin : begin + layer.base.out_features])
        return outputs_TO


def _join(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Give parameters one memory, in order, and return all of it."""
    if len(parameters) == 1:
        return parameters[0].data
    joined = torch.cat([parameter.data for parameter in parameters])
    parts = torch.split(joined, [len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return joined


@dataclass(frozen=True, slots=True)
class _GatedMLP:
    gate_up: FusedLinear
    down: FusedLinear

    def __call__(self, inputs_TW: Tensor) -> Tensor:
        gate, up = self.gate_up(inputs_TW).chunk(2, dim=1)
        return self.down(F.silu(gate).mul_(up))


@dataclass(frozen=True, slots=True)
class _Experts:
    """A layer of experts, computed by transformers: its matrices are joined already."""

    block: nn.Module

    def __call__(self, inputs_TW: Tensor) -> Tensor:
        outputs_1TW: Tensor = self.block(inputs_TW[None])
        return outputs_1TW[0]


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """A decoder layer whose matrices were joined."""

    before_attention: nn.Module
    query_key_value: FusedLinear
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    output: FusedLinear
    before_mlp: nn.Module
    mlp: _GatedMLP | _Experts
    window: int | None  # of how many newest tokens it attends to; None: all

    def head_scales(self, num_heads: int, num_kv_heads: int) -> Tensor | None:
        """Return the factors of the norms of all heads, [H + J, D]; None: they have no norm."""
        if self.query_norm is None or self.key_norm is None:
            return None
        query_D: Any = self.query_norm.weight
        key_D: Any = self.key_norm.weight
        return torch.cat([query_D.expand(num_heads, -1), key_D.expand(num_kv_heads, -1)])


def fuse(model: PreTrainedModel) -> list[FusedLayer] | None:
    """Join the matrices of a model, before other code stores addresses of its parameters.

    Of an unknown family return None, and change nothing.
    """
    if model.config.model_type not in _MODEL_TYPES or model.config.hidden_act != "silu":
        return None
    settings, layers = model.config.to_dict(), model.model.layers
    kinds = settings.get("layer_types") or ["sliding_attention"] * len(layers)
    window = settings.get("sliding_window")
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    return [_fuse_layer(*each) for each in zip(layers, windows, strict=True)]


def _fuse_layer(layer: Any, window: int | None) -> FusedLayer:  # noqa: ANN401 - untyped modules
    attention, mlp = layer.self_attn, layer.mlp
    norms = dict(attention.named_children())
    fused_mlp: _GatedMLP | _Experts = _Experts(mlp)
    if "experts" not in dict(mlp.named_children()):
        gate_up = FusedLinear.of([mlp.gate_proj, mlp.up_proj])
        fused_mlp = _GatedMLP(gate_up, FusedLinear.of([mlp.down_proj]))
    return FusedLayer(
        before_attention=layer.input_layernorm,
        query_key_value=FusedLinear.of([attention.q_proj, attention.k_proj, attention.v_proj]),
        query_norm=norms.get("q_norm"),
        key_norm=norms.get("k_norm"),
        output=FusedLinear.of([attention.o_proj]),
        before_mlp=layer.post_attention_layernorm,
        mlp=fused_mlp,
        window=window,
    )


class FusedForward:
    """The forward passes of one program; weights must not change meanwhile."""

    def __init__(
        self, model: PreTrainedModel, layers: Sequence[FusedLayer], num_places: int
    ) -> None:
        """Prepare the passes over the layers from ``fuse``; ``num_places`` is C."""
        self._model = model
        self._layers = layers
        self._num_heads = model.config.num_attention_heads
        self._num_kv_heads = model.config.num_key_value_heads
        counts = (self._num_heads, self._num_kv_heads)
        self._head_scales = [layer.head_scales(*counts) for layer in layers]
        place_C = torch.arange(num_places, device=model.device)
        rotary: Any = model.model.rotary_emb
        embedded_1CW = model.get_input_embeddings()(place_C[None] * 0)
        cos_1CD, sin_1CD = rotary(embedded_1CW, place_C[None])
        half = cos_1CD.shape[-1] // 2
        sin_1CD[..., :half].neg_()  # of the half that is rotated and subtracted
        self._rotary_C2D = torch.stack([cos_1CD[0], sin_1CD[0]], 1)
        self._epsilon_float = float(model.config.rms_norm_eps)
        self._epsilon = self._rotary_C2D.new_tensor(self._epsilon_float)

    def __call__(
        self, token_T: Tensor, kv_step: KVStep, *, logits_at: Tensor | None = None
    ) -> Tensor:
        """Run a pass; see ``model.Forward``."""
        body = self._model.model
        hidden_TW = F.embedding(token_T, body.embed_tokens.weight)
        rotary_T2D = self._rotary_C2D.index_select(0, kv_step.position_T)
        rotary = rotary_T2D[:, :1], rotary_T2D[:, 1:]
        for number, layer in enumerate(self._layers):
            attended_TX = self._attend(number, layer, hidden_TW, rotary=rotary, kv_step=kv_step)
            hidden_TW = hidden_TW + layer.output(attended_TX)
            hidden_TW += layer.mlp(self._norm(layer.before_mlp, hidden_TW))
        if logits_at is not None:
            hidden_TW = hidden_TW.index_select(0, logits_at)
        head = self._model.get_output_embeddings()
        return linear(self._norm(body.norm, hidden_TW), head.weight, head.bias)

    def _attend(
        self,
        number: int,
        layer: FusedLayer,
        hidden_TW: Tensor,
        *,
        rotary: tuple[Tensor, Tensor],
        kv_step: KVStep,
    ) -> Tensor:
        """Return the attention outputs of a layer's heads, [T, H * D]."""
        num_tokens, num_turned = len(hidden_TW), self._num_heads + self._num_kv_heads
        states = layer.query_key_value(self._norm(layer.before_attention, hidden_TW))
        states = states.view(num_tokens, num_turned + self._num_kv_heads, -1)
        turned, value_TJD = states[:, :num_turned], states[:, num_turned:]
        scales = self._head_scales[number]
        if scales is not None:
            turned = self._normed(turned).mul_(scales)
        cos_T1D, sin_T1D = rotary
        half = turned.shape[-1] // 2
        turned = torch.addcmul(turned * cos_T1D, turned.roll(half, -1), sin_T1D)
        key_TJD = turned[:, self._num_heads :]
        query_THD = turned[:, : self._num_heads]
        return kv_step.attend(number, query_THD, (key_TJD, value_TJD), window=layer.window)

    def _norm(self, module: nn.Module, states: Tensor) -> Tensor:
        # The factor apart: transformers rounds to the model's type before it multiplies, too.
        return self._normed(states).mul_(module.weight)  # type: ignore[arg-type]

    def _normed(self, states: Tensor) -> Tensor:
        """Divide by the root of the mean square over the last dimension."""
        num_entries = states.shape[-1]
        if states.dtype is not torch.float32:
            return F.rms_norm(states, (num_entries,), None, self._epsilon_float)
        length = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        mean_square = torch.addcmul(self._epsilon, length, length, value=1 / num_entries)
        return states * mean_square.rsqrt_()
