"""A score that fails leaves the model sharded: a phase may follow, and all of it must leave."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from hybridrl.models.packed_model import PackedTokens
from tests.models import make_tiny_model
from tests.ranks import run_ranks
from tests.workers.train.engines import build_fsdp2, make_rows


def _parameters_after_a_failure(rank: int, folder: Path) -> list[bool]:
    engine = build_fsdp2(folder)
    rows = make_rows(4)

    def score(tokens: PackedTokens) -> tuple[torch.Tensor, ...]:
        engine.model(tokens, 1.0)
        raise OSError("a kernel failed")

    with pytest.raises(OSError, match="a kernel failed"):
        engine._score_rows(rows.token_ids_BL, rows.response_mask_BL, score)
    return [isinstance(parameter, DTensor) for parameter in engine.model.parameters()]


def test_a_model_is_sharded_again_after_a_score_that_failed(tmp_path: Path) -> None:
    for are_sharded in run_ranks(2, _parameters_after_a_failure, make_tiny_model(tmp_path)):
        assert len(are_sharded) > 10
        assert all(are_sharded)
