from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from torch import Tensor

from hybridrl.errors import EngineError, PhaseError
from hybridrl.images import Images
from hybridrl.sampler import RequestParams, Sample, Sampler
from hybridrl.workers.rollout.event_loop import RequestGate, run_program


class NoSampler(Sampler):
    """For programs that sample nothing."""

    max_context_tokens = 1

    async def sample_group(
        self,
        token_ids: Sequence[int] | Tensor,
        params: RequestParams,
        *,
        keys: Sequence[int],
        images: Images = (),
    ) -> list[Sample]:
        raise NotImplementedError


@pytest.mark.shows("2.11")
def test_while_paused_nothing_is_admitted_and_reopening_ends_it() -> None:
    gate = RequestGate()
    for _ in range(2):
        gate.pause()
        gate.pause()
        with pytest.raises(PhaseError, match="paused"), gate.admit():
            pass
        gate.resume()
        with gate.admit() as call:
            call.require_alive()


def test_a_second_call_or_a_release_is_refused_while_one_runs() -> None:
    gate = RequestGate()
    with gate.admit() as call, call.request(4):
        with pytest.raises(PhaseError, match="refused: 4 requests"), gate.admit():
            pass
        with pytest.raises(PhaseError, match="release was refused"):
            gate.require_idle("release")
    gate.require_idle("release")


def test_an_error_inside_frees_the_engine() -> None:
    gate = RequestGate()
    with pytest.raises(ZeroDivisionError), gate.admit():
        raise ZeroDivisionError
    gate.require_idle("release")
    assert gate.drain(timeout_s=0.0) == 0


def run_until_aborted(gate: RequestGate, started: Event) -> None:
    async def program(_: Sampler) -> None:
        with call.request(1):
            pass
        with call.request(5):
            started.set()
            await asyncio.sleep(60.0)

    with gate.admit() as call:
        run_program(program, NoSampler(), call)


def run_until(gate: RequestGate, started: Event, end: Event) -> str:
    with gate.admit() as call, call.request(6):
        started.set()
        while not end.wait(0.001):
            call.require_alive()
    return "ended"


def test_draining_waits_for_the_running_call() -> None:
    gate, started, end = RequestGate(), Event(), Event()
    with ThreadPoolExecutor(2) as pool:
        generating = pool.submit(run_until, gate, started, end)
        assert started.wait(10.0)
        draining = pool.submit(gate.drain, 60.0)
        assert not draining.done()
        end.set()
        assert draining.result(10.0) == 0
        assert generating.result(10.0) == "ended"


@pytest.mark.shows("2.8")
def test_at_the_deadline_what_is_left_is_aborted_and_counted() -> None:
    gate = RequestGate()
    for _ in range(3):
        started = Event()
        with ThreadPoolExecutor(1) as pool:
            generating = pool.submit(run_until_aborted, gate, started)
            assert started.wait(10.0)
            gate.pause()
            assert gate.drain(timeout_s=0.01) == 5
            with pytest.raises(EngineError, match="aborted 5 of 6 requests"):
                generating.result(10.0)
        gate.resume()
