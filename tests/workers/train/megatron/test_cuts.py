"""Unusual cuts and kernels compute what the plain model computes.

Stages of unequal length, less than a key-value head a rank, parts of a layer that are recomputed,
fused activations, and weights that arrive while the next step computes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config.megatron import MegatronConfig
from tests.contract.layouts import cut
from tests.contract.ranks_under_test import Rank, RanksUnderTest
from tests.contract.steps import Case, check_two_steps
from tests.tiny_models import make_tiny_model

BUDGET = Case({"max_tokens_per_microbatch": 30})
AGAIN = Case({"max_tokens_per_microbatch": 30, "gradient_checkpointing": True})

_cut = partial(cut, "megatron")
EXPERTS: dict[str, Any] = {"num_ranks": 2, "family": "qwen3_moe"}
SEQUENCE_PARALLEL = {"tensor_parallel_size": 2, "sequence_parallel": True}
CASES = [
    (
        _cut(
            "pp3-vp2-uneven",
            num_ranks=3,
            num_layers=8,
            pipeline_parallel_size=3,
            num_virtual_stages=2,
            num_layers_in_first_stage=2,
            num_layers_in_last_stage=2,
        ),
        AGAIN,
    ),
    (
        _cut("tp4-of-2-heads", num_ranks=4, tensor_parallel_size=4, sequence_parallel=True),
        BUDGET,
    ),
    (
        _cut(
            "selective-experts",
            **EXPERTS,
            num_layers=4,
            pipeline_parallel_size=2,
            recompute_modules=("core_attn", "moe"),
            load_balance_coefficient=0.0,
        ),
        AGAIN,
    ),
    (
        _cut(
            "fused",
            num_ranks=2,
            tensor_parallel_size=2,
            transformer_args={"bias_activation_fusion": True, "bias_dropout_fusion": True},
        ),
        BUDGET,
    ),
    (
        _cut(
            "dp2-ep2-overlap",
            **EXPERTS,
            dp_size=2,
            expert_parallel_size=2,
            overlap_communication=True,
        ),
        BUDGET,
    ),
    *(
        (
            _cut(
                f"tp2-sp-etp{size}",
                **EXPERTS,
                **SEQUENCE_PARALLEL,
                expert_tensor_parallel_size=size,
            ),
            BUDGET,
        )
        for size in (1, 2)
    ),
]


def _num_layers(rank: Rank, folder: Path) -> int:
    from hybridrl.workers.train.megatron.backend import MegatronBackend

    backend = rank.policy(folder).backend
    assert isinstance(backend, MegatronBackend)
    names = [name for name, _ in backend.stages.named_tensors() if ".layers." in name]
    return len({name.split(".")[2] for name in names})


@pytest.mark.parametrize(
    ("ranks", "case"), CASES, indirect=["ranks"], ids=[layout.name for layout, _ in CASES]
)
def test_steps_are_those_of_the_plain_model(
    ranks: RanksUnderTest, case: Case, tmp_path: Path
) -> None:
    layout = ranks.layout
    folder = make_tiny_model(tmp_path / "model", layout.family, num_layers=layout.num_layers)
    check_two_steps(ranks, folder, case, rel=1e-4)
    stages = replace(MegatronConfig(), **layout.megatron).layers_of_stages(layout.num_layers)  # type: ignore[arg-type]
    if stages is not None and len(stages) == layout.num_ranks:
        assert ranks.run(_num_layers, folder) == [*stages]
