"""Small critics and their batches for the tests."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.batch import CriticBatch, jagged_from, row_lengths
from hybridrl.config.actor import CriticConfig, CriticOptimizerConfig
from tests.workers.train.engines import OPTIMIZER, make_rows

CRITIC = CriticConfig(
    optimizer=CriticOptimizerConfig(lr=OPTIMIZER.lr),
    num_warmup_steps=0,
    num_epochs=1,
    num_minibatches=1,
    value_clip=0.0,
    num_ranks_per_node=0,
)


def make_lessons(num_rows: int, *, seed: int = 0, num_siblings: int = 1) -> CriticBatch:
    """Rows as ``make_rows`` makes them, with returns and old values of about 1."""
    rows = make_rows(num_rows, seed=seed, num_siblings=num_siblings)
    generator = torch.Generator().manual_seed(seed + 100)

    def column() -> Tensor:
        values = torch.randn(rows.token_ids_BL.values().shape, generator=generator)
        values = torch.where(rows.response_mask_BL.values(), values, 0.0)
        return jagged_from(values, row_lengths(rows.token_ids_BL))

    return CriticBatch(
        token_ids_BL=rows.token_ids_BL,
        response_mask_BL=rows.response_mask_BL,
        old_values_BL=column(),
        returns_BL=column(),
        batch_size=[num_rows],
    )
