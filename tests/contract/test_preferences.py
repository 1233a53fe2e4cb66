from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.load import Part
from hybridrl.algorithms.preference_losses import sigmoid
from hybridrl.batch import PreferenceBatch
from hybridrl.metrics import Metrics
from hybridrl.workers.train.losses import PreferenceObjective
from hybridrl.workers.train.model_engine import ModelEngine
from tests.contract.layouts import on_layouts
from tests.contract.plain import PlainPolicy
from tests.contract.ranks_under_test import (
    Rank,
    RanksUnderTest,
    mute,
    output_metrics,
)
from tests.contract.steps import merged_steps
from tests.workers.train.engines import ACTOR, assert_same_weights, make_rows, weights_of

pytestmark = on_layouts()

BETA, SFT = 0.3, 0.5


def make_pairs() -> PreferenceBatch:
    """Three pairs, of which a rank gets two at most."""
    rows = make_rows(6, num_siblings=2)
    return PreferenceBatch(
        token_ids_BL=rows.token_ids_BL,
        response_mask_BL=rows.response_mask_BL,
        reference_logprobs_B=-torch.arange(6.0).square() / 4,  # each pair has its own difference
        batch_size=[6],
    )


def pairs_of_rank(engine: ModelEngine) -> PreferenceBatch:
    """Two pairs for data-parallel rank 0, one for rank 1, none for others."""
    batch: PreferenceBatch = make_pairs()
    if engine.dp_size == 1:
        return batch
    if engine.dp_rank == 0:
        return batch[:4]
    return batch[4:] if engine.dp_rank == 1 else mute(batch[4:])


def _prefer(rank: Rank, folder: Path, max_tokens: int) -> tuple[list[Metrics], dict[str, Tensor]]:
    engine = rank.policy(folder, replace(ACTOR, max_tokens_per_microbatch=max_tokens))
    objective = PreferenceObjective(Part.of(sigmoid, beta=BETA), SFT)
    batch = pairs_of_rank(engine)
    steps = [output_metrics(engine, engine.fit_pairs(batch, objective)) for _ in range(2)]
    return steps, weights_of(engine)


@pytest.mark.parametrize("max_tokens", [1, 1000], ids=["many micro-batches", "one"])
def test_steps_on_pairs_are_those_of_the_plain_model(
    ranks: RanksUnderTest, folder: Path, max_tokens: int
) -> None:
    model = PlainPolicy(folder, ACTOR.optimizer)
    expected = [model.prefer(make_pairs(), beta=BETA, sft_coefficient=SFT) for _ in range(2)]
    answers = ranks.run(_prefer, folder, max_tokens)
    for metrics, (loss, norm) in zip(merged_steps([a[0] for a in answers]), expected, strict=True):
        total = metrics["loss/preference"] + SFT * metrics["loss/supervised_nats"]
        assert total == pytest.approx(loss, rel=1e-5)
        assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert_same_weights(answers[0][1], model.weights(), atol=1e-5)
    assert expected[1][0] < expected[0][0]
