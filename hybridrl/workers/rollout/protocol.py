"""The interface of a rollout engine: sampling for workers, life cycle for the sharding manager.

Only ``workers/sharding`` calls pause, drain, release, resume and continue_generation; a test reads
the syntax tree to check that.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from hybridrl.errors import first_of
from hybridrl.metrics import Metrics
from hybridrl.sampler import Program, T
from hybridrl.workers.rollout.buckets import Bucket, StagedBucket


class MemoryTag(Enum):
    """Memory of an engine that is released and resumed separately (SGLang's tags)."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    CUDA_GRAPH = "cuda_graph"


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """One tensor under the ``weights`` tag."""

    name: str  # Hugging Face's, of buffers too; of an adapter's tensor the name in its file
    num_bytes: int
    is_buffer: bool  # no trainer sends it (rotary frequencies): only a backup survives a release


@dataclass(frozen=True, slots=True)
class Receiver:
    """A server that takes weights out of a process group."""

    url: str
    key: str = field(repr=False)
    num_ranks: int
    start: str  # name of this start of the server: another one is not in the groups of this


class WeightSender(Protocol):
    """One rank's end of the weight stream into an engine.

    Every rank that shares an engine stages every bucket: rank i of a server reads the bytes that
    rank i staged, on the device that both share. The rank with the engine has the bucket loaded.
    """

    def stage(self, bucket: Bucket) -> StagedBucket:
        """Stage a bucket; it stays readable until the next one but one.

        Its tensors may be reused, unless it is staged by reference. EngineError for a name or shape
        that the engine does not have, or too little memory.
        """

    def release_buffers(self) -> None:
        """Release all buffers; the stream has ended, with or without success. Idempotent."""


def mismatch(names: Sequence[str]) -> str:
    """Mark these weights as not arrived."""
    return (
        f"{len(names)} weights of the rollout engine are not the trainer's after a sync: "
        f"{first_of(names)}; every response would be sampled by another model. "
        "See that trainer and engine load the same model.path, and try rollout.transport=disk"
    )


class RolloutEngine(WeightSender, Protocol):
    """One sampling engine, life cycle as in ``workers/sharding/lifecycle.py``.

    It starts with all its memory resident and with invalid weights (BOOT counts every tensor as
    lost). Implementations do not check the order of calls: the life cycle does.

    What loads weights raises PhaseError while they are released, or requests are running; what
    loads an adapter, while weights are released.
    """

    frees_memory: bool
    """False if release and resume are answered but free no memory (SGLang on a CPU)."""

    @property
    def url(self) -> str | None:
        """Of its server at present; None if it computes in this process."""

    def run(self, program: Program[T]) -> T:
        """Run a program over this engine's sampler, in an event loop of this thread.

        PhaseError if paused, if another program runs, or a memory tag is released. EngineError if
        the engine failed, or ``drain`` ended the program at its deadline.
        """

    def weight_memory(self) -> tuple[WeightMemory, ...]:
        """List all tensors under the ``weights`` tag."""

    def load(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        """Load a bucket of full tensors; from any one thread at a time. All or nothing.

        ``staged`` is this rank's own; ``handles`` are those that all ranks of the engine staged for
        this bucket, in rank order. EngineError for a name or shape that the engine does not have,
        or a server that refuses or is gone; DeadlineError if it does not answer.
        """

    def load_adapter(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        """Load a complete adapter, by the names of its file; its tensors may be reused afterwards.

        Comes after the base weights. It lies beside those of other versions, and requests may run:
        each uses that of ``SampleRequest.version``. An engine built for adapters refuses to sample
        without one. EngineError for an adapter that does not fit (``adapter_fit.py``).
        """

    def unload_adapter(self, *, kept: Collection[int] = ()) -> None:
        """Forget the adapters, but those of versions that are ``kept``. Idempotent.

        Requests may run, but none with an adapter that is forgotten.
        """

    def finish_update(self, *, version: int) -> None:
        """All buckets have arrived: rebuild derived state, drop caches of old weights."""

    def load_reference_weights(self, folder: Path) -> None:
        """Record the weights in the safetensors of ``folder`` in this engine's form; forget them.

        The previous weights are lost, until they are sent again.
        """

    def verify_weights(self) -> None:
        """Compare the sent weights bitwise with those of ``load_reference_weights``; drop these.

        LedgerError names the tensors that differ, by the engine's names.
        """

    def pause(self) -> None:
        """Admit no new request. Idempotent."""

    def interrupt(self) -> None:
        """End open responses at their present token, with ``finish_reason="interrupted"``.

        Until ``continue_generation`` nothing is sampled: later requests return without tokens. May
        be called by any thread, a task of the program included, and returns before the responses
        do. Idempotent.
        """

    def drain(self, *, timeout_s: float) -> int:
        """Wait until no request runs; abort the others at the deadline, return their number."""

    def release(self, part: MemoryTag, *, backup: frozenset[str] = frozenset()) -> None:
        """Free the memory of a tag; of weights those in ``backup`` are copied to the host first.

        PhaseError if released, or requests run. EngineError if a copy fails: nothing is freed.
        """

    def resume(self, part: MemoryTag) -> None:
        """Allocate a released tag again and restore the tensors with a backup.

        EngineError if the device lacks memory, or the server is gone.
        """

    def continue_generation(self) -> None:
        """Admit requests again."""

    def resident_bytes(self, part: MemoryTag) -> int:
        """Return the bytes that this tag holds on the device now (measured, not remembered).

        An engine in another process returns its own count, which may be more than it can give back.
        """

    def progress(self) -> object:
        """Return how far the engine is: two answers differ unless it hangs, busy or not.

        EngineError if it is gone, DeadlineError if it does not answer.
        """

    def has_died(self) -> bool:
        """Whether a process of the engine's own is gone; it has none, if it is in this one."""

    def take_metrics(self) -> Metrics:
        """Return the metrics of the programs since the last time, and reset them."""

    def restart(self) -> None:
        """Free everything and boot again: the only way out of BROKEN."""

    def shutdown(self) -> None:
        """End the engine for good; idempotent."""


@runtime_checkable
class WeightReceiver(Protocol):
    """An engine whose server can join a group with the rank that gathers the weights."""

    def join(self) -> Receiver:
        """Open an update whose buckets come through a group; ``finish_update`` closes it."""

    def compare_with_files(self, folder: Path) -> None:
        """Compare what came through a group with ``folder``; fails as ``verify_weights``."""


@runtime_checkable
class ProfilesItself(Protocol):
    """An engine that computes in other processes, which write profiles of themselves."""

    def profile(self, stem: Path | None) -> None:
        """Profile from here on, into files that begin with ``stem``; None: end, and write them."""


@runtime_checkable
class FileReader(Protocol):
    """An engine that has a part of the weights, and reads it from files: all, or none."""

    is_frozen: bool  # whether the part is never trained

    def read_files(self, folder: Path) -> None:
        """Load the part from safetensors; EngineError if one of its tensors is missing there."""


# How long one rank may wait for its engine within a stage. Ranks wait for each other half as long
# again (``sharding/control.py``). So every wait of a rank has ended, with or without success, while
# the others still wait, and all get the status.

LEAST_WAIT_S = 0.5
"""Seconds of a wait at the end of its stage: enough for an answer that has already arrived."""

_ends_at: ContextVar[float | None] = ContextVar("stage_ends_at", default=None)


@contextmanager
def stage_time(timeout_s: float) -> Iterator[None]:
    """In the block all waits of this thread together take at most ``timeout_s`` seconds."""
    token = _ends_at.set(time.monotonic() + timeout_s)
    try:
        yield
    finally:
        _ends_at.reset(token)


def left_s(at_most_s: float) -> float:
    """Return the seconds that one wait may take: those left in the stage, if one has begun."""
    ends_at = _ends_at.get()
    if ends_at is None:
        return at_most_s
    return min(at_most_s, max(LEAST_WAIT_S, ends_at - time.monotonic()))
