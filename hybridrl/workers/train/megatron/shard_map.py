"""The shards of Hugging Face tensors that each local tensor of megatron-core holds.

Loading, export and checkpoints follow from this one description. Pure: names, shapes and ranks go
in, ranges come out. Names of megatron-core's tensors are those of ``GPTModel`` with *global* layer
numbers, whether its layers are megatron-core's own or TransformerEngine's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from hybridrl.errors import ModelError
from hybridrl.models.adapter_names import ADAPTER_NAME
from hybridrl.models.architecture import Architecture
from hybridrl.models.families import ExpertNames
from hybridrl.planning.split import padded_vocabulary
from hybridrl.workers.train.megatron.architecture import HEAD, Shapes
from hybridrl.workers.train.megatron.context import ParallelRank
from hybridrl.workers.train.shard_spec import ShardSpec, full_range

_REPLICATED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}  # of a layer, in full on every tensor-parallel rank

NamedSpecs = list[tuple[str, ShardSpec]]

_Rows = list[tuple[str, int, int]]
"""Name of a linear layer within its transformer layer, and begin and end of its outputs."""

_LINEAR = re.compile(
    r"(?:self_attention|mlp(?:(?P<is_shared>\.shared_experts)"
    r"|(?P<is_expert>\.experts(?:\.local_experts\.(?P<sequential>\d+))?))?)"
    r"\.(?P<linear>linear_qkv|linear_proj|linear_fc1|linear_fc2)"
    r"\.(?:lora\.(?P<adapted>\w+)\.(?P<matrix>[AB])|(?P<leaf>weight|bias))(?P<grouped>\d+)?"
)

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def global_name(name: str, offset: int) -> str:
    """Return a parameter's name with the layer's number in the full model."""
    words = name.split(".")
    if words[:2] == ["decoder", "layers"]:
        words[2] = str(int(words[2]) + offset)
    return ".".join(words)


def is_of_adapter(name: str) -> bool:
    """Whether a parameter is A or B of an adapter."""
    return ".lora." in name


@dataclass(frozen=True, slots=True)
class LocalShard:
    """Consecutive elements of a flattened local tensor that are one shard of a Hugging Face tensor.

    The matrices of an adapter are named as within peft's model.
    """

    name: str  # of the Hugging Face tensor
    begin: int  # first element in the flattened local tensor
    spec: ShardSpec

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.begin + self.spec.num_values

    def view(self, flat: Tensor, *, begin: int = 0) -> Tensor:
        """Return this shard of ``flat``, which starts at element ``begin`` of the local tensor."""
        return flat[self.begin - begin : self.end - begin].view(self.spec.shape)


@dataclass(frozen=True, slots=True)
class ShardMap:
    """From the local tensors of one rank to the shards that they hold."""

    architecture: Architecture
    rank: ParallelRank

    tensors: Shapes
    """Of the model's files; see ``hf_tensors``."""

    def shards_of(self, name: str, local_shape: Sequence[int]) -> tuple[LocalShard, ...]:
        """Return the shards that a local tensor holds, in the order of its rows.

        Beside megatron-core's names, with global layer numbers from 0, there are
        ``MODULE.lora.LEAF.A`` [r, inputs] and ``.B`` [outputs, r]: the matrices of an adapter
        beside ``LEAF`` (``q_proj``) within ``MODULE`` (``...linear_qkv``), sharded as the matrix
        beside which they stand. ``score.weight`` and ``score.bias`` are a critic's head. There is
        no gap between shards; rows after the last are padding of the vocabulary.
        """
        specs = self._specs(name, local_shape)
        num_rows = sum(spec.shape[0] for _, spec in specs)
        columns = {spec.shape[1:] for _, spec in specs}
        num_missing = local_shape[0] - num_rows
        fits = num_missing >= 0 if name in _VOCABULARY else num_missing == 0
        if not fits or columns != {tuple(local_shape[1:])}:
            raise ModelError(
                f"{name} is {list(local_shape)} on this rank, and the model's files give it "
                f"{num_rows} rows of {sorted(columns)}; build megatron-core's model from the same "
                "config.json, with the same parallel sizes"
            )
        shards: list[LocalShard] = []
        for hf_name, spec in specs:
            if spec.num_values:  # the last rank of a small vocabulary may have only padding
                begin = shards[-1].end if shards else 0
                shards.append(LocalShard(hf_name, begin, spec))
        return tuple(shards)

    def _specs(self, name: str, local_shape: Sequence[int]) -> NamedSpecs:
        architecture, full_shapes = self.architecture, self.tensors
        if name in _VOCABULARY:
            is_head = name == "output_layer.weight" and not architecture.is_tied
            hf_name = HEAD if is_head else "model.embed_tokens.weight"
            return [(hf_name, self._vocabulary())]
        if name in ("score.weight", "score.bias"):
            return [_replica(name, local_shape)]
        if name == "decoder.final_layernorm.weight":
            hf_name = "model.norm.weight"
            return [_replica(hf_name, full_shapes[hf_name])]
        in_layer = _LAYER.fullmatch(name)
        if in_layer is not None:
            prefix, local_name = f"model.layers.{in_layer[1]}.", in_layer[2]
            replicated, experts = _REPLICATED.get(local_name, ""), architecture.experts
            if experts is not None and replicated == "mlp.gate.weight":
                replicated = f"{experts.names.block}.gate.weight"
            hf_name = prefix + replicated
            if hf_name in full_shapes:
                return [_replica(hf_name, full_shapes[hf_name])]
            linear = _LINEAR.fullmatch(local_name)
            with suppress(KeyError):  # the model has no such tensor
                if linear is not None:
                    return _Linear(linear, self).shards(prefix, local_shape)
        raise ModelError(
            f"the files of a {architecture.model_type} model have no tensor for megatron-core's "
            f"parameter {name}; remove the option that adds it to the model, such as an entry of "
            "megatron.transformer_args, or train with actor=fsdp2"
        )

    def _vocabulary(self) -> ShardSpec:
        vocab_size, hidden = self.architecture.vocab_size, self.architecture.hidden_size
        tp_size = self.rank.tp_size
        num_rows = padded_vocabulary(vocab_size, tp_size=tp_size) // tp_size
        begin = min(self.rank.tp_rank * num_rows, vocab_size)
        end = min(begin + num_rows, vocab_size)
        return ShardSpec((vocab_size, hidden), ((begin, end), (0, hidden)))


class _Linear:
    """One linear layer of this rank, given by a match of ``_LINEAR``."""

    def __init__(self, match: re.Match[str], shard_map: ShardMap) -> None:
        architecture, parallel = shard_map.architecture, shard_map.rank
        self._architecture, self._tensors = architecture, shard_map.tensors
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
            per_rank = experts.num_experts // parallel.ep_size
            local = int(match["sequential"] or match["grouped"] or 0)
            self._names, self._inner = experts.names, experts.intermediate_size
            self._mlp = f"{experts.names.block}.experts.{parallel.ep_rank * per_rank + local}"

    def shards(self, prefix: str, local_shape: Sequence[int]) -> NamedSpecs:
        """Return the shards in its rows; ``prefix`` is that of the transformer layer."""
        if self._adapted is not None:
            return self._adapter_shards(prefix, local_shape)
        shards: NamedSpecs = []
        for module, begin, end in self._rows():
            name = f"{prefix}{module}.{self._leaf}"
            full_shape = self._tensors[name]
            columns = tuple(self._columns(inputs) for inputs in full_shape[1:])
            shards.append((name, ShardSpec(full_shape, ((begin, end), *columns))))
        return shards

    def _adapter_shards(self, prefix: str, local_shape: Sequence[int]) -> NamedSpecs:
        module = f"{self._mlp if 'fc' in self._linear else 'self_attn'}.{self._adapted}"
        outputs, inputs = self._tensors[f"{prefix}{module}.weight"]
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
        size = total // self._size
        return self._rank * size, (self._rank + 1) * size


def cut_flat(shards: Iterable[LocalShard], begin: int, end: int) -> tuple[LocalShard, ...]:
    """Restrict shards to elements ``begin`` to ``end`` of the flattened local tensor.

    A span may begin and end within a row, so each shard gives up to three.
    """
    pieces: list[LocalShard] = []
    for shard in shards:
        (first, _), *columns = shard.spec.range
        width = shard.spec.num_values // shard.spec.shape[0]
        low, high = max(begin, shard.begin), min(end, shard.end)
        while low < high:
            row, column = divmod(low - shard.begin, width)
            num_rows = 0 if column else (high - low) // width
            if num_rows:
                stop = low + num_rows * width
                piece = ((first + row, first + row + num_rows), *columns)
            else:
                stop = min(high, low - column + width)
                left = columns[0][0] + column
                piece = ((first + row, first + row + 1), (left, left + stop - low))
            spec = ShardSpec(shard.spec.full_shape, piece)
            pieces.append(LocalShard(shard.name, low, spec))
            low = stop
    return tuple(pieces)


def _replica(hf_name: str, shape: Sequence[int]) -> tuple[str, ShardSpec]:
    return hf_name, ShardSpec(tuple(shape), full_range(shape))
