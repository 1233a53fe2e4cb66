"""Requests to any engine of a server: handed out as engines get room, repeated if one is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec

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
from hybridrl.sampler import RequestParams, Sample, Sampler, interrupted_sample
from hybridrl.serving.engine_handle import EngineHandle
from hybridrl.serving.request_queue import Member, RequestQueue
from hybridrl.workers.rollout.prefixes import KnownPrefixes, prefix_sums
from hybridrl.workers.rollout.single_turn import sample_to_the_end

log = logging.getLogger(__name__)

P = ParamSpec("P")

_NUM_TRIES = 4
"""Engines that may be lost with one request; then it counts as the cause."""


AskGroup = Callable[
    [EngineHandle, Sequence[int] | Tensor, RequestParams, Sequence[int]],
    Coroutine[Any, Any, list[Sample]],
]
"""Sends a request to one engine: context, parameters, and a key for each response."""


async def ask_process(
    engine: EngineHandle,
    token_ids: Sequence[int] | Tensor,
    params: RequestParams,
    keys: Sequence[int],
) -> list[Sample]:
    """Send a request to the process of an engine."""
    return await asyncio.wrap_future(engine.sample_group(token_ids, params, keys=keys))


def _ignore(_: EngineHandle) -> None:
    pass


def _never_replaced(index: int, handle: EngineHandle, reason: str) -> bool:
    return False


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
    """Samples with several engines of one model. Used for one program.

    An engine gets a request while fewer than ``num_slots`` responses are open on it. A request that
    an engine did not answer is sent to another one, as a new one: nothing of a lost answer counts.
    To load weights while the program runs: ``suspend`` an engine, ``interrupt`` its process or let
    its requests end, load, and ``readmit``.
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
        """Prepare.

        Args:
            engines: that serve, by index.
            num_slots: sequences that decode at the same time on an engine.
            max_context_tokens: limit of context + response.
            version: of the policy that must sample, until ``readmit`` names another one.
        """
        self.ask: AskGroup = ask_process
        self.prefixes: KnownPrefixes | None = None
        """Contexts in the caches of engines, to which later turns return; None: there are none."""
        self.drops_interrupted = False
        """Whether interrupted responses lose their tokens, and begin again."""
        self.max_context_tokens = max_context_tokens
        self.on_left: Callable[[EngineHandle], None] = _ignore
        """Called with an engine that is lost, in the program's loop, before ``on_lost``."""
        self.on_lost: Callable[[int, EngineHandle, str], bool] = _never_replaced
        """Called with an engine that did not answer, and the reason; returns at once whether a
        replacement comes: then ``join`` or ``give_up`` follows."""
        self._members = {index: Member(index, handle, version) for index, handle in engines.items()}
        self._lost: dict[int, str] = {}
        self._coming: set[int] = set()
        self._suspended: set[int] = set()
        self._queue = RequestQueue(num_slots=num_slots)
        for member in self._members.values():
            self._queue.add(member)
        self._vocab_size = vocab_size
        self._version = version
        self._num_repeated = self._num_interrupted = self._num_interrupted_tokens = 0
        self._num_asked = 0
        """Requests that engines have."""
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
    def join(self, index: int, handle: EngineHandle) -> None:
        """Send requests to this engine, too, whose weights are the newest. Thread-safe.

        Idempotent: one that is here keeps its open requests.
        """
        self._join(index, handle)

    def _join(self, index: int, handle: EngineHandle) -> None:
        self._coming.discard(index)
        known = self._members.get(index)
        if known is not None and known.handle is handle and index not in self._suspended:
            return  # it has open requests, which are counted
        self._suspended.discard(index)
        if known is not None:
            self._queue.remove(known)
        member = self._members[index] = Member(index, handle, self._version)
        self._queue.add(member)

    @_in_loop
    def suspend(self, index: int) -> None:
        """Send no request to this engine until ``readmit``: it gets weights, and is not lost.

        Requests that it has keep their answers. Thread-safe; an unknown engine is left alone.
        """
        if index in self._members:
            self._members[index].num_pauses += 1
            self._queue.remove(self._members[index])
            self._suspended.add(index)

    @_in_loop
    def readmit(self, index: int, handle: EngineHandle, *, version: int) -> None:
        """Send requests to this engine again, which has weights of this version. Thread-safe.

        Engines that ``join`` later have this version, too.

        Args:
            index: of an engine that was suspended; or lost since.
            handle: of its process, which may have been replaced.
        """
        if self._idle_since_s is None:
            self._idle_since_s = time.perf_counter()
        self._version = version
        member = self._members.get(index)
        if member is None or member.handle is not handle:
            self._join(index, handle)
        elif index in self._suspended:
            member.version = version
            self._suspended.remove(index)
            self._queue.add(member)

    @_in_loop
    def drop(self, index: int, handle: EngineHandle, reason: str) -> None:
        """Send this engine's open requests to others: it does not answer. Thread-safe, idempotent.

        One of them reports the loss, as if it had failed by itself.
        """
        member = self._members.get(index)
        if member is None or member.handle is not handle:
            return
        self._lose(member, reason)
        for loss in member.losses:
            if not loss.done():
                loss.set_result(reason)

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
        if index in self._suspended:
            self._suspended.remove(index)
            del self._members[index]
        self._refuse_if_none_is_left()

    # -- requests --------------------------------------------------------------------------------

    async def sample_group(
        self, token_ids: Sequence[int] | Tensor, params: RequestParams, *, keys: Sequence[int]
    ) -> list[Sample]:
        """See ``Sampler``. An answer that no model can give counts as none.

        Interrupted responses continue on any engine that serves, each with the tokens that it has;
        the others of their group that ended stay.

        Raises:
            ServerDiedError: no engine is left and none comes, or several were lost with it.
            DriftError: an engine has other weights.
        """
        return await sample_to_the_end(self._answer, token_ids, params, keys)

    async def _answer(
        self, token_ids: Tensor, params: RequestParams, keys: Sequence[int]
    ) -> list[Sample]:
        """Return the responses of one engine; some may be interrupted."""
        num_lost = 0
        while num_lost < _NUM_TRIES:
            member = await self._take(token_ids, len(keys))
            version, num_pauses = member.version, member.num_pauses
            try:
                samples = await self._ask(member, token_ids, params, keys)
                self._require_possible(samples, num_asked=len(keys))
                if member.num_pauses == num_pauses:
                    _require_uninterrupted(samples)
            except (RequestError, DriftError):  # another engine would refuse it, too
                raise
            except (EngineError, PhaseError, DeadlineError) as error:
                if isinstance(error, PhaseError) and member.num_pauses > num_pauses:
                    continue  # it was suspended before the request arrived
                reason = str(error)
                num_lost += 1
                self._num_repeated += len(keys)
                self._lose(member, reason)
            else:
                self._require_version(member.index, samples, version=version)
                self._count_interrupted(samples)
                if self.drops_interrupted:
                    samples = [
                        interrupted_sample(s.weight_version) if s.is_interrupted else s
                        for s in samples
                    ]
                self._remember(member, token_ids, *(each.token_ids for each in samples))
                return samples
            finally:
                self._queue.give_back(member, len(keys))
                self._gave_back.set()
        raise ServerDiedError(
            f"a request was sent to {_NUM_TRIES} rollout engines, and each was lost; the last one: "
            f"{reason}"
        )

    def take_metrics(self) -> Metrics:
        """Describe the requests and idle seconds since the last call, and count from 0 again."""
        self._count_asked(0)
        metrics = self.metrics() | {"time/engines_idle_s": Max(self._idle_s)}
        self._idle_s = 0.0
        self._num_repeated = self._num_interrupted = self._num_interrupted_tokens = 0
        return metrics

    def metrics(self) -> Metrics:
        """Describe the program's requests under declared names."""
        metrics: Metrics = {"rollout/repeated_requests": Sum(self._num_repeated)}
        if self._num_interrupted and self.drops_interrupted:
            metrics["rollout/aborted_responses"] = Sum(self._num_interrupted)
            metrics["rollout/aborted_tokens"] = Sum(self._num_interrupted_tokens)
        elif self._num_interrupted:
            metrics["rollout/interrupted_responses"] = Sum(self._num_interrupted)
            metrics["rollout/interrupted_tokens"] = Sum(self._num_interrupted_tokens)
        return metrics

    async def _ask(
        self,
        member: Member,
        token_ids: Sequence[int] | Tensor,
        params: RequestParams,
        keys: Sequence[int],
    ) -> list[Sample]:
        """Ask one engine until it answers or is dropped; others watch it, so there is no limit."""
        answer = asyncio.ensure_future(self.ask(member.handle, token_ids, params, keys))
        loss: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        member.losses.add(loss)
        self._count_asked(1)
        try:
            await asyncio.wait((answer, loss), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
        finally:
            self._count_asked(-1)
            member.losses.discard(loss)
            answer.cancel()
        raise EngineError(loss.result())

    def _count_asked(self, change: int) -> None:
        if self._idle_since_s is not None:
            now_s = time.perf_counter()
            self._idle_s += 0.0 if self._num_asked else now_s - self._idle_since_s
            self._idle_since_s = now_s
        self._num_asked += change

    async def _take(self, token_ids: Sequence[int] | Tensor, num_responses: int) -> Member:
        """Wait for an engine with room, and return the one with the fewest open responses.

        Or the one that has the context in its cache; see ``RequestQueue.take``.
        """
        self.loop = asyncio.get_running_loop()
        if not self._members and not self._coming:
            raise self._none_serves()
        if self.prefixes is None:
            return await self._queue.take(num_responses)
        holder = self.prefixes.find(prefix_sums(token_ids))
        known = None if holder is None else self._members.get(holder)
        member = await self._queue.take(num_responses, holder=known)
        self._remember(member, token_ids)
        return member

    def _remember(self, member: Member, *turns: Sequence[int] | Tensor) -> None:
        """Note who has a context, and the one response to it, which a later turn may continue."""
        if self.prefixes is not None and len(turns) <= 2:
            tokens = torch.cat([torch.as_tensor(turn) for turn in turns])
            self.prefixes.add(prefix_sums(tokens), member.index)

    def _none_serves(self) -> ServerDiedError:
        reasons = "; ".join(f"engine {i}: {reason}" for i, reason in self._lost.items())
        return ServerDiedError(f"no rollout engine serves; {reasons or 'none did before'}")

    def _refuse_if_none_is_left(self) -> None:
        if not self._members and not self._coming:
            self._queue.refuse(self._none_serves())

    def _lose(self, member: Member, reason: str) -> None:
        if self._members.get(member.index) is not member:
            return
        log.warning("a rollout engine is lost: engine=%d reason=%s", member.index, reason)
        del self._members[member.index]
        self._suspended.discard(member.index)
        self._queue.remove(member)
        self._lost[member.index] = reason
        self.on_left(member.handle)
        if self.on_lost(member.index, member.handle, reason):
            self._coming.add(member.index)
        self._refuse_if_none_is_left()

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

    def _require_version(self, index: int, samples: Sequence[Sample], *, version: int) -> None:
        versions = {sample.weight_version for sample in samples} - {version}
        if versions:
            raise DriftError(
                f"engine {index} sampled with weights of version {sorted(versions)}, and the "
                f"policy is at version {version}; nothing of this phase is used"
            )

    def _count_interrupted(self, samples: Sequence[Sample]) -> None:
        lengths = [len(sample.token_ids) for sample in samples if sample.is_interrupted]
        self._num_interrupted += sum(length > 0 for length in lengths)
        self._num_interrupted_tokens += sum(lengths)


def _require_uninterrupted(samples: Sequence[Sample]) -> None:
    """Raise EngineError if responses were interrupted: nobody has asked for it."""
    if any(sample.is_interrupted for sample in samples):
        raise EngineError("it interrupted a response, and was not suspended before")
