from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridrl.workers.rollout.protocol import Bucket
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.weight_stream import (
    StreamReport,
    bucket_bytes_for,
    buckets,
    stream_weights,
)
from tests.ranks import run_ranks

SIZES = [3, 5, 2, 9, 1, 1, 4]


def _weights(sizes: list[int]) -> list[tuple[str, Tensor]]:
    return [(f"w{index}", torch.full((n,), float(index))) for index, n in enumerate(sizes)]


@given(sizes=st.lists(st.integers(0, 20)), bucket_floats=st.integers(1, 30))
def test_buckets_hold_everything_in_order_and_none_is_too_full_or_needlessly_small(
    sizes: list[int], bucket_floats: int
) -> None:
    weights = _weights(sizes)
    cut = list(buckets(iter(weights), bucket_bytes=4 * bucket_floats))
    assert [name for bucket in cut for name, _ in bucket] == [name for name, _ in weights]
    assert all(a is b for a, b in zip(_tensors(cut), _tensors([weights]), strict=True))
    num_floats = [sum(t.numel() for _, t in bucket) for bucket in cut]
    for bucket, filled in zip(cut, num_floats, strict=True):
        assert bucket
        assert filled <= bucket_floats or len(bucket) == 1
    for filled, following in zip(num_floats, cut[1:], strict=False):
        assert filled + following[0][1].numel() > bucket_floats


def _tensors(cut: list[Bucket]) -> list[Tensor]:
    return [tensor for bucket in cut for _, tensor in bucket]


def test_the_size_of_a_bucket_is_the_configured_one_or_taken_from_what_is_free() -> None:
    assert bucket_bytes_for(3, torch.device("cpu")) == 3 * 2**20
    assert bucket_bytes_for(0, torch.device("cpu")) == 256 * 2**20


@pytest.mark.parametrize("has_engine", [True, False])
def test_the_report_counts_what_was_moved(has_engine: bool) -> None:
    arrived: list[Bucket] = []
    for _ in range(2):
        report = stream_weights(
            iter(_weights(SIZES)),
            arrived.append if has_engine else None,
            bucket_bytes=32,
            control=ControlGroup(timeout_s=5.0),
        )
        assert report == StreamReport(num_tensors=7, num_buckets=4, num_bytes=100, failures={})
    assert len(arrived) == (8 if has_engine else 0)


def test_an_empty_stream_is_no_bucket() -> None:
    control = ControlGroup(timeout_s=5.0)
    report = stream_weights(iter(()), None, bucket_bytes=32, control=control)
    assert report == StreamReport(num_tensors=0, num_buckets=0, num_bytes=0, failures={})


def test_a_bucket_is_freed_before_the_next_is_gathered() -> None:
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

    control = ControlGroup(timeout_s=5.0)
    stream_weights(gather(), lambda bucket: None, bucket_bytes=48, control=control)
    assert most_alive == 3 + 1  # a bucket of three, and the tensor that did not fit in


def _stream_with_a_fault(rank: int, at_fault: int, place: str) -> tuple[int, list[int], object]:
    """Two streams, of which the first breaks off at the second bucket; then what arrived."""
    control = ControlGroup(timeout_s=20.0)
    arrived = [0, 0]
    reports = []
    for attempt in (0, 1):
        is_faulty = rank == at_fault and attempt == 0

        def gather(is_faulty: bool = is_faulty) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in _weights(SIZES):
                if is_faulty and place == "gather" and name == "w3":
                    raise OSError("gathering w3 failed")
                yield name, tensor

        def deliver(bucket: Bucket, attempt: int = attempt, is_faulty: bool = is_faulty) -> None:
            if is_faulty and place == "deliver" and arrived[attempt] == 1:
                raise OSError("the engine does not answer")
            arrived[attempt] += 1

        has_engine = rank != 2  # as a rank of a tensor-parallel group that leads no engine
        report = stream_weights(
            gather(), deliver if has_engine else None, bucket_bytes=32, control=control
        )
        reports.append(report)
    assert reports[1] == StreamReport(num_tensors=7, num_buckets=4, num_bytes=100, failures={})
    assert arrived[1] == (4 if has_engine else 0)
    return reports[0].num_buckets, arrived, reports[0].failures


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("place", ["gather", "deliver"])
def test_when_one_rank_fails_in_the_middle_all_stop_at_the_same_bucket(
    num_ranks: int, place: str
) -> None:
    answers = run_ranks(num_ranks, _stream_with_a_fault, 1, place)
    reason = {"gather": "gathering w3 failed", "deliver": "the engine does not answer"}[place]
    for num_buckets, _, failures in answers:
        assert num_buckets == 1
        assert failures == {1: f"OSError: {reason}"}
    assert all(arrived[0] <= 2 for _, arrived, _ in answers)
