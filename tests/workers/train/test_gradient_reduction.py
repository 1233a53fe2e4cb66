"""When ranks exchange gradients: what each of them keeps meanwhile, and what comes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from hybridrl.metrics import Metrics
from hybridrl.workers.train.model_engine import TOKEN_MEAN
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import TokenLossInputs, TrainState
from tests.ranks import run_ranks
from tests.workers.train.engines import (
    ACTOR,
    LOSS,
    assert_same_weights,
    build_fsdp2,
    fsdp2_of,
    make_rows,
    rows_of,
    weights_of,
)


class _LossThatLooksAround:
    """The usual loss; notes the gradients that a rank keeps when a micro-batch begins."""

    needs_entropy_gradient = False

    def __init__(self, engine: PolicyEngine) -> None:
        self._engine: PolicyEngine | None = engine
        self.shares: list[int] = []
        self.wholes: list[int] = []

    def __call__(self, inputs: TokenLossInputs) -> tuple[Tensor, Metrics]:
        assert self._engine is not None
        self.shares.append(self._engine.resident_bytes(TrainState.GRADIENTS))
        self.wholes.append(_bytes_of_whole_gradients(self._engine))
        return LOSS(inputs)


def _bytes_of_whole_gradients(engine: PolicyEngine) -> int:
    """Count what FSDP2 has not reduced yet, of whole parameters."""
    num_bytes = 0
    for module in fsdp2_of(engine).model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    kept = parameter.unsharded_accumulated_grad
                    if kept is None and hasattr(parameter, "_unsharded_param"):
                        kept = parameter.unsharded_param.grad
                    num_bytes += 0 if kept is None else kept.nbytes
    return num_bytes


def _learn(
    rank: int, folder: Path, reduce_gradients: Any
) -> tuple[dict[str, Tensor], _LossThatLooksAround]:
    options = replace(ACTOR.fsdp2, reduce_gradients=reduce_gradients)
    config = replace(ACTOR, fsdp2=options, max_tokens_per_microbatch=20)
    engine = build_fsdp2(folder, config=config)
    loss = _LossThatLooksAround(engine)
    # Few rows on one rank: it computes dummies while the other still has micro-batches.
    rows = range(11) if rank == 0 else range(11, 12)
    for seed in range(2):
        engine.update(
            rows_of(make_rows(12, seed=seed), rows),
            loss=loss,
            aggregation=TOKEN_MEAN,
            temperature=0.9,
            max_response_tokens=8,
        )
    loss._engine = None
    return weights_of(engine), loss


def test_gradient_reduction_modes_learn_alike(tiny_model: Path) -> None:
    every = run_ranks(2, _learn, tiny_model, "every_microbatch")
    once = run_ranks(2, _learn, tiny_model, "last_microbatch")
    for (weights, loss), (same, kept) in zip(every, once, strict=True):
        whole = sum(tensor.nbytes for tensor in weights.values())
        assert len(loss.shares) > 4
        assert max(loss.wholes) == 0
        assert 0.4 * whole < max(loss.shares) < 0.6 * whole
        assert max(kept.wholes) == whole
        assert max(kept.shares) == 0
        assert_same_weights(weights, same, atol=3e-7)  # a last bit or two
