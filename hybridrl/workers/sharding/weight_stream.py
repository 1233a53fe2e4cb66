"""The one stream of weights from a training engine to rollout engines: buckets of HF-named tensors.

A training engine yields ``(name, tensor)``, a rollout engine stages and loads buckets, this file
connects them. Into another process a bucket travels while the next is gathered: memory of the
bucket that is gathered and of two flat ones. Within a process it is loaded at once: memory of one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridrl.workers.rollout.buckets import Bucket, StagedBucket, stage_by_reference
from hybridrl.workers.rollout.protocol import WeightSender, stage_time
from hybridrl.workers.sharding.control import ControlGroup, Failures, attempt
from hybridrl.workers.sharding.memory import DeviceMemory

Load = Callable[[StagedBucket, Sequence[str]], None]
"""Loads a bucket, given the handles that all ranks of the engine staged; see ``RolloutEngine``."""

_ATTENTION = ".self_attn."
_JOINED = (f"{_ATTENTION}q_a_proj.weight", f"{_ATTENTION}kv_a_proj_with_mqa.weight")
"""SGLang makes one matrix of both, and silently drops one that comes in a bucket without the other
(models/deepseek_common/deepseek_weight_loader.py, 0.5.23)."""

_SHARE_OF_FREE = 0.1
_DEFAULT_BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class StreamReport:
    """The end of one stream."""

    num_bytes: int = 0  # as sent, in the engine's type
    failures: Failures = field(default_factory=dict)
    # Buffers of this rank whose handle was sent for a load that failed: torch keeps them on a GPU
    # until the server opens and closes them, so for good if it ends.
    unanswered_bytes: int = 0


def bucket_bytes_for(configured_mib: int, device: torch.device) -> int:
    """Return the size of a bucket: ``rollout.bucket_mib``, or a tenth of the free memory."""
    if configured_mib:
        return configured_mib * 2**20
    free = DeviceMemory(device).free_bytes()
    return _DEFAULT_BUCKET_BYTES if free is None else max(2**20, int(free * _SHARE_OF_FREE))


def common_bucket_bytes(configured_mib: int, device: torch.device, *, control: ControlGroup) -> int:
    """Return the size for which all ranks have the memory: all must divide the stream alike."""
    return -control.largest("bucket size", -bucket_bytes_for(configured_mib, device))


def buckets(weights: Iterable[tuple[str, Tensor]], *, bucket_bytes: int) -> Iterator[Bucket]:
    """Gather tensors until the next would exceed ``bucket_bytes``; a larger one is sent alone.

    Where ``_JOINED`` are in a layer, a bucket takes all that comes between them.
    """
    bucket: list[tuple[str, Tensor]] = []
    filled = 0
    waits_for = ""
    for name, tensor in weights:
        module = name.partition(_ATTENTION)[0]
        if bucket and filled + tensor.nbytes > bucket_bytes and module != waits_for:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor))
        filled += tensor.nbytes
        if name.endswith(_JOINED):
            waits_for = "" if module == waits_for else module
    if bucket:
        yield bucket


def stream_weights(
    weights: Iterator[tuple[str, Tensor]],
    load: Load | None,
    *,
    sender: WeightSender | None,
    bucket_bytes: int,
    control: ControlGroup,
    ranks: range | None = None,
) -> StreamReport:
    """Send all weights, bucket by bucket; every bucket ends in a status exchange of all ranks.

    Gathering a sharded tensor is a collective, so every rank iterates, even one that loads nothing.
    One exchange carries the status of all ranks: of loading one bucket and staging the next. Only
    then do ranks make and gather handles, so no rank waits for a failed one, and no handle of
    a bucket that is not sent exists. All ranks stop at the same exchange when one fails.

    All ranks have the same names in the same order, and the same ``bucket_bytes``. ``load`` is
    given on a rank that has an engine, and runs in a thread of its own, unless the bucket was
    staged by reference. ``sender`` stages this rank's buckets; None: by reference. ``ranks`` share
    an engine with this one, and the first of them owns it; None: this one alone.
    """
    ranks = ranks or range(control.rank, control.rank + 1)
    stream = buckets(weights, bucket_bytes=bucket_bytes)
    stage = stage_by_reference if sender is None else sender.stage
    loaded_bytes = sent_bytes = 0
    handle_error: Exception | None = None
    # A server of several ranks may answer while some still copy, until it answers the next bucket.
    open_bytes: deque[int] = deque(maxlen=min(2, len(ranks)))

    def stage_next() -> StagedBucket | None:
        bucket = next(stream, None)
        return None if bucket is None else stage(bucket)

    loading: Future[Exception | None] | None = None
    try:
        # The end of the pool waits: buffers must not be freed while a server reads them.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights") as pool:
            while True:
                staged, error = attempt(stage_next)
                load_error = None if loading is None else loading.result()
                loading = None
                failures = control.exchange("stream", load_error or handle_error or error)
                if failures:
                    is_unanswered = control.gather("loads", load_error is not None)
                    left_bytes = sum(open_bytes) if is_unanswered[ranks.start] else 0
                    return StreamReport(loaded_bytes, failures, left_bytes)
                loaded_bytes = sent_bytes
                if staged is None:
                    return StreamReport(loaded_bytes)
                sent_bytes += staged.spans[-1].end
                handle, handle_error = attempt(staged.make_handle)
                open_bytes.append(staged.buffer_bytes if handle else 0)
                handles = control.gather_on_first(ranks, handle)
                known = [each for each in handles if each is not None]
                if load is not None and len(known) == len(handles):  # else a rank says why
                    loading = _loading(pool, load, staged, known, timeout_s=control.timeout_s)
                del staged  # otherwise its memory would stay while the next one is gathered
    finally:
        if sender is not None:
            sender.release_buffers()


def _loading(
    pool: ThreadPoolExecutor,
    load: Load,
    staged: StagedBucket,
    handles: Sequence[str],
    *,
    timeout_s: float,
) -> Future[Exception | None]:
    """Load a bucket, in a thread unless it is staged by reference; the future has the error."""

    def run() -> Exception | None:
        with stage_time(timeout_s):
            return attempt(lambda: load(staged, handles))[1]

    if not staged.tensors:
        return pool.submit(run)
    loaded: Future[Exception | None] = Future()
    loaded.set_result(run())  # so that the next is not gathered beside it
    return loaded
