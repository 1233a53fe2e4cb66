"""A rank without an engine: its weights go to servers, as files or by broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridrl.batch import PromptBatch
from hybridrl.config.serving import WeightRoute
from hybridrl.errors import ServerDiedError
from hybridrl.metrics import Metrics
from hybridrl.models.load import WeightFiles
from hybridrl.sampler import Sample, SamplingParams
from hybridrl.workers.sharding.control import ControlGroup, StageError
from hybridrl.workers.sharding.manager import ShardingManager
from hybridrl.workers.sharding.served_engines import Servers
from hybridrl.workers.sharding.weight_broadcast import WeightOffer, receiving
from hybridrl.workers.sharding.weight_files import WeightSource
from tests.ranks import run_ranks
from tests.workers.sharding.recording import (
    CPU,
    WEIGHTS,
    Journal,
    RecordingTrainEngine,
    rollout_config,
)


class RecordingServers(Servers):
    """Takes the weights that it is given, as engines would."""

    timeout_s = 20.0

    def __init__(self, weights: WeightRoute = "files") -> None:
        self.weights_by_name: dict[str, Tensor] = {}
        self.weights = weights
        self.version = -1
        self.updates: list[tuple[WeightSource, int]] = []
        self.errors: list[Exception] = []

    def need_weights(self, *, version: int) -> bool:
        return self.version != version

    def update(self, source: WeightSource, *, version: int) -> None:
        self.updates.append((source, version))
        if self.errors:
            raise self.errors.pop(0)
        if isinstance(source, WeightOffer):
            with receiving(source.to_group(1), timeout_s=20.0) as buckets:
                for bucket in buckets:
                    self.weights_by_name |= {name: tensor.clone() for name, tensor in bucket}
        else:
            assert WeightFiles(source).names == set(WEIGHTS)
            for file in source.glob("*.safetensors"):
                self.weights_by_name |= load_file(file)
        self.version = version

    def folders(self) -> list[Path]:
        return [source for source, _ in self.updates if isinstance(source, Path)]

    def sample(
        self,
        prompts: PromptBatch,
        sampling: SamplingParams,
        *,
        version: int,
        fused: Sequence[str] = (),
    ) -> tuple[list[Sample], Metrics]:
        raise NotImplementedError


def rank_with(servers: Servers) -> tuple[ShardingManager, RecordingTrainEngine]:
    manager = ShardingManager(
        engine=servers,
        config=rollout_config(sleep=False),
        device=CPU,
        control=ControlGroup(timeout_s=20.0),
    )
    trainer = RecordingTrainEngine(Journal())
    manager.attach_policy(trainer)
    return manager, trainer


def pass_phase(manager: ShardingManager) -> None:
    with manager.rollout_phase() as engine:
        assert engine is None


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
    assert [version for _, version in servers.updates] == [0]
    trainer.step()
    manager.weights_changed(version=1)
    pass_phase(manager)
    require_sent(servers, trainer)
    assert [version for _, version in servers.updates] == [0, 1]
    assert not any(folder.exists() for folder in servers.folders())
    manager.shutdown()


def test_an_update_is_tried_three_times() -> None:
    servers = RecordingServers()
    servers.errors = [StageError("sync", {0: "gone"}, of="engine") for _ in range(3)]
    manager, _ = rank_with(servers)
    with pytest.raises(StageError, match=r"sync failed on rank 0: StageError: .* engine 0: gone"):
        pass_phase(manager)
    assert len(servers.updates) == 3
    manager.shutdown()


def test_a_broadcast_is_tried_again_with_a_new_sender() -> None:
    servers = RecordingServers("broadcast")
    servers.errors = [StageError("sync", {0: "gone"}, of="engine")]
    manager, trainer = rank_with(servers)
    pass_phase(manager)
    require_sent(servers, trainer)
    first, second = (source for source, _ in servers.updates if isinstance(source, WeightOffer))
    assert first.port != second.port
    manager.shutdown()


def test_a_failed_update_is_raised_and_leaves_no_files() -> None:
    servers = RecordingServers()
    servers.errors = [ServerDiedError("all engines are gone")]
    manager, trainer = rank_with(servers)
    with pytest.raises(StageError, match="ServerDiedError: all engines are gone"):
        pass_phase(manager)
    assert not servers.folders()[0].exists()
    manager.require_training()
    pass_phase(manager)
    require_sent(servers, trainer)
    manager.shutdown()


def _serve_on_a_rank(rank: int) -> tuple[int, str]:
    servers = RecordingServers()
    manager, _ = rank_with(servers)
    pass_phase(manager)
    servers.errors, servers.version = [ServerDiedError("gone")], -1
    try:
        pass_phase(manager)
    except StageError as error:
        manager.shutdown()
        return len(servers.updates), str(error)
    return len(servers.updates), ""


def test_one_rank_sends_and_all_fail_alike() -> None:
    first, second = run_ranks(2, _serve_on_a_rank)
    assert (first[0], second[0]) == (2, 0)
    assert first[1] == second[1] == "sync failed on rank 0: ServerDiedError: gone"
