from __future__ import annotations

import resource

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridrl import env
from hybridrl.errors import EngineError
from hybridrl.workers.rollout.buckets import (
    FlatBuffers,
    allocate_shared,
    allocator_of,
    lay_out,
    tensors_in,
)
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
