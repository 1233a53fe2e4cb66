"""Workers that communicate over gloo."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from hybridrl.single_controller import Dispatch, Worker, register


class GlooWorker(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def sum_of_ranks(self) -> float:
        total = torch.tensor([float(self.rank)])
        dist.all_reduce(total)
        return total.item()

    @register(Dispatch.ONE_TO_ALL)
    def join(self) -> str:
        dist.init_process_group("gloo")
        return os.environ["MASTER_PORT"]

    @register(Dispatch.ONE_TO_ALL)
    def leave(self) -> None:
        dist.destroy_process_group()
