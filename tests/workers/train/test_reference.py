"""A policy on a back end without an optimizer: it scores, and cannot learn or be saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.errors import ModelError
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import TrainState
from tests.tiny_models import make_tiny_model
from tests.workers.train.engines import ACTOR, CPU, MODEL, fsdp2_of, make_rows, to_rollouts, update


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
