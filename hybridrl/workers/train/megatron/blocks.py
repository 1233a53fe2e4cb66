"""Which part of which Hugging Face tensor each row of a local megatron-core tensor is.

Loading, export and checkpoints follow from this one description. Pure: names, shapes and ranks go
in, boxes come out. Names of megatron-core's tensors are those of ``GPTModel`` with *global* layer
numbers, whether its layers are megatron-core's own or TransformerEngine's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hybridrl.config.architecture import Architecture
from hybridrl.errors import ModelError
from hybridrl.planning.split import padded_vocabulary
from hybridrl.workers.train.megatron.hf_tensors import (
    EMBEDDING,
    HEAD,
    LAST_NORM,
    hf_tensors,
    layer_prefix,
)
from hybridrl.workers.train.megatron.linear_layers import Boxes, linear_boxes
from hybridrl.workers.train.megatron.parallel_rank import ParallelRank
from hybridrl.workers.train.places import ShardSpec, TensorRange

_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
    "mlp.router.weight": "mlp.gate.weight",
}
"""Tensors of a layer that every tensor-parallel rank has whole."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of a local tensor, all columns of them, that are one box of a Hugging Face tensor."""

    name: str
    """Of the Hugging Face tensor; a matrix of an adapter is called as within peft's model."""

    begin: int
    """First of the local tensor's rows."""

    shape: tuple[int, ...]
    place: ShardSpec

    @property
    def end(self) -> int:
        """One past the last of the local tensor's rows."""
        return self.begin + self.shape[0]

    @property
    def box(self) -> TensorRange:
        """What it covers of the Hugging Face tensor."""
        return self.place.box(self.shape)


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """A stretch of a flattened local tensor that is one box of a Hugging Face tensor."""

    name: str
    begin: int
    """First of the flattened local tensor's elements."""

    shape: tuple[int, ...]
    place: ShardSpec

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.begin + math.prod(self.shape)

    def view(self, flat: Tensor, *, begin: int) -> Tensor:
        """Return this piece of ``flat``, which starts at element ``begin`` of the local tensor."""
        return flat[self.begin - begin : self.end - begin].view(self.shape)


def padded_vocab_size(architecture: Architecture, *, tp_size: int) -> int:
    """Return the rows of the padded embedding: a multiple of 8 on every tensor-parallel rank."""
    return padded_vocabulary(architecture.vocab_size, tp_size=tp_size)


def blocks_of(
    name: str,
    local_shape: Sequence[int],
    *,
    architecture: Architecture,
    parallel: ParallelRank,
) -> tuple[Block, ...]:
    """Say what the rows of a local tensor are, in their order.

    Beside megatron-core's names there are ``MODULE.lora.LEAF.A`` [r, inputs] and ``.B``
    [outputs, r], the matrices of an adapter beside ``LEAF`` (``q_proj``) within ``MODULE``
    (``...linear_qkv``), cut as the matrix that they stand beside; and ``score.weight`` and
    ``score.bias``, a critic's head.

    Args:
        name: megatron-core's, with the global number of the layer, from 0.
        local_shape: of this rank's tensor.
        architecture: of the model.
        parallel: this rank.

    Returns:
        Blocks without a gap between them. Rows after the last are padding of the vocabulary.

    Raises:
        ModelError: no such tensor is known, its shape is another, or a size does not divide.
    """
    boxes = _boxes(name, local_shape, architecture, parallel=parallel)
    blocks: list[Block] = []
    row = 0
    for hf_name, full_shape, box in boxes:
        shape = tuple(end - begin for begin, end in box)
        place = ShardSpec(full_shape, tuple(begin for begin, _ in box))
        if shape[0]:  # the last rank of a small vocabulary may have padding alone
            blocks.append(Block(hf_name, row, shape, place))
        row += shape[0]
    _check_shape(name, local_shape, rows=row, blocks=blocks)
    return tuple(blocks)


def flat_pieces(blocks: Iterable[Block], begin: int, end: int) -> tuple[FlatPiece, ...]:
    """Cut elements ``begin`` to ``end`` of a flattened local tensor into boxes.

    A stretch may begin and end within a row: it gives up to three boxes of each block. Elements of
    padding are in none.
    """
    pieces: list[FlatPiece] = []
    for block in blocks:
        width = math.prod(block.shape[1:])
        low, high = max(begin, block.begin * width), min(end, block.end * width)
        while low < high:
            row, column = divmod(low, width)
            num_rows = (high - low) // width if column == 0 else 0
            stop = low + num_rows * width if num_rows else min(high, (row + 1) * width)
            pieces.append(_piece(block, low, (row, column), num=(num_rows, stop - low)))
            low = stop
    return tuple(pieces)


def _boxes(
    name: str, local_shape: Sequence[int], architecture: Architecture, *, parallel: ParallelRank
) -> Boxes:
    whole_shapes = hf_tensors(architecture)
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        is_head = name == "output_layer.weight" and not architecture.is_tied
        return _vocabulary(HEAD if is_head else EMBEDDING, architecture, parallel)
    if name in ("score.weight", "score.bias"):
        return [_whole(name, tuple(local_shape))]
    if name == "decoder.final_layernorm.weight":
        return [_whole(LAST_NORM, whole_shapes[LAST_NORM])]
    in_layer = _LAYER.fullmatch(name)
    if in_layer is not None:
        prefix, local_name = layer_prefix(int(in_layer[1])), in_layer[2]
        if prefix + _WHOLE.get(local_name, "") in whole_shapes:
            hf_name = prefix + _WHOLE[local_name]
            return [_whole(hf_name, whole_shapes[hf_name])]
        linear = linear_boxes(
            local_name, local_shape, prefix, architecture=architecture, rank=parallel
        )
        if linear is not None:
            return linear
    raise ModelError(
        f"{name}: nothing in the files of a {architecture.model_type} model is known to belong to "
        "this parameter of megatron-core; take out what adds it to the model, such as an entry of "
        "megatron.transformer_args, or train with actor=fsdp2"
    )


def _vocabulary(hf_name: str, architecture: Architecture, parallel: ParallelRank) -> Boxes:
    num_rows = padded_vocab_size(architecture, tp_size=parallel.tp_size) // parallel.tp_size
    vocab_size, hidden = architecture.vocab_size, architecture.hidden_size
    begin = min(parallel.tp_rank * num_rows, vocab_size)
    end = min(begin + num_rows, vocab_size)
    return [(hf_name, (vocab_size, hidden), ((begin, end), (0, hidden)))]


def _whole(hf_name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], TensorRange]:
    return hf_name, shape, tuple((0, size) for size in shape)


def _piece(block: Block, begin: int, start: tuple[int, int], *, num: tuple[int, int]) -> FlatPiece:
    """Return whole rows of a block, or if there are none a part of one row.

    Args:
        block: in whose rows the piece lies.
        begin: first element of the local tensor.
        start: the same as row and column.
        num: whole rows, and elements.
    """
    (row, column), (num_rows, num_elements) = start, num
    first, *others = block.place.offset
    shape, offset = (num_rows, *block.shape[1:]), (first + row - block.begin, *others)
    if not num_rows:
        shape, offset = (1, num_elements), (offset[0], others[0] + column)
    return FlatPiece(block.name, begin, shape, ShardSpec(block.place.global_shape, offset))


def _check_shape(
    name: str, local_shape: Sequence[int], *, rows: int, blocks: Sequence[Block]
) -> None:
    columns = {block.shape[1:] for block in blocks} or {tuple(local_shape[1:])}
    is_vocabulary = name in ("embedding.word_embeddings.weight", "output_layer.weight")
    fits = local_shape[0] >= rows if is_vocabulary else local_shape[0] == rows
    if not fits or columns != {tuple(local_shape[1:])}:
        raise ModelError(
            f"{name} is {list(local_shape)} on this rank, and the model's files give it {rows} "
            f"rows of {sorted(columns)}; build megatron-core's model from the same config.json, "
            "with the same parallel sizes"
        )
