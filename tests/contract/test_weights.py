from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.errors import RunFolderError
from hybridrl.workers.train.protocol import TrainState, WeightSet
from tests.contract.layouts import TIES_AND_FAMILIES, on_layouts
from tests.contract.plain import PlainPolicy, weights_in
from tests.contract.ranks_under_test import Rank, RanksUnderTest, take_step
from tests.tiny_models import Family
from tests.workers.train.engines import (
    OPTIMIZER,
    assert_same_weights,
    make_rows,
    to_rollouts,
    weights_of,
)

pytestmark = on_layouts()


def _stream(rank: Rank, folder: Path) -> dict[str, Tensor]:
    engine = rank.policy(folder)
    assert engine.weight_sets == (WeightSet.BASE,)
    loaded = weights_of(engine)
    _assert_announced(engine, loaded)
    take_step(engine, make_rows(5))
    _assert_announced(engine, weights_of(engine))
    held = engine.resident_bytes(TrainState.PARAMETERS)
    assert held <= rank.layout.max_share * sum(spec.num_bytes for spec in engine.weight_specs())
    return loaded


def _assert_announced(engine: Any, streamed: dict[str, Tensor]) -> None:
    for spec, (name, tensor) in zip(engine.weight_specs(), streamed.items(), strict=True):
        assert (spec.name, spec.shape, spec.num_bytes) == (name, tensor.shape, tensor.nbytes)


@pytest.mark.parametrize(("ties", "some"), TIES_AND_FAMILIES)
def test_weights_stream_on_every_rank_as_specified(
    ranks: RanksUnderTest, make_model: Any, ties: Sequence[bool], some: Sequence[Family]
) -> None:
    for family, tie in zip(ranks.families_among(some), cycle(ties), strict=False):
        folder = make_model(ranks.layout, tie=tie, family=family)
        expected = weights_in(folder)
        assert ("lm_head.weight" in expected) is not tie
        for streamed in ranks.run(_stream, folder):
            assert_same_weights(streamed, expected)


def _stream_in_halves(rank: Rank, folder: Path) -> list[torch.dtype]:
    engine = rank.policy(folder)
    take_step(engine, make_rows(5))  # numbers that bfloat16 does not hold
    whole = weights_of(engine)
    halves = dict(engine.full_weights(dtype=torch.bfloat16))
    for name, tensor in whole.items():
        assert torch.equal(halves[name].bfloat16(), tensor.bfloat16()), name
    assert all(torch.equal(tensor, whole[name]) for name, tensor in engine.full_weights())
    wider = dict(engine.full_weights(dtype=torch.float64))
    assert all(torch.equal(wider[name], whole[name]) for name in whole)
    return [tensor.dtype for tensor in halves.values()]


def test_weights_gathered_in_the_engines_type_are_those_that_it_would_cast(
    ranks: RanksUnderTest, folder: Path
) -> None:
    for dtypes in ranks.run(_stream_in_halves, folder):
        if ranks.layout.engine == "fsdp2":
            assert set(dtypes) == {torch.bfloat16}


def _export(rank: Rank, folder: Path, target: Path) -> tuple[dict[str, Tensor], Tensor | None, str]:
    engine = rank.policy(folder)
    for seed in range(2):
        take_step(engine, make_rows(5, seed=seed))
    engine.export_hf(target)
    assert sorted(path.name for path in target.parent.iterdir()) == ["exported"]
    with pytest.raises(RunFolderError, match="exported exists; export to a new folder") as again:
        engine.export_hf(target)
    scored = engine.compute_logprobs(to_rollouts(make_rows(4)), temperature=1.0)
    trained = weights_of(engine)
    assert_same_weights(weights_of(rank.policy(target)), trained)
    take_step(engine, make_rows(4, seed=1))  # and goes on
    dist.barrier()
    logprobs = scored.logprobs_BL.values() if engine.is_output_rank else None
    return trained, logprobs, str(again.value)


@pytest.mark.parametrize("tie", [True, False])
def test_export_scores_in_transformers_as_the_engine_and_errors_reach_all_ranks(
    ranks: RanksUnderTest, make_model: Any, tmp_path: Path, tie: bool
) -> None:
    target = tmp_path / "deep" / "exported"
    folder = make_model(ranks.layout, tie=tie)
    answers = ranks.run(_export, folder, target)
    assert len({text for *_, text in answers}) == 1
    assert (target / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
    assert "hybridrl" not in (target / "config.json").read_text()
    trained, stored = answers[0][0], weights_in(target)
    assert_same_weights({name: stored[name] for name in trained}, trained)
    loaded = PlainPolicy(target, OPTIMIZER)
    assert loaded.model.config.tie_word_embeddings is tie
    with torch.no_grad():
        expected, _ = loaded.score(make_rows(4), temperature=1.0)
    for scored in (logprobs for _, logprobs, _ in answers if logprobs is not None):
        torch.testing.assert_close(scored, expected, atol=2e-5, rtol=0)


def _fail_to_export(rank: Rank, folder: Path, root: Path) -> str:
    engine = rank.policy(folder)
    with pytest.raises(RunFolderError, match="cannot be written") as raised:
        engine.export_hf(root / "file" / "exported")
    take_step(engine, make_rows(4))
    return str(raised.value)


def test_failed_export_leaves_no_files_and_raises_on_all_ranks(
    ranks: RanksUnderTest, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert len(set(ranks.run(_fail_to_export, folder, tmp_path))) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
