"""megatron-core on CUDA: types, kernels and layers on one device, NCCL between several."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hybridrl.workers.checkpointed import end_process_group, start_process_group
from hybridrl.workers.sharding.memory import DeviceMemory
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import TrainState
from tests.config.values import config_of
from tests.tiny_models import Family, make_tiny_model
from tests.workers.train.engines import (
    ACTOR,
    MODEL,
    assert_same_weights,
    make_rows,
    rows_of,
    to_rollouts,
    update,
    weights_of,
)

MIXED = replace(ACTOR, compute_dtype="bfloat16")
_MIB = 2**20
_HAS_TE = find_spec("transformer_engine") is not None
_needs_te = pytest.mark.skipif(not _HAS_TE, reason="TransformerEngine is not installed")

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")


def build(folder: Path, device: torch.device, **sizes: Any) -> Any:
    # Imported by ranks alone: megatron-core is an extra, and asks for CUDA while it is imported.
    from hybridrl.workers.train.megatron.backend import MegatronBackend
    from hybridrl.workers.train.megatron.context import MegatronContext

    megatron = replace(config_of().megatron, **sizes)
    context = MegatronContext(megatron=megatron, model=MODEL, device=device, seed=0, timeout_s=60.0)
    config = replace(MIXED, engine="megatron")
    backend = MegatronBackend(folder, config=config, context=context, num_total_steps=10)
    return PolicyEngine(backend)


def run_ranks(
    num_ranks: int, check: Callable[..., Any], folder: Path, target: Path, **sizes: Any
) -> list[Any]:
    """Call ``check(device, folder, sizes)`` on ranks with a device each; return what they say."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    target.mkdir()
    mp.spawn(_enter, args=(num_ranks, port, check, folder, target, sizes), nprocs=num_ranks)
    return [torch.load(target / f"{rank}.pt") for rank in range(num_ranks)]


def _enter(
    rank: int,
    num_ranks: int,
    port: int,
    check: Callable[..., Any],
    folder: Path,
    target: Path,
    sizes: Mapping[str, Any],
) -> None:
    place = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    device = start_process_group(device="cuda", local_rank=rank, timeout_s=60.0)
    try:
        torch.save(check(device, folder, sizes), target / f"{rank}.pt")
    finally:
        end_process_group()


def _two_steps(engine: PolicyEngine) -> dict[str, Any]:
    rows = make_rows(8, seed=1, num_siblings=2)
    share = range(engine.dp_rank, len(rows), engine.dp_size)
    norms, scored = [], []
    for _ in range(2):
        mine = rows_of(rows, share)
        scores = engine.compute_logprobs(to_rollouts(mine), temperature=0.9)
        scored.append(scores.logprobs_BL.values())
        norms.append(update(engine, mine)["policy/grad_norm"])
    weights = {name: tensor.cpu() for name, tensor in weights_of(engine).items()}
    return {"norms": norms, "scored": scored, "weights": weights, "leads": engine.is_output_rank}


def _learn(device: torch.device, folder: Path, sizes: Mapping[str, Any]) -> dict[str, Any]:
    return _two_steps(build(folder, device, **sizes))


def _learn_on_fsdp2(device: torch.device, folder: Path, _: Mapping[str, Any]) -> dict[str, Any]:
    backend = FSDP2Backend(
        folder, config=MIXED, model_config=MODEL, num_total_steps=10, device=device
    )
    return _two_steps(PolicyEngine(backend))


def assert_learnt_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """bfloat16 rounds, and no two ways of cutting a sum round alike."""
    assert found["norms"] == pytest.approx(expected["norms"], rel=0.1)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(
            found["weights"][name].float(), weight.float(), atol=0.05, rtol=0.05, msg=name
        )


@pytest.mark.gpu
@pytest.mark.parametrize("layers", ["local", pytest.param("transformer_engine", marks=_needs_te)])
def test_one_rank_learns_what_fsdp2_learns(tmp_path: Path, layers: str) -> None:
    folder = make_tiny_model(tmp_path / "model", hidden_size=64)
    [found] = run_ranks(1, _learn, folder, tmp_path / "found", layers=layers)
    [expected] = run_ranks(1, _learn_on_fsdp2, folder, tmp_path / "expected")
    assert_learnt_alike(found, expected)
    for mine, theirs in zip(found["scored"], expected["scored"], strict=True):
        torch.testing.assert_close(mine, theirs, atol=0.1, rtol=0)


@pytest.mark.gpu
@_needs_te
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_eight_bit_products_learn_about_the_same(tmp_path: Path, recipe: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this device has no 8-bit matrix products")
    folder = make_tiny_model(tmp_path / "model", hidden_size=64)
    args = {"fp8": "hybrid", "fp8_recipe": recipe}
    sizes = {"layers": "transformer_engine", "transformer_args": args}
    [found] = run_ranks(1, _learn, folder, tmp_path / "found", **sizes)
    [expected] = run_ranks(1, _learn, folder, tmp_path / "expected", layers="transformer_engine")
    assert found["norms"] == pytest.approx(expected["norms"], rel=0.5)


def _take_workspaces(device: torch.device) -> None:
    """Let cuBLAS take its 32 MiB in this thread and in autograd's: later they would lie in segments
    of what leaves, and keep 28 MiB of those (seen on an H200)."""
    a = torch.ones(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    (a @ a).sum().backward()


def _leave_and_return(
    device: torch.device, folder: Path, sizes: Mapping[str, Any]
) -> list[dict[str, float]]:
    _take_workspaces(device)
    engine = build(folder, device, **sizes)
    rows = make_rows(4, seed=3)
    update(engine, rows)
    cycles = []
    for _ in range(2):
        before = {n: t.cpu() for n, t in weights_of(engine).items()}
        held = sum(engine.resident_bytes(part) for part in TrainState)
        DeviceMemory(device).empty_cache()
        free_before = DeviceMemory(device).free_bytes() or 0
        begin = time.perf_counter()
        for part in TrainState:
            engine.offload(part)
        DeviceMemory(device).empty_cache()
        away_s = time.perf_counter() - begin
        freed = (DeviceMemory(device).free_bytes() or 0) - free_before
        left = sum(engine.resident_bytes(part) for part in TrainState)
        residue = DeviceMemory(device).residue_bytes() or 0
        for part in TrainState:
            engine.restore(part)
        assert_same_weights(before, {n: t.cpu() for n, t in weights_of(engine).items()})
        assert update(engine, rows)["policy/updates"] == 1
        cycles.append(
            {"held": held, "freed": freed, "left": left, "residue": residue, "away_s": away_s}
        )
    return cycles


@pytest.mark.gpu
def test_what_leaves_is_seen_free_and_comes_back_bit_by_bit(tmp_path: Path) -> None:
    folder = make_tiny_model(
        tmp_path / "model", hidden_size=512, num_layers=4, vocab_size=4096, initializer_range=0.02
    )
    [cycles] = run_ranks(1, _leave_and_return, folder, tmp_path / "found")
    for cycle in cycles:
        assert cycle["left"] == 0
        assert cycle["freed"] >= cycle["held"] - 8 * _MIB
    # What NCCL and the context hold does not grow with cycles.
    assert cycles[1]["residue"] <= cycles[0]["residue"] + 8 * _MIB


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3", {"tensor_parallel_size": 2}),
        ("qwen3", {"tensor_parallel_size": 2, "sequence_parallel": True}),
        ("qwen3", {"pipeline_parallel_size": 2}),
        ("qwen3", {"context_parallel_size": 2}),
        ("qwen3", {"ddp_args": {"overlap_grad_reduce": True}}),
        ("qwen3_moe", {"expert_parallel_size": 2}),
    ],
    ids=["tp2", "sp2", "pp2", "cp2", "dp2", "ep2"],
)
@pytest.mark.parametrize("layers", ["local", pytest.param("transformer_engine", marks=_needs_te)])
def test_two_ranks_learn_what_one_learns(
    tmp_path: Path, family: Family, sizes: dict[str, Any], layers: str
) -> None:
    folder = make_tiny_model(tmp_path / "model", family, hidden_size=64)
    [expected] = run_ranks(1, _learn, folder, tmp_path / "one", layers=layers)
    found = run_ranks(2, _learn, folder, tmp_path / "two", layers=layers, **sizes)
    for rank in found:
        assert_learnt_alike(rank, expected)
        assert_same_weights(found[0]["weights"], rank["weights"])


def _reduce_in_each_group(
    device: torch.device, folder: Path, sizes: Mapping[str, Any]
) -> list[Any]:
    engine = build(folder, device, **sizes)
    answers = []
    for name in ("tensor", "pipeline", "context", "data", "expert", "replica"):
        place = getattr(engine.backend.parallel, name)
        value = torch.ones(1, device=device)
        dist.all_reduce(value, group=place.group)
        answers.append((name, place.size, value.item()))
    return answers


@pytest.mark.gpus(2)
def test_each_group_reduces_over_its_ranks_by_nccl(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    for answers in run_ranks(
        2, _reduce_in_each_group, folder, tmp_path / "found", context_parallel_size=2
    ):
        assert all(size == value for _, size, value in answers)
        assert dict((name, size) for name, size, _ in answers)["context"] == 2
