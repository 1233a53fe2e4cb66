"""The sharding manager: owns the device that training and rollout engine use in turn."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from hybridrl.config.model import LoraConfig
from hybridrl.config.rollout import RolloutConfig
from hybridrl.diagnostics import activity, trace
from hybridrl.errors import PhaseError
from hybridrl.metrics import Max, Metrics
from hybridrl.workers.rollout.protocol import RolloutEngine
from hybridrl.workers.sharding.control import ControlGroup, Limit
from hybridrl.workers.sharding.fused_engines import FusedEngines
from hybridrl.workers.sharding.lifecycle import LifeCycle, SleepLevel
from hybridrl.workers.sharding.memory import ordinary_segments
from hybridrl.workers.sharding.meter import PeakMeter
from hybridrl.workers.sharding.offloadable_models import OffloadableModels
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import OffloadableModel

log = logging.getLogger(__name__)

_MOVES_MEMORY = {
    *("start", "restart", "offload_optimizer", "resume_weights", "sync", "offload_parameters"),
    *("resume_cache", "release", "release_cache", "onload_training", "unwind"),
}
"""Stages whose peak is measured; of the others only the seconds are. Reading the peak of a CPU's
process costs some 40 us, and the others allocate nothing."""


class ShardingManager:
    """Owns the device of this process; every fused role registers with it."""

    def __init__(
        self,
        *,
        engines: FusedEngines,
        config: RolloutConfig,
        meter: PeakMeter,
        control: ControlGroup,
        call_timeout_s: float,
        lora: LoraConfig | None = None,
    ) -> None:
        """Take over rollout engines that have just started, and let them sleep. A collective call.

        Call it before the training engine is built: the rollout engine sizes itself on an empty
        device. ``lora`` is given if the engine applies an adapter.
        """
        self.meter = meter
        self._control = control
        # A rank waits for the longest response; that its engine makes progress is looked at there.
        self._sampled = Limit(call_timeout_s, "cluster.call_timeout_s")
        self._sleeps = config.sleep
        self._stages: Metrics = {}
        self._is_rollout_open = False
        self.end_requests: Callable[[], None] = lambda: None
        """Called at the end of a phase, on all ranks, before engines sleep."""
        self._engines = engines
        self._resends_base = lora is None or lora.base == "resend"
        self._colocated = OffloadableModels(device=meter.device, control=control)
        if engines.num_engines:
            self._colocated.engine_bytes = engines.torch_bytes
        if engines.managed is not None:
            engines.managed.neighbours = self._colocated.holders
        depth = SleepLevel.RELEASE_ALL if config.sleep else SleepLevel.KEEP_ALL
        if config.sleep and lora is not None and lora.base == "resident":
            depth = SleepLevel.RELEASE_CACHE
        self._life = LifeCycle(
            self._engines, host=self._colocated, depth=depth, observe=self._observe
        )
        self._life.start()

    def attach_policy(self, source: PolicyEngine) -> None:
        """Make ``source`` the engine whose weights are streamed; register it as ``actor``."""
        self._engines.attach(source, resends_base=self._resends_base)
        self.register("actor", source)

    def register(self, name: str, model: OffloadableModel) -> None:
        """Add a colocated engine: its state leaves the device while the rollout engine has it."""
        self.require_training()
        self._colocated.register(name, model)

    @contextmanager
    def rollout_phase(self) -> Iterator[RolloutEngine | None]:
        """Lend the device to the rollout engine, loaded with the newest weights. A collective call.

        ``LifeCycle.wake`` and ``LifeCycle.sleep`` list the order of the stages. Yields this rank's
        engine, or None on a rank without one. A StageError is the same on all ranks, and the next
        phase begins with the recovery.
        """
        if self._is_rollout_open:
            raise PhaseError("a rollout phase is already open; generate and evaluate take turns")
        self._engines.require_source()
        self._is_rollout_open = True
        try:
            with ordinary_segments():
                # sleep is a no-op, unless engines stayed awake after the last phase, or it could
                # not put them to sleep
                self._sleep()
                self._life.wake()
                try:
                    yield None if self._engines.managed is None else self._engines.managed.engine
                finally:
                    with self._observe("skew"):  # no stage's deadline: responses differ in length
                        self._control.meet("generate", self._sampled)
                    if not self._engines.has_frozen:
                        self._sleep()
        finally:
            self._is_rollout_open = False

    def require_training(self) -> None:
        """Refuse to compute while the rollout engine has the device.

        Frozen models on devices of the trainer answer after a phase, too, until this is called: it
        puts all engines to sleep then, and is a collective call.
        """
        if self._engines.has_frozen and not self._is_rollout_open:
            self._sleep()
        if not self._life.may_train:
            raise PhaseError(
                f"the rollout engine holds the device ({self._life.describe()}); "
                "training may compute again when a rollout phase has ended without an error"
            )

    def _sleep(self) -> None:
        self.end_requests()
        self._life.sleep()

    def weights_changed(self, *, version: int) -> None:
        """The optimizer stepped: the next rollout phase sends the weights again, as ``version``."""
        self._engines.trained_version = version
        self.meter.settle()

    def mark_lost(self, engines: Collection[int]) -> None:
        """Take engines for lost: they are asked nothing, and restarted at the end of the phase."""
        log.warning("engines of the ranks are lost, and restart after the phase: %s", engines)
        self._life.mark_broken(engines)

    def profile_engine(self, stem: Path | None) -> None:
        """Let this rank's rollout engine, if it owns one, profile itself."""
        if self._engines.managed is not None:
            self._engines.managed.profile(stem)

    def take_metrics(self) -> Metrics:
        """Return the costs of the stages since the last call, and reset them."""
        stages, self._stages = self._stages, {}
        left = self._colocated.take_metrics()
        return stages | left | self._engines.take_metrics() | self.meter.take_metrics()

    def shutdown(self) -> None:
        """End this rank's rollout engine, and remove the weights published for others."""
        self._engines.close()

    @contextmanager
    def _observe(self, stage: str) -> Iterator[None]:
        begin = time.perf_counter()
        moves = stage in _MOVES_MEMORY and (self._sleeps or stage != "resume_cache")
        measured = self.meter(stage) if moves else nullcontext()
        try:
            with measured, activity.scope(stage), trace.span(stage):
                yield
        finally:
            name = f"time/{stage}_s"
            # This rank's two phases are added. The slowest rank counts: all wait for it.
            before = self._stages[name].value if name in self._stages else 0.0
            self._stages[name] = Max(before + time.perf_counter() - begin)
