"""A score that fails leaves the model sharded: a phase may follow, and all of it must leave."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridrl.models.packed_model import PackedTokens
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_model
from tests.workers.train.engines import build_fsdp2, fsdp2_of, make_rows


def _parameters_after_a_failure(rank: int, folder: Path) -> list[bool]:
    engine = build_fsdp2(folder)
    rows = make_rows(4)

    backend = fsdp2_of(engine)

    def compute(model: nn.Module, tokens: PackedTokens) -> Tensor:
        model(tokens, 1.0)
        raise OSError("a kernel failed")

    with pytest.raises(OSError, match="a kernel failed"):
        backend.forward(backend.microbatches(rows), compute, num_columns=2)
    return [isinstance(parameter, DTensor) for parameter in backend.model.parameters()]


def test_a_model_is_sharded_again_after_a_score_that_failed(tmp_path: Path) -> None:
    for are_sharded in run_ranks(2, _parameters_after_a_failure, make_tiny_model(tmp_path)):
        assert len(are_sharded) > 10
        assert all(are_sharded)
