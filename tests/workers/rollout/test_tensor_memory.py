from __future__ import annotations

import pytest
import torch

from hybridrl.errors import EngineError, PhaseError
from hybridrl.workers.rollout.embedded.tensor_memory import TensorMemory


def make_memory() -> tuple[TensorMemory, dict[str, torch.Tensor]]:
    tensors = {"a": torch.ones(4, 8), "b": torch.full((3,), 2.0), "count": torch.tensor([7])}
    return TensorMemory("weights", tensors, lost_value=float("nan")), tensors


def test_resuming_brings_back_tensors_that_were_backed_up() -> None:
    memory, tensors = make_memory()
    num_bytes = memory.resident_bytes()
    assert num_bytes == 32 * 4 + 3 * 4 + 8
    for _ in range(3):
        memory.release(frozenset({"b"}))
        assert memory.resident_bytes() == 0
        assert not memory.is_resident
        memory.resume()
        assert memory.resident_bytes() == num_bytes
        assert tensors["a"].isnan().all()
        assert tensors["b"].tolist() == [2.0, 2.0, 2.0]
        assert tensors["count"].tolist() == [torch.iinfo(torch.int64).min]


def test_views_of_one_storage_count_and_return_once() -> None:
    whole = torch.arange(6.0)
    memory = TensorMemory(
        "weights", {"front": whole[:2], "back": whole[2:]}, lost_value=float("nan")
    )
    assert memory.resident_bytes() == 24
    memory.release(frozenset({"front", "back"}))
    memory.resume()
    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_backup_of_something_unknown_frees_nothing() -> None:
    memory, tensors = make_memory()
    with pytest.raises(EngineError, match=r"'aa'.*did you mean 'a'"):
        memory.release(frozenset({"a", "aa"}))
    assert memory.is_resident
    assert tensors["a"].sum().item() == 32.0


def test_twice_the_same_edge_is_refused() -> None:
    memory, _ = make_memory()
    with pytest.raises(PhaseError, match="resident already"):
        memory.resume()
    memory.release(frozenset())
    with pytest.raises(PhaseError, match="released already"):
        memory.release(frozenset({"a"}))
    memory.free()
    memory.free()
    assert memory.resident_bytes() == 0


@pytest.mark.shows("3.13")
def test_a_resume_without_room_frees_all_and_can_be_repeated() -> None:
    tensors = {"small": torch.ones(2), "large": torch.ones(2)}
    memory = TensorMemory("the KV cache", tensors, lost_value=0.0)
    memory.release(frozenset({"small"}))
    storage, num_bytes = memory._storages[1]
    memory._storages[1] = (storage, 1 << 60)
    with pytest.raises(EngineError, match=r"the KV cache needs .* GiB"):
        memory.resume()
    assert memory.resident_bytes() == 0
    memory._storages[1] = (storage, num_bytes)
    memory.resume()
    assert tensors["small"].tolist() == [1.0, 1.0]
