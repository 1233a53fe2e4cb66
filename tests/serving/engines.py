from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Generic, TypeVar, cast

import torch
from safetensors.torch import save_file

from hybridrl.config.serving import (
    FaultKind,
    ServedModelConfig,
    ServerGroupConfig,
    ServingConfig,
    WorkerType,
)
from hybridrl.errors import EngineError, PhaseError, RequestError, ServerDiedError
from hybridrl.sampler import FinishReason, Sample, SampleRequest
from hybridrl.serving.engine_handle import EngineHandle, answered
from hybridrl.serving.engine_pool import EnginePool
from hybridrl.serving.plan import ModelPlan, PlannedDevices, engines_of
from hybridrl.serving.server import RolloutServer
from hybridrl.workers.sharding.lifecycle import Action
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.weight_files import WeightSource, load_weights
from tests.workers.sharding.recording import (
    WEIGHTS,
    Journal,
    Policy,
    RecordingEngine,
    managed_engine,
    rollout_config,
)


class Pool(EnginePool):
    """Has engines by their place, and notes lost ones; promises no other unless a test says so."""

    def __init__(
        self, *engines: object, num_slots: int = 2, vocab_size: int = 1000, version: int = 0
    ) -> None:
        super().__init__(
            {index: cast(EngineHandle, engine) for index, engine in enumerate(engines)},
            num_slots=num_slots,
            max_context_tokens=32,
            vocab_size=vocab_size,
            version=version,
        )
        self.reasons: dict[int, str] = {}
        self.is_promising = False
        self.on_lost = self._note

    def _note(self, index: int, _: EngineHandle, reason: str) -> bool:
        self.reasons[index] = reason
        return self.is_promising


def weights_in(folder: Path, version: int) -> Path:
    folder.mkdir(exist_ok=True)
    weights = {name: torch.tensor(Policy.WHOLE.truth(name, version)) for name in WEIGHTS}
    save_file(weights, folder / "model.safetensors")
    return folder


_THREADS = ThreadPoolExecutor(max_workers=16, thread_name_prefix="engine")


class RecordingHandle(EngineHandle):
    """An engine whose calls run in a thread; it dies when a test says so."""

    def __init__(self, index: int, journal: Journal) -> None:
        self.index = index
        self.journal = journal
        self.engine = RecordingEngine(index, journal)
        self._managed = managed_engine(self.engine, sleep=False)
        self._is_dead = threading.Event()
        self.is_silent = False
        self.harms: list[FaultKind] = []
        self.probes: list[Future[object]] = []
        self.loads: list[tuple[WeightSource, int]] = []
        """Folders of weights that it was given, with versions."""

    def build(self) -> Future[None]:
        def build() -> None:
            with self.journal.entry(self.index, "restart"):  # which a dead one survives
                pass

        return self._submit(build)

    def act(self, action: Action) -> Future[Any]:
        if isinstance(action, partial) and action.func is load_weights:
            self.loads.append((action.keywords["source"], action.keywords["version"]))
            action = partial(action, bucket_bytes=40)
        return self._submit(lambda: action(self._managed))

    def answer(self, request: SampleRequest) -> Future[list[Sample]]:
        raise NotImplementedError

    def probe(self) -> Future[object]:
        self.probes.append(Future())
        return self.probes[-1]

    def is_alive(self) -> bool:
        return not self._is_dead.is_set()

    def kill(self) -> None:
        self._is_dead.set()

    def end(self) -> None:
        self.kill()

    def harm(self, kind: FaultKind) -> None:
        self.harms.append(kind)
        self.is_silent |= kind == "cut"
        if kind == "kill":
            self.kill()

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        def unless_dead() -> Any:
            if self._is_dead.is_set():
                raise ServerDiedError(f"engine {self.index} is gone")
            return work()

        return Future() if self.is_silent else _THREADS.submit(unless_dead)


MOST_TOKENS = 40


def length_of(key: int) -> int:
    return 1 + key % 5 if key % 7 else MOST_TOKENS - key % 3


def token_of(key: int, position: int) -> int:
    return (key * 31 + position) % 97


@dataclass
class _Open:
    context: list[int]
    keys: Sequence[int]
    answer: Future[list[Sample]]
    version: int
    tokens: list[list[int]] = field(default_factory=list)


class DecodingHandle(RecordingHandle):
    """Samples a token of each open response in a step of its thread."""

    def __init__(self, index: int, journal: Journal) -> None:
        super().__init__(index, journal)
        self.version = -1
        self.adapters: set[int] = set()
        """Policy versions that answer; one, but for adapters beside each other."""
        self.refusal: RequestError | None = None
        """Of all requests."""
        self.is_frozen, self.has_requests = threading.Event(), threading.Event()
        self.takes_weights = True
        """False: it never answers a load, and lives."""
        self.step_s = 0.0
        """Seconds of a step, besides its work."""
        self.dies_after: int | None = None
        """Steps that it has left; None: it lives."""
        self._open: list[_Open] = []
        self._changed = threading.Condition()
        self._is_serving = self._is_interrupted = False
        self.num_requests = 0
        threading.Thread(target=self._decode, daemon=True).start()

    def act(self, action: Action) -> Future[Any]:
        is_load = isinstance(action, partial)
        if is_load and not self.takes_weights:
            return Future()
        with self._changed:
            if action is ManagedEngine.pause:
                self._is_serving = False
            elif action is ManagedEngine.continue_generation:
                self._is_serving, self._is_interrupted = True, False
            elif action is ManagedEngine.interrupt:
                self._is_interrupted = True
                self._changed.notify()
                return answered(None)
            elif action is ManagedEngine.take_metrics:
                return answered({})
            elif isinstance(action, partial):
                kept = set(action.keywords.get("kept", ()))
                assert {each.version for each in self._open} <= kept, "an open response lost it"
                self.version = action.keywords["version"]
                self.adapters = (self.adapters & kept) | {self.version}
        return super().act(action)

    def answer(self, request: SampleRequest) -> Future[list[Sample]]:
        future: Future[list[Sample]] = Future()
        future.set_running_or_notify_cancel()  # as a call of Ray, it cannot be taken back
        context, keys = request.token_ids.tolist(), request.keys
        with self._changed:
            if not self.is_alive():
                future.set_exception(EngineError("it is gone"))
            elif self.refusal is not None:
                future.set_exception(self.refusal)
            elif not self._is_serving:
                future.set_exception(PhaseError("it is paused"))
            elif request.version is not None and request.version not in self.adapters:
                future.set_exception(RequestError(f"{request.version} of {self.adapters}"))
            else:
                self.num_requests += 1
                version = self.version if request.version is None else request.version
                self._open.append(_Open(context, keys, future, version, [[] for _ in keys]))
                self.has_requests.set()
                self._changed.notify()
        return future

    def probe(self) -> Future[object]:
        return answered(object())  # two answers differ: it gets on

    def kill(self) -> None:
        super().kill()
        with self._changed:
            self._changed.notify()

    def thaw(self) -> None:
        self.is_frozen.clear()
        with self._changed:
            self._changed.notify()

    def _decode(self) -> None:
        while self.is_alive():
            with self._changed:
                while (not self._open or self.is_frozen.is_set()) and self.is_alive():
                    self._changed.wait()
                self._step()
            time.sleep(self.step_s)
        with self._changed:
            while self._open:
                self._open.pop().answer.set_exception(EngineError("it is gone"))

    def _step(self) -> None:
        if self.dies_after is not None:
            self.dies_after -= 1
            if self.dies_after < 0:
                super().kill()
                return
        for request in list(self._open):
            begin = len(request.context) - 1  # of a prompt with one token
            if not self._is_interrupted:
                for tokens, key in zip(request.tokens, request.keys, strict=True):
                    if begin + len(tokens) < length_of(key):
                        tokens.append(token_of(key, begin + len(tokens)))
            samples = [
                self._sample(tokens, key, begin, request.version)
                for tokens, key in zip(request.tokens, request.keys, strict=True)
            ]
            if self._is_interrupted or not any(sample.is_interrupted for sample in samples):
                self._open.remove(request)
                request.answer.set_result(samples)

    def _sample(self, tokens: list[int], key: int, begin: int, version: int) -> Sample:
        is_complete = begin + len(tokens) == length_of(key)
        reason: FinishReason = "stop" if is_complete else "interrupted"
        return Sample(
            torch.tensor(tokens, dtype=torch.int64), torch.zeros(len(tokens)), reason, version
        )


H = TypeVar("H", bound=RecordingHandle)


def plan_of(*groups: tuple[WorkerType, int]) -> ModelPlan:
    named = {
        f"g{number}": ServerGroupConfig(num_devices=count, worker_type=kind)
        for number, (kind, count) in enumerate(groups)
    }
    serving = ServingConfig(
        num_devices_per_node=64, colocated=False, models={"policy": ServedModelConfig(groups=named)}
    )
    engines = (engines_of(group, per_node=64) for group in serving.placed_groups)
    return ModelPlan("policy", tuple(chain.from_iterable(engines)))


class ServerRig(Generic[H]):
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

    def _launch(self, engine: PlannedDevices) -> H:
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
