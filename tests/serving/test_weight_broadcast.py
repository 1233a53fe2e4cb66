"""Weights by broadcast: real sending processes and gloo groups, and what becomes of failures."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import psutil
import pytest
import torch
from torch import Tensor

from hybridrl.errors import EngineError, TransferError
from hybridrl.workers.rollout.buckets import stage_by_reference
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.sharding.states import State
from hybridrl.workers.sharding.weight_broadcast import (
    WeightOffer,
    receiving,
    wait_for_receivers,
)
from hybridrl.workers.sharding.weight_sender import WeightBroadcaster, WeightMemoryFile
from tests.serving.test_server import plan_of, started
from tests.workers.sharding.recording import WEIGHTS, Policy

_THREADS = ThreadPoolExecutor(8)
LIMIT_S = 30.0


@pytest.fixture(scope="module")
def sender() -> Iterator[WeightBroadcaster]:
    sender = WeightBroadcaster(host="127.0.0.1", dtype=torch.float32, timeout_s=LIMIT_S)
    yield sender
    sender.close()
    assert not sending_processes()


def sending_processes() -> list[psutil.Process]:
    senders = [p for p in psutil.Process().children(recursive=True) if _sends(p)]
    return [process for process in senders if "guard.py" not in " ".join(process.cmdline())]


def _sends(process: psutil.Process) -> bool:
    try:
        return "weight_sender_child" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def weights_of(version: int) -> dict[str, Tensor]:
    return {name: torch.tensor(Policy.WHOLE.truth(name, version)) for name in WEIGHTS}


def write(sender: WeightBroadcaster, weights: dict[str, Tensor]) -> WeightOffer:
    """Write each tensor as a bucket of its own."""
    sender.begin()
    for name, tensor in weights.items():
        sender.write(stage_by_reference([(name, tensor)]), [])
    return sender.source()


def receive(offer: WeightOffer, timeout_s: float = LIMIT_S) -> dict[str, Tensor]:
    with receiving(offer, timeout_s=timeout_s) as buckets:
        return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}


def receive_all(offer: WeightOffer, count: int) -> list[Future[dict[str, Tensor]]]:
    return [_THREADS.submit(receive, offer) for _ in range(count)]


def require_weights(future: Future[dict[str, Tensor]], version: int) -> None:
    arrived = future.result()
    assert arrived.keys() == WEIGHTS.keys()
    assert all(torch.equal(arrived[name], w) for name, w in weights_of(version).items())


def require_recovery(sender: WeightBroadcaster) -> None:
    """As rank 0 tries again."""
    sender.break_off()
    require_working(sender)


def require_working(sender: WeightBroadcaster) -> None:
    for future in receive_all(sender.source().to_group(2), 2):
        require_weights(future, sender.source().generation)


@pytest.mark.shows("2.14")
def test_a_server_gets_each_version_also_after_an_engine_was_replaced(
    sender: WeightBroadcaster,
) -> None:
    rig = started(plan_of(("regular", 2), ("regular", 1)))
    for version in (1, 2, 3):
        if version == 2:
            rig.newest[1].kill()
        rig.server.update(write(sender, weights_of(version)), version=version)
        rig.check_served(version)
        rig.check_stages()
    assert [handle.index for handle in rig.launched[3:]] == [1]
    assert len(sending_processes()) == 1


@pytest.mark.shows("4.12")
def test_an_engine_that_fails_in_a_broadcast_is_replaced_alone(sender: WeightBroadcaster) -> None:
    rig = started(plan_of(("regular", 3)))
    rig.journal.fail(1, "load", skip=2)
    with pytest.raises(StageError, match="sync failed on engine 1: InjectedFault") as failure:
        rig.server.update(write(sender, weights_of(1)), version=1)
    assert "engine 0" not in str(failure.value)
    assert rig.server.states[0] is rig.server.states[2] is State.DRAINED  # and serve nothing
    assert not rig.server.serving_engines()
    sender.break_off()
    rig.server.update(sender.source(), version=1)
    assert [handle.index for handle in rig.launched[3:]] == [1]
    rig.check_served(1)


def test_a_replacement_gets_the_broadcast_weights_within_a_phase(sender: WeightBroadcaster) -> None:
    rig = started(plan_of(("regular", 3)))
    rig.server.update(write(sender, weights_of(1)), version=1)
    rig.newest[1].kill()
    loads = [len(rig.newest[index].loads) for index in (0, 2)]
    assert rig.recover()[1]
    assert [len(rig.newest[index].loads) for index in (0, 2)] == loads
    rig.check_served(1)


def _take_one_bucket_and_die(offer: WeightOffer) -> None:
    with receiving(offer, timeout_s=LIMIT_S) as buckets:
        next(buckets)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_receiver_killed_in_the_middle_frees_the_others(sender: WeightBroadcaster) -> None:
    weights = {f"w{number}": torch.full((2**20,), float(number)) for number in range(8)}
    offer = write(sender, weights).to_group(3)
    victim = multiprocessing.get_context("forkserver").Process(
        target=_take_one_bucket_and_die, args=(offer,)
    )
    victim.start()
    others = receive_all(offer, 2)
    for future in others:
        with pytest.raises(TransferError, match=r"not all weights arrived from 127\.0\.0\.1"):
            future.result()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    sender.break_off()
    for future in receive_all(sender.source().to_group(2), 2):
        assert all(torch.equal(future.result()[name], w) for name, w in weights.items())


def test_a_receiver_that_never_comes_is_given_up(sender: WeightBroadcaster) -> None:
    offer = write(sender, weights_of(sender.source().generation + 1)).to_group(3)
    lost: Future[None] = Future()
    others = receive_all(offer, 2)
    lost.set_exception(EngineError("its process is gone"))
    seconds = wait_for_receivers(offer, [lost, *others], timeout_s=LIMIT_S)  # type: ignore[list-item]
    for future in others:
        with pytest.raises(TransferError):
            future.result(seconds)
    require_working(sender)


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        if process.is_running():
            process.resume()


def test_a_sender_that_stalls_costs_the_limit_of_one_transfer(sender: WeightBroadcaster) -> None:
    offer = write(sender, weights_of(sender.source().generation + 1)).to_group(1)
    with stopped(sending_processes()[0]):
        with pytest.raises(
            TransferError, match=r"timed out; a transfer may take rollout\.stage_timeout_s"
        ):
            receive(offer, timeout_s=0.6)
        require_recovery(sender)


def test_a_sender_that_dies_is_replaced(sender: WeightBroadcaster) -> None:
    offer = write(sender, weights_of(sender.source().generation + 1)).to_group(3)
    others = receive_all(offer, 2)  # wait for the third
    sending_processes()[0].kill()
    for future in others:
        with pytest.raises(TransferError):
            future.result()
    require_recovery(sender)


def test_weights_overwritten_while_they_are_sent_are_refused(sender: WeightBroadcaster) -> None:
    old = write(sender, weights_of(sender.source().generation + 1))
    write(sender, weights_of(sender.source().generation + 1))
    [future] = receive_all(old.to_group(1), 1)
    with pytest.raises(TransferError, match=r"were overwritten by number \d+"):
        future.result()
    require_working(sender)


def test_nobody_without_the_key_gets_weights(sender: WeightBroadcaster) -> None:
    offer = write(sender, weights_of(sender.source().generation + 1)).to_group(1)
    with pytest.raises(TransferError, match="the sender of the weights ended"):
        receive(replace(offer, key="guessed"))
    with socket.create_connection((offer.host, offer.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(100) == b""
    assert offer.key not in repr(offer)
    assert all(offer.key not in " ".join(p.cmdline()) for p in sending_processes())
    require_working(sender)


def test_without_memory_for_the_weights_the_other_way_is_named() -> None:
    memory = WeightMemoryFile(dtype=torch.float32)
    memory.begin()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(EngineError, match=r"no 4 MiB of shared memory .*serving.weights=files"):
            memory.write(stage_by_reference([("w", torch.zeros(2**20))]), [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        memory.close()
