from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridrl.errors import ModelError
from hybridrl.models.packed_model import PackedTokens
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import TrainState
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_model
from tests.workers.train.engines import (
    ACTOR,
    CPU,
    MODEL,
    build_fsdp2,
    fsdp2_of,
    make_rows,
    to_rollouts,
    update,
)


def test_policy_without_optimizer_scores_but_cannot_learn(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    reference = PolicyEngine(FSDP2Backend(folder, config=ACTOR, model_config=MODEL, device=CPU))
    scored = reference.compute_logprobs(to_rollouts(make_rows(4)), temperature=1.0)
    assert not any(p.requires_grad for p in fsdp2_of(reference).model.parameters())
    assert scored.logprobs_BL.values().any()
    assert [reference.resident_bytes(part) > 0 for part in TrainState] == [True, False, False]
    for use in (lambda: update(reference, make_rows(4)), reference.checkpoint_tensors):
        with pytest.raises(ModelError, match="built without an optimizer"):
            use()


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
