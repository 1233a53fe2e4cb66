"""megatron-core on one device: what leaves it while a rollout engine samples, and how fast."""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.gpu_parts.bench import Bench
from benchmarks.gpu_parts.mfu import rows_of_packs, use_stand_ins
from benchmarks.gpu_parts.rank import Setup, read_setup, small, stand_alone
from benchmarks.gpu_parts.shapes import shape_in
from benchmarks.gpu_parts.transfers import pinned_bandwidth, synchronize
from hybridrl.workers.build import build_policy_loss, build_train_engine
from hybridrl.workers.checkpointed import start_process_group
from hybridrl.workers.sharding.memory import DeviceMemory
from hybridrl.workers.train.model_engine import TOKEN_MEAN
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import TrainState

_SHAPE = "qwen2.5-3b"
_MIB = 2**20


def run(bench: Bench) -> None:
    """Learn once; then let all leave the device and come back, and learn again."""
    to_host, to_device = pinned_bandwidth(bench)
    use_stand_ins(bench)
    setup = Setup(shape=_SHAPE, pack_tokens=8192, extra=("actor.engine=megatron",))
    config = read_setup(bench, small(setup) if bench.is_dry else setup)
    folder = bench.model(_SHAPE)
    stand_alone()
    device = start_process_group(device=bench.device.type, local_rank=0, timeout_s=600.0)
    engine = build_train_engine(config, folder, device)
    batch = rows_of_packs(bench, vocab_size=shape_in(folder).vocab_size)

    def update() -> None:
        engine.update(
            batch,
            loss=build_policy_loss(config),
            aggregation=TOKEN_MEAN,
            temperature=1.0,
            max_response_tokens=2048,
        )

    update()
    away, back = [], []
    for _ in range(bench.size(4, dry=2)):
        num_bytes = sum(engine.resident_bytes(part) for part in TrainState)
        away.append(_seconds(bench, engine, "offload"))
        _look(bench, engine, device)
        back.append(_seconds(bench, engine, "restore"))
        update()
    gb = num_bytes / 1e9
    # The first time pins the host's memory.
    away_s, back_s = statistics.median(away[1:]), statistics.median(back[1:])
    bench.record.figure("offloaded_bytes", num_bytes, "bytes")
    bench.record.figures({"first_offload_s": away[0], "offload_s": away_s}, "s")
    bench.record.figure("restore_s", back_s, "s")
    bench.record.figure("offload_share", gb / away_s / to_host, "1")
    bench.record.figure("restore_share", gb / back_s / to_device, "1")


def _seconds(bench: Bench, engine: PolicyEngine, verb: str) -> float:
    synchronize(bench.device)
    begin = time.perf_counter()
    for part in TrainState:
        if verb == "offload":
            engine.offload(part)
        else:
            engine.restore(part)
    synchronize(bench.device)
    return time.perf_counter() - begin


def _look(bench: Bench, engine: PolicyEngine, device: torch.device) -> None:
    """Record what stays while all is away; nothing of the engine may."""
    left = sum(engine.resident_bytes(part) for part in TrainState)
    bench.record.figure("left_bytes", left, "bytes")
    DeviceMemory(device).empty_cache()
    residue = DeviceMemory(device).residue_bytes()
    if residue is None:
        bench.record.not_exercised("what stays on the device: a CPU has no context and no NCCL")
        return
    bench.record.figure("residue_mib", residue / _MIB, "MiB")
    bench.record.figure("reserved_mib", torch.cuda.memory_reserved(device) / _MIB, "MiB")
