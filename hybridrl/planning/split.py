"""The parameters of a model."""

from __future__ import annotations

from hybridrl.config.model import LoraConfig
from hybridrl.models.architecture import MLP_MODULES, Architecture

_ROWS_PER_RANK = 8
"""The vocabulary is padded to a multiple of this many rows on each tensor-parallel rank."""


def padded_vocabulary(vocab_size: int, *, tp_size: int) -> int:
    """Return the rows of a padded embedding: a multiple of 8 on every tensor-parallel rank."""
    multiple = _ROWS_PER_RANK * tp_size
    return -(-vocab_size // multiple) * multiple


def count_parameters(model: Architecture) -> int:
    """Count all parameters, tied ones once, as transformers does."""
    num_sparse = len(model.experts.sparse_layers) if model.experts else 0
    blocks = num_sparse * _count_block(model, is_sparse=True)
    blocks += (model.num_layers - num_sparse) * _count_block(model, is_sparse=False)
    if (net := model.delta_net) is not None:
        other = net.count_parameters(model.hidden_size) - _count_attention(model)
        blocks += len(net.layers) * other
    if model.tower is not None:
        blocks += model.tower.count_parameters()
    num_embeddings = 1 if model.is_tied else 2
    return blocks + num_embeddings * model.vocab_size * model.hidden_size + model.hidden_size


def _count_attention(model: Architecture) -> int:
    hidden, query, key = model.hidden_size, model.query_size, model.key_size
    if model.latent is not None:
        return model.latent.count_parameters(hidden, model.num_heads)
    attention = 2 * hidden * (query + key) + model.has_output_gate * hidden * query
    attention += model.has_qkv_bias * (query + 2 * key) + model.has_output_bias * hidden
    norms = model.has_head_norms * 2 * model.head_size + model.norms_all_heads * (query + key)
    return attention + norms + model.has_sinks * model.num_heads


def _count_block(model: Architecture, *, is_sparse: bool) -> int:
    hidden, inner = model.hidden_size, model.intermediate_size
    block = _count_attention(model) + model.num_norms * hidden
    if not is_sparse or model.experts is None:
        return block + 3 * hidden * inner + model.has_mlp_bias * (2 * inner + hidden)
    experts = model.experts
    block += 3 * hidden * experts.shared_size + experts.has_shared_gate * hidden
    block += experts.has_router_bias * experts.num_experts
    biases = 2 * experts.intermediate_size + hidden
    block += experts.has_biases * experts.num_experts * biases
    return block + hidden * experts.num_experts * (1 + 3 * experts.intermediate_size)


def count_adapter(model: Architecture, lora: LoraConfig) -> int:
    """Count the numbers of A and B of an adapter."""
    experts = model.experts
    num_sparse = len(experts.sparse_layers) if experts else 0
    sides = 0
    for name, (outputs, inputs) in model.linear_sizes.items():
        if name not in lora.modules:
            continue
        is_in_mlp = name in MLP_MODULES
        num_layers = model.num_layers - num_sparse if is_in_mlp else model.num_attention_layers
        sides += num_layers * (outputs + inputs)
        if is_in_mlp and experts is not None:
            widths = experts.num_experts * [experts.intermediate_size]
            widths += [experts.shared_size] * bool(experts.shared_size)
            sides += num_sparse * sum(width + model.hidden_size for width in widths)
    return lora.rank * sides
