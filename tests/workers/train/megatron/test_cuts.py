from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.config.megatron import MegatronConfig
from hybridrl.workers.train.shard_spec import full_range, relative_slices
from tests.contract.layouts import EP2, OVERLAP, PP2, SP2, TP2, VP2, cut
from tests.contract.ranks_under_test import Rank, RanksUnderTest
from tests.contract.steps import Case, check_two_steps
from tests.tiny_models import make_tiny_model
from tests.workers.train.engines import ACTOR

BUDGET = Case({"max_tokens_per_microbatch": 30})
AGAIN = Case({"max_tokens_per_microbatch": 30, "gradient_checkpointing": True})

_cut = partial(cut, "megatron")
EXPERTS: dict[str, Any] = {"num_ranks": 2, "family": "qwen3_moe"}
FUSIONS = {"bias_activation_fusion": True, "bias_dropout_fusion": True}
UNEVEN = {"num_layers_in_first_stage": 2, "num_layers_in_last_stage": 2}
SELECTIVE: dict[str, Any] = {
    "num_layers": 4,
    "transformer_args": {"recompute_modules": ("core_attn", "moe")},
    "load_balance_coefficient": 0.0,
}
CASES = [
    (
        _cut(
            "pp3-vp2-uneven",
            num_ranks=3,
            **{**VP2, "pipeline_parallel_size": 3, "num_layers": 8, **UNEVEN},
        ),
        AGAIN,
    ),
    (_cut("tp4-of-2-heads", num_ranks=4, tensor_parallel_size=4, sequence_parallel=True), BUDGET),
    (_cut("selective-experts", **EXPERTS, **PP2, **SELECTIVE), AGAIN),
    (_cut("fused", num_ranks=2, **TP2, transformer_args=FUSIONS), BUDGET),
    (_cut("dp2-ep2-overlap", **EXPERTS, **EP2, **OVERLAP, dp_size=2), BUDGET),
    *(
        (_cut(f"tp2-sp-etp{size}", **EXPERTS, **SP2, expert_tensor_parallel_size=size), BUDGET)
        for size in (1, 2)
    ),
]


def _num_layers(rank: Rank, folder: Path) -> int:
    from hybridrl.workers.train.megatron.backend import MegatronBackend

    backend = rank.policy(folder).backend
    assert isinstance(backend, MegatronBackend)
    names = [name for name, _ in backend.stages.named_tensors() if ".layers." in name]
    return len({name.split(".")[2] for name in names})


BY_NIGHT = ("fused", "tp2-sp-etp1")
"""Kernels of megatron-core's own, and a size of 1, which tests of mixtures have by day."""


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        pytest.param(
            *(layout, case), id=layout.name, marks=[pytest.mark.nightly] * (layout.name in BY_NIGHT)
        )
        for layout, case in CASES
    ],
    indirect=["ranks"],
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


LAYOUTS = [
    _cut("tp2", num_ranks=2, **TP2),
    _cut("pp2", num_ranks=2, **PP2),
    _cut("dp2", num_ranks=2, dp_size=2),
]


def _compare(rank: Rank, folder: Path) -> int:
    """Compare this rank's masters with the files; return how many numbers there were."""
    engine = rank.policy(folder, replace(ACTOR, compute_dtype="bfloat16"))
    stored = load_file(folder / "model.safetensors")
    count = 0
    for name, held in engine.checkpoint_tensors().items():
        whole = stored[name.removeprefix("model.hf.")]
        for shard in held.shards:
            expected = whole[relative_slices(shard.spec.range, outer=full_range(whole.shape))]
            assert shard.values.dtype == torch.float32
            assert torch.equal(shard.values, expected), name
            count += shard.values.numel()
    for name, weight in engine.full_weights():
        assert torch.equal(weight, stored[name].bfloat16()), name
    return count


@pytest.mark.parametrize("ranks", LAYOUTS, ids=lambda layout: layout.name, indirect=True)
def test_masters_begin_as_the_values_of_the_files(ranks: RanksUnderTest, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    assert any(not torch.equal(t.bfloat16().float(), t) for t in stored.values())
    counts = ranks.run(_compare, folder)
    assert sum(counts) >= sum(tensor.numel() for tensor in stored.values())
