from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from hybridrl.batch import PreferenceBatch, SupervisedBatch
from hybridrl.data.conversations import lay_out_conversations
from hybridrl.errors import PhaseError
from hybridrl.metrics import Metrics
from hybridrl.workers.train.protocol import TrainState
from hybridrl.workers.train.value_engines import RewardEngine
from tests.contract.layouts import on_layouts
from tests.contract.plain import PlainRewardModel, weights_in
from tests.contract.ranks_under_test import (
    Rank,
    RanksUnderTest,
    merge_metrics,
    mute,
    output_metrics,
    rank_ranges,
    rows_of_rank,
)
from tests.contract.steps import assert_steps
from tests.tiny_models import make_tiny_classifier, save_tiny_tokenizer
from tests.workers.train.engines import ACTOR, OPTIMIZER, assert_same_weights

# FSDP2 maps the names of a mixture's experts for reward models by itself.
pytestmark = on_layouts(lambda engine: engine.has_critic, steps_of=["fsdp2-moe"])

Kind = Literal["sequence", "token"]


def conversations(num_rows: int, *, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (num_rows,), generator=generator).tolist()
    return [torch.randint(0, 60, (n,), generator=generator).tolist() for n in lengths]


def plain_scores(folder: Path, rows: list[list[int]], kind: Kind = "sequence") -> Tensor:
    classes = {
        "sequence": AutoModelForSequenceClassification,
        "token": AutoModelForTokenClassification,
    }
    model = classes[kind].from_pretrained(folder).eval()
    with torch.no_grad():
        logits = [model(torch.tensor([row])).logits for row in rows]
    return torch.stack([each.view(-1)[-1] for each in logits])


def _scores(rank: Rank, folder: Path, batch: SupervisedBatch) -> Tensor | None:
    engine = rank.reward_model(folder)
    rewards_B = engine.compute_rewards(rows_of_rank(batch, engine, 4)).rewards_B
    num_rows = len(rank_ranges(len(batch), engine.dp_size, 4)[engine.dp_rank])
    return rewards_B[:num_rows] if engine.is_output_rank else None


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_scores_are_those_of_transformers(
    ranks: RanksUnderTest, tmp_path: Path, kind: Kind
) -> None:
    folder = make_tiny_classifier(
        tmp_path / "model", ranks.layout.family, kind=kind, num_layers=ranks.layout.num_layers
    )
    rows = conversations(6)
    answers = ranks.run(_scores, folder, lay_out_conversations(rows))
    scores = torch.cat([answer for answer in answers if answer is not None])
    torch.testing.assert_close(scores, plain_scores(folder, rows, kind), rtol=1e-4, atol=1e-4)


def to_batch(rows: list[list[int]], margins: list[float] | None = None) -> PreferenceBatch:
    laid_out = lay_out_conversations(rows)
    margins_B = None if margins is None else torch.tensor(margins).repeat_interleave(2)
    return PreferenceBatch(
        token_ids_BL=laid_out.token_ids_BL,
        response_mask_BL=laid_out.response_mask_BL,
        margins_B=margins_B,
        batch_size=[len(rows)],
    )


def pairs_of_rank(batch: PreferenceBatch, engine: RewardEngine, first: int) -> PreferenceBatch:
    """This rank's pairs; a rank without any has one that is masked out."""
    own = rank_ranges(len(batch) // 2, engine.dp_size, first // 2)[engine.dp_rank]
    return batch[2 * own.start : 2 * own.stop] if own else mute(batch[:2])


@dataclass(frozen=True)
class Case:
    changes: dict[str, Any]
    """Of the actor's configuration."""

    first: int = 4
    """Rows of the first of two data-parallel ranks, of six."""

    begins: Literal["language model", "reward model"] = "language model"
    center_coefficient: float = 0.0
    margins: list[float] | None = None


CASES = {
    "one micro-batch": Case({}, begins="reward model"),
    "many micro-batches": Case(
        {"max_tokens_per_microbatch": 12}, center_coefficient=0.02, margins=[0.5, 0.0, 2.0]
    ),
    "a rank without rows": Case({"max_tokens_per_microbatch": 12}, first=6),
    "activations computed again": Case({"gradient_checkpointing": True}, first=2),
}


def _train(
    rank: Rank, folder: Path, target: Path, case: Case
) -> tuple[list[Metrics], Metrics, Tensor | None]:
    engine = rank.reward_trainer(
        folder, replace(ACTOR, **case.changes), center_coefficient=case.center_coefficient
    )
    steps = []
    for seed in range(2):
        batch = pairs_of_rank(
            to_batch(conversations(6, seed=seed), case.margins), engine, case.first
        )
        steps.append(output_metrics(engine, engine.fit_pairs(batch)))
    held_out = to_batch(conversations(6, seed=9), case.margins)
    held_out = pairs_of_rank(held_out, engine, case.first)
    measured = output_metrics(engine, engine.evaluate_pairs(held_out))
    engine.export_hf(target)
    engine.offload(TrainState.PARAMETERS)
    with pytest.raises(PhaseError, match=r"compute_rewards\(\) needs parameters"):
        engine.compute_rewards(lay_out_conversations(conversations(5)))
    engine.restore(TrainState.PARAMETERS)
    scores_B = engine.compute_rewards(lay_out_conversations(conversations(5))).rewards_B
    return steps, measured, scores_B if engine.is_output_rank else None


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_steps_and_export_are_those_of_the_plain_model(
    ranks: RanksUnderTest, folder: Path, tmp_path: Path, case: Case
) -> None:
    if case.begins == "reward model":
        folder = make_tiny_classifier(
            tmp_path / "model", ranks.layout.family, num_layers=ranks.layout.num_layers
        )
        save_tiny_tokenizer(folder)
    plain = PlainRewardModel(folder, OPTIMIZER)
    center = case.center_coefficient
    margins = case.margins or [0.0] * 3
    expected = [
        plain.update(conversations(6, seed=n), center_coefficient=center, margins=margins)
        for n in range(2)
    ]
    answers = ranks.run(_train, folder, tmp_path / "exported", case)
    assert_steps([a[0] for a in answers], expected, loss="loss/preference", rel=1e-4)
    stored = weights_in(tmp_path / "exported")
    weights = plain.weights()
    assert_same_weights({name: stored[name] for name in weights}, weights, atol=2e-5)
    scores = plain_scores(tmp_path / "exported", conversations(5))
    assert scores.std() > 1e-3
    for computed in (answer[2] for answer in answers if answer[2] is not None):
        torch.testing.assert_close(computed, scores, atol=1e-4, rtol=1e-4)
    chosen, rejected = plain.scores(conversations(6, seed=9)).detach().view(-1, 2).unbind(dim=1)
    measured = merge_metrics([answer[1] for answer in answers])
    assert measured["eval/accuracy"] == pytest.approx((chosen > rejected).float().mean().item())
    losses = torch.log1p(torch.exp(rejected + torch.tensor(margins) - chosen))
    losses += center * (chosen + rejected).square()
    assert measured["eval/preference_loss"] == pytest.approx(losses.mean().item(), rel=1e-3)
    margin = (chosen - rejected).mean().item()
    assert measured["eval/margin"] == pytest.approx(margin, rel=1e-3, abs=1e-4)
