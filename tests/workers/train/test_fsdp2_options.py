"""What the keys of ``actor.fsdp2`` make of a model, beside the numbers of tests/contract."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from hybridrl.checkpoint.store import FileEntry
from hybridrl.metrics import Metrics
from hybridrl.workers.train.checkpoint import CheckpointWriter
from hybridrl.workers.train.model_engine import TOKEN_MEAN
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import TokenLossInputs
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_model
from tests.workers.train.engines import ACTOR, LOSS, build_fsdp2, fsdp2_of, make_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_layers=4)


def _build(folder: Path, **options: Any) -> PolicyEngine:
    return build_fsdp2(folder, config=replace(ACTOR, fsdp2=replace(ACTOR.fsdp2, **options)))


class _LossThatCountsShards:
    """The usual loss; counts parameters of blocks that are whole when the forward pass is over."""

    needs_entropy_gradient = False

    def __init__(self, engine: PolicyEngine) -> None:
        self._parameters = fsdp2_of(engine).model.hf.model.layers.parameters
        self.num_whole: list[int] = []

    def __call__(self, inputs: TokenLossInputs) -> tuple[Tensor, Metrics]:
        is_whole = [not isinstance(parameter, DTensor) for parameter in self._parameters()]
        self.num_whole.append(sum(is_whole) if not all(is_whole) else -1)
        return LOSS(inputs)


def _count_whole(rank: int, folder: Path, reshards: bool) -> list[int]:
    engine = _build(folder, reshard_after_forward=reshards)
    loss = _LossThatCountsShards(engine)
    engine.update(
        make_rows(4), loss=loss, aggregation=TOKEN_MEAN, temperature=1.0, max_response_tokens=8
    )
    assert all(isinstance(parameter, DTensor) for parameter in fsdp2_of(engine).model.parameters())
    return loss.num_whole


def test_reshard_option_frees_gathered_blocks(folder: Path) -> None:
    assert run_ranks(2, _count_whole, folder, True) == [[0], [0]]
    assert run_ranks(2, _count_whole, folder, False) == [[-1], [-1]]  # all of them


def _policies(rank: int, folder: Path) -> list[set[type]]:
    return [
        {
            type(group.offload_policy)
            for module in fsdp2_of(_build(folder, cpu_offload=offloads)).model.modules()
            if isinstance(module, FSDPModule)
            for group in module._get_fsdp_state()._fsdp_param_groups
        }
        for offloads in (True, False)
    ]


def test_offload_is_asked_of_every_block_and_the_root(folder: Path) -> None:
    for offloaded, usual in run_ranks(2, _policies, folder):
        assert offloaded == {CPUOffloadPolicy}
        assert CPUOffloadPolicy not in usual


def _save(rank: int, folder: Path, target: Path, num_replicas: int) -> FileEntry | None:
    writer, engine = CheckpointWriter(), _build(folder, num_replicas=num_replicas)
    writer.begin(engine, target / f"rank-{rank}.safetensors", notes={})
    entry = writer.collect(waits=True)
    writer.close()
    return entry


def test_of_two_copies_of_the_model_one_is_saved(folder: Path, tmp_path: Path) -> None:
    first, second = run_ranks(2, _save, folder, tmp_path / "copies", 2)
    shards = run_ranks(2, _save, folder, tmp_path / "shards", 1)
    assert first.num_bytes > 1.9 * shards[0].num_bytes - 20_000
    assert second.num_bytes < 0.2 * first.num_bytes  # generators alone
