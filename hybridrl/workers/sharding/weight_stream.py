"""The one stream of weights from a training engine to rollout engines: buckets of HF-named tensors.

N training engines and M rollout engines need N + M pieces of code: a training engine yields
``(name, tensor)``, a rollout engine takes a bucket, and this file moves one to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hybridrl.workers.rollout.protocol import Bucket
from hybridrl.workers.sharding.control import ControlGroup, Failures, attempt
from hybridrl.workers.sharding.memory import free_bytes

_SHARE_OF_FREE = 0.1
_DEFAULT_BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class StreamReport:
    """What one sync moved."""

    num_tensors: int
    num_buckets: int
    num_bytes: int
    failures: Failures


def bucket_bytes_for(configured_mib: int, device: torch.device) -> int:
    """Return the size of a bucket: ``rollout.bucket_mib``, or a tenth of the free memory."""
    if configured_mib:
        return configured_mib * 2**20
    free = free_bytes(device)
    return _DEFAULT_BUCKET_BYTES if free is None else max(2**20, int(free * _SHARE_OF_FREE))


def buckets(weights: Iterable[tuple[str, Tensor]], *, bucket_bytes: int) -> Iterator[Bucket]:
    """Gather tensors until the next would exceed ``bucket_bytes``; a larger one goes alone."""
    bucket: list[tuple[str, Tensor]] = []
    filled = 0
    for name, tensor in weights:
        if bucket and filled + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor))
        filled += tensor.nbytes
    if bucket:
        yield bucket


def stream_weights(
    weights: Iterator[tuple[str, Tensor]],
    deliver: Callable[[Bucket], None] | None,
    *,
    bucket_bytes: int,
    control: ControlGroup,
) -> StreamReport:
    """Send all weights, bucket by bucket; every bucket ends in a status exchange of all ranks.

    Gathering a sharded tensor is a collective, so every rank iterates, also one that delivers to no
    engine, and all ranks stop at the same bucket when one fails.

    Args:
        weights: (HF name, full tensor), the same names in the same order on all ranks.
        deliver: hands a bucket to this rank's engine; None on a rank without one.
        bucket_bytes: size of a bucket, the same on all ranks.
        control: the control group.
    """
    stream = buckets(weights, bucket_bytes=bucket_bytes)
    num_tensors = num_buckets = num_bytes = 0
    while True:
        bucket, error = attempt(partial(next, stream, None))
        if bucket and deliver is not None:
            _, error = attempt(partial(deliver, bucket))
        failures = control.exchange("stream", error)
        if failures or not bucket:
            return StreamReport(num_tensors, num_buckets, num_bytes, failures)
        num_tensors += len(bucket)
        num_buckets += 1
        num_bytes += sum(tensor.nbytes for _, tensor in bucket)
        del bucket  # else its memory would stay while the next one is gathered
