"""The linear layers of a transformer layer: which outputs and inputs of them a rank has."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hybridrl.errors import ModelError
from hybridrl.models.adapter_names import ADAPTER_NAME
from hybridrl.models.architecture import Architecture
from hybridrl.models.families import ExpertNames
from hybridrl.workers.train.megatron.context import ParallelRank
from hybridrl.workers.train.megatron.hf_tensors import hf_tensors
from hybridrl.workers.train.shard_spec import ShardSpec

NamedSpecs = list[tuple[str, ShardSpec]]
"""Shards by the names of their Hugging Face tensors."""

_Rows = list[tuple[str, int, int]]
"""Name of a linear layer within its transformer layer, and begin and end of its outputs."""

_LINEAR = re.compile(
    r"(?:self_attention|mlp(?:(?P<is_shared>\.shared_experts)"
    r"|(?P<is_expert>\.experts(?:\.local_experts\.(?P<sequential>\d+))?))?)"
    r"\.(?P<linear>linear_qkv|linear_proj|linear_fc1|linear_fc2)"
    r"\.(?:lora\.(?P<adapted>\w+)\.(?P<matrix>[AB])|(?P<leaf>weight|bias))(?P<grouped>\d+)?"
)


def linear_shards(
    name: str,
    local_shape: Sequence[int],
    prefix: str,
    *,
    architecture: Architecture,
    rank: ParallelRank,
) -> NamedSpecs | None:
    """Return the shards that a linear layer's tensor holds, in the order of its rows.

    Args:
        name: megatron-core's, within the layer.

    Returns:
        None if the model has no such tensor.

    Raises:
        ModelError: a size does not divide.
    """
    match = _LINEAR.fullmatch(name)
    if match is None:
        return None
    try:
        return _Linear(match, architecture, rank).shards(prefix, local_shape)
    except KeyError:
        return None


class _Linear:
    """One linear layer of this rank, given by a match of ``_LINEAR``."""

    def __init__(
        self, match: re.Match[str], architecture: Architecture, parallel: ParallelRank
    ) -> None:
        self._architecture = architecture
        self._linear, self._adapted = match["linear"], match["adapted"]
        self._leaf = match["leaf"] or match["matrix"]
        self._rank, self._size = parallel.tp_rank, parallel.tp_size
        self._mlp, self._names = "mlp", ExpertNames()
        self._inner = architecture.intermediate_size
        experts = architecture.experts
        if match["is_shared"]:
            self._mlp, self._inner = "mlp.shared_expert", experts.shared_size if experts else 0
        elif match["is_expert"] and experts is not None:
            self._rank, self._size = parallel.etp_rank, parallel.etp_size
            per_rank = _divide(experts.num_experts, parallel.ep_size)
            local = int(match["sequential"] or match["grouped"] or 0)
            self._names, self._inner = experts.names, experts.intermediate_size
            self._mlp = f"{experts.names.block}.experts.{parallel.ep_rank * per_rank + local}"

    def shards(self, prefix: str, local_shape: Sequence[int]) -> NamedSpecs:
        """Return the shards in its rows; ``prefix`` is that of the transformer layer."""
        full_shapes = hf_tensors(self._architecture)
        if self._adapted is not None:
            return self._adapter_shards(prefix, local_shape)
        shards: NamedSpecs = []
        for module, begin, end in self._rows():
            name = f"{prefix}{module}.{self._leaf}"
            full_shape = full_shapes[name]
            columns = tuple(self._columns(inputs) for inputs in full_shape[1:])
            shards.append((name, ShardSpec(full_shape, ((begin, end), *columns))))
        return shards

    def _adapter_shards(self, prefix: str, local_shape: Sequence[int]) -> NamedSpecs:
        module = f"{self._mlp if 'fc' in self._linear else 'self_attn'}.{self._adapted}"
        outputs, inputs = hf_tensors(self._architecture)[f"{prefix}{module}.weight"]
        name = f"{prefix}{module}.lora_{self._leaf}.{ADAPTER_NAME}.weight"
        if self._leaf == "A":
            rank = local_shape[0]
            return [(name, ShardSpec((rank, inputs), ((0, rank), self._columns(inputs))))]
        rank = local_shape[1]
        own_rows = [(begin, end) for of, begin, end in self._rows() if of == module]
        return [(name, ShardSpec((outputs, rank), (rows, (0, rank)))) for rows in own_rows]

    def _columns(self, inputs: int) -> tuple[int, int]:
        is_row_parallel = self._linear in ("linear_proj", "linear_fc2")
        return self._own_range(inputs) if is_row_parallel else (0, inputs)

    def _rows(self) -> _Rows:
        """Return this rank's outputs, in their order."""
        hidden = self._architecture.hidden_size
        if self._linear == "linear_qkv":
            return self._queries_keys_values()
        if self._linear == "linear_proj":
            return [("self_attn.o_proj", 0, hidden)]
        if self._linear == "linear_fc2":
            return [(f"{self._mlp}.{self._names.down}", 0, hidden)]
        gated = (self._names.gate, self._names.up)
        return [(f"{self._mlp}.{leaf}", *self._own_range(self._inner)) for leaf in gated]

    def _queries_keys_values(self) -> _Rows:
        """Interleave q, k and v by key-value head and keep this rank's rows.

        They end within a head's rows where there are fewer key-value heads than ranks.
        """
        sizes = self._architecture
        num_groups, head = sizes.num_key_value_heads, sizes.head_size
        begin, end = self._own_range(sizes.query_size + 2 * sizes.key_size)
        rows: _Rows = []
        start = 0
        for group in range(num_groups):
            for leaf, height in (("q", sizes.query_size // num_groups), ("k", head), ("v", head)):
                low, high = max(begin, start), min(end, start + height)
                if low < high:
                    shift = group * height - start
                    rows.append((f"self_attn.{leaf}_proj", low + shift, high + shift))
                start += height
        return rows

    def _own_range(self, total: int) -> tuple[int, int]:
        size = _divide(total, self._size)
        return self._rank * size, (self._rank + 1) * size


def _divide(total: int, num_ranks: int) -> int:
    if total % num_ranks:
        raise ModelError(
            f"{num_ranks} ranks cannot share {total} rows, columns or experts of a layer evenly; "
            "set megatron.tensor_parallel_size, expert_parallel_size and "
            "expert_tensor_parallel_size to divisors of the model's sizes"
        )
    return total // num_ranks
