"""A bucket in flight outlives the copies of whoever reads it, by the transports' own buffers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from hybridrl.workers.rollout.buckets import Bucket, StagedBucket, tensors_in
from hybridrl.workers.rollout.sglang.transports import SharedTransport, Transport
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.weight_stream import stream_weights

CPU = torch.device("cpu")
NUM_BUCKETS = 6


def _shared(num_ranks: int) -> Transport:
    return SharedTransport(
        device=CPU, num_ranks=num_ranks, encode=lambda flat, spans: "", dtype=torch.float32
    )


TRANSPORTS = {"shared": lambda: _shared(1), "shared by two ranks": lambda: _shared(2)}


class LateReader:
    """A server whose ranks read as late as they may.

    The first has read a bucket when it answers: here, when the next one has been packed. The others
    have read it when the first answers the bucket after it.
    """

    def __init__(self, transport: Transport, *, num_ranks: int) -> None:
        self._transport = transport
        self._num_ranks = num_ranks
        self._num_packed = 0
        self._packed = threading.Condition()
        self._loaded: list[StagedBucket] = []
        self.read: list[list[list[float]]] = [[] for _ in range(num_ranks)]

    def stage(self, bucket: Bucket) -> StagedBucket:
        staged = self._transport.stage(bucket)
        with self._packed:
            self._num_packed += 1
            self._packed.notify_all()
        return staged

    def load(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        self._loaded.append(staged)
        number = len(self._loaded)
        with self._packed:
            is_packed = self._packed.wait_for(
                lambda: self._num_packed >= min(number + 1, NUM_BUCKETS), timeout=20.0
            )
        assert is_packed
        self._read(0, staged)
        if self._num_ranks > 1 and number > 1:
            self._read(1, self._loaded[-2])

    def release_buffers(self) -> None:
        self._transport.release_buffers()

    def _read(self, rank: int, staged: StagedBucket) -> None:
        assert staged.flat is not None
        (values,) = tensors_in(staged.flat, staged.spans).values()
        self.read[rank].append(values.tolist())


def _weights() -> Iterator[tuple[str, Tensor]]:
    for number in range(NUM_BUCKETS):
        yield f"w{number}", torch.full((8,), float(number))


@pytest.mark.shows("5.8")
@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_bucket_is_whole_for_the_last_who_reads_it(name: str) -> None:
    num_ranks = 2 if "two" in name else 1
    reader = LateReader(TRANSPORTS[name](), num_ranks=num_ranks)
    control = ControlGroup(timeout_s=20.0)
    report = stream_weights(
        _weights(), reader.load, sender=reader, bucket_bytes=32, control=control
    )
    assert not report.failures
    sent = [[float(number)] * 8 for number in range(NUM_BUCKETS)]
    assert reader.read[0] == sent
    assert reader.read[1:] == [sent[:-1]] * (num_ranks - 1)
