"""The training engine on a CUDA device: types, kernels, process group, what offloading frees."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridrl.config.actor import ActorConfig
from hybridrl.workers.checkpointed import end_process_group, start_process_group
from hybridrl.workers.sharding.memory import DeviceMemory
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import TrainState
from tests.tiny_models import make_tiny_model
from tests.workers.train.engines import (
    ACTOR,
    MODEL,
    assert_same_weights,
    make_rows,
    to_rollouts,
    update,
    weights_of,
    whole_tensors,
)

pytestmark = pytest.mark.gpu

MIXED = replace(ACTOR, compute_dtype="bfloat16")
_MIB = 2**20


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    """An NCCL process group of one, as a single GPU's worker has it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in place.items():
            patch.setitem(os.environ, name, value)
        yield start_process_group(device="cuda", local_rank=0, timeout_s=60.0)
        end_process_group()


def build(
    folder: Path,
    device: torch.device,
    *,
    config: ActorConfig = MIXED,
    dtype: Any = "float32",
    attention: Any = "auto",
) -> PolicyEngine:
    model = replace(MODEL, dtype=dtype, attention=attention)
    backend = FSDP2Backend(
        folder, config=config, model_config=model, num_total_steps=10, device=device
    )
    return PolicyEngine(backend)


def test_a_group_of_one_reduces_on_the_device_and_on_the_host(device: torch.device) -> None:
    for place in (device, torch.device("cpu")):
        value = torch.tensor([3.0], device=place)
        dist.all_reduce(value)
        assert value.tolist() == [3.0]


def test_masters_stay_float32_and_learn_while_bfloat16_computes(
    tmp_path: Path, device: torch.device
) -> None:
    engine = build(make_tiny_model(tmp_path), device)
    before = weights_of(engine)
    for seed in range(2):
        metrics = update(engine, make_rows(8, seed=seed))
        assert metrics["policy/updates"] == 1
    after = weights_of(engine)
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert any(not torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("num_siblings", [1, 4])
def test_varlen_and_padded_attention_take_the_same_step(
    tmp_path: Path, device: torch.device, num_siblings: int
) -> None:
    folder = make_tiny_model(tmp_path)
    rows = make_rows(12, seed=1, num_siblings=num_siblings)
    scored, norms = [], []
    for attention in ("varlen", "padded"):
        engine = build(folder, device, attention=attention)
        scored.append(engine.compute_logprobs(to_rollouts(rows), temperature=1.0).logprobs_BL)
        norms.append(update(engine, rows)["policy/grad_norm"])
    torch.testing.assert_close(scored[0].values(), scored[1].values(), atol=0.1, rtol=0)
    assert norms[0] == pytest.approx(norms[1], rel=0.1)


def test_bfloat16_scores_are_those_of_float32_on_a_cpu_but_for_rounding(
    tmp_path: Path, device: torch.device
) -> None:
    folder = make_tiny_model(tmp_path)
    rows = to_rollouts(make_rows(12, seed=2))
    on_gpu = build(folder, device).compute_logprobs(rows, temperature=1.0).logprobs_BL.values()
    on_cpu = (
        build(folder, torch.device("cpu"), config=ACTOR)
        .compute_logprobs(rows, temperature=1.0)
        .logprobs_BL.values()
    )
    torch.testing.assert_close(on_gpu, on_cpu, atol=0.1, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_leaves_is_seen_free_and_comes_back_bit_by_bit(
    tmp_path: Path, device: torch.device, dtype: str
) -> None:
    folder = make_tiny_model(
        tmp_path, hidden_size=512, num_layers=4, vocab_size=4096, initializer_range=0.02
    )
    engine = build(folder, device, dtype=dtype)
    rows = make_rows(4, seed=3)
    update(engine, rows)
    for cycle in range(2):
        before = {n: t.clone().cpu() for n, t in whole_tensors(engine).items()}
        held = sum(engine.resident_bytes(part) for part in TrainState)
        DeviceMemory(device).empty_cache()
        free_before = DeviceMemory(device).free_bytes() or 0
        for part in TrainState:
            engine.offload(part)
        DeviceMemory(device).empty_cache()
        assert (DeviceMemory(device).free_bytes() or 0) - free_before >= held - 8 * _MIB
        assert not any(engine.resident_bytes(part) for part in TrainState)
        for part in TrainState:
            engine.restore(part)
        after = {n: t.clone().cpu() for n, t in whole_tensors(engine).items()}
        assert_same_weights(before, after)
        assert update(engine, rows)["policy/updates"] == 1, cycle


def test_recomputed_activations_give_the_same_gradient(
    tmp_path: Path, device: torch.device
) -> None:
    folder = make_tiny_model(tmp_path)
    rows = make_rows(8, seed=4)
    norms = [
        update(build(folder, device, config=replace(MIXED, gradient_checkpointing=flag)), rows)[
            "policy/grad_norm"
        ]
        for flag in (False, True)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)
