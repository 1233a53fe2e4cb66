"""Streams into engines of other processes: who offers, delivers, learns of a failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from hybridrl.workers.rollout.protocol import Bucket, StagedBucket
from hybridrl.workers.rollout.sglang.flat_buffers import FlatBuffers, lay_out, tensors_in
from hybridrl.workers.sharding.control import ControlGroup, Neighbours
from hybridrl.workers.sharding.weight_pipeline import stream_offers
from hybridrl.workers.sharding.weight_stream import StreamReport
from tests.ranks import run_ranks

SIZES = [3, 5, 2, 9, 1, 1, 4]
WHOLE = StreamReport(num_tensors=7, num_buckets=4, num_bytes=100, failures={})


def _allocate(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


@dataclass
class Port:
    """A port whose server is a dictionary; handles say which rank offered which bucket."""

    rank: int = 0
    offered: int = 0
    ended: int = 0
    handles: list[list[str]] = field(default_factory=list)
    loaded: dict[str, list[float]] = field(default_factory=dict)
    fails_to: str = ""
    buffers: FlatBuffers = field(default_factory=lambda: FlatBuffers(count=2, allocate=_allocate))

    def offer(self, bucket: Bucket) -> StagedBucket:
        self.offered += 1
        if self.fails_to == "offer" and self.offered == 2:
            raise OSError("no memory for an offer")
        flat, slots = self.buffers.pack(bucket)
        assert slots == lay_out(bucket)
        return StagedBucket(slots, flat, f"rank {self.rank} bucket {self.offered}")

    def deliver(self, offer: StagedBucket, handles: Sequence[str]) -> None:
        if self.fails_to == "deliver" and len(self.handles) == 1:
            raise OSError("answered with status 400")
        assert offer.flat is not None
        self.handles.append(list(handles))
        self.loaded |= {n: t.tolist() for n, t in tensors_in(offer.flat, offer.slots).items()}

    def release_buffers(self) -> None:
        self.buffers.free()
        self.ended += 1


def _weights(*, fails: bool = False) -> Iterator[tuple[str, Tensor]]:
    for index, size in enumerate(SIZES):
        if fails and index == 3:
            raise OSError("gathering w3 failed")
        yield f"w{index}", torch.full((size,), float(index))


def _stream(rank: int, num_neighbours: int, at_fault: int, place: str) -> list[object]:
    """Two streams, of which the first breaks off in the middle if a rank is at fault."""
    control = ControlGroup(timeout_s=20.0)
    neighbours = Neighbours(control, size=num_neighbours)
    answers: list[object] = []
    for attempt in range(2):
        fails = rank == at_fault and attempt == 0
        port = Port(rank=rank, fails_to=place if fails else "")
        report = stream_offers(
            _weights(fails=fails and place == "gather"),
            port,
            deliver=port.deliver if rank % num_neighbours == 0 else None,
            bucket_bytes=32,
            control=control,
            neighbours=neighbours,
        )
        assert port.ended == 1
        answers.append((report, port.handles, port.loaded))
    return answers


def test_every_rank_of_an_engine_offers_and_its_leader_delivers() -> None:
    for rank, answer in enumerate(run_ranks(4, _stream, 2, -1, "")):
        for report, handles, loaded in answer:
            assert report == WHOLE
            if rank % 2:
                assert not handles and not loaded
            else:
                assert handles == [
                    [f"rank {rank} bucket {n}", f"rank {rank + 1} bucket {n}"] for n in range(1, 5)
                ]
                assert loaded == {name: tensor.tolist() for name, tensor in _weights()}


@pytest.mark.parametrize(
    ("at_fault", "place", "reason"),
    [
        (1, "gather", "gathering w3 failed"),
        (1, "offer", "no memory for an offer"),
        (2, "deliver", "answered with status 400"),
        (0, "gather", "gathering w3 failed"),
    ],
)
def test_when_a_rank_fails_in_the_middle_all_leave_the_stream_and_the_next_one_arrives(
    at_fault: int, place: str, reason: str
) -> None:
    answers = run_ranks(4, _stream, 2, at_fault, place)
    for rank, (broken, whole) in enumerate(answers):
        report, handles, _ = broken
        assert report.failures == {at_fault: f"OSError: {reason}"}
        assert report.num_buckets == answers[0][0][0].num_buckets < 4
        assert len(handles) < 4
        assert whole[0] == WHOLE
        assert len(whole[2]) == (0 if rank % 2 else 7)


def test_the_next_bucket_is_gathered_while_one_is_delivered() -> None:
    gathered_more = threading.Event()
    port = Port()
    late: list[bool] = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for number, item in enumerate(_weights()):
            if number == 4:  # beyond the first bucket, and what did not fit into the second
                gathered_more.set()
            yield item

    def deliver(offer: StagedBucket, handles: Sequence[str]) -> None:
        if not port.handles:
            late.append(not gathered_more.wait(timeout=20.0))
        port.deliver(offer, handles)

    control = ControlGroup(timeout_s=5.0)
    report = stream_offers(
        weights(),
        port,
        deliver=deliver,
        bucket_bytes=48,
        control=control,
        neighbours=Neighbours(control, size=1),
    )
    assert report.num_tensors == 7
    assert late == [False]


def test_an_empty_stream_delivers_nothing() -> None:
    port, control = Port(), ControlGroup(timeout_s=5.0)
    report = stream_offers(
        iter(()),
        port,
        deliver=port.deliver,
        bucket_bytes=48,
        control=control,
        neighbours=Neighbours(control, size=1),
    )
    assert report == StreamReport(num_tensors=0, num_buckets=0, num_bytes=0, failures={})
    assert port.ended == 1 and not port.handles
