from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.load import Part
from hybridrl.algorithms.policy_losses.ppo import ppo_clip
from hybridrl.batch import jagged_from, row_lengths
from hybridrl.errors import DataError
from hybridrl.workers.train.losses import PolicyGradientLoss
from hybridrl.workers.train.model_engine import TOKEN_MEAN
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import TrainState
from tests.contract.layouts import on_layouts
from tests.contract.plain import PlainPolicy
from tests.contract.ranks_under_test import (
    Rank,
    RanksUnderTest,
    merge_metrics,
    mute,
    rows_of_rank,
    take_step,
)
from tests.contract.steps import merged_steps
from tests.workers.train.engines import (
    ACTOR,
    OPTIMIZER,
    add_masks,
    after,
    make_conversations,
    make_rows,
    to_rollouts,
    weights_of,
)

pytestmark = on_layouts(compares_numbers=True)


def _score(rank: Rank, folder: Path, batch: Any) -> tuple[Tensor, Tensor] | None:
    engine = rank.policy(folder)
    assert (engine.dp_size, engine.is_output_rank) in {
        (rank.layout.dp_size, True),
        (engine.dp_size, False),
    }
    rows = to_rollouts(rows_of_rank(batch, engine, 6))
    scored = engine.compute_logprobs(rows, temperature=0.7)
    assert scored.logprobs_BL.values().dtype == torch.float32
    if not engine.is_output_rank:
        return None
    return scored.logprobs_BL.values(), scored.entropy_BL.values()


def check_scores(
    ranks: RanksUnderTest, folder: Path, batch: Any, *, apart: Any | None = None
) -> None:
    """``apart``: the same batch for the plain model, which knows one sequence a row."""
    answers = [answer for answer in ranks.run(_score, folder, batch) if answer is not None]
    assert len(answers) == ranks.layout.dp_size  # one leads for each data-parallel rank
    with torch.no_grad():
        rows = batch if apart is None else apart
        expected = PlainPolicy(folder, OPTIMIZER).score(rows, temperature=0.7)
    for number, column in enumerate(expected):
        scored = torch.cat([answer[number] for answer in answers])
        torch.testing.assert_close(scored, column, atol=2e-5, rtol=0, msg=after(folder.name))


@pytest.mark.parametrize(("num_siblings", "tie"), [(1, True), (6, False)])
def test_logprobs_and_entropies_are_those_of_the_plain_model(
    ranks: RanksUnderTest, make_model: Any, num_siblings: int, tie: bool
) -> None:
    check_scores(ranks, make_model(ranks.layout, tie=tie), make_rows(12, num_siblings=num_siblings))


@pytest.mark.parametrize("num_siblings", [pytest.param(1, marks=pytest.mark.nightly), 6])
def test_families_score_as_transformers_beyond_their_windows(
    ranks: RanksUnderTest, make_model: Any, num_siblings: int
) -> None:
    if ranks.layout.family not in ranks.families:
        pytest.skip("a layout for mixtures of experts")
    batch = make_rows(12, num_siblings=num_siblings, seed=2)
    for family in ranks.families:
        check_scores(ranks, make_model(ranks.layout, family=family), batch)


@pytest.mark.parametrize("num_siblings", [1, 6])
def test_tokens_are_scored_among_those_that_the_sampler_left(
    ranks: RanksUnderTest, folder: Path, num_siblings: int
) -> None:
    check_scores(ranks, folder, add_masks(make_rows(12, num_siblings=num_siblings)))


def test_rewritten_turns_and_branches_of_siblings_are_scored_as_if_alone(
    ranks: RanksUnderTest, folder: Path
) -> None:
    together, apart = make_conversations(12)
    check_scores(ranks, folder, together, apart=apart)


def _compare_with_itself(rank: Rank, folder: Path) -> Any:
    # Were old or reference log-probs mixed up between tokens, no distance would be 0.
    engine, batch = rank.policy(folder), make_rows(7)
    scored = engine.compute_logprobs(to_rollouts(batch), temperature=0.9).logprobs_BL
    batch.old_logprobs_BL = batch.reference_logprobs_BL = batch.sampler_logprobs_BL = scored
    loss = PolicyGradientLoss(policy_loss=Part.of(ppo_clip), kl_coefficient=0.1)
    return take_step(engine, batch, loss=loss)


def test_columns_stay_with_their_tokens(ranks: RanksUnderTest, folder: Path) -> None:
    metrics = merge_metrics(ranks.run(_compare_with_itself, folder))
    for name in ("kl_to_old_nats/mean", "kl_to_reference_nats/mean", "sampler_mismatch_nats/max"):
        assert metrics[f"policy/{name}"] == pytest.approx(0.0, abs=3e-6), name


def _look_around_scoring(rank: Rank, folder: Path) -> None:
    engine = rank.policy(folder, replace(ACTOR, compute_dtype="bfloat16"))
    batch, untouched = make_rows(4), make_rows(4)
    take_step(engine, batch, first=2)
    held = {part: engine.resident_bytes(part) for part in TrainState}
    dtypes = {name: tensor.dtype for name, tensor in engine.full_weights()}
    for _ in range(2):
        engine.compute_logprobs(to_rollouts(batch), temperature=1.0)
        assert held == {part: engine.resident_bytes(part) for part in TrainState}
        assert dtypes == {name: tensor.dtype for name, tensor in engine.full_weights()}
    for name in ("token_ids_BL", "response_mask_BL", "advantages_BL", "sampler_logprobs_BL"):
        assert torch.equal(getattr(batch, name).values(), getattr(untouched, name).values())


def test_scoring_leaves_no_gathered_weights_and_batches_as_they_were(
    ranks: RanksUnderTest, folder: Path
) -> None:
    ranks.run(_look_around_scoring, folder)


def _score_what_has_no_response(rank: Rank, folder: Path) -> tuple[Any, Any]:
    engine, batch = rank.policy(folder), make_rows(4)
    lengths_B = row_lengths(batch.token_ids_BL)
    mask = batch.response_mask_BL.values().clone()
    mask[: int(lengths_B[0])] = False
    batch.response_mask_BL = jagged_from(mask, lengths_B)
    partly = take_step(engine, batch, first=2)
    silent = mute(batch)
    wholly = take_step(engine, silent, first=2)
    scored = engine.compute_logprobs(to_rollouts(silent), temperature=1.0)
    assert not scored.logprobs_BL.values().any()
    assert all(tensor.isfinite().all() for tensor in weights_of(engine).values())
    return partly, wholly


@pytest.mark.shows("4.17")
def test_rows_without_a_response_count_but_are_not_computed(
    ranks: RanksUnderTest, folder: Path
) -> None:
    partly, wholly = merged_steps(ranks.run(_score_what_has_no_response, folder))
    num_tokens = int(row_lengths(make_rows(4).token_ids_BL)[1:].sum()) - 3
    assert partly["data/train_tokens"] == num_tokens
    assert "data/train_tokens" not in wholly
    assert wholly["policy/updates"] == 1


def _refuse(rank: Rank, folder: Path) -> str:
    engine, batch = rank.policy(folder), make_rows(3)
    lengths_B = row_lengths(batch.token_ids_BL)
    mask = batch.response_mask_BL.values().clone()
    mask[int(lengths_B[0])] = True
    batch.response_mask_BL = jagged_from(mask, lengths_B)
    with pytest.raises(DataError, match="row 1 of the batch begins with a response token") as error:
        engine.update(
            batch,
            loss=PolicyGradientLoss(policy_loss=Part.of(ppo_clip)),
            aggregation=TOKEN_MEAN,
            temperature=1.0,
            max_response_tokens=8,
        )
    take_step(engine, make_rows(4))  # and goes on
    return str(error.value)


def test_a_row_that_begins_with_a_response_token_is_refused(
    ranks: RanksUnderTest, folder: Path
) -> None:
    assert len(set(ranks.run(_refuse, folder))) == 1


def _hold_still(rank: Rank, folder: Path) -> None:
    policy = rank.policy(folder)
    reference = rank.reference(folder, policy=policy)
    assert isinstance(reference, PolicyEngine)
    rollouts = to_rollouts(make_rows(4 + 2 * policy.dp_rank))
    start = reference.compute_logprobs(rollouts, temperature=1.0).logprobs_BL.values()
    for cycle in range(3):
        take_step(policy, make_rows(5, seed=cycle))
        reference.offload(TrainState.PARAMETERS)
        assert reference.resident_bytes(TrainState.PARAMETERS) == 0
        reference.restore(TrainState.PARAMETERS)
        frozen = reference.compute_logprobs(rollouts, temperature=1.0).logprobs_BL.values()
        moved = policy.compute_logprobs(rollouts, temperature=1.0).logprobs_BL.values()
        assert torch.equal(frozen, start)
        assert not policy.is_output_rank or not torch.equal(moved, start)


def test_a_reference_stays_where_it_was_while_the_policy_moves(
    ranks: RanksUnderTest, folder: Path
) -> None:
    ranks.run(_hold_still, folder)
