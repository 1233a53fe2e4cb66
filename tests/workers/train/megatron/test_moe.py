from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.contract.plain import weights_in
from tests.contract.ranks_under_test import (
    RanksUnderTest,
)
from tests.contract.steps import Case, check_two_steps
from tests.contract.test_checkpoints import check_resumes
from tests.workers.train.engines import (
    assert_same_weights,
)
from tests.workers.train.megatron.expert_layouts import cut_as, running

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
