"""Two ranks with an engine each: which engine gets a request, and when one of them is gone."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from hybridrl.errors import EngineError, ServerDiedError
from hybridrl.metrics import Mean
from hybridrl.sampler import Program, RequestParams, Sampler, T
from hybridrl.workers.rollout.directory import EngineDirectory
from hybridrl.workers.rollout.event_loop import run_program
from hybridrl.workers.rollout.prefixes import KnownPrefixes, prefix_sums
from hybridrl.workers.rollout.request_gate import RequestGate
from hybridrl.workers.rollout.sglang.answers import ServedModel
from hybridrl.workers.rollout.sglang.client import Endpoint
from hybridrl.workers.rollout.sglang.engine_choice import EngineChoice
from hybridrl.workers.rollout.sglang.sampling import ServerSampler
from tests.workers.rollout.answering import Answering, answering
from tests.workers.rollout.served_samples import Samples

PARAMS = RequestParams(max_new_tokens=3, temperature=1.0)
MODEL = ServedModel(max_context_tokens=60, vocab_size=64, version=5)


class Ranks:
    """Two ranks of a machine, whose engines this process answers for."""

    def __init__(self, servers: Sequence[Answering], *, num_slots: int = 8) -> None:
        self.servers = servers
        self.directories = [EngineDirectory(2) for _ in servers]
        for directory, server in zip(self.directories, servers, strict=True):
            directory.announce(server.url, key="", pid=os.getpid())
        self.exchange()
        self._num_slots = num_slots
        self.choice: EngineChoice

    def exchange(self) -> None:
        for directory in self.directories:
            directory.learn([each.own for each in self.directories])

    def run(self, program: Program[T], *, rank: int = 0) -> T:
        """Run a program on one of the ranks."""
        own = Endpoint(self.servers[rank].url, name="the server", require_alive=lambda _: None)
        directory = self.directories[rank]
        self.choice = EngineChoice(own, directory=directory, num_slots=self._num_slots)
        with RequestGate().admit() as call:
            sampler = ServerSampler(self.choice, MODEL, call, timeout_s=30.0)

            async def connected(_: Sampler) -> T:
                async with sampler:
                    return await program(sampler)

            return run_program(connected, sampler, call)

    @property
    def num_requests(self) -> list[int]:
        return [len(server.asked) for server in self.servers]

    @property
    def loads(self) -> list[int]:
        return [self.directories[0].load(engine) for engine in range(2)]


@contextmanager
def two_ranks(*, num_slots: int = 8) -> Iterator[Ranks]:
    answers = Samples(lambda _, __: "length")
    with answering(answers) as first, answering(answers) as second:
        yield Ranks((first, second), num_slots=num_slots)


async def sample_all(sampler: Sampler, contexts: Sequence[list[int]]) -> None:
    work = [sampler.sample(context, PARAMS, key=key) for key, context in enumerate(contexts)]
    await asyncio.gather(*work)


def test_a_ranks_requests_are_spread_over_idle_engines() -> None:
    async def program(sampler: Sampler) -> None:
        await sample_all(sampler, [[token] for token in range(12)])

    with two_ranks() as ranks:
        ranks.run(program)
        assert ranks.num_requests == [6, 6]
        assert ranks.choice.metrics() == {"rollout/foreign_response_fraction": Mean(6, 12)}
        ranks.run(program, rank=1)
        assert ranks.num_requests == [12, 12]
        assert ranks.loads == [0, 0]


def test_the_requests_of_other_ranks_count_as_load() -> None:
    with two_ranks() as ranks:
        ranks.directories[1].count(0, 3)
        ranks.run(lambda sampler: sample_all(sampler, [[token] for token in range(5)]))
        assert ranks.num_requests == [1, 4]


def test_a_conversation_stays_until_its_engine_is_far_busier() -> None:
    async def converse(sampler: Sampler) -> None:
        context = [1, 2]
        for turn, load in enumerate((3, 5, 9, 14)):
            ranks.directories[1].count(1, load)  # of the other rank, at its own engine
            sample = await sampler.sample(context, PARAMS, key=turn)
            ranks.directories[1].count(1, -load)
            context += [*sample.token_ids.tolist(), 50 + turn]

    with two_ranks(num_slots=16) as ranks:
        ranks.directories[1].count(0, 4)
        ranks.run(converse)
        # 4 to 3: the second engine is less busy. 4 to 5: it has the beginning. 4 to 9 as well, and
        # 4 to 14 is too busy; then the first has the beginning.
        assert [len(body["input_ids"][0]) for _, body in ranks.servers[1].asked] == [2, 6, 10]
        assert [len(body["input_ids"][0]) for _, body in ranks.servers[0].asked] == [14]


def test_single_responses_wait_while_all_engines_are_full() -> None:
    async def program(sampler: Sampler) -> None:
        for engine in range(2):
            ranks.directories[1].count(engine, 9)  # one of them is queued
        work = asyncio.ensure_future(sample_all(sampler, [[1], [2]]))
        await asyncio.sleep(0.1)
        assert ranks.num_requests == [0, 0]
        ranks.directories[1].count(1, -1)
        await work
        assert ranks.num_requests == [0, 2]
        ranks.directories[1].count(1, 1)
        await sampler.sample_group([3], PARAMS, keys=(1, 2))

    with two_ranks(num_slots=8) as ranks:
        ranks.run(program)
        assert ranks.num_requests == [2, 2]  # of the group, prefill and responses


def test_a_foreign_engine_that_died_is_named() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # its parent has not noticed yet

    async def program(sampler: Sampler) -> None:
        await sample_all(sampler, [[token] for token in range(4)])

    with two_ranks() as ranks:
        own = ranks.directories[1].own
        assert own is not None
        ranks.directories[1].announce("http://127.0.0.1:9", key="", pid=ended.pid)
        ranks.exchange()
        with pytest.raises(ServerDiedError, match=r"SGLang of engine 1 \(process \d+\) is gone"):
            ranks.run(program)
        ended.wait()
        with pytest.raises(ServerDiedError, match="is gone"):
            ranks.run(program)
        ranks.directories[1].announce("http://127.0.0.1:9", key="", pid=os.getpid())
        ranks.exchange()
        with pytest.raises(EngineError, match=r"3 times.*SGLang of engine 1 did not answer"):
            ranks.run(program)
        ranks.directories[1].announce(own.url, key="", pid=own.pid)  # it was restarted
        ranks.exchange()
        ranks.run(program)
        assert ranks.loads == [0, 0]


def test_engines_of_another_machine_are_not_used() -> None:
    with two_ranks() as ranks:
        own, other = (directory.own for directory in ranks.directories)
        assert own is not None
        assert other is not None
        for row in (
            replace(other.row, token=other.row.token + 1),
            replace(other.row, file="/proc/1/fd/99999"),
        ):
            ranks.directories[0].learn([own, replace(other, row=row)])
            assert ranks.directories[0].others == ()
        ranks.run(lambda sampler: sample_all(sampler, [[1], [2], [3]]))
        assert ranks.num_requests == [3, 0]


def test_a_servers_key_is_not_printed_with_its_address() -> None:
    directory = EngineDirectory(1)
    directory.announce("http://127.0.0.1:9", key="secret", pid=1)
    assert "secret" not in repr(directory.own)


def test_the_longest_known_beginning_counts() -> None:
    known = KnownPrefixes()
    known.add(prefix_sums([1, 2]), 0)
    known.add(prefix_sums([1, 2, 3, 4]), 1)
    contexts = [[1, 2, 3], [1, 2, 3, 4, 5], [2, 1]]
    assert [known.find(prefix_sums(context)) for context in contexts] == [0, 1, None]
