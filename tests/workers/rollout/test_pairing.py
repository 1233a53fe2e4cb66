"""Requests to a prefill and a decode server, which sample nothing but record what they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest
from aiohttp import web

from hybridrl.errors import EngineError
from hybridrl.sampler import Sample, Sampler
from hybridrl.workers.rollout.event_loop import RequestGate, run_program
from hybridrl.workers.rollout.sglang.arguments import KeyedAddress
from hybridrl.workers.rollout.sglang.client import ControlClient
from hybridrl.workers.rollout.sglang.pairing import PairedEndpoint
from hybridrl.workers.rollout.sglang.sampling import HttpSampler, ServedModel
from hybridrl.workers.rollout.single_turn import single_turn
from tests.workers.rollout.answering import Answer, Answering, Body, answering
from tests.workers.rollout.engines import tokens_of
from tests.workers.rollout.served_samples import Samples
from tests.workers.rollout.test_server_sampling import PROMPTS, SAMPLING

SAMPLES = Samples(lambda _, __: "length")
MODEL = ServedModel(max_context_tokens=6, vocab_size=64, version=5)


async def refuses(_: str, __: Body) -> web.Response:
    return web.json_response({"message": "this half is broken"}, status=500)


class Waits(Samples):
    """A decode server that waits for its first requests, as one whose other half is gone."""

    def __init__(self, num_lost: int) -> None:
        super().__init__(lambda _, __: "length")
        self._num_lost = num_lost

    async def __call__(self, path: str, body: Body) -> web.StreamResponse:
        if path != "/generate":
            return web.Response()
        self._num_lost -= 1
        if self._num_lost >= 0:
            await asyncio.Event().wait()
        return await super().__call__(path, body)


def address_of(server: Answering, port: int) -> KeyedAddress:
    host, own_port = server.url.removeprefix("http://").split(":")
    return KeyedAddress(host=host, port=int(own_port), key="secret", bootstrap_port=port)


@contextmanager
def pairs(
    decode: Answer, *prefills: Answer
) -> Iterator[tuple[Answering, Sequence[Answering], Callable[[], list[Sample]]]]:
    """A decode server, its prefill servers, and what samples with them."""
    with ExitStack() as opened:
        second = opened.enter_context(answering(decode))
        firsts = [opened.enter_context(answering(prefill)) for prefill in prefills]
        client = ControlClient(second.url, name="decode", require_alive=lambda _: None)
        opened.callback(client.close)
        addresses = [address_of(one, 9000 + n) for n, one in enumerate(firsts)]

        def run() -> list[Sample]:
            with RequestGate().admit() as call:
                pair = PairedEndpoint(client, addresses)
                sampler = HttpSampler(pair, MODEL, call, timeout_s=30.0)

                async def connected(_: Sampler) -> list[Sample]:
                    async with sampler:
                        return await single_turn(PROMPTS, SAMPLING)(sampler)

                return run_program(connected, sampler, call)

        yield second, firsts, run


def rooms_of(server: Answering) -> list[tuple[list[int], int, int]]:
    """Context, port and room of each response that a server was asked for."""
    return sorted(
        asked
        for path, body in server.asked
        if path == "/generate"
        for asked in zip(
            body["input_ids"], body["bootstrap_port"], body["bootstrap_room"], strict=True
        )
    )


@pytest.mark.shows("4.2")
def test_both_halves_get_a_request_with_the_same_room() -> None:
    with pairs(SAMPLES, SAMPLES, SAMPLES) as (second, firsts, run):
        samples = run()
    assert tokens_of(samples) == [[1] * 3] * 3 + [[4] * 4] * 3
    rooms = rooms_of(second)
    assert rooms == sorted(rooms_of(firsts[0]) + rooms_of(firsts[1]))
    assert len({room for _, _, room in rooms}) == len(rooms) == 6
    for number, first in enumerate(firsts):  # in turns
        assert {port for _, port, _ in rooms_of(first)} == {9000 + number}
        assert len(rooms_of(first)) == 3


@pytest.mark.shows("4.12")
def test_a_broken_prefill_half_is_passed_over() -> None:
    with pairs(Waits(1), refuses, SAMPLES) as (second, firsts, run):
        assert tokens_of(run()) == [[1] * 3] * 3 + [[4] * 4] * 3
    assert len(rooms_of(firsts[0])) == 3  # asked once, for one group
    assert len(rooms_of(firsts[1])) == 6
    named = {body["rid"] for path, body in second.asked if path == "/abort_request"}
    assert named == set(second.asked[0][1]["rid"])  # what waited for the broken half


def test_without_a_prefill_half_a_request_fails() -> None:
    with (
        pairs(Waits(100), refuses) as (_, __, run),
        pytest.raises(EngineError, match="this half is broken"),
    ):
        run()
