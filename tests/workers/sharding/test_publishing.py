from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridrl.config.serving import WeightRoute
from hybridrl.errors import EngineError, ServerDiedError
from hybridrl.metrics import Sum
from hybridrl.models.load import WeightFiles
from hybridrl.workers.rollout import weight_folder
from hybridrl.workers.rollout.buckets import Bucket, StagedBucket
from hybridrl.workers.sharding import weight_stream
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.sharding.manager import ShardingManager
from hybridrl.workers.sharding.manager_client import ManagerClient
from hybridrl.workers.sharding.weight_files import WeightSource
from tests.ranks import run_ranks
from tests.workers.sharding.recording import (
    CPU,
    WEIGHTS,
    Policy,
    RecordingTrainEngine,
    recording_device,
)


class RecordingServers(ManagerClient):
    timeout_s = 20.0

    def __init__(self, weights: WeightRoute = "files") -> None:
        self.weights_by_name: dict[str, Tensor] = {}
        self.weights = weights
        self.version = -1
        self.updates: list[tuple[Path, int]] = []
        self.begun: list[int] = []
        self.ended: list[str] = []
        """Reasons of the broadcasts that ended; empty: they succeeded."""
        self.has_left = False
        self.errors: list[Exception] = []
        self.is_gone = False
        self.takes_s = 0.0
        """Seconds that an update takes."""

    def need_weights(self, *, version: int) -> bool:
        if self.is_gone:
            raise ServerDiedError("the manager is gone")
        return self.version != version

    def update(self, source: WeightSource, *, version: int) -> None:
        assert isinstance(source, Path)
        self.updates.append((source, version))
        time.sleep(self.takes_s)
        if self.errors:
            raise self.errors.pop(0)
        assert WeightFiles(source).names == set(WEIGHTS)
        for file in source.glob("*.safetensors"):
            self.weights_by_name |= load_file(file)
        self.version = version

    def update_adapter(self, base: Path, adapter: Bucket, *, version: int) -> None:
        self.weights_by_name = {}
        self.update(base, version=version)
        self.weights_by_name |= dict(adapter)

    def begin_update(self, *, version: int, device: torch.device) -> None:
        self.begun.append(version)
        self.weights_by_name = {}

    def send(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.weights_by_name |= {name: tensor.clone() for name, tensor in staged.tensors}

    def end_update(self, *, reason: str = "") -> None:
        self.ended.append(reason)
        time.sleep(self.takes_s)
        if reason:
            raise StageError("sync", {1: reason}, of="engine")
        self.version = self.begun[-1]

    def leave(self) -> None:
        self.has_left = True

    def folders(self) -> list[Path]:
        return [source for source, _ in self.updates]


def rank_with(
    servers: ManagerClient, *, stage_timeout_s: float = 20.0, policy: Policy = Policy.WHOLE
) -> tuple[ShardingManager, RecordingTrainEngine]:
    device = recording_device(
        kind=None,
        engines=(),
        servers=servers,
        policy=policy,
        timeout_s=stage_timeout_s,
        sleep=False,
    )
    return device.manager, device.trainer


def refuse(*_: object, **__: object) -> None:
    raise OSError("no space left on device")


def pass_phase(manager: ShardingManager) -> None:
    with manager.rollout_phase() as engine:
        assert engine is None


def versions_of(servers: RecordingServers) -> list[int]:
    return servers.begun or [version for _, version in servers.updates]


def require_sent(servers: RecordingServers, trainer: RecordingTrainEngine) -> None:
    assert servers.weights_by_name.keys() == WEIGHTS.keys()
    for name, tensor in trainer.weights_of(list(WEIGHTS)):
        assert torch.equal(servers.weights_by_name[name], tensor)


@pytest.mark.parametrize("weights", ["files", "broadcast"])
def test_servers_get_weights_that_they_lack(weights: WeightRoute) -> None:
    servers = RecordingServers(weights)
    manager, trainer = rank_with(servers)
    pass_phase(manager)
    require_sent(servers, trainer)
    pass_phase(manager)
    assert versions_of(servers) == [0]
    num_bytes = sum(tensor.nbytes for tensor in servers.weights_by_name.values())
    assert manager.take_metrics()["memory/synced_bytes"] == Sum(num_bytes)
    assert "memory/synced_bytes" not in manager.take_metrics()
    trainer.step()
    manager.weights_changed(version=1)
    pass_phase(manager)
    require_sent(servers, trainer)
    assert versions_of(servers) == [0, 1]
    # The newest stay: an engine that replaces another one within a phase loads them.
    exist = [folder.exists() for folder in servers.folders()]
    assert exist == ([False, True] if weights == "files" else [])
    assert trainer.asked == {torch.float32}  # of the engines
    manager.shutdown()
    assert not any(folder.exists() for folder in servers.folders())
    assert servers.has_left


def test_weights_below_an_adapter_are_sent_once_and_then_adapters_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    policy = Policy.ADAPTER_KEPT_BASE
    servers = RecordingServers()
    servers.folder = tmp_path
    manager, trainer = rank_with(servers, policy=policy)
    with monkeypatch.context() as patch, pytest.raises(StageError, match="no space left"):
        patch.setattr(weight_folder, "save_file", refuse)
        pass_phase(manager)
    sent = []
    for version in range(3):
        pass_phase(manager)
        expected = {name: policy.truth(name, version) for name in policy.tensors}
        assert {name: t.tolist() for name, t in servers.weights_by_name.items()} == expected
        sent.append(manager.take_metrics()["memory/synced_bytes"].value)
        trainer.step()
        manager.weights_changed(version=version + 1)
    base_bytes, num_bytes = (4 * sum(sizes.values()) for sizes in (WEIGHTS, policy.adapter))
    assert sent == [base_bytes + num_bytes, num_bytes, num_bytes]
    assert [*tmp_path.iterdir()] == [servers.folders()[-1]]  # of the first try nothing is left
    assert len(set(servers.folders())) == 1
    manager.shutdown()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("weights", ["files", "broadcast"])
def test_an_update_is_tried_three_times(weights: WeightRoute) -> None:
    servers = RecordingServers(weights)
    servers.errors = [StageError("sync", {1: "gone again"}, of="engine") for _ in range(4)]
    manager, _ = rank_with(servers)
    with pytest.raises(StageError, match=r"sync failed on rank 0: .* engine 1: .*gone again"):
        pass_phase(manager)
    assert len(versions_of(servers)) == 3
    manager.shutdown()


def _send_from_a_rank(rank: int, weights: WeightRoute) -> tuple[int, str]:
    servers = RecordingServers(weights)
    servers.errors += [EngineError("gone")] * (rank == 0 and weights == "broadcast")
    manager, trainer = rank_with(servers)
    pass_phase(manager)
    if rank == 0:
        require_sent(servers, trainer)
        tries = ["rank 0: EngineError: gone", ""]  # from the first bucket on
        assert servers.ended == (tries if weights == "broadcast" else [])
    servers.errors += [ServerDiedError("gone")] * 3 * (rank == 0)
    servers.version = -1
    with pytest.raises(StageError) as raised:
        pass_phase(manager)
    manager.shutdown()
    return len(versions_of(servers)), str(raised.value)


@pytest.mark.parametrize(("weights", "num_tries"), [("files", 2), ("broadcast", 5)])
def test_one_rank_sends_and_all_fail_and_try_again_alike(
    weights: WeightRoute, num_tries: int
) -> None:
    first, second = run_ranks(2, _send_from_a_rank, weights)
    assert (first[0], second[0]) == (num_tries, 0)
    assert first[1] == second[1]
    assert "ServerDiedError: gone" in first[1]


def test_a_failed_update_is_raised_and_leaves_no_files() -> None:
    servers = RecordingServers()
    servers.errors = [ServerDiedError("all engines are gone")]
    manager, trainer = rank_with(servers)
    with pytest.raises(StageError, match="ServerDiedError: all engines are gone"):
        pass_phase(manager)
    manager.require_training()
    servers.is_gone = True  # before they are asked to take anything
    with pytest.raises(StageError, match="ServerDiedError: the manager is gone"):
        pass_phase(manager)
    servers.is_gone = False
    pass_phase(manager)
    assert not servers.folders()[0].exists()
    require_sent(servers, trainer)
    manager.shutdown()
    assert not servers.folders()[1].exists()


def test_weights_that_cannot_be_written_are_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = RecordingServers()
    manager, _ = rank_with(servers)
    with monkeypatch.context() as patch:
        patch.setattr(weight_folder, "save_file", refuse)
        with pytest.raises(StageError, match=r"no space left .*serving\.weights=broadcast"):
            pass_phase(manager)
    assert servers.updates == []
    pass_phase(manager)
    assert len(servers.updates) == 1
    manager.shutdown()


def _divide_a_stream(rank: int) -> tuple[int, int]:
    """Ranks find room for buckets of other sizes."""
    weight_stream.bucket_bytes_for = lambda *_: 2**20 if rank else 40
    servers = RecordingServers()
    manager, trainer = rank_with(servers)
    pass_phase(manager)
    if rank == 0:
        require_sent(servers, trainer)
    agreed = weight_stream.common_bucket_bytes(0, CPU, control=manager._control)
    manager.shutdown()
    return len(servers.updates), agreed


def test_the_rank_with_the_least_memory_sizes_the_buckets() -> None:
    assert run_ranks(2, _divide_a_stream) == [(1, 40), (0, 40)]


def _update_slowly(rank: int) -> None:
    servers = RecordingServers()
    servers.takes_s = 2.0
    manager, _ = rank_with(servers, stage_timeout_s=0.5)
    pass_phase(manager)
    manager.shutdown()


def test_ranks_wait_for_an_update_longer_than_for_a_stage() -> None:
    run_ranks(2, _update_slowly)
