from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrl.batch import TrainBatch, response_lengths
from hybridrl.workers.train.model_engine import TOKEN_MEAN
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.teachers import Teachers
from tests.contract.layouts import on_layouts
from tests.contract.ranks_under_test import Rank, RanksUnderTest, rows_of_rank
from tests.workers.train.engines import LOSS, build_fsdp2, make_rows

pytestmark = on_layouts(compares_numbers=True)

K, FIRST = 5, 4
COMPARING = replace(LOSS, divergence_coefficient=2.0)


def _learn(
    engine: PolicyEngine, teacher: Any, rows: TrainBatch
) -> tuple[list[Tensor], float, float]:
    """Return what the teacher says of response tokens, the divergence and the gradient's norm."""
    teachers = Teachers(models=[teacher], temperature=0.9, vocab_size=64, num_likeliest=K)
    taught = teachers.teach(rows)
    mask_N = rows.response_mask_BL.values()
    columns = (taught.teacher_top_logprobs_BLK, taught.teacher_top_ids_BLK)
    said = [column.values()[mask_N] for column in columns if column is not None]
    metrics = engine.update(
        taught,
        loss=COMPARING,
        aggregation=TOKEN_MEAN,
        temperature=0.9,
        max_response_tokens=8,
        beta=0.3,
    )
    divergence = metrics.get("loss/divergence")
    return said, 0.0 if divergence is None else divergence.value, metrics["policy/grad_norm"].value


def _learn_on_a_rank(rank: Rank, folders: list[Path], batch: TrainBatch) -> Any:
    engine = rank.policy(folders[0])
    teacher = rank.reference(folders[1], policy=engine)
    rows = rows_of_rank(batch, engine, FIRST)
    said, divergence, norm = _learn(engine, teacher, rows)
    num_tokens = int(response_lengths(rows.response_mask_BL).sum())
    return (said, divergence * num_tokens, norm) if engine.is_output_rank else None


@pytest.mark.parametrize("tie", [False, True])
def test_a_policy_learns_from_the_likeliest_tokens_of_a_teacher_as_on_one_rank(
    ranks: RanksUnderTest, make_model: Any, *, tie: bool
) -> None:
    batch = make_rows(12)
    folders = [make_model(ranks.layout, tie=tie, seed=seed) for seed in range(2)]
    answers = [each for each in ranks.run(_learn_on_a_rank, folders, batch) if each is not None]
    policy, teacher = (build_fsdp2(each) for each in folders)
    expected, divergence, norm = _learn(policy, teacher, batch)
    logprobs, ids = (torch.cat(columns) for columns in zip(*(a[0] for a in answers), strict=True))
    torch.testing.assert_close(logprobs, expected[0], atol=2e-5, rtol=0)
    assert torch.equal(ids, expected[1])
    num_tokens = int(response_lengths(batch.response_mask_BL).sum())
    assert sum(each[1] for each in answers) / num_tokens == pytest.approx(divergence, rel=1e-4)
    assert [each[2] for each in answers] == pytest.approx([norm] * len(answers), rel=1e-4)
