from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridrl.workers.rollout.buckets import (
    Bucket,
    FlatBuffers,
    StagedBucket,
    stage_by_reference,
    tensors_in,
)
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.weight_stream import (
    Load,
    StreamReport,
    bucket_bytes_for,
    buckets,
    stream_weights,
)
from tests.ranks import run_ranks
from tests.workers.rollout.engines import allocate_on_host

SIZES = [3, 5, 2, 9, 1, 1, 4]
COMPLETE = StreamReport(num_bytes=100)


@dataclass
class DictionaryEngine:
    """An engine whose weights are a dictionary; handles say which rank staged which bucket."""

    rank: int = 0
    copies: bool = True
    fails_to: str = ""
    num_staged: int = 0
    num_handles: int = 0
    num_ended: int = 0
    handles: list[list[str]] = field(default_factory=list)
    loaded: dict[str, list[float]] = field(default_factory=dict)
    threads: set[threading.Thread] = field(default_factory=set)
    buffers: FlatBuffers = field(
        default_factory=lambda: FlatBuffers(count=2, allocate=allocate_on_host)
    )

    def stage(self, bucket: Bucket) -> StagedBucket:
        self.num_staged += 1
        if self.fails_to == "stage" and self.num_staged == 2:
            raise OSError("no memory for a bucket")
        if not self.copies:
            return stage_by_reference(bucket)
        flat, spans = self.buffers.pack(bucket)
        return StagedBucket(
            spans=spans, flat=flat, make_handle=partial(self._make_handle, self.num_staged)
        )

    def _make_handle(self, number: int) -> str:
        self.num_handles += 1
        if self.fails_to == "open" and number == 2:
            raise OSError("cudaIpcGetMemHandle failed")
        return f"rank {self.rank} bucket {number}"

    def load(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        if self.fails_to == "load" and len(self.handles) == 1:
            raise OSError("answered with status 400")
        self.handles.append(list(handles))
        self.threads.add(threading.current_thread())
        flat = staged.flat
        tensors = dict(staged.tensors) if flat is None else tensors_in(flat, staged.spans)
        self.loaded |= {name: tensor.tolist() for name, tensor in tensors.items()}

    def release_buffers(self) -> None:
        self.buffers.free()
        self.num_ended += 1


def _weights(*, fails: bool = False) -> Iterator[tuple[str, Tensor]]:
    for index, size in enumerate(SIZES):
        if fails and index == 3:
            raise OSError("gathering w3 failed")
        yield f"w{index}", torch.full((size,), float(index))


def _stream(
    weights: Iterator[tuple[str, Tensor]],
    load: Load | None,
    sender: DictionaryEngine | None = None,
    *,
    num_neighbours: int = 1,
    bucket_bytes: int = 32,
) -> StreamReport:
    control = ControlGroup(timeout_s=20.0)
    first = control.rank // num_neighbours * num_neighbours
    return stream_weights(
        weights,
        load,
        sender=sender,
        bucket_bytes=bucket_bytes,
        control=control,
        ranks=range(first, first + num_neighbours),
    )


@given(sizes=st.lists(st.integers(0, 20)), bucket_floats=st.integers(1, 30))
def test_buckets_hold_everything_in_order_and_are_well_filled(
    sizes: list[int], bucket_floats: int
) -> None:
    weights = [(f"w{index}", torch.full((n,), float(index))) for index, n in enumerate(sizes)]
    cut = list(buckets(iter(weights), bucket_bytes=4 * bucket_floats))
    items = [item for bucket in cut for item in bucket]
    assert [name for name, _ in items] == [name for name, _ in weights]
    assert all(a is b for (_, a), (_, b) in zip(items, weights, strict=True))
    num_floats = [sum(t.numel() for _, t in bucket) for bucket in cut]
    for bucket, filled in zip(cut, num_floats, strict=True):
        assert bucket
        assert filled <= bucket_floats or len(bucket) == 1
    for filled, following in zip(num_floats, cut[1:], strict=False):
        assert filled + following[0][1].numel() > bucket_floats


@pytest.mark.parametrize("begins", ["q_a", "kv_a"])
def test_matrices_that_sglang_joins_are_in_one_bucket(begins: str) -> None:
    parts = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
    names = parts if begins == "q_a" else sorted(parts)
    weights = [
        (f"model.layers.{layer}.{name}.weight", torch.zeros(2))
        for layer in range(2)
        for name in (*(f"self_attn.{name}" for name in names), "mlp.up_proj")
    ]
    cut = [[name for name, _ in bucket] for bucket in buckets(iter(weights), bucket_bytes=8)]
    for layer in range(2):
        joined = {
            f"model.layers.{layer}.self_attn.{name}.weight"
            for name in ("q_a_proj", "kv_a_proj_with_mqa")
        }
        assert [bucket for bucket in cut if joined & {*bucket}] == [
            bucket for bucket in cut if joined <= {*bucket}
        ]
    assert len(cut) > 4


def test_the_size_of_a_bucket_is_configured_or_from_free_memory() -> None:
    assert bucket_bytes_for(3, torch.device("cpu")) == 3 * 2**20
    assert bucket_bytes_for(0, torch.device("cpu")) == 256 * 2**20


def test_an_empty_stream_loads_nothing() -> None:
    engine = DictionaryEngine()
    assert _stream(iter(()), engine.load, engine) == StreamReport()
    assert engine.num_ended == 1 and not engine.handles
    assert _stream(iter(()), None) == StreamReport()


def test_a_bucket_by_reference_is_freed_before_the_next_is_gathered() -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most_alive = 0

    def gather() -> Iterator[tuple[str, Tensor]]:
        nonlocal most_alive
        for index in range(12):
            tensor = torch.zeros(4)
            alive.add(tensor)
            most_alive = max(most_alive, len(alive))
            yield f"w{index}", tensor
            del tensor

    engine = DictionaryEngine(copies=False)
    assert _stream(gather(), engine.load, engine, bucket_bytes=48) == StreamReport(12 * 16)
    assert engine.threads == {threading.current_thread()}
    assert most_alive == 3 + 1  # a bucket of three, and the tensor that did not fit in


def test_the_next_bucket_is_gathered_while_a_copied_one_is_loaded() -> None:
    gathered_more = threading.Event()
    engine = DictionaryEngine()
    late: list[bool] = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for number, item in enumerate(_weights()):
            if number == 4:  # beyond the first bucket, and what did not fit into the second
                gathered_more.set()
            yield item

    def load(staged: StagedBucket, handles: Sequence[str]) -> None:
        if not engine.handles:
            late.append(not gathered_more.wait(timeout=20.0))
        engine.load(staged, handles)

    assert _stream(weights(), load, engine, bucket_bytes=48) == COMPLETE
    assert late == [False]


def test_an_interrupt_frees_no_buffer_that_is_still_read() -> None:
    interrupted, freed = threading.Event(), threading.Event()
    early: list[bool] = []

    class Interrupted(DictionaryEngine):
        def release_buffers(self) -> None:
            super().release_buffers()
            freed.set()

    def weights() -> Iterator[tuple[str, Tensor]]:
        for number, item in enumerate(_weights()):
            if number == 4:  # the first bucket is being loaded
                interrupted.set()
                raise KeyboardInterrupt
            yield item

    def load(staged: StagedBucket, handles: Sequence[str]) -> None:
        interrupted.wait(timeout=20.0)
        early.append(freed.wait(timeout=0.5))

    with pytest.raises(KeyboardInterrupt):
        _stream(weights(), load, Interrupted(), bucket_bytes=48)
    assert early == [False]
    assert freed.is_set()


# -- several ranks: 0 and 1 share an engine, 2 and 3 another ------------------------------------


def _two_streams(rank: int, copies: bool, at_fault: int, place: str) -> list[object]:
    """Two streams, of which the first breaks off in the middle if a rank is at fault."""
    answers: list[object] = []
    owns = rank % 2 == 0
    for attempt in range(2):
        fails = rank == at_fault and attempt == 0
        engine = DictionaryEngine(rank, copies=copies, fails_to=place if fails else "")
        sender = engine if copies or owns else None
        weights = _weights(fails=fails and place == "gather")
        report = _stream(weights, engine.load if owns else None, sender, num_neighbours=2)
        assert engine.num_ended == (sender is not None)
        answers.append((report, engine.handles, engine.loaded, engine.num_handles))
    return answers


@pytest.mark.shows("3.10")
@pytest.mark.parametrize("copies", [True, False])
def test_every_rank_stages_and_the_rank_with_the_engine_loads(copies: bool) -> None:
    for rank, answer in enumerate(run_ranks(4, _two_streams, copies, -1, "")):
        for report, handles, loaded, _ in answer:
            assert report == COMPLETE
            if rank % 2:
                assert not handles and not loaded
                continue
            assert loaded == {name: tensor.tolist() for name, tensor in _weights()}
            staged = [
                [f"rank {rank} bucket {n}", f"rank {rank + 1} bucket {n}"] for n in range(1, 5)
            ]
            assert handles == (staged if copies else [["", ""]] * 4)


@pytest.mark.shows("3.10")
@pytest.mark.parametrize(
    ("copies", "at_fault", "place", "reason"),
    [
        (True, 1, "gather", "gathering w3 failed"),
        (True, 1, "stage", "no memory for a bucket"),
        (True, 1, "open", "cudaIpcGetMemHandle failed"),
        (True, 2, "load", "answered with status 400"),
        (True, 0, "gather", "gathering w3 failed"),
        (False, 1, "gather", "gathering w3 failed"),
        (False, 2, "load", "answered with status 400"),
    ],
)
def test_all_ranks_leave_a_stream_that_fails_and_the_next_arrives(
    copies: bool, at_fault: int, place: str, reason: str
) -> None:
    answers = run_ranks(4, _two_streams, copies, at_fault, place)
    for rank, (broken, complete) in enumerate(answers):
        report, handles, _, num_handles = broken
        if copies:  # no bucket that is not sent has a handle: torch would keep its memory
            assert num_handles == (1 if place in ("stage", "gather") else 2)
        is_unanswered = copies and place == "load" and rank in (2, 3)
        # Two buffers of a server of two ranks; what was answered is given back.
        assert report.unanswered_bytes == (64 if is_unanswered else 0)
        assert report.failures == {at_fault: f"OSError: {reason}"}
        assert report.num_bytes == answers[0][0][0].num_bytes < COMPLETE.num_bytes
        assert len(handles) < 4
        assert complete[0] == COMPLETE
        assert len(complete[2]) == (0 if rank % 2 else 7)
