"""What needs more than one GPU: NCCL between ranks, shards gathered while they are sent."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hybridrl.workers.checkpointed import end_process_group, start_process_group
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import TrainState
from tests.tiny_models import make_tiny_model
from tests.workers.train.engines import ACTOR, MODEL, make_rows, rows_of, update

MIXED = replace(ACTOR, compute_dtype="bfloat16")


def _train(rank: int, num_ranks: int, port: int, folder: Path, target: Path) -> None:
    place = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    device = start_process_group(device="cuda", local_rank=rank, timeout_s=60.0)
    try:
        backend = FSDP2Backend(
            folder, config=MIXED, model_config=MODEL, num_total_steps=10, device=device
        )
        engine = PolicyEngine(backend)
        rows = make_rows(8, seed=1)
        for cycle in range(2):
            metrics = update(engine, rows_of(rows, range(rank, len(rows), num_ranks)))
            for part in TrainState:
                engine.offload(part)
            for part in TrainState:
                engine.restore(part)
            assert metrics["policy/updates"] == (1 if rank == 0 else 0), cycle
        weights = {name: tensor.cpu().clone() for name, tensor in engine.full_weights()}
        if rank == 0:
            torch.save(weights, target)
    finally:
        end_process_group()


def _weights_after(num_ranks: int, folder: Path, target: Path) -> dict[str, torch.Tensor]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    mp.spawn(_train, args=(num_ranks, port, folder, target), nprocs=num_ranks)
    weights: dict[str, torch.Tensor] = torch.load(target)
    return weights


@pytest.mark.gpus(2)
def test_two_sharded_ranks_learn_what_one_learns(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    one = _weights_after(1, folder, tmp_path / "one.pt")
    two = _weights_after(2, folder, tmp_path / "two.pt")
    assert list(one) == list(two)
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], atol=0.05, rtol=0.05, msg=name)
