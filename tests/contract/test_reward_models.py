"""Reward models on every layout: the scores are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from hybridrl.batch import SupervisedBatch
from hybridrl.data.conversations import lay_out_conversations
from tests.contract.layouts import on_layouts
from tests.contract.ranks_under_test import Rank, RanksUnderTest, rows_of_rank
from tests.tiny_models import make_tiny_classifier

pytestmark = on_layouts(lambda engine: engine.has_critic)

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
    return rewards_B if engine.is_output_rank else None


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
