"""A rig that looks at everything, before and after every stage of every operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.sharding.lifecycle import EDGES, SleepLevel, State
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.train.protocol import TrainState
from tests.workers.sharding.recording import (
    BUFFER,
    WEIGHTS,
    Policy,
    RecordingEngine,
    RecordingTenant,
    Rig,
)

EDGE_OF = {edge.name: edge for edge in EDGES}

RELEASES = {"release weights", "release kv_cache", "release cuda_graph"}
CALLS = {
    "start": {"pause"} | RELEASES,
    "pause": {"pause"},
    "drain": {"drain"},
    "roll_back": {"continue_generation"},
    "release": RELEASES,
    "release_cache": RELEASES - {"release weights"},
    "resume_weights": {"resume weights"},
    "sync": {*("full_weights", "load", "finish_update"), *("unload_adapter", "load_adapter")},
    "resume_cache": {"resume kv_cache", "resume cuda_graph"},
    "continue": {"continue_generation"},
    "unwind": RELEASES,
    "restart": {"restart"},
    "offload_optimizer": {"offload gradients", "offload optimizer"},
    "offload_parameters": {"offload parameters"},
    "onload_training": {"restore parameters", "restore gradients", "restore optimizer"},
}
"""What engines and tenants are asked in each stage, and in no other."""

CACHE_BYTES = 4 * (64 + 8)
BUFFER_BYTES = 4 * 3
OTHER_STATE_BYTES = 4 * (17 + 34)
SYNCED = (State.SYNCED, State.CACHE_UP, State.READY)
UNTRUSTED = (State.BOOT, State.BROKEN)
"""Nobody asks an engine in these states for an answer, whatever it holds."""


class WatchedRig(Rig):
    """Engines of which every move, answer, book and byte is checked."""

    def __init__(
        self, num_engines: int, *, depth: SleepLevel, policy: Policy = Policy.WHOLE
    ) -> None:
        self._last_states = (State.BOOT,) * num_engines
        self._last_stage = ""
        self._num_events = 0
        self._last_seen: object = None
        self._sent_bytes = 4 * sum(policy.tensors.values())
        super().__init__(num_engines, depth=depth, policy=policy)
        self.look()

    @contextmanager
    def _watch(self, stage: str) -> Iterator[None]:
        self.look()
        self._last_stage = stage
        has_base = [managed.ledger.covers(WEIGHTS) for managed in self._managed()]
        try:
            yield
        finally:
            self._check_passes(has_base)
            self._check_kept(has_base)
            self._check_calls(stage)
            self.check_device()
            self._check_answers()

    def look(self) -> None:
        assert len(self.journal.events) == self._num_events, "called outside of every stage"
        seen = (self.life.states, self._num_events, self.set.trained_version)
        if seen == self._last_seen:
            return
        self._last_seen = seen
        self._check_moves()
        self.check_device()
        self._check_answers()
        self._check_ledgers()
        self._check_host()

    def _check_calls(self, stage: str) -> None:
        events = self.journal.events[self._num_events :]
        asked = {f"{event.call} {event.part}".strip() for event in events}
        assert asked <= CALLS[stage], f"{asked - CALLS[stage]} asked in {stage}"
        self._num_events = len(self.journal.events)

    def _managed(self) -> Sequence[ManagedEngine]:
        return () if self._last_stage == "start" else self.set.engines

    def _check_passes(self, has_base: Sequence[bool]) -> None:
        """No adapter before its base; no base where all have it; unloaded before it is loaded."""
        if not self.policy.adapter:
            return
        events = self.journal.events[self._num_events :]
        for engine, had_base in zip(self.engines, has_base, strict=False):
            calls = [event.call for event in events if event.engine == engine.index]
            assert not (all(has_base) and "load" in calls), "the base was sent again"
            if "load_adapter" in calls:
                at = calls.index("load_adapter")
                assert calls[at - 1] == "unload_adapter"
                assert had_base or "load" in calls[:at], "an adapter without its base"
                assert "load" not in calls[at:]

    def _check_kept(self, has_base: Sequence[bool]) -> None:
        """A base that is not sent again outlives whatever is no restart and no sync."""
        may_lose = self._last_stage in ("restart", "sync")
        if self.policy is Policy.ADAPTER_KEPT_BASE and not may_lose:
            for managed, had_base in zip(self.set.engines, has_base, strict=False):
                assert managed.ledger.covers(WEIGHTS) or not had_base, "the base was not kept"

    def _check_moves(self) -> None:
        """Each engine stands still, breaks, or has taken the edge of the last stage."""
        states = self.life.states
        for was, now in zip(self._last_states, states, strict=True):
            if now in (was, State.BROKEN):
                continue
            edge = EDGE_OF[self._last_stage]
            assert was in edge.sources and now is edge.target, f"{was} -> {now} by {edge.name}"
        self._last_states = states

    def _check_answers(self) -> None:
        """Whoever would answer a request now answers with the newest weights."""
        for engine, state in zip(self.engines, self.life.states, strict=True):
            if engine.is_admitting and state not in UNTRUSTED:
                self.check_answer(engine)

    def _check_ledgers(self) -> None:
        """A tensor in good books holds, or has a copy of, what a trainer sent; none is garbage."""
        for engine, managed in zip(self.engines, self.set.engines, strict=True):
            versions = set()
            for name in managed.ledger.backup_for(()):
                tensor = _find(engine, name)
                if name == BUFFER or not self.policy.learns(name):
                    assert tensor.tolist() == self.policy.truth(name, 0)
                else:
                    version = int(tensor[0]) - self.policy.tensors[name]  # fails on NaN
                    assert tensor.tolist() == self.policy.truth(name, version)
                    versions.add(version)
            assert len(versions) <= 1, f"engine {engine.index} holds versions {versions}"
            if self.life.states[engine.index] in SYNCED:
                assert managed.ledger.is_covered
                assert versions == {engine.version} == {self.set.trained_version}

    def _check_host(self) -> None:
        """Training state is where it was, or in the host's memory: never in neither."""
        for tenant, version in ((self.trainer, self.set.trained_version), (self.reference, 0)):
            for part, tensors in tenant.state.items():
                for name, tensor in tensors.items():
                    held = tensor if tensor.untyped_storage().nbytes() else tenant.copy(part, name)
                    is_weight = part is TrainState.PARAMETERS
                    expected = (
                        self.policy.truth(name, version) if is_weight else [1.0] * len(tensor)
                    )
                    assert held.tolist() == expected, f"{part} {name}"

    def check_awake_bytes(self) -> None:
        """All of each engine, nothing of the training side unless nobody sleeps, no copy left."""
        for engine in self.engines:
            assert _engine_bytes(engine) == self._weight_bytes + CACHE_BYTES
            assert engine.copied_bytes() == 0
        is_shared = self.depth is SleepLevel.KEEP_ALL
        for tenant in (self.trainer, self.reference):
            assert _tenant_bytes(tenant) == (self._bytes_of(tenant) if is_shared else 0)

    def check_asleep_bytes(self) -> None:
        """What each state leaves on the device, and the copies of what no sync sends again."""
        for tenant in (self.trainer, self.reference):
            assert _tenant_bytes(tenant) == self._bytes_of(tenant)
            assert tenant.copied_bytes() == 0
        for engine, state in zip(self.engines, self.life.states, strict=True):
            weights = 0 if state is State.ASLEEP else self._weight_bytes
            whole = self._weight_bytes + CACHE_BYTES
            held = whole if self.depth is SleepLevel.KEEP_ALL else weights
            assert _engine_bytes(engine) == held
            assert engine.copied_bytes() == (0 if held else self._kept_bytes(engine))

    @property
    def _weight_bytes(self) -> int:
        return self._sent_bytes + BUFFER_BYTES

    def _bytes_of(self, tenant: RecordingTenant) -> int:
        weights = self._sent_bytes if tenant is self.trainer else 4 * sum(WEIGHTS.values())
        return weights + OTHER_STATE_BYTES

    def _kept_bytes(self, engine: RecordingEngine) -> int:
        """The buffer; and as much of a base that is not sent again as had arrived."""
        if self.policy is not Policy.ADAPTER_KEPT_BASE:
            return BUFFER_BYTES
        ledger = self.set.engines[engine.index].ledger
        arrived = [name for name in WEIGHTS if ledger.covers([name])]
        return BUFFER_BYTES + ledger.bytes_of(arrived)


def _find(engine: RecordingEngine, name: str) -> Tensor:
    tensor = engine.memory[MemoryTag.WEIGHTS][name]
    return tensor if tensor.untyped_storage().nbytes() else engine.copy(name)


def _engine_bytes(engine: RecordingEngine) -> int:
    return sum(engine.resident_bytes(part) for part in MemoryTag)


def _tenant_bytes(tenant: RecordingTenant) -> int:
    return sum(tenant.resident_bytes(part) for part in TrainState)
