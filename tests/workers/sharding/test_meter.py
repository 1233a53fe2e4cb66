from __future__ import annotations

import mmap

import pytest
import torch

from hybridrl.metrics import Metrics
from hybridrl.workers.sharding.meter import PeakMeter

CPU = torch.device("cpu")
MIB = 2**20
BLOCK = 100 * MIB
NOISE = 20 * MIB


def hold(num_bytes: int, *, device: torch.device = CPU) -> torch.Tensor:
    return torch.ones(num_bytes, dtype=torch.uint8, device=device)


def hold_pages(num_bytes: int) -> torch.Tensor:
    """Memory of the kernel alone: malloc may answer from what earlier tests freed, or keep it."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8).fill_(1)


def peaks(metrics: Metrics) -> dict[str, float]:
    return {name.split("/")[1].removesuffix("_peak_bytes"): m.value for name, m in metrics.items()}


def give_back_free_heap() -> None:
    """Return the heap that earlier tests freed: a block from there would not grow the process."""
    meter = PeakMeter(CPU)
    meter.settle()
    with meter("heap"):
        pass


def test_a_peak_is_seen_by_its_scope_and_those_around_it_alone() -> None:
    meter = PeakMeter(CPU)
    for _ in range(2):
        with meter("before"):
            pass
        with meter("outer"):
            with meter("inner"):
                hold_pages(BLOCK)
            with meter("later"):
                pass
        with meter("after"):
            pass
        found = peaks(meter.take_metrics())
        assert BLOCK - MIB < found["inner"] <= found["outer"] < BLOCK + NOISE
        assert max(found["before"], found["later"], found["after"]) < NOISE
        assert meter.take_metrics() == {}


def test_what_stays_is_counted_in_every_later_scope() -> None:
    meter = PeakMeter(CPU)
    kept = hold_pages(BLOCK)
    with meter("later"):
        pass
    assert peaks(meter.take_metrics())["later"] > BLOCK - MIB
    del kept


def test_of_two_scopes_of_one_name_the_larger_peak_counts() -> None:
    meter = PeakMeter(CPU)
    for num_bytes in (2 * BLOCK, BLOCK):
        with meter("twice"):
            hold_pages(num_bytes)
    assert peaks(meter.take_metrics())["twice"] > 2 * BLOCK - MIB


def test_a_scope_that_raises_is_closed_and_measured() -> None:
    meter = PeakMeter(CPU)
    with pytest.raises(ValueError, match="on purpose"), meter("outer"), meter("inner"):
        hold_pages(BLOCK)
        raise ValueError("on purpose")
    with meter("next"):
        pass
    assert list(peaks(meter.take_metrics())) == ["inner", "outer", "next"]


def test_once_settled_a_scope_is_measured_without_what_malloc_kept() -> None:
    give_back_free_heap()
    meter = PeakMeter(CPU)
    # Small blocks come from malloc's heap; the last one keeps the heap from shrinking by itself.
    blocks = [hold(64 * 1024) for _ in range(BLOCK // (64 * 1024))]
    last = hold(64 * 1024)
    del blocks
    with meter("unsettled"):
        pass
    meter.settle()
    with meter("settled"):
        pass
    found = peaks(meter.take_metrics())
    # Some of the blocks may lie in pages that the process already held, and the collector of other
    # tests' garbage may give some back meanwhile: so only half of them must have been kept.
    assert found["settled"] < BLOCK // 4 < BLOCK // 2 < found["unsettled"]
    del last


@pytest.mark.gpu
def test_on_a_gpu_torchs_own_peak_counts() -> None:
    device = torch.device("cuda:0")
    meter = PeakMeter(device)
    with meter("outer"), meter("inner"):
        hold(BLOCK, device=device)
    found = peaks(meter.take_metrics())
    assert found["outer"] == found["inner"] >= BLOCK
