"""Workers that take tensors."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

import hybridrl.payload  # noqa: F401 - carries tensors
from hybridrl.single_controller import Dispatch, Worker, register


class TensorWorker(Worker):
    @register(Dispatch.DP_COMPUTE)
    def echo(self, batch: Any) -> Any:
        return batch

    @register(Dispatch.DP_COMPUTE)
    def storage_bytes(self, rows: torch.Tensor) -> list[int]:
        return [rows.untyped_storage().nbytes()]

    @register(Dispatch.ONE_TO_ALL)
    def keep(self, rows: torch.Tensor) -> None:
        self.kept = rows

    @register(Dispatch.RANK_ZERO)
    def write_into_kept(self, *, is_hidden: bool) -> None:
        (self.kept.data if is_hidden else self.kept).add_(1.0)

    @register(Dispatch.ONE_TO_ALL)
    def first_kept(self) -> float:
        return self.kept[0].item()

    @register(Dispatch.DP_COMPUTE)
    def add_in_place(self, batch: TensorDict) -> TensorDict:
        batch["x"].add_(1.0)
        return batch

    @register(Dispatch.DP_COMPUTE)
    def add_in_place_without_autograd(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            rows[0] = 5.0
        return rows

    @register(Dispatch.DP_COMPUTE)
    def clone_and_add_in_place(self, batch: TensorDict) -> TensorDict:
        own = batch.clone()
        own["x"].add_(1.0)
        return own
