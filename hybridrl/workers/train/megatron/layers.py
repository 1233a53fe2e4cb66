"""The layers of megatron-core's decoder.

Legend: T packed tokens (of this rank), S keys taken, N query heads and J key-value heads of this
rank, D size of a head, H hidden.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from hybridrl.models.architecture import Architecture
from hybridrl.models.packed_attention import PackLayout
from hybridrl.models.packed_share import SharedLayout
from hybridrl.models.varlen import VarlenCall, VarlenLayout
from hybridrl.workers.train.megatron.megatron_core import (
    AttnBackend,
    ColumnParallelLinear,
    MegatronModule,
    MoELayer,
    RowParallelLinear,
    TEDotProductAttention,
    TENorm,
    TransformerBlockSubmodules,
    TransformerConfig,
    TransformerLayer,
    VocabParallelEmbedding,
    checkpoint,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_num_layers_to_build,
    get_transformer_layer_offset,
    set_tensor_model_parallel_attributes,
)
from hybridrl.workers.train.megatron.routing import PackedRows, Router


class PackedAttention(MegatronModule):
    """The core of attention over a micro-batch, with the same kernels as models on FSDP2."""

    def __init__(self, config: TransformerConfig, *_: object, **__: object) -> None:
        # Megatron-core passes more: layer, mask, dropout. A row is causal, and has no dropout.
        super().__init__(config=config)

    def forward(
        self,
        query_T1ND: Tensor,
        key_T1JD: Tensor,
        value_T1JD: Tensor,
        _attention_mask: None,
        *,
        packed_seq_params: PackedRows,
        **_: object,
    ) -> Tensor:
        """Attend causally within each row; returns [T, 1, N D]."""
        query, key, value = query_T1ND.squeeze(1), key_T1JD.squeeze(1), value_T1JD.squeeze(1)
        return self._attend(packed_seq_params.layout, query, key, value).flatten(1)[:, None]

    def _attend(
        self, layout: PackLayout, query_TND: Tensor, key_TJD: Tensor, value_TJD: Tensor
    ) -> Tensor:
        return layout.attend(query_TND, key_TJD, value_TJD, scale=None)


class FusedAttention(PackedAttention):
    """The core of attention by TransformerEngine, in its format ``thd``; unproved on a GPU.

    It computes micro-batches whose rows lie end to end. Any other layout, such as one with shared
    prompts, uses the kernel of the base class. With context parallelism keys and values are
    gathered as there, and TransformerEngine attends from this rank's spans to all tokens before
    them. Its own exchange of keys in a ring would need rows in equal pieces.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(config)
        alone = copy(config)
        alone.context_parallel_size = 1
        self.kernel = TEDotProductAttention(alone, *args, **kwargs)

    def _attend(
        self, layout: PackLayout, query_TND: Tensor, key_TJD: Tensor, value_TJD: Tensor
    ) -> Tensor:
        if isinstance(layout, VarlenLayout) and layout.prompts is None:
            states = (query_TND, key_TJD, value_TJD)
            return self._compute(states, layout.own, mask="padding_causal")
        if isinstance(layout, SharedLayout) and isinstance(layout.attention, VarlenLayout):
            spans = layout.attention.own
            states = (query_TND, *spans.seen(*layout.gathered(key_TJD, value_TJD)))
            return self._compute(states, spans, mask="padding_causal_bottom_right")
        return super()._attend(layout, query_TND, key_TJD, value_TJD)

    def _compute(
        self, states: tuple[Tensor, Tensor, Tensor], call: VarlenCall, *, mask: str
    ) -> Tensor:
        # Past megatron-core's own forward pass, whose masks lack the one aligned to the last key.
        parent: Any = super(TEDotProductAttention, self.kernel)
        attended: Tensor = parent.forward(
            *states,
            None,
            qkv_format="thd",
            cu_seqlens_q=call.query_offsets,
            cu_seqlens_kv=call.key_offsets,
            max_seqlen_q=call.longest[0],
            max_seqlen_kv=call.longest[1],
            attn_mask_type=mask,
        )
        return attended


class RoutedLayer(TransformerLayer):
    """A layer with experts, which hands the routing of the micro-batch to its router."""

    def forward(self, *args: Any, packed_seq_params: PackedRows, **kwargs: Any) -> Any:  # noqa: ANN401
        """Compute the layer; see TransformerLayer."""
        router: Router = self.mlp.router
        router.current = packed_seq_params.routing
        try:
            return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            router.current = None


class RecomputedExperts(MoELayer):
    """The experts of a layer, recomputed in the backward pass with the same routing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **kwargs)
        self.moe_layer_recompute = False  # its own would call a router without routing

    def forward(self, hidden_T1H: Tensor, **kwargs: Any) -> Any:  # noqa: ANN401
        """Compute the experts; see MoELayer."""
        if not self.training:
            return super().forward(hidden_T1H, **kwargs)
        router: Router = self.router
        routing, compute = router.current, super().forward

        def compute_routed(hidden_T1H: Tensor) -> Any:  # noqa: ANN401
            before, router.current = router.current, routing
            try:
                return compute(hidden_T1H, **kwargs)
            finally:
                router.current = before

        return checkpoint(compute_routed, False, hidden_T1H)  # noqa: FBT003 - megatron's


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv:1910.07467) whose weight may see only a part of the tokens.

    Megatron-core's own, without TransformerEngine, rejects sequence parallelism. The mark on the
    weight makes it sum the gradient over the tensor-parallel ranks.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, **_: object
    ) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """Normalise the last dimension, in float32."""
        wide = rms_norm(states.float(), states.shape[-1:], eps=self._eps)
        return self.weight * wide.to(states.dtype)


def decoder_layers(
    config: TransformerConfig, architecture: Architecture, *, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return the layers of one stage; megatron-core's own get our norms."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    is_fused = config.transformer_impl == "transformer_engine"
    get_layer = get_gpt_layer_with_transformer_engine_spec
    if not is_fused:
        get_layer = partial(get_gpt_layer_local_spec, normalization="RMSNorm")
    is_local = config.attention_backend is AttnBackend.local
    attention = PackedAttention if is_local else FusedAttention
    is_selective = config.recompute_granularity == "selective"
    recomputes_experts = is_selective and "moe" in config.recompute_modules
    specs = []
    for layer in range(first, first + num_layers):
        is_sparse = architecture.is_sparse(layer)
        spec = get_layer(
            num_experts=config.num_moe_experts if is_sparse else None,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
        attention_spec = spec.submodules.self_attention.submodules
        attention_spec.core_attention = attention
        if not is_fused:
            spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
            if config.qk_layernorm:
                attention_spec.q_layernorm = attention_spec.k_layernorm = RMSNorm
        if is_sparse:
            spec.module = RoutedLayer
            kind = RecomputedExperts if recomputes_experts else MoELayer
            spec.submodules.mlp = _with_router(spec.submodules.mlp, kind)
        specs.append(spec)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=TENorm if is_fused else RMSNorm)


def _with_router(mlp: Any, kind: type) -> Any:  # noqa: ANN401
    """Return the builder of an expert layer with our router; since 0.17 it is a partial."""
    if not isinstance(mlp, partial):
        mlp.module, mlp.submodules.router = kind, Router
        return mlp
    mlp.keywords["submodules"].router = Router
    return partial(kind, **mlp.keywords)


def mark_shards(model: nn.Module) -> None:
    """Mark the weights that are shards; megatron-core marks only those it initialises.

    Without the mark a gradient norm counts only the shard of the first tensor-parallel rank.
    """
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and _is_replicated(module):
            # Megatron-core sums gradients of experts over expert-parallel ranks, or not at all.
            module.weight.sequence_parallel = module.config.sequence_parallel
        elif isinstance(module, RowParallelLinear):
            _mark(module.weight, dim=1)
        elif isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            _mark(module.weight, dim=0)


def _is_replicated(layer: ColumnParallelLinear | RowParallelLinear) -> bool:
    """Whether each tensor-parallel rank has all of an expert's layer, for its own tokens."""
    is_alone = layer.is_expert and not layer.expert_parallel and layer.tp_group.size() == 1
    # Since megatron-core 0.17 it is reduced over the expert data-parallel ranks.
    return is_alone and getattr(layer.weight, "allreduce", True)


def _mark(weight: nn.Parameter | None, *, dim: int) -> None:
    # A tied output layer has no weight of its own.
    if weight is not None and not hasattr(weight, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(weight, True, dim, 1)  # noqa: FBT003 - megatron's
