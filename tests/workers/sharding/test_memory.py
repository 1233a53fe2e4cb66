from __future__ import annotations

import pytest
import torch

from hybridrl.errors import EngineError, PhaseError
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.memory import empty_cache, free_bytes, wait_until_freed
from hybridrl.workers.sharding.tenants import Tenants
from hybridrl.workers.train.protocol import TrainState
from tests.workers.sharding.recording import CPU, Journal, RecordingTenant


def test_a_release_that_takes_a_while_is_waited_for() -> None:
    resident = iter([3, 2, 1, 0])
    wait_until_freed(lambda: next(resident), expected_free=None, timeout_s=60.0)
    assert list(resident) == []


def test_memory_that_does_not_come_back_is_an_error_with_the_amount_and_the_key() -> None:
    with pytest.raises(EngineError) as raised:
        wait_until_freed(lambda: 3 * 2**20, expected_free=None, timeout_s=0.05)
    assert str(raised.value) == (
        "released memory did not come back within 0.05 s: the engine still holds 3.0 MiB and the "
        "device lacks 0.0 MiB; if releasing is only slow, raise rollout.stage_timeout_s"
    )


def test_a_cpu_counts_storage_and_not_free_memory() -> None:
    assert free_bytes(CPU) is None
    empty_cache(CPU)


@pytest.mark.gpu
def test_a_release_counts_only_when_the_device_is_free_again() -> None:
    device = torch.device("cuda:0")
    block = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    before = free_bytes(device) or 0
    wanted = (device, before + block.nbytes)
    with pytest.raises(EngineError, match="the device lacks"):
        wait_until_freed(lambda: 0, expected_free=wanted, timeout_s=0.1)
    del block
    empty_cache(device)
    wait_until_freed(lambda: 0, expected_free=wanted, timeout_s=5.0)


def test_all_tenants_leave_and_come_back_in_every_cycle() -> None:
    tenants = Tenants(device=CPU, control=ControlGroup(timeout_s=1.0))
    both = [RecordingTenant(Journal()), RecordingTenant(Journal())]
    for name, tenant in zip(("actor", "critic"), both, strict=True):
        tenants.register(name, tenant)
    for _ in range(2):
        for _twice in range(2):
            tenants.make_room()
        for tenant in both:
            assert tenant.resident_bytes(TrainState.PARAMETERS)
            assert not tenant.resident_bytes(TrainState.OPTIMIZER)
            assert not tenant.resident_bytes(TrainState.GRADIENTS)
        tenants.leave()
        assert not any(tenant.resident_bytes(part) for tenant in both for part in TrainState)
        for _twice in range(2):
            tenants.come_back()
        assert all(tenant.is_home() for tenant in both)
        assert both[0].state[TrainState.PARAMETERS]["embed.weight"].tolist() == [6.0] * 6


def test_two_tenants_may_not_have_one_name() -> None:
    tenants = Tenants(device=CPU, control=ControlGroup(timeout_s=1.0))
    tenants.register("actor", RecordingTenant(Journal()))
    with pytest.raises(PhaseError, match="'actor' is registered already"):
        tenants.register("actor", RecordingTenant(Journal()))
