"""Two ranks share a server of two ranks: each offers its own bytes, one talks to the server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.rollout.sglang.weights import build_transport
from tests.ranks import run_ranks
from tests.sglang.engines import running_engine, server_spec, weights_of
from tests.sglang.weights import assert_serves, broken_off, stream
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")


def _one_core_each(num_ranks: int) -> dict[str, str]:
    """SGLang wants to be told where its ranks run when they outnumber the NUMA nodes."""
    cores = sorted(os.sched_getaffinity(0))
    names = [str(cores[rank % len(cores)]) for rank in range(num_ranks)]
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(names)}


def _send_from(rank: int, engine: SGLangEngine | None, folders: list[Path]) -> list[str]:
    """Two streams that arrive, and before each one that breaks off on the rank that only offers."""
    rollout = server_spec(folders[0], tensor_parallel_size=2).rollout
    dist.barrier()  # one of us has waited for the server, longer than a stage may take
    follower = (
        None if engine else build_transport(rollout, device=CPU, is_sender=False, from_disk=False)
    )
    reasons = []
    for version, folder in enumerate(folders):
        if engine is not None:
            engine.pause()
            engine.drain(timeout_s=10.0)
        whole = weights_of(folder)
        broken = broken_off(folder, after=12) if rank == 1 else iter(whole.items())
        reasons.append(stream(engine, broken, follower=follower, num_ranks=2).failures[1])
        report = stream(engine, iter(whole.items()), follower=follower, num_ranks=2)
        assert not report.failures
        assert report.num_bytes == sum(tensor.nbytes for tensor in whole.values())
        if engine is not None:
            engine.finish_update(version=version)
            engine.continue_generation()
            assert_serves(engine, folder)
    return reasons


def _serve_or_offer(rank: int, folders: list[Path]) -> list[str]:
    if rank == 1:
        return _send_from(rank, None, folders)
    spec = server_spec(folders[0], tensor_parallel_size=2)
    # Ranks of a test join the store of their parent; those of the server must make their own.
    variables = _one_core_each(2) | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    with running_engine(spec, variables=variables) as engine:
        return _send_from(rank, engine, folders)


@pytest.mark.shows("3.10")
@pytest.mark.nightly
def test_two_ranks_feed_a_server_after_a_stream_that_broke_off(
    tmp_path: Path,
) -> None:
    folders = [make_tiny_model(tmp_path / str(seed), seed=seed) for seed in range(2)]
    answers = run_ranks(2, _serve_or_offer, folders, deadline_s=220.0)
    assert answers == [["OSError: gathering failed"] * 2] * 2
