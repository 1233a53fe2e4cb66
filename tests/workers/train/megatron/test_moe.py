from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.contract.plain import PlainPolicy, weights_in
from tests.contract.ranks_under_test import (
    Rank,
    RanksUnderTest,
    rows_of_rank,
)
from tests.contract.steps import Case, check_two_steps
from tests.contract.test_checkpoints import check_resumes
from tests.workers.train.engines import (
    ACTOR,
    OPTIMIZER,
    assert_same_weights,
    to_rollouts,
)
from tests.workers.train.megatron.expert_layouts import batches, cut_as, running

ALL = ("1", "ep2", "tp2-sp-ep2", "pp2", "pp2-ep2", "cp2-ep2")


@pytest.mark.shows("6.1")
@cut_as(*ALL)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(), marks=pytest.mark.nightly),
        Case({"max_tokens_per_microbatch": 30, "gradient_checkpointing": True}),
        # One of two data-parallel ranks has fillers alone; by day the contract has such a case.
        pytest.param(Case({"max_tokens_per_microbatch": 30}, first=11), marks=pytest.mark.nightly),
    ],
    ids=["one pack", "computed again", "fillers"],
)
def test_two_steps_and_their_export_equal_the_plain_model_with_its_routers(
    ranks: RanksUnderTest, folder: Path, tmp_path: Path, case: Case
) -> None:
    learned = check_two_steps(ranks, folder, case, target=tmp_path / "end")
    before = weights_in(folder)
    assert sum(".experts." in name for name in learned) >= 3 * 6
    assert [name for name, tensor in learned.items() if torch.equal(tensor, before[name])] == []
    assert_same_weights(weights_in(tmp_path / "end"), learned)


def _score_and_export(rank: Rank, folder: Path, target: Path) -> tuple[int, Tensor] | None:
    engine = rank.policy(folder, replace(ACTOR, max_tokens_per_microbatch=30))
    engine.export_hf(target)
    rows = to_rollouts(rows_of_rank(batches()[0], engine, 8))
    scored = engine.compute_logprobs(rows, temperature=0.9).logprobs_BL.values()
    return (engine.dp_rank, scored) if engine.is_output_rank else None


@cut_as(*ALL)
def test_what_was_loaded_scores_as_hugging_face_and_is_exported_bitwise(
    ranks: RanksUnderTest, folder: Path, tmp_path: Path
) -> None:
    with torch.no_grad():
        expected, _ = PlainPolicy(folder, OPTIMIZER).score(batches()[0], temperature=0.9)
    answers = ranks.run(_score_and_export, folder, tmp_path / "exported")
    scored = torch.cat(
        [logprobs for _, logprobs in sorted(filter(None, answers), key=lambda a: a[0])]
    )
    torch.testing.assert_close(scored, expected, atol=2e-5, rtol=0)
    assert_same_weights(weights_in(tmp_path / "exported"), weights_in(folder))


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [
        ("ep2", "tp2-sp-ep2"),
        pytest.param("1", "pp2-ep2", marks=pytest.mark.nightly),
        ("pp2-ep2", "ep2"),
        ("tp2-sp-ep2", "1"),
    ],
)
def test_expert_checkpoint_resumes_in_another_layout(
    folder: Path, tmp_path: Path, saved_by: str, loaded_by: str
) -> None:
    with running(saved_by) as writers, running(loaded_by) as readers:
        check_resumes(writers, readers, folder, tmp_path, "policy")
