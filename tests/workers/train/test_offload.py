from __future__ import annotations

import pytest
import torch

from hybridrl.workers.train import offload
from hybridrl.workers.train.offload import OffloadedTensors, copy_to_host, resident_bytes


@pytest.mark.parametrize("slab_bytes", [1, 7, 16, 4096])
def test_views_share_one_storage_and_bits_that_are_no_number_survive(
    monkeypatch: pytest.MonkeyPatch, slab_bytes: int
) -> None:
    monkeypatch.setattr(offload, "SLAB_BYTES", slab_bytes)
    whole = torch.arange(12.0)
    view = whole[3:9].view(2, 3)
    pattern = torch.tensor([0x7FC00001, 0x7F800000, -1], dtype=torch.int32)
    odd = pattern.clone().view(torch.float32)
    for cycle in range(3):
        assert resident_bytes([whole, view]) == 48
        parked = OffloadedTensors([whole, view, odd, torch.zeros(0)])
        assert resident_bytes([whole, view, odd]) == 0
        parked.restore()
        assert whole.tolist() == [float(n) + cycle for n in range(12)]
        whole += 1
        assert view[0, 0] == 4.0 + cycle
        assert torch.equal(odd.view(torch.int32), pattern)


@pytest.mark.parametrize("slab_bytes", [1, 7, 4096])
def test_host_copy_holds_all_tensors_end_to_end(
    monkeypatch: pytest.MonkeyPatch, slab_bytes: int
) -> None:
    monkeypatch.setattr(offload, "SLAB_BYTES", slab_bytes)
    tensors = [
        torch.arange(12.0).view(3, 4).T,  # not contiguous
        torch.tensor(5.0),
        torch.zeros(0),
        torch.arange(3).bfloat16(),
    ]
    slabs = copy_to_host(tensors)
    assert [len(slab) for slab in slabs[:-1]] == [slab_bytes] * (len(slabs) - 1)
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    assert torch.equal(torch.cat(slabs), torch.cat(flat))


@pytest.mark.gpu
def test_pinned_offload_is_bitwise_exact_in_two_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SLAB_BYTES", 2**22)
    generator = torch.Generator(device="cuda").manual_seed(0)
    sizes = (1, 3_000_001, 2**22, 77)
    tensors = [
        torch.randint(-(2**31), 2**31, (n,), dtype=torch.int32, device="cuda", generator=generator)
        for n in sizes
    ]
    expected = [tensor.cpu() for tensor in tensors]
    for _cycle in range(2):
        before = torch.cuda.memory_allocated()
        parked = OffloadedTensors(tensors)
        assert before - torch.cuda.memory_allocated() >= 4 * sum(sizes)
        parked.restore()
        assert all(torch.equal(t.cpu(), e) for t, e in zip(tensors, expected, strict=True))


@pytest.mark.gpu
def test_pinned_host_memory_wastes_at_most_one_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SLAB_BYTES", 2**22)
    tensors = [torch.zeros(5 * 2**20 + 1, dtype=torch.uint8, device="cuda") for _ in range(8)]
    before = torch.cuda.host_memory_stats()["active_bytes.current"]
    parked = OffloadedTensors(tensors)
    taken = torch.cuda.host_memory_stats()["active_bytes.current"] - before
    parked.restore()
    assert taken <= 8 * (5 * 2**20 + 1) + 2**22
