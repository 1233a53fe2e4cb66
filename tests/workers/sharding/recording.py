"""Small honest engines that write down what is asked of them, and can be told to fail.

Their tensors are real: releasing frees storage, resuming brings back garbage (NaN) unless a host
copy was kept, and whoever works with memory that is not there raises.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from hybridrl.config.rollout import RolloutConfig
from hybridrl.config.topology import LedDevices
from hybridrl.errors import EngineError
from hybridrl.metrics import Metrics
from hybridrl.sampler import Program, T
from hybridrl.workers.rollout.buckets import Bucket, StagedBucket, stage_by_reference
from hybridrl.workers.rollout.protocol import MemoryTag, WeightMemory
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.lifecycle import LifeCycle, SleepLevel, State
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.manager import ShardingManager
from hybridrl.workers.sharding.manager_client import ManagerClient
from hybridrl.workers.sharding.memory import DeviceMemory
from hybridrl.workers.sharding.offloadable_models import OffloadableModels
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import TrainState, WeightSet, WeightSpec
from tests.workers.rollout import engines
from tests.workers.sharding.engine_set import LocalSet
from tests.workers.sharding.managers import sharding_manager

CPU = torch.device("cpu")
BUFFER = "rotary.inv_freq"
WEIGHTS = {"embed.weight": 6, "layer.weight": 4, "norm.weight": 2, "head.weight": 5}
"""Name and number of float32 elements of what a sync sends."""

ADAPTER = {"layer.lora_A.weight": 3, "layer.lora_B.weight": 8}
"""The same of what is sent besides where a policy learns an adapter beside frozen weights."""

TENANT = -1
"""Stands in the log where an engine's index would."""


@dataclass(frozen=True)
class Event:
    engine: int
    call: str
    part: str = ""


class Policy(Enum):
    """What a trainer learns, and what becomes of the rest when engines release their weights."""

    WHOLE = "every weight"
    ADAPTER_KEPT_BASE = "an adapter; frozen weights are copied to the host"
    ADAPTER_RESENT_BASE = "an adapter; frozen weights are sent again"

    @property
    def adapter(self) -> Mapping[str, int]:
        """Name and number of elements of the adapter's tensors; empty without one."""
        return {} if self is Policy.WHOLE else ADAPTER

    @property
    def tensors(self) -> Mapping[str, int]:
        return {**WEIGHTS, **self.adapter}

    def truth(self, name: str, version: int) -> list[float]:
        if name == BUFFER:
            return [0.0, 1.0, 2.0]
        size = self.tensors[name]
        return [float(size + version * self.learns(name))] * size

    def learns(self, name: str) -> bool:
        return self is Policy.WHOLE or name in ADAPTER


class InjectedFault(RuntimeError):
    """The failure that a test asked for."""


@dataclass
class Fault:
    """Spare ``skip`` calls, then fail ``times`` of them, before or after they did their work."""

    engine: int
    call: str
    part: str
    when: str
    times: int
    skip: int


@dataclass
class Journal:
    """The event log that all engines and tenants of a test share, and the faults still to come."""

    events: list[Event] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)
    """Engines of which every call fails until they are restarted."""
    forgotten: set[str] = field(default_factory=set)
    """Tensors that the next stream of weights leaves out, though it promised them."""

    @contextmanager
    def entry(self, engine: int, call: str, part: str = "") -> Iterator[None]:
        self.events.append(Event(engine, call, part))
        if engine in self.dead and call != "restart":
            raise InjectedFault(f"engine {engine} is dead")
        self._strike(engine, call, part, "before")
        yield
        if call == "restart":
            self.dead.discard(engine)
        self._strike(engine, call, part, "after")

    def fail(
        self,
        engine: int,
        call: str,
        part: str = "",
        *,
        when: str = "before",
        times: int = 1,
        skip: int = 0,
    ) -> None:
        self.faults.append(Fault(engine, call, part, when, times, skip))

    def calls(self, engine: int | None = None) -> list[str]:
        return [
            f"{event.call} {event.part}".strip()
            for event in self.events
            if engine is None or event.engine == engine
        ]

    def _strike(self, engine: int, call: str, part: str, when: str) -> None:
        for fault in self.faults:
            aimed_at = (fault.engine, fault.call, fault.part, fault.when)
            if aimed_at != (engine, call, part, when) or not fault.times:
                continue
            if fault.skip:
                fault.skip -= 1
            else:
                fault.times -= 1
                what = f"{call} {part}".strip()
                raise InjectedFault(f"{what} of {engine} failed {when} its work")


def free(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def allocate(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
    tensor.fill_(torch.nan)


def stored_bytes(tensors: Collection[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


class RecordingEngine:
    """A RolloutEngine whose responses' log-probs are its weights, so that garbage is seen."""

    frees_memory = True
    url = None
    keeps_backup = True
    """Whether it was started so that it can copy weights to the host, as a server must be."""

    load_s = 0.0
    """Seconds that it takes for a bucket."""

    def __init__(self, index: int, journal: Journal, policy: Policy = Policy.WHOLE) -> None:
        self.index = index
        self.journal = journal
        self.policy = policy
        self.version: int | None = None
        self.is_admitting = True
        self.is_alive = True
        self.memory: dict[MemoryTag, dict[str, Tensor]] = {}
        self._copies: dict[str, Tensor] = {}
        self._boot()

    def _boot(self) -> None:
        sizes = self.policy.tensors
        weights = {name: torch.full((size,), torch.nan) for name, size in sizes.items()}
        self.memory = {
            MemoryTag.WEIGHTS: weights | {BUFFER: torch.arange(3.0)},
            MemoryTag.KV_CACHE: {"kv": torch.zeros(64)},
            MemoryTag.CUDA_GRAPH: {"graph": torch.zeros(8)},
        }
        self._copies = {}
        self.version = None
        self.is_admitting = True

    def run(self, program: Program[T]) -> T:
        raise NotImplementedError("tests sample by `serve`")

    def serve(self) -> dict[str, Tensor]:
        """Answer a request with the weights that it ran on."""
        if not self.is_admitting:
            raise EngineError(f"engine {self.index} is paused")
        released = [part for part in MemoryTag if not self.resident_bytes(part)]
        if released:
            raise EngineError(f"engine {self.index} has no memory for {released}")
        return {name: tensor.clone() for name, tensor in self.memory[MemoryTag.WEIGHTS].items()}

    def weight_memory(self) -> tuple[WeightMemory, ...]:
        sizes = {**self.policy.tensors, BUFFER: 3}
        return tuple(WeightMemory(name, 4 * size, name == BUFFER) for name, size in sizes.items())

    def stage(self, bucket: Bucket) -> StagedBucket:
        return stage_by_reference(bucket)

    def release_buffers(self) -> None:
        pass

    def load(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        time.sleep(self.load_s)
        with self.journal.entry(self.index, "load"):
            for name, tensor in staged.tensors:
                self.memory[MemoryTag.WEIGHTS][name].copy_(tensor)

    def load_adapter(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        with self.journal.entry(self.index, "load_adapter"):
            if tensors.keys() != self.policy.adapter.keys():
                raise EngineError(f"an adapter of {sorted(tensors)} does not fit")
            for name, tensor in tensors.items():
                self.memory[MemoryTag.WEIGHTS][name].copy_(tensor)

    def unload_adapter(self, *, kept: Collection[int] = ()) -> None:
        with self.journal.entry(self.index, "unload_adapter"):
            for name in self.policy.adapter:
                self.memory[MemoryTag.WEIGHTS][name].fill_(torch.nan)

    def finish_update(self, *, version: int) -> None:
        with self.journal.entry(self.index, "finish_update"):
            self.version = version

    def load_reference_weights(self, folder: Path) -> None:
        raise NotImplementedError  # tests of the first sync take real engines

    def verify_weights(self) -> None:
        raise NotImplementedError

    def pause(self) -> None:
        with self.journal.entry(self.index, "pause"):
            self.is_admitting = False

    def drain(self, *, timeout_s: float) -> int:
        with self.journal.entry(self.index, "drain"):
            return 0

    def release(self, part: MemoryTag, *, backup: frozenset[str] = frozenset()) -> None:
        with self.journal.entry(self.index, "release", part.value):
            if not self.keeps_backup and backup - {BUFFER}:
                raise EngineError(f"{sorted(backup)} would be lost: no host copy is kept here")
            for name, tensor in self.memory[part].items():
                if name in backup:
                    self._copies[name] = tensor.clone()
                free(tensor)

    def resume(self, part: MemoryTag) -> None:
        with self.journal.entry(self.index, "resume", part.value):
            for name, tensor in self.memory[part].items():
                allocate(tensor)
                if name in self._copies:
                    tensor.copy_(self._copies.pop(name))

    def interrupt(self) -> None:
        with self.journal.entry(self.index, "interrupt"):
            pass

    def continue_generation(self) -> None:
        with self.journal.entry(self.index, "continue_generation"):
            self.is_admitting = True

    def resident_bytes(self, part: MemoryTag) -> int:
        return stored_bytes(self.memory[part].values())

    def copy(self, name: str) -> Tensor:
        return self._copies[name]

    def copied_bytes(self) -> int:
        return stored_bytes(self._copies.values())

    def restart(self) -> None:
        with self.journal.entry(self.index, "restart"):
            self._boot()

    def progress(self) -> object:
        if self.index in self.journal.dead:
            raise InjectedFault(f"engine {self.index} is dead")
        return len(self.journal.events)

    def has_died(self) -> bool:
        return not self.is_alive

    def take_metrics(self) -> Metrics:
        return {}

    def shutdown(self) -> None:
        self.is_alive = False


def managed_engine(engine: RecordingEngine, /, **keys: Any) -> ManagedEngine:
    return ManagedEngine(engine, config=rollout_config(**keys), device=CPU)


class CountedMemory(DeviceMemory):
    """A device of ``total`` bytes, on which the storages of engines and tenants are counted."""

    def __init__(self, *, total: int, held_bytes: Callable[[], int]) -> None:
        super().__init__(CPU)
        self._total = total
        self._held_bytes = held_bytes
        self.unlisted = 0
        """Bytes that somebody holds and nobody lists."""
        self.calls: list[str] = []

    def free_bytes(self) -> int:
        return self._total - self._held_bytes() - self.unlisted

    def allocated_bytes(self) -> int:
        return self._held_bytes() + self.unlisted

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")


class RecordingTenant:
    """A frozen or trainable role whose state really leaves."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.state: dict[TrainState, dict[str, Tensor]] = {
            TrainState.PARAMETERS: {
                name: torch.full((size,), float(size)) for name, size in WEIGHTS.items()
            },
            TrainState.GRADIENTS: {"grad": torch.ones(17)},
            TrainState.OPTIMIZER: {"moments": torch.ones(34)},
        }
        self._copies: dict[TrainState, dict[str, Tensor]] = {}

    def is_home(self) -> bool:
        return all(self.resident_bytes(part) for part in TrainState)

    def offload(self, part: TrainState) -> None:
        with self.journal.entry(TENANT, "offload", part.value):
            if part not in self._copies:
                self._copies[part] = {name: t.clone() for name, t in self.state[part].items()}
                for tensor in self.state[part].values():
                    free(tensor)

    def restore(self, part: TrainState) -> None:
        with self.journal.entry(TENANT, "restore", part.value):
            for name, copy in self._copies.pop(part, {}).items():
                allocate(self.state[part][name])
                self.state[part][name].copy_(copy)

    def resident_bytes(self, part: TrainState) -> int:
        return stored_bytes(self.state[part].values())

    def copy(self, part: TrainState, name: str) -> Tensor:
        return self._copies[part][name]

    def copied_bytes(self) -> int:
        return sum(stored_bytes(part.values()) for part in self._copies.values())


class RecordingTrainEngine(RecordingTenant):
    """A training engine that can step and export; it neither scores nor learns."""

    def __init__(self, journal: Journal, policy: Policy = Policy.WHOLE) -> None:
        super().__init__(journal)
        self.policy = policy
        self.asked: set[torch.dtype | None] = set()
        """Types in which weights were asked for."""
        self.weight_sets: tuple[WeightSet, ...] = (WeightSet.BASE,)
        if policy.adapter:
            self.weight_sets += (WeightSet.ADAPTER,)
            self.state[TrainState.PARAMETERS] |= {
                name: torch.full((size,), float(size)) for name, size in policy.adapter.items()
            }

    def as_policy(self) -> PolicyEngine:
        """This engine, as far as a sync asks it."""
        return cast(PolicyEngine, self)

    def step(self) -> None:
        if not self.is_home():
            raise EngineError("training state is not on the device")
        for name, tensor in self.state[TrainState.PARAMETERS].items():
            if self.policy.learns(name):
                tensor.add_(1.0)

    def weight_specs(self, part: WeightSet = WeightSet.BASE) -> tuple[WeightSpec, ...]:
        sizes = WEIGHTS if part is WeightSet.BASE else ADAPTER
        return tuple(WeightSpec(name, (size,), 4 * size) for name, size in sizes.items())

    def full_weights(
        self, part: WeightSet = WeightSet.BASE, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        self.asked.add(dtype)
        return self.stream(self.take_names(part))

    def take_names(self, part: WeightSet) -> list[str]:
        """The names of the next pass: what a test wants forgotten is left out once."""
        names = [spec.name for spec in self.weight_specs(part)]
        forgotten = self.journal.forgotten.intersection(names)
        self.journal.forgotten -= forgotten
        return [name for name in names if name not in forgotten]

    def stream(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Gather tensors, and write down that it was asked for."""
        with self.journal.entry(TENANT, "full_weights"):
            yield from self.weights_of(names)

    def weights_of(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            if not self.resident_bytes(TrainState.PARAMETERS):
                raise EngineError("training parameters are not on the device")
            yield name, self.state[TrainState.PARAMETERS][name].clone()


class Shard(RecordingTrainEngine):
    """The trainer as one rank has it: all stream the same names, of which the first tells."""

    def __init__(self, rank: int, trainer: RecordingTrainEngine, passes: list[list[str]]) -> None:
        super().__init__(trainer.journal, trainer.policy)
        self._rank = rank
        self._trainer = trainer
        self._passes = passes
        self._num_passes = 0

    def full_weights(
        self, part: WeightSet = WeightSet.BASE, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        with _TAKING:
            if self._num_passes == len(self._passes):
                self._passes.append(self._trainer.take_names(part))
        names = self._passes[self._num_passes]
        self._num_passes += 1
        trainer = self._trainer
        return trainer.stream(names) if self._rank == 0 else trainer.weights_of(names)


_TAKING = threading.Lock()


class Rig:
    """Engines, a trainer and a frozen tenant around one life cycle, watched at every stage."""

    def __init__(
        self,
        num_engines: int = 2,
        *,
        depth: SleepLevel = SleepLevel.RELEASE_ALL,
        policy: Policy = Policy.WHOLE,
    ) -> None:
        self.policy = policy
        self.journal = Journal()
        self.engines = [
            RecordingEngine(index, self.journal, policy) for index in range(num_engines)
        ]
        self.trainer = RecordingTrainEngine(self.journal, policy)
        self.reference = RecordingTenant(self.journal)
        tenants = OffloadableModels(device=CPU, control=ControlGroup(timeout_s=5.0))
        tenants.register("actor", self.trainer)
        tenants.register("reference", self.reference)
        passes: list[list[str]] = []
        self.set = LocalSet(
            [
                managed_engine(engine, sleep=depth is not SleepLevel.KEEP_ALL, stage_timeout_s=0.05)
                for engine in self.engines
            ],
            [Shard(index, self.trainer, passes).as_policy() for index in range(num_engines)],
            config=rollout_config(sleep=depth is not SleepLevel.KEEP_ALL),
            resends_base=policy is not Policy.ADAPTER_KEPT_BASE,
        )
        self.depth = depth
        self.life = LifeCycle(self.set, host=tenants, depth=depth, observe=self._watch)
        self.life.start()

    @contextmanager
    def _watch(self, stage: str) -> Iterator[None]:
        try:
            yield
        finally:
            self.check_device()

    def check_device(self) -> None:
        """No KV cache stands beside training state, and nobody serves half-awake."""
        tenants = (self.trainer, self.reference)
        is_training_in = any(t.resident_bytes(part) for t in tenants for part in TrainState)
        for engine, state in zip(self.engines, self.life.states, strict=True):
            if self.depth is SleepLevel.KEEP_ALL or state in (State.BOOT, State.BROKEN):
                continue
            has_cache = engine.resident_bytes(MemoryTag.KV_CACHE)
            assert not (has_cache and is_training_in), f"{state}: KV cache beside training state"

    def train(self) -> None:
        assert self.life.may_train
        self.trainer.step()
        self.set.trained_version += 1

    def check_serving(self) -> None:
        assert set(self.life.states) == {State.READY}
        for engine in self.engines:
            self.check_answer(engine)

    def check_answer(self, engine: RecordingEngine) -> None:
        assert engine.version == self.set.trained_version
        for name, tensor in engine.serve().items():
            expected = self.policy.truth(name, engine.version)
            assert tensor.tolist() == expected, f"{name} of {engine.index}"

    def check_training(self) -> None:
        assert self.life.may_train
        assert self.trainer.is_home()
        assert self.reference.is_home()
        for engine, state in zip(self.engines, self.life.states, strict=True):
            if state is not State.BROKEN:
                assert not engine.is_admitting
            if self.depth is SleepLevel.RELEASE_ALL and state is not State.BROKEN:
                assert not any(engine.resident_bytes(part) for part in MemoryTag)

    def cycle(self) -> None:
        self.life.sleep()
        self.life.wake()
        self.check_serving()
        self.life.sleep()
        self.check_training()
        self.train()


@dataclass
class RecordingDevice:
    """One rank's device: a manager, an engine (unless another rank owns it), the trainer."""

    journal: Journal
    engine: RecordingEngine | None
    trainer: RecordingTrainEngine
    manager: ShardingManager
    version: int = 0

    def serve(self) -> bool:
        """Sample in a phase of its own; True if the trainer's newest weights answered."""
        with self.manager.rollout_phase() as engine:
            assert engine is self.engine
            if self.engine is None:
                return True
            served = self.engine.serve()
            assert served.pop(BUFFER).tolist() == [0.0, 1.0, 2.0]
            return self.engine.version == self.version and all(
                bool((served[name] == WEIGHTS[name] + self.version).all()) for name in WEIGHTS
            )

    def train(self) -> None:
        self.manager.require_training()
        self.trainer.step()
        self.version += 1
        self.manager.weights_changed(version=self.version)


def recording_device(
    rank: int = 0,
    *,
    kind: type[RecordingEngine] | None = RecordingEngine,
    timeout_s: float = 20.0,
    call_timeout_s: float = 60.0,
    engines: tuple[LedDevices, ...] | None = None,
    servers: ManagerClient | None = None,
    policy: Policy = Policy.WHOLE,
    **keys: Any,
) -> RecordingDevice:
    journal = Journal()
    config = rollout_config(**keys)
    is_leader = rank % config.tensor_parallel_size == 0
    engine = kind(rank, journal) if kind is not None and is_leader else None
    manager = sharding_manager(
        engine,
        config=config,
        control=ControlGroup(timeout_s=timeout_s),
        call_timeout_s=call_timeout_s,
        engines=engines,
        servers=servers,
    )
    trainer = RecordingTrainEngine(journal, policy)
    manager.attach_policy(trainer.as_policy())
    return RecordingDevice(journal, engine, trainer, manager)


def rollout_config(**keys: Any) -> RolloutConfig:
    common = {"drain_timeout_s": 1.0, "stage_timeout_s": 20.0}
    return replace(engines.rollout_config(num_slots=2), **(common | keys))
