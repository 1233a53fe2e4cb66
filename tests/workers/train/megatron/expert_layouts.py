"""Mixture-of-experts models, and the ways in which their tests cut them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hybridrl.batch import TrainBatch
from tests.contract.layouts import CP2, EP2, PP2, SP2, VP2, Layout, cut
from tests.contract.ranks_under_test import RanksUnderTest
from tests.tiny_models import Family, make_tiny_model
from tests.workers.train.engines import make_rows, rows_of


def _cut(name: str, *, engine: str = "megatron", **options: Any) -> Layout:
    return cut(engine, name, **{"family": "qwen3_moe", "num_layers": 4, **options})


LAYOUTS = {
    layout.name: layout
    for layout in (
        _cut("1", num_ranks=1),
        _cut("ep2", num_ranks=2, dp_size=2, **EP2),
        _cut("tp2-sp-ep2", num_ranks=2, **SP2, **EP2),
        _cut("pp2", num_ranks=2, **PP2),
        _cut("cp2-ep2", num_ranks=2, **CP2, **EP2),
        _cut("pp2-vp2", num_ranks=2, **VP2),
        _cut("fsdp2", num_ranks=1, engine="fsdp2"),
        _cut("fsdp2 x 2", num_ranks=2, dp_size=2, engine="fsdp2"),
        _cut("fsdp2 cp2", num_ranks=2, engine="fsdp2", **CP2),
        _cut("pp2-ep2", num_ranks=4, dp_size=2, **PP2, **EP2),
    )
}


BY_NIGHT = {"ep2", "pp2-vp2", "pp2-ep2", "cp2-ep2", "fsdp2 cp2"}
"""What the others, or the contract suite, show in part."""


def cut_as(
    *names: str,
    replays_routes: bool = False,
    by_night: Collection[str] = (),
    **megatron: float | bool,
) -> pytest.MarkDecorator:
    """Run a test on the layouts of these names, with changes of the ``megatron`` section.

    ``by_night`` names further layouts that this test leaves to the night.
    """
    changes, left = megatron | {"replays_routes": replays_routes}, {*BY_NIGHT, *by_night}
    params = [
        pytest.param((name, changes), id=name, marks=[pytest.mark.nightly] * (name in left))
        for name in names
    ]
    return pytest.mark.parametrize("ranks", params, indirect=True)


@contextmanager
def running(
    name: str, *, replays_routes: bool = False, **megatron: object
) -> Iterator[RanksUnderTest]:
    layout = LAYOUTS[name]
    changed = dict(layout.megatron) | megatron
    ranks = RanksUnderTest(replace(layout, megatron=changed, replays_routes=replays_routes))
    try:
        yield ranks
    finally:
        ranks.close()


@cache
def batches() -> list[TrainBatch]:
    """Eleven rows a step, whose prompts are shared by up to four."""
    return [rows_of(make_rows(12, seed=seed, num_siblings=4), range(11)) for seed in range(2)]


def make_expert_model(folder: Path, family: Family = "qwen3_moe", **changes: Any) -> Path:
    """Four layers with four experts each, two of them for a token, unless told otherwise."""
    make_tiny_model(folder, family, tie_embeddings=False, vocab_size=67, num_layers=4, **changes)
    (folder / "tokenizer.json").write_text("{}")
    return folder


MODELS: dict[str, dict[str, Any]] = {
    "normalised weights": {"family": "mixtral"},
    # Of four layers the second alone has experts, and one for all tokens beside them: of two
    # stages the last has none.
    "weights as they are, one sparse layer": {
        "family": "qwen2_moe",
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "num_experts": 6,
        "num_experts_per_tok": 3,
    },
}

NORMALISED, SPARSE = MODELS
BY_DAY = {
    *((NORMALISED, "1"), (SPARSE, "tp2-sp-ep2"), (SPARSE, "pp2"), (NORMALISED, "ep2")),
    (SPARSE, "fsdp2 x 2"),
}
"""Models with the layouts, or the layouts that saved them, which are not nightly."""
