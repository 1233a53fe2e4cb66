"""Mixtures of experts on megatron-core: what is computed is what transformers computes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrl.metrics import Metrics
from tests.contract.plain import PlainPolicy, weights_in
from tests.contract.ranks_under_test import (
    Rank,
    RanksUnderTest,
    merge_metrics,
    rows_of_rank,
    take_step,
)
from tests.workers.train.engines import (
    ACTOR,
    OPTIMIZER,
    after,
    assert_same_weights,
    load,
    save,
    to_rollouts,
    weights_of,
    with_optimizer,
)
from tests.workers.train.megatron.expert_layouts import batches, cut_as, running

ALL = ("1", "ep2", "tp2-sp-ep2", "pp2", "pp2-ep2", "cp2-ep2")


@cache
def _plain(folder: Path) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    model = PlainPolicy(folder, OPTIMIZER)
    steps = [
        model.update(batch, temperature=0.9, aggregation="token_mean", entropy_coefficient=0.0)
        for batch in batches()
    ]
    return steps, model.weights()


Learned = tuple[list[Metrics], dict[str, Tensor]]


def _score(rank: Rank, folder: Path) -> tuple[int, Tensor] | None:
    engine = rank.policy(folder, replace(ACTOR, max_tokens_per_microbatch=30))
    rows = to_rollouts(rows_of_rank(batches()[0], engine, 8))
    scored = engine.compute_logprobs(rows, temperature=0.9).logprobs_BL.values()
    return (engine.dp_rank, scored) if engine.is_output_rank else None


@cut_as(*ALL)
def test_log_probs_are_those_of_hugging_face(ranks: RanksUnderTest, folder: Path) -> None:
    with torch.no_grad():
        expected, _ = PlainPolicy(folder, OPTIMIZER).score(batches()[0], temperature=0.9)
    found = sorted((a for a in ranks.run(_score, folder) if a), key=lambda a: a[0])
    scored = torch.cat([logprobs for _, logprobs in found])
    torch.testing.assert_close(scored, expected, atol=2e-5, rtol=0)


def _train(rank: Rank, folder: Path, changes: dict[str, Any], first: int) -> Learned:
    engine = rank.policy(folder, replace(ACTOR, **changes))
    return [take_step(engine, batch, first=first) for batch in batches()], weights_of(engine)


@pytest.mark.shows("6.1")
@cut_as(*ALL)
@pytest.mark.parametrize(
    ("changes", "first"),
    [
        pytest.param({}, 8, marks=pytest.mark.nightly),
        ({"max_tokens_per_microbatch": 30, "gradient_checkpointing": True}, 8),
        ({"max_tokens_per_microbatch": 30}, 11),  # one rank has fillers alone
    ],
    ids=["one pack", "computed again", "fillers"],
)
def test_two_steps_equal_the_plain_model_with_its_routers(
    ranks: RanksUnderTest, folder: Path, changes: dict[str, Any], first: int
) -> None:
    steps, expected = _plain(folder)
    before = weights_in(folder)
    answers: list[Learned] = ranks.run(_train, folder, changes, first)
    for number, (loss, grad_norm) in enumerate(steps):
        metrics = merge_metrics([of_rank[number] for of_rank, _ in answers])
        assert metrics["loss/policy"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert metrics["policy/grad_norm"] == pytest.approx(grad_norm, rel=1e-5)
    for _, weights in answers:
        assert weights.keys() == expected.keys()
        assert sum(".experts." in name for name in weights) >= 3 * 6
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0, msg=after(name))
            assert not torch.equal(tensor, before[name]), f"{name} has not learned"


def _export(rank: Rank, folder: Path, target: Path) -> dict[str, Tensor]:
    engine = rank.policy(folder)
    for number, batch in enumerate(batches()):
        engine.export_hf(target / str(number))
        take_step(engine, batch, first=8)
    engine.export_hf(target / "end")
    return weights_of(engine)


@cut_as(*ALL)
def test_export_is_bitwise_identical_under_hf_names(
    ranks: RanksUnderTest, folder: Path, tmp_path: Path
) -> None:
    streamed = ranks.run(_export, folder, tmp_path)[0]
    loaded, exported = weights_in(folder), weights_in(tmp_path / "0")
    assert exported.keys() == loaded.keys()
    assert_same_weights({name: exported[name] for name in loaded}, loaded)
    end = weights_in(tmp_path / "end")
    assert_same_weights({name: end[name] for name in streamed}, streamed)


COSINE = {"schedule": "cosine", "num_warmup_steps": 1, "lr": 0.1, "eps": 1e-3}


def _save_and_go_on(rank: Rank, folder: Path, target: Path) -> dict[str, Tensor]:
    engine = rank.policy(folder, with_optimizer(**COSINE))
    take_step(engine, batches()[0], first=8)
    save(engine, target)
    take_step(engine, batches()[1], first=8)
    return weights_of(engine)


def _load_and_go_on(rank: Rank, folder: Path, source: Path) -> dict[str, Tensor]:
    engine = rank.policy(folder, with_optimizer(**COSINE))
    load(engine, source)
    take_step(engine, batches()[1], first=8)
    return weights_of(engine)


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
        saved = writers.run(_save_and_go_on, folder, tmp_path)[0]
        for loaded in readers.run(_load_and_go_on, folder, tmp_path):
            assert loaded.keys() == saved.keys()
            for name, tensor in loaded.items():
                torch.testing.assert_close(tensor, saved[name], atol=1e-5, rtol=0, msg=name)
