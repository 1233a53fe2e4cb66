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
import torch
from torch import Tensor

from hybridrl.config.megatron import MegatronConfig
from hybridrl.metrics import Metrics
from tests.contract.layouts import cut
from tests.contract.plain import PlainPolicy
from tests.contract.ranks_under_test import Rank, RanksUnderTest, merge_metrics, take_step
from tests.tiny_models import make_tiny_model
from tests.workers.train.engines import (
    ACTOR,
    OPTIMIZER,
    assert_same_weights,
    make_rows,
    to_rollouts,
    weights_of,
)
from tests.workers.train.megatron.expert_layouts import batches

BUDGET = {"max_tokens_per_microbatch": 30}
AGAIN = {**BUDGET, "gradient_checkpointing": True}


_cut = partial(cut, "megatron")
UNEVEN_VIRTUAL = _cut(
    "pp3-vp2-uneven",
    num_ranks=3,
    num_layers=8,
    pipeline_parallel_size=3,
    num_virtual_stages=2,
    num_layers_in_first_stage=2,
    num_layers_in_last_stage=2,
)
PART_OF_A_HEAD = _cut("tp4-of-2-heads", num_ranks=4, tensor_parallel_size=4, sequence_parallel=True)
SELECTIVE_EXPERTS = _cut(
    "selective-experts",
    num_ranks=2,
    num_layers=4,
    family="qwen3_moe",
    pipeline_parallel_size=2,
    transformer_args={"recompute_modules": ("core_attn", "moe")},
    load_balance_coefficient=0.0,
)
FUSED = _cut(
    "fused",
    num_ranks=2,
    tensor_parallel_size=2,
    transformer_args={"bias_activation_fusion": True, "bias_dropout_fusion": True},
)
OVERLAPPED_EXPERTS = _cut(
    "dp2-ep2-overlap",
    num_ranks=2,
    dp_size=2,
    family="qwen3_moe",
    expert_parallel_size=2,
    ddp_args={"overlap_grad_reduce": True},
)
SHARED_EXPERTS = [
    _cut(
        f"tp2-sp-etp{size}",
        num_ranks=2,
        family="qwen3_moe",
        tensor_parallel_size=2,
        sequence_parallel=True,
        expert_tensor_parallel_size=size,
    )
    for size in (1, 2)
]
CASES = [
    pytest.param(layout, changes, id=layout.name)
    for layout, changes in (
        (UNEVEN_VIRTUAL, AGAIN),
        (PART_OF_A_HEAD, BUDGET),
        (SELECTIVE_EXPERTS, AGAIN),
        (FUSED, BUDGET),
        (OVERLAPPED_EXPERTS, BUDGET),
        *((layout, BUDGET) for layout in SHARED_EXPERTS),
    )
]


Learned = tuple[list[Metrics], dict[str, Tensor], Tensor | None, int]


def _train(rank: Rank, folder: Path, changes: dict[str, Any]) -> Learned:
    from hybridrl.workers.train.megatron.backend import MegatronBackend

    engine = rank.policy(folder, replace(ACTOR, **changes))
    assert isinstance(engine.backend, MegatronBackend)
    steps = [take_step(engine, batch) for batch in batches()]
    scored = engine.compute_logprobs(to_rollouts(make_rows(4, seed=9)), temperature=0.9)
    names = [
        name.split(".")[2]
        for name, _ in engine.backend.stages.named_tensors()
        if ".layers." in name
    ]
    logprobs = scored.logprobs_BL.values() if engine.is_output_rank else None
    return steps, weights_of(engine), logprobs, len(set(names))


@pytest.mark.parametrize(("ranks", "changes"), CASES, indirect=["ranks"])
def test_steps_are_those_of_the_plain_model(
    ranks: RanksUnderTest, changes: dict[str, Any], tmp_path: Path
) -> None:
    layout = ranks.layout
    folder = make_tiny_model(tmp_path / "model", layout.family, num_layers=layout.num_layers)
    plain = PlainPolicy(folder, OPTIMIZER)
    expected = [
        plain.update(batch, temperature=0.9, aggregation="token_mean", entropy_coefficient=0.0)
        for batch in batches()
    ]
    answers = ranks.run(_train, folder, changes)
    for number, (loss, norm) in enumerate(expected):
        reported = merge_metrics([steps[number] for steps, *_ in answers])
        assert reported["loss/policy"] == pytest.approx(loss, abs=1e-5)
        assert reported["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)
    with torch.no_grad():
        logprobs, _ = plain.score(make_rows(4, seed=9), temperature=0.9)
    stages = replace(MegatronConfig(), **layout.megatron).layers_of_stages(layout.num_layers)  # type: ignore[arg-type]
    if stages is not None and len(stages) == layout.num_ranks:
        assert [num_layers for *_, num_layers in answers] == [*stages]
    for _, weights, scored, _ in answers:
        expected_weights = plain.weights()
        assert weights.keys() == expected_weights.keys()
        in_order = {name: expected_weights[name] for name in weights}
        assert_same_weights(weights, in_order, atol=1e-5)
        if scored is not None:
            torch.testing.assert_close(scored, logprobs, atol=2e-5, rtol=0)
