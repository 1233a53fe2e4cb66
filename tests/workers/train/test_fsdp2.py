from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from hybridrl.algorithms.policy_losses import PolicyLoss
from hybridrl.algorithms.policy_losses.ppo import ppo_clip
from hybridrl.batch import TrainBatch
from hybridrl.checkpoint.store import FileEntry
from hybridrl.errors import ModelError
from hybridrl.models.packed_model import PackedTokens
from hybridrl.workers.train.checkpoint import CheckpointWriter
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.model_engine import TOKEN_MEAN
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import TrainState
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_model
from tests.workers.train.engines import (
    ACTOR,
    CPU,
    LOSS,
    MODEL,
    build_fsdp2,
    fsdp2_of,
    make_rows,
    rows_of,
    to_rollouts,
    update,
    weights_of,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_layers=4)


def _build(folder: Path, **options: Any) -> PolicyEngine:
    return build_fsdp2(folder, config=replace(ACTOR, fsdp2=replace(ACTOR.fsdp2, **options)))


def learn(engine: PolicyEngine, rows: TrainBatch, look: Callable[[], int]) -> list[int]:
    """Learn by the usual loss; return what ``look`` sees when a micro-batch has been computed."""
    seen = []

    def policy_loss(**inputs: Any) -> PolicyLoss:
        seen.append(look())
        return ppo_clip(**inputs)

    loss = replace(LOSS, policy_loss=replace(LOSS.policy_loss, function=policy_loss))
    asked: dict[str, Any] = {"temperature": 0.9, "max_response_tokens": 8}
    engine.update(rows, loss=loss, aggregation=TOKEN_MEAN, **asked)
    return seen


def _count_whole(rank: int, folder: Path, reshards: bool) -> list[int]:
    """Count parameters of blocks that are whole when the forward pass is over."""
    engine = _build(folder, reshard_after_forward=reshards)

    def look() -> int:
        parameters = fsdp2_of(engine).model.hf.model.layers.parameters()
        is_whole = [not isinstance(parameter, DTensor) for parameter in parameters]
        return -1 if all(is_whole) else sum(is_whole)

    seen = learn(engine, make_rows(4), look)
    assert all(isinstance(parameter, DTensor) for parameter in fsdp2_of(engine).model.parameters())
    return seen


def test_reshard_option_frees_gathered_blocks(folder: Path) -> None:
    assert run_ranks(2, _count_whole, folder, True) == [[0], [0]]
    assert run_ranks(2, _count_whole, folder, False) == [[-1], [-1]]  # all of them


def _policies(rank: int, folder: Path) -> list[set[type]]:
    return [
        {
            type(group.offload_policy)
            for module in fsdp2_of(_build(folder, cpu_offload=offloads)).model.modules()
            if isinstance(module, FSDPModule)
            for group in module._get_fsdp_state()._fsdp_param_groups
        }
        for offloads in (True, False)
    ]


def test_offload_is_asked_of_every_block_and_the_root(folder: Path) -> None:
    for offloaded, usual in run_ranks(2, _policies, folder):
        assert offloaded == {CPUOffloadPolicy}
        assert CPUOffloadPolicy not in usual


def _save(rank: int, folder: Path, target: Path, num_replicas: int) -> FileEntry | None:
    writer, engine = CheckpointWriter(), _build(folder, num_replicas=num_replicas)
    writer.begin(engine, target / f"rank-{rank}.safetensors", notes={})
    entry = writer.collect(waits=True)
    writer.close()
    return entry


def test_of_two_copies_of_the_model_one_is_saved(folder: Path, tmp_path: Path) -> None:
    first, second = run_ranks(2, _save, folder, tmp_path / "copies", 2)
    shards = run_ranks(2, _save, folder, tmp_path / "shards", 1)
    assert first.num_bytes > 1.9 * shards[0].num_bytes - 20_000
    assert second.num_bytes < 0.2 * first.num_bytes  # generators alone


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


def _learn(rank: int, folder: Path) -> tuple[dict[str, Tensor], list[int], list[int]]:
    """Return weights, and what a rank keeps of gradients after each micro-batch: shares, wholes."""
    config = replace(ACTOR, max_tokens_per_microbatch=20)
    engine = build_fsdp2(folder, config=config)
    shares: list[int] = []

    def look() -> int:
        shares.append(engine.resident_bytes(TrainState.GRADIENTS))
        return _bytes_of_whole_gradients(engine)

    wholes: list[int] = []
    # Few rows on one rank: it computes dummies while the other still has micro-batches.
    rows = range(11) if rank == 0 else range(11, 12)
    for seed in range(2):
        wholes += learn(engine, rows_of(make_rows(12, seed=seed), rows), look)
    return weights_of(engine), shares, wholes


def test_a_rank_keeps_its_share_of_gradients_alone(tiny_model: Path) -> None:
    for weights, shares, wholes in run_ranks(2, _learn, tiny_model):
        whole = sum(tensor.nbytes for tensor in weights.values())
        assert len(shares) > 4
        assert max(wholes) == 0
        assert 0.4 * whole < max(shares) < 0.6 * whole


def test_policy_without_optimizer_scores_but_cannot_learn(folder: Path) -> None:
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


def test_a_model_is_sharded_again_after_a_score_that_failed(folder: Path) -> None:
    for are_sharded in run_ranks(2, _parameters_after_a_failure, folder):
        assert len(are_sharded) > 10
        assert all(are_sharded)
