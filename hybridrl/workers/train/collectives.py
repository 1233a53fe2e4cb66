"""The few collectives of a training engine, written so that one process needs no process group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.diagnostics import activity
from hybridrl.metrics import Metrics, merge


class Ranks:
    """A process group (None: all ranks) for tensors of ``device``, or this process alone."""

    def __init__(self, device: torch.device, *, group: dist.ProcessGroup | None = None) -> None:
        self.device = device
        self.group = group
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.size = dist.get_world_size(group) if dist.is_initialized() else 1

    def gather(self, numbers: Sequence[int]) -> Tensor:
        """Return every rank's ``n`` numbers, int64 [size, n], on the host."""
        own = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        everyone = [torch.empty_like(own) for _ in range(self.size)]
        if self.size == 1:
            everyone = [own]
        else:
            with activity.scope("all_gather", waits=True):
                dist.all_gather(everyone, own, group=self.group)
        return torch.stack(everyone).cpu()

    def sum(self, values: Tensor) -> Tensor:
        """Add a tensor over ranks, in place; every rank gets the same bits."""
        if self.size > 1:
            with activity.scope("all_reduce", waits=True):
                dist.all_reduce(values, group=self.group)
        return values

    def merge(self, metrics: Metrics) -> Metrics:
        """Return the merged metrics of all ranks, on every rank."""
        if self.size == 1:
            return metrics
        everyone: list[Metrics] = [{} for _ in range(self.size)]
        with activity.scope("all_gather", waits=True):
            dist.all_gather_object(everyone, metrics, group=self.group)
        return merge(everyone)

    def share_text(self, text: str) -> str:
        """Return the first rank's text on every rank; also a barrier."""
        if self.size == 1:
            return text
        texts = [text]
        with activity.scope("broadcast", waits=True):
            dist.broadcast_object_list(texts, group=self.group, group_src=0, device=self.device)
        return texts[0]
