"""The same training on one rank and on two real gloo ranks, over several updates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.batch import TrainBatch, jagged_from, row_lengths
from hybridrl.errors import RunFolderError
from hybridrl.metrics import merge
from hybridrl.workers.train.fsdp2 import FSDP2Engine
from hybridrl.workers.train.protocol import TrainEngine, TrainState
from hybridrl.workers.train.scorer import FSDP2Scorer
from tests.models import make_tiny_model
from tests.ranks import run_ranks
from tests.workers.train.engines import (
    ACTOR,
    BUILDERS,
    CPU,
    LOSS,
    MODEL,
    assert_same_weights,
    build_fsdp2,
    make_rows,
    rows_of,
    to_rollouts,
    update,
    weights_of,
    with_nan_advantage,
    with_optimizer,
)

# Rank 1 gets few rows: fewer micro-batches than rank 0, in one case none at all.
SPLITS = [(range(0, 8), range(8, 11)), (range(0, 11), range(0, 0))]


def _train(
    rank: int, engine_name: str, folder: Path, split: tuple[range, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Tensor], Tensor]:
    config = replace(ACTOR, max_tokens_per_microbatch=30, **kwargs)
    engine: TrainEngine = BUILDERS[engine_name](folder, config=config)
    assert (engine.dp_rank, engine.dp_size) == (rank, len(split))
    steps = []
    for seed in range(3):
        mine = rows_of(_eleven_rows(seed), split[rank]) if len(split[rank]) else None
        # An empty slice cannot be taken of jagged rows: stand in rows without a response.
        batch = _mute(rows_of(make_rows(11), [0])) if mine is None else mine
        engine.compute_logprobs(to_rollouts(batch), temperature=0.9)  # must not disturb anything
        steps.append(
            engine.update(
                batch,
                loss=LOSS,
                aggregation="token_mean",
                temperature=0.9,
                max_response_tokens=8,
            )
        )
    batch = make_rows(4, seed=9)
    scored = engine.compute_logprobs(to_rollouts(batch), temperature=0.9)
    return steps, weights_of(engine), scored.logprobs_BL.values()


def _eleven_rows(seed: int) -> TrainBatch:
    return rows_of(make_rows(12, seed=seed, num_siblings=4), range(11))


def _mute(batch: TrainBatch) -> TrainBatch:
    batch = batch.clone()
    silent = torch.zeros_like(batch.response_mask_BL.values())
    batch.response_mask_BL = jagged_from(silent, row_lengths(batch.token_ids_BL))
    return batch


@pytest.mark.parametrize("engine_name", sorted(BUILDERS))
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kwargs", [{}, {"gradient_checkpointing": True}])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_weights_and_metrics_do_not_depend_on_how_rows_fall_on_ranks(
    tmp_path: Path,
    engine_name: str,
    split: tuple[range, range],
    kwargs: dict[str, Any],
    tie_embeddings: bool,
) -> None:
    folder = make_tiny_model(tmp_path / "model", tie_embeddings=tie_embeddings)
    alone_steps, alone_weights, alone_scores = _train(
        0, engine_name, folder, (range(0, 11),), kwargs
    )
    ranks = run_ranks(2, _train, engine_name, folder, split, kwargs)
    for step, alone in enumerate(alone_steps):
        together = merge(answer[0][step] for answer in ranks)
        assert sorted(alone) == sorted(together)
        for name in set(alone) - {"data/microbatches", "data/train_tokens"}:
            expected = alone[name].value
            assert together[name].value == pytest.approx(expected, rel=2e-6, abs=1e-7), name
    for _, weights, scores in ranks:
        assert_same_weights(alone_weights, weights, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(alone_scores, scores, atol=1e-5, rtol=0)
    assert_same_weights(ranks[0][1], ranks[1][1])


def _skip_together(rank: int, folder: Path) -> None:
    engine = build_fsdp2(folder, config=with_optimizer(eps=1e-4))
    batch = make_rows(4, seed=rank)
    before = weights_of(engine)
    spoiled = with_nan_advantage(batch, 1) if rank == 1 else batch
    metrics = update(engine, spoiled)
    assert ("policy/skipped_updates" in metrics) == (rank == 0)  # counted once, not once a rank
    assert metrics.get("policy/skipped_updates", 1) == 1
    assert_same_weights(before, weights_of(engine))
    assert engine.optimizer.state() == []
    assert metrics["policy/lr"] > 0
    assert update(engine, batch).get("policy/updates", 1) == 1


def test_one_rank_with_a_nan_makes_all_ranks_skip(tmp_path: Path) -> None:
    run_ranks(2, _skip_together, make_tiny_model(tmp_path / "model"))


def _rest_and_train(rank: int, folder: Path) -> None:
    resting, steady = build_fsdp2(folder), build_fsdp2(folder)
    full_bytes = sum(spec.num_bytes for spec in resting.weight_specs())
    for seed in range(3):
        for engine in (resting, steady):
            update(engine, make_rows(4 + rank, seed=seed))
            engine.compute_logprobs(to_rollouts(make_rows(3)), temperature=1.0)
        held = resting.resident_bytes(TrainState.PARAMETERS)
        assert held < 0.6 * full_bytes  # a shard, and nothing gathered is left behind
        for part in TrainState:
            resting.offload(part)
            assert resting.resident_bytes(part) == 0
        for part in TrainState:
            resting.restore(part)
        assert resting.resident_bytes(TrainState.PARAMETERS) == held
    assert_same_weights(weights_of(resting), weights_of(steady))


def test_offloaded_shards_come_back_bit_by_bit(tmp_path: Path) -> None:
    run_ranks(2, _rest_and_train, make_tiny_model(tmp_path / "model"))


def _export(rank: int, folder: Path, target: Path) -> None:
    engine = build_fsdp2(folder)
    update(engine, make_rows(4, seed=rank))
    engine.export_hf(target)
    assert (target / "model.safetensors").is_file()  # whole, on whichever rank looks
    with pytest.raises(RunFolderError, match="exists; export to a new folder"):
        engine.export_hf(target)
    update(engine, make_rows(4, seed=rank))
    dist.barrier()


def test_all_ranks_wait_for_an_export_and_fail_with_it(tmp_path: Path) -> None:
    target = tmp_path / "exported"
    run_ranks(2, _export, make_tiny_model(tmp_path / "model"), target)
    assert dict(build_fsdp2(target).full_weights())


def _mixed_precision(rank: int, folder: Path) -> None:
    config = replace(ACTOR, compute_dtype="bfloat16", optimizer=with_optimizer(lr=0.05).optimizer)
    engine = build_fsdp2(folder, config=config)
    exact = FSDP2Scorer(folder, config=ACTOR, model_config=MODEL, device=CPU)
    rollouts = to_rollouts(make_rows(5))
    one, other = (e.compute_logprobs(rollouts, temperature=1.0) for e in (engine, exact))
    assert one.logprobs_BL.values().dtype == torch.float32
    torch.testing.assert_close(
        one.logprobs_BL.values(), other.logprobs_BL.values(), atol=0.15, rtol=0
    )
    assert {tensor.dtype for _, tensor in engine.full_weights()} == {torch.float32}
    before = weights_of(engine)
    update(engine, make_rows(5, seed=rank))
    changed = [
        name for name, tensor in weights_of(engine).items() if (tensor != before[name]).any()
    ]
    assert changed == list(before)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bfloat16_computes_and_float32_is_kept(tmp_path: Path, num_ranks: int) -> None:
    run_ranks(num_ranks, _mixed_precision, make_tiny_model(tmp_path / "model"))


def _frozen_and_trained(rank: int, folder: Path) -> None:
    policy = FSDP2Engine(folder, config=ACTOR, model_config=MODEL, num_total_steps=10, device=CPU)
    reference = FSDP2Scorer(folder, config=ACTOR, model_config=MODEL, device=CPU)
    rollouts = to_rollouts(make_rows(4 + 2 * rank))
    start = reference.compute_logprobs(rollouts, temperature=1.0).logprobs_BL.values()
    for cycle in range(3):
        update(policy, make_rows(4, seed=cycle))
        reference.offload(TrainState.PARAMETERS)
        assert reference.resident_bytes(TrainState.PARAMETERS) == 0
        reference.restore(TrainState.PARAMETERS)
        frozen = reference.compute_logprobs(rollouts, temperature=1.0).logprobs_BL.values()
        moved = policy.compute_logprobs(rollouts, temperature=1.0).logprobs_BL.values()
        assert torch.equal(frozen, start)
        assert not torch.equal(moved, start)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_reference_stays_where_it_was_while_the_policy_moves(
    tmp_path: Path, num_ranks: int
) -> None:
    run_ranks(num_ranks, _frozen_and_trained, make_tiny_model(tmp_path / "model"))
