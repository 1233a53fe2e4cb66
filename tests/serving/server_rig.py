"""A server of small engines, of which a test sees every process."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Generic, TypeVar

from hybridrl.config.serving import ServedModelConfig, ServerGroupConfig, ServingConfig, WorkerType
from hybridrl.serving.plan import GroupPlan, ModelPlan, PlannedDevices, lay_out
from hybridrl.serving.server import RolloutServer
from tests.serving.recording_handle import RecordingHandle, weights_in
from tests.workers.sharding.recording import Journal, rollout_config

H = TypeVar("H", bound=RecordingHandle)


def plan_of(*groups: tuple[WorkerType, int]) -> ModelPlan:
    named = {
        f"g{number}": ServerGroupConfig(num_devices=count, worker_type=kind)
        for number, (kind, count) in enumerate(groups)
    }
    serving = ServingConfig(
        num_devices_per_node=64,
        colocated=False,
        models={"policy": ServedModelConfig(groups=named)},
    )
    (plan,) = lay_out(serving.placed_groups, num_devices_per_node=64, num_shared_per_node=0)
    return plan


class ServerRig(Generic[H]):
    """A server of engines of one kind; ``settings`` are those of its rollout."""

    def __init__(self, kind: type[H], plan: ModelPlan, **settings: Any) -> None:
        self.plan = plan
        self.journal = Journal()
        self.launched: list[H] = []
        self._kind, self._folder = kind, Path(mkdtemp())
        settings = {"start_timeout_s": 20.0, "stage_timeout_s": 5.0} | settings
        self.server = RolloutServer(plan, self._launch, config=rollout_config(**settings))

    @property
    def newest(self) -> dict[int, H]:
        return {handle.index: handle for handle in self.launched}

    def _launch(self, group: GroupPlan, engine: PlannedDevices) -> H:
        handle = self._kind(self.plan.engines.index(engine), self.journal)
        self.prepare(handle)
        self.launched.append(handle)
        return handle

    def prepare(self, handle: H) -> None:
        """Change an engine before its process starts."""

    def update(self, version: int) -> None:
        folder = self._folder / str(version)
        if not folder.exists():
            weights_in(folder, version)
        self.server.update(folder, version=version)
