from __future__ import annotations

import resource
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridrl import env
from hybridrl.errors import EngineError
from hybridrl.workers.rollout.buckets import (
    Bucket,
    FlatBuffers,
    StagedBucket,
    allocate_shared,
    allocator_of,
    lay_out,
    tensors_in,
)
from hybridrl.workers.rollout.sglang.transports import SharedTransport, Transport
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.weight_stream import stream_weights
from tests.drawn import cases
from tests.workers.rollout.engines import allocate_on_host

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
shapes = st.lists(st.integers(0, 4), max_size=3)
buckets = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=8)


def _bucket(shapes_and_types: list[tuple[list[int], torch.dtype]]) -> list[tuple[str, Tensor]]:
    return [
        (f"w{i}", torch.arange(torch.Size(shape).numel()).view(shape).add(i).to(dtype))
        for i, (shape, dtype) in enumerate(shapes_and_types)
    ]


@cases(by_day=30, by_night=300)
@given(buckets)
def test_what_was_packed_is_read_back_whatever_the_types_and_shapes(
    shapes_and_types: list[tuple[list[int], torch.dtype]],
) -> None:
    bucket = [*_bucket(shapes_and_types), ("transposed", torch.arange(6.0).view(2, 3).T)]
    flat, slots = FlatBuffers(count=2, allocate=allocate_on_host).pack(bucket)
    assert len(flat) == sum(tensor.nbytes for _, tensor in bucket)
    found = tensors_in(flat, slots)
    assert found.keys() == dict(bucket).keys()
    for name, tensor in bucket:  # also of the transposed one
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_the_layout_leaves_no_gaps_and_aligns_every_tensor() -> None:
    slots = lay_out(_bucket([([1], torch.uint8), ([3], torch.bfloat16), ([2], torch.float32)]))
    assert [(slot.name, slot.begin, slot.end) for slot in slots] == [
        ("w2", 0, 8),
        ("w1", 8, 14),
        ("w0", 14, 15),
    ]


def test_a_bucket_stays_readable_while_the_next_is_packed() -> None:
    buffers = FlatBuffers(count=2, allocate=allocate_on_host)
    packed = [buffers.pack([("w", torch.full((4,), float(i)))])[0] for i in range(2)]
    assert [flat.view(torch.float32)[0].item() for flat in packed] == [0.0, 1.0]
    third, _ = buffers.pack([("w", torch.full((3,), 2.0))])
    assert third.data_ptr() == packed[0].data_ptr()
    assert packed[1].view(torch.float32).tolist() == [1.0] * 4


def test_shared_memory_that_there_is_no_room_for_is_a_named_error() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(EngineError, match=r"no 16 MiB of shared memory.*--shm-size"):
            allocate_shared(16 * 2**20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.shows("1.13", "5.7")
def test_a_trainer_whose_memory_cannot_be_exported_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Not in the environment itself: every child would look for the library.
    monkeypatch.setattr(env, "get", {"LD_PRELOAD": "/lib/torch_memory_saver_hook.so"}.get)
    with pytest.raises(EngineError, match=r"LD_PRELOAD=.*CUDA IPC cannot export"):
        allocator_of(torch.device("cuda", 0))


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_trainer_may_have_segments_that_grow_while_it_trains(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "expandable_segments:True")
    assert callable(allocator_of(torch.device("cuda", 0)))


def test_weights_travel_in_the_type_that_the_engine_holds() -> None:
    bucket = [("w", torch.tensor([1.0, 1 / 3])), ("step", torch.tensor([7, 8]))]
    flat, slots = FlatBuffers(count=1, allocate=allocate_on_host, dtype=torch.bfloat16).pack(bucket)
    assert len(flat) == 2 * 2 + 2 * 8
    assert slots == lay_out(bucket, dtype=torch.bfloat16)
    found = tensors_in(flat, slots)
    assert torch.equal(found["w"], bucket[0][1].bfloat16())
    assert torch.equal(found["step"], bucket[1][1])


NUM_BUCKETS = 6


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
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_bucket_is_whole_for_the_last_who_reads_it(num_ranks: int) -> None:
    transport = SharedTransport(
        device=torch.device("cpu"),
        num_ranks=num_ranks,
        encode=lambda flat, spans: "",
        dtype=torch.float32,
    )
    reader = LateReader(transport, num_ranks=num_ranks)
    control = ControlGroup(timeout_s=20.0)
    report = stream_weights(
        _weights(), reader.load, sender=reader, bucket_bytes=32, control=control
    )
    assert not report.failures
    sent = [[float(number)] * 8 for number in range(NUM_BUCKETS)]
    assert reader.read[0] == sent
    assert reader.read[1:] == [sent[:-1]] * (num_ranks - 1)
