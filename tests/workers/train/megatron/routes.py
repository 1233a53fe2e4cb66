"""Routes to replay, and transformers' model made to take them: the truth about replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hybridrl.batch import TrainBatch, jagged_from, row_lengths
from tests.contract.plain import PlainPolicy
from tests.workers.train.engines import OPTIMIZER


class ForcedRouter(nn.Module):
    """Weighs the experts that it is given, or those that it prefers, by its own logits."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight = router.weight
        self._top_k = router.top_k
        self._normalizes = getattr(router, "norm_topk_prob", True)  # Mixtral's has no choice
        self.given_LK: Tensor | None = None
        self.used_LK = torch.zeros(0)

    def forward(self, hidden_LH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = linear(hidden_LH, self.weight)
        scores = logits.softmax(dim=-1)
        self.used_LK = scores.topk(self._top_k).indices if self.given_LK is None else self.given_LK
        weights = scores.gather(1, self.used_LK)
        if self._normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights, self.used_LK


class RoutedPolicy(PlainPolicy):
    """A policy that sends tokens where ``batch.routed_experts_BLJK`` says."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, OPTIMIZER)
        self._routers = {}
        for number, layer in enumerate(self.model.model.layers):
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate = self._routers[number] = ForcedRouter(layer.mlp.gate)

    def score(self, batch: TrainBatch, *, temperature: float) -> tuple[Tensor, Tensor]:
        """See PlainPolicy; the last token of a row, which has no route, changes nothing."""
        if batch.routed_experts_BLJK is None:
            return super().score(batch, temperature=temperature)
        scored = []
        for row, experts_LJK in enumerate(batch.routed_experts_BLJK.unbind()):
            for number, router in self._routers.items():
                router.given_LK = experts_LJK[:, number].long().clamp(min=0)
            scored.append(super().score(batch[row : row + 1], temperature=temperature))
            for router in self._routers.values():
                router.given_LK = None
        logprobs, entropies = zip(*scored, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    @torch.no_grad()
    def with_own_routes(self, batch: TrainBatch) -> TrainBatch:
        config = self.model.config
        rows = []
        for tokens in batch.token_ids_BL.unbind():
            self.model(tokens[None])
            shape = (len(tokens), config.num_hidden_layers, config.num_experts_per_tok)
            experts_LJK = torch.zeros(shape, dtype=torch.int16)  # as is for layers without experts
            for number, router in self._routers.items():
                experts_LJK[:, number] = router.used_LK
            rows.append(experts_LJK)
        return _with(batch, torch.cat(rows))

    def with_random_routes(self, batch: TrainBatch, *, seed: int) -> TrainBatch:
        config = self.model.config
        shape = (len(batch.token_ids_BL.values()), config.num_hidden_layers, config.num_experts)
        noise = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
        return _with(batch, noise.topk(config.num_experts_per_tok).indices.to(torch.int16))


def _with(batch: TrainBatch, experts_TJK: Tensor) -> TrainBatch:
    lengths_B = row_lengths(batch.token_ids_BL)
    experts_TJK[lengths_B.cumsum(0) - 1] = -1
    routed = batch.clone()
    routed.routed_experts_BLJK = jagged_from(experts_TJK, lengths_B)
    return routed
