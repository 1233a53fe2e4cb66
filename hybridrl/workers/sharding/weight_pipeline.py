"""The weight stream into engines of other processes: a bucket travels while the next is gathered.

Memory, on every rank that contributes bytes: the bucket that is gathered and two flat ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import TracebackType

from torch import Tensor

from hybridrl.workers.rollout.protocol import Bucket, StagedBucket, WeightSender
from hybridrl.workers.sharding.control import ControlGroup, Neighbours, attempt
from hybridrl.workers.sharding.weight_stream import StreamReport, buckets

Deliver = Callable[[StagedBucket, Sequence[str]], None]


def stream_offers(
    weights: Iterator[tuple[str, Tensor]],
    port: WeightSender,
    *,
    deliver: Deliver | None,
    bucket_bytes: int,
    control: ControlGroup,
    neighbours: Neighbours,
) -> StreamReport:
    """Send all weights, bucket by bucket; every bucket ends in a status exchange of all ranks.

    One exchange says of all ranks how the delivery of a bucket went and how the next was made
    ready. Only then do neighbours gather what they offer, so a rank that fails leaves none waiting
    for it. All ranks stop at the same exchange when one fails.

    Args:
        weights: (HF name, full tensor), the same names in the same order on all ranks.
        port: this rank's end of the stream.
        deliver: hands the leader's offer and the handles of all neighbours to the engine, and runs
            in a thread; None on a rank that leads none.
        bucket_bytes: size of a bucket, the same on all ranks.
        control: the control group.
        neighbours: the ranks that share an engine.
    """
    stream = buckets(weights, bucket_bytes=bucket_bytes)
    report = StreamReport(num_tensors=0, num_buckets=0, num_bytes=0, failures={})
    travelling: StagedBucket | None = None
    try:
        with _AsyncLoader(deliver) as courier:
            while True:
                offer, error = attempt(partial(_next_offer, stream, port))
                late = courier.wait()
                failures = control.exchange("stream", late or error)
                if failures:
                    return replace(report, failures=failures)
                report = _counting(report, travelling)
                if offer is None:
                    return report
                courier.send(offer, neighbours.gather(offer.handle))
                travelling = offer
    finally:
        port.release_buffers()


def _next_offer(stream: Iterator[Bucket], port: WeightSender) -> StagedBucket | None:
    bucket = next(stream, None)
    return None if bucket is None else port.offer(bucket)


def _counting(report: StreamReport, offer: StagedBucket | None) -> StreamReport:
    if offer is None:
        return report
    return StreamReport(
        num_tensors=report.num_tensors + len(offer.slots),
        num_buckets=report.num_buckets + 1,
        num_bytes=report.num_bytes + sum(slot.end - slot.begin for slot in offer.slots),
        failures={},
    )


class _AsyncLoader:
    """Delivers one bucket at a time, in a thread of its own."""

    def __init__(self, deliver: Deliver | None) -> None:
        self._deliver = deliver
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._errand: Future[tuple[None, Exception | None]] | None = None

    def __enter__(self) -> _AsyncLoader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._pool.shutdown()  # waits: buffers must not go while a server reads them

    def send(self, offer: StagedBucket, handles: Sequence[str]) -> None:
        if self._deliver is not None:
            self._errand = self._pool.submit(attempt, partial(self._deliver, offer, handles))

    def wait(self) -> Exception | None:
        """Return how the delivery that was sent last went."""
        if self._errand is None:
            return None
        errand, self._errand = self._errand, None
        return errand.result()[1]
