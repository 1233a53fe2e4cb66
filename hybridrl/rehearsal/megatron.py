"""megatron-core in a rehearsal: what a rank learns from ranks that are not there.

A fake process group answers with what this rank sent. Four answers depend on who sends: the shards
of the other ranks, the lengths of what neighbours in the pipeline send, and how many tokens come
for which expert: as many for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridrl.config.megatron import MegatronConfig
from hybridrl.models.architecture import Architecture
from hybridrl.planning.split import padded_vocabulary
from hybridrl.rehearsal.gpu import FakeGpu
from hybridrl.workers.train.megatron import backend, export
from hybridrl.workers.train.megatron.backend import Schedule
from hybridrl.workers.train.megatron.context import ParallelRank
from hybridrl.workers.train.megatron.export import WeightExport
from hybridrl.workers.train.megatron.megatron_core import (
    P2PCommunicator,
    parallel_state,
    token_dispatcher,
)
from hybridrl.workers.train.megatron.shard_map import ShardMap

_LAYER = "decoder.layers."


def install(gpu: FakeGpu, sizes: MegatronConfig, architecture: Architecture) -> None:
    """Replace what a fake process group cannot answer."""
    vars(backend)["WeightExport"] = _export_class(sizes)
    _tell_lengths(architecture.hidden_size, sizes)
    if architecture.experts is not None:
        gpu.share_selected = architecture.experts.num_per_token / architecture.experts.num_experts
        _balance(architecture.experts.num_per_token)


# -- shards --------------------------------------------------------------------------------------


def _export_class(sizes: MegatronConfig) -> type[WeightExport]:
    class Export(WeightExport):
        """Knows the shards of the other ranks of a replica by their numbers."""

        def __init__(
            self,
            local: Mapping[str, Tensor],
            shard_map: ShardMap,
            **kwargs: Any,  # noqa: ANN401
        ) -> None:
            self._local, self._map = local, shard_map
            super().__init__(local, shard_map, **kwargs)

        def _gather_shards(self, own_shards: Any) -> Any:  # noqa: ANN401
            if self._group is None:
                return [own_shards]
            size = self._group.size() // sizes.pipeline_parallel_size
            shards = [self._shards_of(n % size, n // size) for n in range(self._group.size())]
            shards[self._rank] = own_shards  # in their own order
            return shards

        def _shards_of(self, rank: int, stage: int) -> Any:  # noqa: ANN401
            shard_map = replace(self._map, rank=_parallel_rank(sizes, rank))
            return [
                export._OwnedShard(shard.name, shard.spec, tensor.dtype)
                for name, tensor in _tensors_of(stage, self._local, shard_map, sizes)
                for shard in shard_map.shards_of(name, tensor.shape)
            ]

    return Export


def _parallel_rank(sizes: MegatronConfig, rank: int) -> ParallelRank:
    """Return a rank of a replica by its number within its stage: tensor ranks are neighbours."""
    tp, etp = sizes.tensor_parallel_size, sizes.expert_tensor_parallel_size
    return ParallelRank(
        tp_rank=rank % tp,
        tp_size=tp,
        ep_rank=rank // etp % sizes.expert_parallel_size,
        ep_size=sizes.expert_parallel_size,
        etp_rank=rank % etp,
        etp_size=etp,
    )


def _tensors_of(
    stage: int, local: Mapping[str, Tensor], shard_map: ShardMap, sizes: MegatronConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and shapes of the tensors of a stage; its layers are like those of this one."""
    if sizes.pipeline_parallel_size == 1:
        yield from local.items()
        return
    model = shard_map.architecture
    like: dict[bool, dict[str, Tensor]] = {}
    for name, tensor in local.items():
        if name.startswith(_LAYER):
            number, _, leaf = name.removeprefix(_LAYER).partition(".")
            like.setdefault(model.is_sparse(int(number)), {})[leaf] = tensor
    for layer in _layers_of(stage, sizes, model.num_layers):
        for leaf, tensor in like[model.is_sparse(layer)].items():
            yield f"{_LAYER}{layer}.{leaf}", tensor
    rows = padded_vocabulary(model.vocab_size, tp_size=sizes.tensor_parallel_size)
    dtype = next(iter(local.values())).dtype
    table = torch.empty(
        rows // sizes.tensor_parallel_size, model.hidden_size, dtype=dtype, device="meta"
    )
    if stage == 0:
        yield "embedding.word_embeddings.weight", table
    if stage == sizes.pipeline_parallel_size - 1:
        yield "decoder.final_layernorm.weight", table[0]
        yield "output_layer.weight", table


def _layers_of(stage: int, sizes: MegatronConfig, num_layers: int) -> Iterator[int]:
    """Yield the layers of a stage, from 0: a span of each virtual stage."""
    num_virtual = sizes.num_virtual_stages
    of_stages = sizes.layers_of_stages(num_layers) or ()  # they divide: a rule has seen to it
    lengths = [number // num_virtual for number in of_stages]
    for chunk in range(num_virtual):
        begin = chunk * sum(lengths) + sum(lengths[:stage])
        yield from range(begin, begin + lengths[stage])


# -- pipeline ------------------------------------------------------------------------------------


def _tell_lengths(hidden_size: int, sizes: MegatronConfig) -> None:
    """Let a neighbour's tensors have the tokens of the micro-batch that this rank has next."""
    run = Schedule.run
    shares = sizes.tensor_parallel_size if sizes.sequence_parallel else 1
    coming: dict[str, Iterator[int]] = {}

    def run_and_note(schedule: Schedule, microbatches: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        lengths = [len(each.tokens.token_ids_T) // shares for each in microbatches]
        coming.update(
            {way: iter(_received(lengths, way, sizes)) for way in ("forward", "backward")}
        )
        return run(schedule, microbatches, *args, **kwargs)

    def shapes(
        _: object,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,  # noqa: FBT001 - megatron's
        recv_next: bool,  # noqa: FBT001
    ) -> Sequence[list[int]]:
        return [
            [next(coming[way]), 1, hidden_size] if is_coming else [0, 0, 0]
            for way, is_coming in (("forward", recv_prev), ("backward", recv_next))
        ]

    Schedule.run = run_and_note  # type: ignore[method-assign,assignment]
    P2PCommunicator._communicate_shapes = shapes


def _received(lengths: Sequence[int], way: str, sizes: MegatronConfig) -> Iterator[int]:
    """Yield the lengths in their order: a few micro-batches go through all virtual stages first."""
    num_stages, num_virtual = sizes.pipeline_parallel_size, sizes.num_virtual_stages
    stage = parallel_state.get_pipeline_model_parallel_rank()
    is_end = stage == (0 if way == "forward" else num_stages - 1)
    for begin in range(0, len(lengths), num_stages):
        for part in range(num_virtual):
            if not (is_end and part == 0):  # this rank begins there
                yield from lengths[begin : begin + num_stages]


# -- experts -------------------------------------------------------------------------------------


class _Balanced:
    """A map of tokens to experts that uses all alike."""

    def __init__(self, num_tokens: int, num_experts: int, num_per_token: int) -> None:
        self._num_tokens, self._num_experts = num_tokens, num_experts
        self._num_per_token = num_per_token

    def size(self, dim: int) -> int:
        return (self._num_tokens, self._num_experts)[dim]

    def sum(self, dim: int) -> Tensor:
        each, more = divmod(self._num_tokens * self._num_per_token, self._num_experts)
        return torch.tensor([each + (e < more) for e in range(self._num_experts)])


def _balance(num_per_token: int) -> None:
    preprocess = token_dispatcher.MoEAlltoAllTokenDispatcher.preprocess

    def balanced(dispatcher: Any, routing_map: Tensor) -> Any:  # noqa: ANN401
        num_tokens, num_experts = routing_map.shape
        counts = preprocess(dispatcher, _Balanced(num_tokens, num_experts, num_per_token))
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if isinstance(splits := getattr(dispatcher, name), Tensor):
                setattr(dispatcher, name, splits.numpy())  # as its copy from the GPU would be
        return counts

    gather = token_dispatcher.gather_from_sequence_parallel_region

    def gathered(tensor: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:  # noqa: ANN401
        if tensor.is_cuda:
            return gather(tensor, *args, group=group, **kwargs)
        return tensor.repeat(group.size())  # the counts of ranks that are all alike

    token_dispatcher.gather_from_sequence_parallel_region = gathered
    token_dispatcher.MoEAlltoAllTokenDispatcher.preprocess = balanced
