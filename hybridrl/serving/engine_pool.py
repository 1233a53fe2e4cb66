"""Chooses the engine of each request: one with room, or with its prefix; repeats lost ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Concatenate, ParamSpec

import torch
from torch import Tensor

from hybridrl.errors import (
    DeadlineError,
    DriftError,
    EngineError,
    PhaseError,
    RequestError,
    ServerDiedError,
)
from hybridrl.metrics import Max, Metrics, Sum
from hybridrl.sampler import Sample, Sampler, SampleRequest, interrupted_sample
from hybridrl.serving.engine_handle import AskGroup, EngineHandle, ask_process
from hybridrl.workers.rollout.prefixes import STAY, KnownPrefixes, prefix_sums
from hybridrl.workers.rollout.single_turn import sample_to_the_end

log = logging.getLogger(__name__)

P = ParamSpec("P")

_NUM_TRIES = 4
"""Engines that may be lost with one request; then it counts as the cause."""

_ENTRIES_PER_ENGINE = 8
"""Entries of the heap, at most, before those of earlier counts are dropped."""


@dataclass(eq=False, slots=True)
class Member:
    """An engine of the pool."""

    index: int
    handle: EngineHandle
    version: int
    """Of its weights."""

    num_open: int = 0
    """Responses that it was asked for and did not give yet."""
    losses: set[asyncio.Future[str]] = field(default_factory=set)
    """One of each open request, which gets the reason if the engine is lost meanwhile."""

    num_pauses: int = 0
    """Times that it was suspended."""
    is_suspended: bool = False


class RequestQueue:
    """Hands engines with room to requests, the oldest first; for one event loop.

    A change costs the same with any number of engines (but for a logarithm) and of requests that
    wait: it wakes those alone that get an engine.
    """

    def __init__(self, *, num_slots: int) -> None:
        """Begin without engines; ``num_slots`` responses decode at the same time on each."""
        self._num_slots = num_slots
        self._members: set[Member] = set()
        self._by_load: list[tuple[int, int, Member]] = []
        """Heap of open responses, number of the entry, and engine; entries of earlier counts are
        skipped."""
        self._number = count()
        self._waiting: deque[tuple[int, asyncio.Future[Member], Member | None]] = deque()
        """Requests without an engine, oldest first: responses, what they wait for, and the engine
        that has the context in its cache."""

    def add(self, member: Member) -> None:
        """Hand out this engine, too."""
        self._members.add(member)
        self._note(member)
        self._hand_out()

    def remove(self, member: Member) -> None:
        """Hand it out no more; requests that have it give it back all the same. Idempotent."""
        self._members.discard(member)

    async def take(self, num_responses: int, *, holder: Member | None = None) -> Member:
        """Wait for the engine with the fewest open responses, or for ``holder`` of the context."""
        future: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_responses, future, holder))
        self._hand_out()
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None:  # it came just before
                self.give_back(future.result(), num_responses)
            raise

    def give_back(self, member: Member, num_responses: int) -> None:
        """Note that responses of an engine are open no more."""
        member.num_open -= num_responses
        self._note(member)
        self._hand_out()

    def refuse(self, error: Exception) -> None:
        """Let all requests that wait fail: no engine will come."""
        while self._waiting:
            _, future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)

    def _hand_out(self) -> None:
        while self._waiting and (freest := self._freest()) is not None:
            num_responses, future, holder = self._waiting.popleft()
            if not future.done():  # else its request was cancelled
                member = holder if holder and self._may_stay(holder, freest) else freest
                member.num_open += num_responses
                self._note(member)
                future.set_result(member)

    def _may_stay(self, holder: Member, freest: Member) -> bool:
        has_room = holder in self._members and holder.num_open < self._num_slots
        return has_room and holder.num_open - freest.num_open <= STAY

    def _freest(self) -> Member | None:
        """Return the engine with the fewest open responses; None if none has room."""
        while self._by_load:
            load, _, member = self._by_load[0]
            if member in self._members and load == member.num_open:
                return member if load < self._num_slots else None
            heappop(self._by_load)
        return None

    def _note(self, member: Member) -> None:
        heappush(self._by_load, (member.num_open, next(self._number), member))
        if len(self._by_load) > _ENTRIES_PER_ENGINE * (len(self._members) + 1):
            self._by_load = [(each.num_open, next(self._number), each) for each in self._members]
            heapify(self._by_load)


def _in_loop(
    change: Callable[Concatenate[EnginePool, P], None],
) -> Callable[Concatenate[EnginePool, P], None]:
    """Let any thread make a change of a pool: it runs in the loop of the program."""

    @wraps(change)
    def make(pool: EnginePool, /, *args: P.args, **kwargs: P.kwargs) -> None:
        loop = pool.loop
        if loop is None:
            change(pool, *args, **kwargs)
            return
        with suppress(RuntimeError):  # the program has ended, and its loop with it
            loop.call_soon_threadsafe(partial(change, pool, *args, **kwargs))

    return make


class EnginePool(Sampler):
    """Samples with several engines of one model, for one program.

    An engine gets a request while fewer than ``num_slots`` responses are open on it. A request that
    an engine did not answer is sent to another one, as a new one: nothing of a lost answer counts.
    To load weights while the program runs: ``suspend`` an engine, ``interrupt`` its process or let
    its requests end, load, and let it ``join`` again.
    """

    def __init__(
        self,
        engines: Mapping[int, EngineHandle],
        *,
        num_slots: int,
        max_context_tokens: int,
        vocab_size: int,
        version: int,
    ) -> None:
        """Begin with engines that serve weights of ``version``, by index."""
        self.ask: AskGroup = ask_process
        self.prefixes: KnownPrefixes | None = None
        """Contexts in the caches of engines, to which later turns return; None: there are none."""
        self.drops_interrupted = False
        """Whether interrupted responses lose their tokens, and begin again."""
        self.max_context_tokens = max_context_tokens
        self.on_left: Callable[[EngineHandle], None] = lambda _: None
        """Called with an engine that is lost, in the program's loop, before ``on_lost``."""
        self.on_lost: Callable[[int, EngineHandle, str], bool] = lambda *_: False
        """Called with an engine that did not answer, and the reason; returns at once whether a
        replacement comes: then ``join`` or ``give_up`` follows."""
        self._members = {index: Member(index, handle, version) for index, handle in engines.items()}
        self._lost: dict[int, str] = {}
        self._coming: set[int] = set()
        self._queue = RequestQueue(num_slots=num_slots)
        for member in self._members.values():
            self._queue.add(member)
        self._vocab_size = vocab_size
        self._version = version
        self._num_repeated = self._num_interrupted = self._num_interrupted_tokens = 0
        self._num_open: Counter[int] = Counter()
        """Requests that engines have, by the version that is to answer; none of 0."""
        self._idle_s = 0.0
        """Seconds in which they had none, up to ``_idle_since_s``."""
        self._idle_since_s: float | None = None
        """None before the first weights: the start of the engines is not idleness."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """Of the program, from its first request on."""
        self._gave_back = asyncio.Event()

    # -- members ---------------------------------------------------------------------------------

    def expect(self, index: int) -> None:
        """An engine comes: ``join`` or ``give_up`` follows. Before the first request."""
        self._coming.add(index)

    @_in_loop
    def join(self, index: int, handle: EngineHandle, *, version: int | None = None) -> None:
        """Send requests to this engine, whose weights are the newest. Thread-safe, idempotent.

        A new process takes the place of the old one; one that is here keeps its open requests, of
        an older adapter, too.
        Engines that join after a new ``version`` have that, too.
        """
        if version is not None:
            self._idle_since_s = self._idle_since_s or time.perf_counter()
            self._version = version
        self._coming.discard(index)
        member = self._members.get(index)
        if member is None or member.handle is not handle:
            if member is not None:
                self._queue.remove(member)
            member = self._members[index] = Member(index, handle, self._version)
        elif not member.is_suspended and member.version == self._version:
            return
        member.version, member.is_suspended = self._version, False
        self._queue.add(member)

    @_in_loop
    def suspend(self, index: int) -> None:
        """Send no request to this engine until it joins: it gets weights, and is not lost.

        Requests that it has keep their answers. Thread-safe; an unknown engine is left alone.
        """
        member = self._members.get(index)
        if member is not None:
            member.num_pauses += 1
            member.is_suspended = True
            self._queue.remove(member)

    @_in_loop
    def drop(self, index: int, handle: EngineHandle, reason: str) -> None:
        """Send this engine's open requests to others, and lose it. Thread-safe, idempotent."""
        member = self._members.get(index)
        if member is None or member.handle is not handle:
            return
        self._lose(member, reason)
        for loss in member.losses:
            if not loss.done():
                loss.set_result(reason)

    @property
    def open_versions(self) -> frozenset[int]:
        """Policy versions that are to answer open requests."""
        return frozenset(self._num_open)

    async def drained(self) -> None:
        """Wait until no response is open: those of suspended engines have ended, or were lost."""
        while any(member.num_open for member in self._members.values()):
            self._gave_back.clear()
            await self._gave_back.wait()

    @_in_loop
    def give_up(self, index: int, reason: str) -> None:
        """Expect no engine of this index any more, nor its return if suspended. Thread-safe."""
        self._coming.discard(index)
        self._lost[index] = reason
        if index in self._members and self._members[index].is_suspended:
            del self._members[index]
        self._refuse_if_none_is_left()

    # -- requests --------------------------------------------------------------------------------

    async def answer(self, request: SampleRequest) -> list[Sample]:
        """See ``Sampler``. An answer that no model can give counts as none.

        Interrupted responses continue on any engine that serves, each with its own tokens. A
        ServerDiedError if no engine is left and none comes, or several were lost with the request;
        a DriftError if an engine has other weights.
        """
        return await sample_to_the_end(self._answer_once, request)

    async def _answer_once(self, request: SampleRequest) -> list[Sample]:
        """Return the responses of one engine; some may be interrupted."""
        num_lost, num_responses = 0, len(request.keys)
        while num_lost < _NUM_TRIES:
            member = await self._take(request)
            version, num_pauses = member.version, member.num_pauses
            self._count_open(version, 1)
            try:
                samples = await self._ask(member, replace(request, version=version))
                self._require_possible(samples, num_asked=num_responses)
                if member.num_pauses == num_pauses and any(s.is_interrupted for s in samples):
                    raise EngineError("it interrupted a response, and was not suspended before")
            except (RequestError, DriftError):  # another engine would refuse it, too
                raise
            except (EngineError, PhaseError, DeadlineError) as error:
                if isinstance(error, PhaseError) and member.num_pauses > num_pauses:
                    continue  # it was suspended before the request arrived
                reason = str(error)
                num_lost += 1
                self._num_repeated += num_responses
                self._lose(member, reason)
            else:
                _require_version(member.index, samples, version=version)
                self._count_interrupted(samples)
                if self.drops_interrupted:
                    samples = [
                        interrupted_sample(s.weight_version) if s.is_interrupted else s
                        for s in samples
                    ]
                self._remember(member, request, *(each.token_ids for each in samples))
                return samples
            finally:
                self._count_open(version, -1)
                self._queue.give_back(member, num_responses)
                self._gave_back.set()
        raise ServerDiedError(
            f"a request was sent to {_NUM_TRIES} rollout engines, and each was lost; the last one: "
            f"{reason}"
        )

    def take_metrics(self) -> Metrics:
        """Describe requests and idle seconds since the last call under declared names."""
        metrics: Metrics = {"rollout/repeated_requests": Sum(self._num_repeated)}
        if self._num_interrupted:
            kind = "aborted" if self.drops_interrupted else "interrupted"
            metrics[f"rollout/{kind}_responses"] = Sum(self._num_interrupted)
            metrics[f"rollout/{kind}_tokens"] = Sum(self._num_interrupted_tokens)
        if self._idle_since_s is not None:
            self._count_open(self._version, 0)
            metrics["time/engines_idle_s"] = Max(self._idle_s)
        self._idle_s = 0.0
        self._num_repeated = self._num_interrupted = self._num_interrupted_tokens = 0
        return metrics

    async def _ask(self, member: Member, request: SampleRequest) -> list[Sample]:
        """Ask one engine until it answers or is dropped; others watch it, so there is no limit."""
        answer = asyncio.ensure_future(self.ask(member.handle, request))
        loss: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        member.losses.add(loss)
        try:
            await asyncio.wait((answer, loss), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
        finally:
            member.losses.discard(loss)
            answer.cancel()
        raise EngineError(loss.result())

    def _count_open(self, version: int, change: int) -> None:
        if self._idle_since_s is not None:
            now_s = time.perf_counter()
            self._idle_s += 0.0 if self._num_open else now_s - self._idle_since_s
            self._idle_since_s = now_s
        self._num_open[version] += change
        if not self._num_open[version]:
            del self._num_open[version]

    async def _take(self, request: SampleRequest) -> Member:
        """Wait for an engine with room; see ``RequestQueue.take``."""
        self.loop = asyncio.get_running_loop()
        if not self._members and not self._coming:
            raise self._none_serves()
        num_responses = len(request.keys)
        if self.prefixes is None:
            return await self._queue.take(num_responses)
        holder = self.prefixes.find(prefix_sums(request.token_ids, request.images))
        known = None if holder is None else self._members.get(holder)
        member = await self._queue.take(num_responses, holder=known)
        self._remember(member, request)
        return member

    def _remember(self, member: Member, request: SampleRequest, *responses: Tensor) -> None:
        """Note who has a context, and the one response to it, which a later turn may continue."""
        if self.prefixes is not None and len(responses) <= 1:
            known_L = torch.cat([request.token_ids, *responses])
            self.prefixes.add(prefix_sums(known_L, request.images), member.index)

    def _lose(self, member: Member, reason: str) -> None:
        if self._members.get(member.index) is not member:
            return
        log.warning("a rollout engine is lost: engine=%d reason=%s", member.index, reason)
        del self._members[member.index]
        self._queue.remove(member)
        self._lost[member.index] = reason
        self.on_left(member.handle)
        if self.on_lost(member.index, member.handle, reason):
            self._coming.add(member.index)
        self._refuse_if_none_is_left()

    def _refuse_if_none_is_left(self) -> None:
        if not self._members and not self._coming:
            self._queue.refuse(self._none_serves())

    def _none_serves(self) -> ServerDiedError:
        reasons = "; ".join(f"engine {i}: {reason}" for i, reason in self._lost.items())
        return ServerDiedError(f"no rollout engine serves; {reasons or 'none did before'}")

    # -- answers ---------------------------------------------------------------------------------

    def _require_possible(self, samples: Sequence[Sample], *, num_asked: int) -> None:
        """Raise EngineError if a model that works cannot have given these answers."""
        if len(samples) != num_asked:
            raise EngineError(f"it gave {len(samples)} responses where {num_asked} were asked for")
        for sample in samples:
            tokens, logprobs = sample.token_ids, sample.logprobs
            if tokens.shape != logprobs.shape:
                raise EngineError(f"it gave {len(logprobs)} log-probs to {len(tokens)} tokens")
            if not bool(torch.isfinite(logprobs).all()):
                raise EngineError("it gave a log-prob that is not finite")
            if bool(((tokens < 0) | (tokens >= self._vocab_size)).any()):
                raise EngineError(f"it gave a token beyond the vocabulary of {self._vocab_size}")

    def _count_interrupted(self, samples: Sequence[Sample]) -> None:
        lengths = [len(sample.token_ids) for sample in samples if sample.is_interrupted]
        self._num_interrupted += sum(length > 0 for length in lengths)
        self._num_interrupted_tokens += sum(lengths)


def _require_version(index: int, samples: Sequence[Sample], *, version: int) -> None:
    versions = {sample.weight_version for sample in samples} - {version}
    if versions:
        raise DriftError(
            f"engine {index} sampled with weights of version {sorted(versions)}, and the "
            f"policy is at version {version}; nothing of this phase is used"
        )
