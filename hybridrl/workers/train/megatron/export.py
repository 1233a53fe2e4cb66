"""Gather full Hugging Face tensors from the shards of one model replica.

All ranks know which rank has which shard. So they agree on batches of tensors and on the sender of
each shard; a batch is then gathered over tensor, pipeline and expert ranks at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.diagnostics import activity
from hybridrl.errors import ModelError
from hybridrl.models.adapter_names import is_adapter_name
from hybridrl.workers.train.export import divide_by_bytes
from hybridrl.workers.train.megatron.architecture import HEAD, Shapes
from hybridrl.workers.train.megatron.shard_map import LocalShard, ShardMap
from hybridrl.workers.train.protocol import WeightSpec
from hybridrl.workers.train.shard_spec import ShardSpec, full_range, relative_slices

ReadTensor: TypeAlias = Callable[[str], Tensor]
"""Returns a tensor of this rank by megatron-core's name."""

_ALIGNMENT = 16

DEFAULT_BATCH_BYTES = 256 * 2**20  # of full tensors; enough for full speed over NVLink


@dataclass(frozen=True, slots=True)
class _OwnedShard:
    """A shard that a rank has, as ranks exchange it."""

    name: str
    spec: ShardSpec
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.spec.num_values * self.dtype.itemsize

    def in_buffer(self, begin: int, buffer: Tensor) -> Tensor:
        """Return the shard's values at byte ``begin`` of a buffer."""
        flat = buffer[begin : begin + self.num_bytes].view(self.dtype)
        return flat.view(self.spec.shape)


_Holders = dict[_OwnedShard, dict[int, int]]
"""Shards of a tensor; for each the ranks that have it, with the shard's number on that rank."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A shard of a batch, and where its values come from."""

    shard: _OwnedShard
    own: int  # its number on this rank, if this rank sends it or no rank does; else -1
    begin: int | None  # byte in the batch's buffer; None: every rank has the shard


@dataclass(frozen=True, slots=True)
class _Batch:
    tensors: Mapping[str, Sequence[_Source]]  # shards of each full tensor
    segments: Sequence[tuple[int, int]]  # bytes of the buffer that each rank of the group sends


class WeightExport:
    """Yields full weights, in the order of the Hugging Face model, on all ranks of a replica.

    It plans the gathering of every tensor once, by names and shapes; making it is a collective.

    Args:
        local: tensors by megatron-core's names, with global layer numbers. Only shapes and types
            are read here.
        group: ranks that together have the full model; None if this rank has it alone.
        batch_bytes: size of full tensors that are gathered together; a larger tensor goes alone.
    """

    specs: tuple[WeightSpec, ...]  # of ``full_weights``, in its order
    buffer_bytes: int  # memory of a pass beside the tensor it yields

    def __init__(
        self,
        local: Mapping[str, Tensor],
        shard_map: ShardMap,
        *,
        group: dist.ProcessGroup | None,
        batch_bytes: int = DEFAULT_BATCH_BYTES,
    ) -> None:
        self._group = group if group is not None and group.size() > 1 else None
        self._rank = 0 if self._group is None else self._group.rank()
        self._shards: list[tuple[str, LocalShard]] = []
        own_shards: list[_OwnedShard] = []
        for name, tensor in local.items():
            for shard in shard_map.shards_of(name, tensor.shape):
                self._shards.append((name, shard))
                own_shards.append(_OwnedShard(shard.name, shard.spec, tensor.dtype))
        shards_by_rank = self._gather_shards(own_shards)
        holders = _find_holders(shards_by_rank, shard_map.tensors)
        specs = []
        for name, shards in holders.items():
            first = next(iter(shards))
            shape = first.spec.full_shape
            specs.append(WeightSpec(name, shape, math.prod(shape) * first.dtype.itemsize))
        self.specs = tuple(specs)
        self._batches = [
            self._plan({spec.name: holders[spec.name] for spec in batch}, len(shards_by_rank))
            for batch in divide_by_bytes(self.specs, batch_bytes)
        ]
        self.buffer_bytes = max((batch.segments[-1][1] for batch in self._batches), default=0)

    @torch.no_grad()
    def full_weights(self, read: ReadTensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor), one at a time; every rank of the group must exhaust it.

        A tensor is the caller's: it is not kept or overwritten here. Where this rank has all of it
        as one shard, it is the live weight. ``read`` may return another tensor of the same shape
        and type, such as a weight with merged adapters.
        """
        device = read(self._shards[0][0]).device
        buffer = torch.empty(self.buffer_bytes, dtype=torch.uint8, device=device)
        for batch in self._batches:
            self._gather(batch, read, buffer)
            for name, sources in batch.tensors.items():
                yield name, self._assemble(sources, read, buffer)

    def _gather_shards(self, own_shards: list[_OwnedShard]) -> list[list[_OwnedShard]]:
        if self._group is None:
            return [own_shards]
        shards_by_rank: list[list[_OwnedShard]] = [[] for _ in range(self._group.size())]
        with activity.scope("all_gather", waits=True):
            dist.all_gather_object(shards_by_rank, own_shards, group=self._group)
        return shards_by_rank

    def _plan(self, tensors: Mapping[str, _Holders], num_ranks: int) -> _Batch:
        """Choose as sender of each shard the holder with the fewest bytes to send so far."""
        loads = [0] * num_ranks
        senders: dict[_OwnedShard, tuple[int, int]] = {}
        for shard, holders in ((s, h) for shards in tensors.values() for s, h in shards.items()):
            if len(holders) < num_ranks:
                sender = min(holders, key=lambda rank: (loads[rank], rank))
                senders[shard] = sender, loads[sender]
                loads[sender] += -(-shard.num_bytes // _ALIGNMENT) * _ALIGNMENT
        starts = [sum(loads[:rank]) for rank in range(num_ranks)]

        def source(shard: _OwnedShard, holders: Mapping[int, int]) -> _Source:
            if shard not in senders:
                return _Source(shard, holders[self._rank], None)
            sender, offset = senders[shard]
            own = holders[self._rank] if sender == self._rank else -1
            return _Source(shard, own, starts[sender] + offset)

        sources = {name: [source(*item) for item in of.items()] for name, of in tensors.items()}
        segments = [(start, start + load) for start, load in zip(starts, loads, strict=True)]
        return _Batch(sources, segments)

    def _gather(self, batch: _Batch, read: ReadTensor, buffer: Tensor) -> None:
        for sources in batch.tensors.values():
            for source in sources:
                if source.begin is not None and source.own >= 0:
                    target = source.shard.in_buffer(source.begin, buffer)
                    target.copy_(self._own(source.own, read))
        with activity.scope("broadcast", waits=True):
            # Segments differ in size: a stage has some layers, a norm has one sender. With gloo
            # this is also 4 times as fast as its all-gather (2 ranks: 2.4 against 0.6 GiB/s).
            pending = [
                dist.broadcast(buffer[begin:end], group=self._group, group_src=rank, async_op=True)
                for rank, (begin, end) in enumerate(batch.segments)
                if begin < end
            ]
            for work in pending:
                work.wait()

    def _assemble(self, sources: Sequence[_Source], read: ReadTensor, buffer: Tensor) -> Tensor:
        first = sources[0].shard
        if len(sources) == 1 and sources[0].begin is None:
            return self._own(sources[0].own, read)
        full = torch.empty(first.spec.full_shape, dtype=first.dtype, device=buffer.device)
        outer = full_range(full.shape)
        for source in sources:
            if source.begin is None:
                values = self._own(source.own, read)
            else:
                values = source.shard.in_buffer(source.begin, buffer)
            full[relative_slices(source.shard.spec.range, outer=outer)] = values
        return full

    def _own(self, number: int, read: ReadTensor) -> Tensor:
        name, shard = self._shards[number]
        return shard.view(read(name).detach().view(-1))


def _find_holders(
    shards_by_rank: Sequence[Sequence[_OwnedShard]], wanted: Shapes
) -> dict[str, _Holders]:
    """Return the shards of each tensor and their ranks, in the order of the Hugging Face model."""
    holders: dict[str, _Holders] = {}
    for rank, shards in enumerate(shards_by_rank):
        for number, shard in enumerate(shards):
            holders.setdefault(shard.name, {}).setdefault(shard, {})[rank] = number
    incomplete = [
        name
        for name, of in holders.items()
        if sum(shard.spec.num_values for shard in of) != math.prod(next(iter(of)).spec.full_shape)
    ]
    if holders.keys() & wanted.keys():
        is_critic = any(name.startswith("score.") for name in holders)
        incomplete += [n for n in wanted if n not in holders and not (is_critic and n == HEAD)]
    if incomplete:
        raise ModelError(
            f"the {len(shards_by_rank)} ranks of one replica do not have all of "
            f"{', '.join(incomplete)}; this is a bug in how the model was sharded: report it with "
            "the megatron section of the run"
        )
    numbers = {name: number for number, name in enumerate(wanted)}
    return dict(sorted(holders.items(), key=lambda item: _order(item[0], numbers)))


def _order(name: str, numbers: Mapping[str, int]) -> tuple[int, str]:
    """Sort adapters behind the weight beside which they stand, and a critic's head to the end."""
    if not is_adapter_name(name):
        return numbers.get(name, len(numbers)), "" if name in numbers else name
    module, _, matrix = name.partition(".lora_")
    return numbers[f"{module}.weight"], matrix
