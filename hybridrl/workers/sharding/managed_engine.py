"""One rollout engine with its ledger: weights and KV cache leave at sleep here, and come back.

Releasing memory loses tensors; a sync brings them back. Without a book, a tensor that was released
and not sent again is garbage that still samples fluent text. With it, generating on garbage is
impossible, and a host copy is kept of exactly those tensors that no sync rewrites.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hybridrl.config.rollout import RolloutConfig
from hybridrl.diagnostics import trace
from hybridrl.errors import EngineError, LedgerError, PhaseError, first_of
from hybridrl.metrics import Max, Metrics, Sum, merge
from hybridrl.workers.rollout.buckets import StagedBucket
from hybridrl.workers.rollout.protocol import (
    FileReader,
    MemoryTag,
    ProfilesItself,
    Receiver,
    RolloutEngine,
    WeightMemory,
    WeightReceiver,
    left_s,
)
from hybridrl.workers.sharding.memory import (
    DeviceMemory,
    Holder,
    await_release,
    demanded_bytes,
    memory_table,
    require_room,
)
from hybridrl.workers.sharding.weight_changes import KeptWeights

log = logging.getLogger(__name__)

_CACHE_PARTS = (MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH)


class WeightLedger:
    """Bookkeeping for one rollout engine. Starts as at BOOT: weights lost, buffers good."""

    def __init__(self, tensors: Sequence[WeightMemory]) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._invalid: dict[str, str] = {}
        self.boot()

    def boot(self) -> None:
        """A new engine: its weights are not the trainer's, but it computed its own buffers."""
        self._invalid = {
            name: "never sent since the engine started"
            for name, tensor in self._tensors.items()
            if not tensor.is_buffer
        }

    def backup_for(self, sent: Collection[str]) -> frozenset[str]:
        """Name the good tensors that no sync sends: they need a host copy to survive a release."""
        return frozenset(self._tensors.keys() - self._invalid.keys() - set(sent))

    def bytes_of(self, names: Collection[str] | None = None) -> int:
        """Return the bytes of these tensors, or of all."""
        names = self._tensors if names is None else names
        return sum(self._tensors[name].num_bytes for name in names)

    def release(self, backup: Collection[str]) -> None:
        """Weights memory was freed; only ``backup`` survives, in the state it was in."""
        for name in self._tensors.keys() - set(backup):
            self._invalid[name] = "lost when the engine released its weights"

    def begin_sync(self, names: Collection[str]) -> None:
        """A sync is about to send these: each is invalid until it has arrived."""
        for name in names:
            if name in self._tensors:
                self._invalid.setdefault(name, "the last sync broke off before it")

    def receive(self, names: Collection[str]) -> None:
        """Mark these tensors as valid: they have arrived. LedgerError for one that is unknown."""
        unknown = [name for name in names if name not in self._tensors]
        if unknown:
            raise LedgerError(
                f"the trainer sent {len(unknown)} tensors that the rollout engine does not have: "
                f"{first_of(unknown)}; trainer and engine must load the same model.path"
            )
        for name in names:
            self._invalid.pop(name, None)

    def covers(self, names: Collection[str]) -> bool:
        """Return whether each of these tensors holds what it should."""
        return self._invalid.keys().isdisjoint(names)

    @property
    def is_covered(self) -> bool:
        """True if every tensor holds what it should."""
        return not self._invalid

    def require_covered(self) -> None:
        """Refuse (LedgerError) to call the weights synced while a tensor is not."""
        if not self._invalid:
            return
        invalid = [name for name in self._tensors if name in self._invalid]  # in model order
        raise LedgerError(
            f"{len(invalid)} of {len(self._tensors)} rollout tensors are not what the "
            f"trainer holds: {first_of(invalid)} ({self._invalid[invalid[0]]}). "
            "Send them with the sync, or keep a host copy with rollout.backup_weights=ledger"
        )


class ManagedEngine:
    """A rollout engine whose memory and weights are accounted for."""

    def __init__(
        self, engine: RolloutEngine, *, config: RolloutConfig, device: torch.device
    ) -> None:
        """Take over an engine that has just started; without ``rollout.sleep`` it frees none."""
        self.engine = engine
        self.ledger = WeightLedger(engine.weight_memory())
        self.sent_names: frozenset[str] = frozenset()
        """Tensors that are sent after every release; known once a policy is attached."""
        self.is_proved = False
        """Whether its weights were compared with the trainer's since it started."""
        self.neighbours: Callable[[], Sequence[Holder]] = tuple
        """Other holders of device memory, for the error of an engine that lacks memory."""
        self.memory = DeviceMemory(device)
        """Of the device, as its driver counts it."""
        self.kept = KeptWeights()
        """On the host, where changes alone are sent; else nothing."""
        self._config = config
        self._device = device
        self._metrics: Metrics = {}
        self._adapter: dict[str, Tensor] = {}
        """Tensors of an adapter that have arrived so far."""
        self._released: dict[MemoryTag, int] = {}
        """Released memory tags, and the bytes that each needs again at least."""

    def take_metrics(self) -> Metrics:
        """Return aborted requests and bytes moved since the last call, and reset them."""
        metrics, self._metrics = self._metrics, {}
        return metrics | self.engine.take_metrics()

    def resident_bytes(self) -> int:
        """Return the engine's memory on the device, as it counts it."""
        return sum(self.engine.resident_bytes(part) for part in MemoryTag)

    def start(self) -> None:
        """Put a newly booted engine to sleep: it admits no request and holds no memory."""
        self.pause()
        self.release_all()

    def pause(self) -> None:
        """Admit no new request."""
        self.engine.pause()

    def drain(self) -> None:
        """Wait until nothing runs; requests past the deadline are aborted and counted."""
        aborted = self.engine.drain(timeout_s=self._config.drain_timeout_s)
        if aborted:
            self._add("rollout/aborted_requests", aborted)
            log.warning(
                "aborted requests that did not finish in rollout.drain_timeout_s: count=%d", aborted
            )

    def interrupt(self) -> None:
        """End open responses at their present token, and later ones until ``continue``."""
        self.engine.interrupt()

    def continue_generation(self) -> None:
        """Admit requests again."""
        self.engine.continue_generation()

    def release_all(self) -> None:
        """Free KV cache, graphs, then weights; keep a host copy of those that no sync will send."""
        self.release_cache()
        if not self._config.sleep or MemoryTag.WEIGHTS in self._released:
            return
        keeps_all = self._config.backup_weights == "always"
        backup = self.ledger.backup_for(frozenset() if keeps_all else self.sent_names)
        # Before the release: one that fails half-way must not leave lost weights marked valid.
        self.ledger.release(backup)
        self._release(MemoryTag.WEIGHTS, backup)
        kept = self.ledger.bytes_of(backup)
        self._add("memory/weight_backup_bytes", kept)
        self._add("memory/weight_backup_saved_bytes", self.ledger.bytes_of() - kept)

    def release_cache(self) -> None:
        """Free KV cache and graphs."""
        if self._config.sleep:
            for part in _CACHE_PARTS:
                self._release(part, frozenset())

    def resume_weights(self) -> None:
        """Allocate the weights; those with a host copy have their values again."""
        self._resume(MemoryTag.WEIGHTS)

    def resume_cache(self) -> None:
        """Allocate KV cache and graphs."""
        for part in _CACHE_PARTS:
            self._resume(part)

    def begin_part(self, names: Collection[str]) -> None:
        """A pass of a sync is about to send these; tensors of an interrupted pass are dropped."""
        self._adapter = {}
        self.ledger.begin_sync(names)

    def load(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        """Load one bucket, and enter it in the ledger; see ``RolloutEngine``."""
        self.engine.load(staged, handles)
        self.ledger.receive([span.name for span in staged.spans])

    def keep_adapter(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        """Keep one bucket of an adapter until it is complete: engines load all of it at once."""
        for name, tensor in staged.tensors:
            # A copy: the trainer's tensors may be on the host, or in memory that no other process
            # can open, and are reused for the next bucket.
            self._adapter[name] = tensor.detach().to(self._device, copy=True)

    def load_adapter(self, *, version: int, kept: Collection[int] = ()) -> None:
        """Load the received adapter in place of others, and enter it in the ledger.

        Others stay if their version is ``kept``, and so do their requests.
        """
        adapter, self._adapter = self._adapter, {}
        self.engine.unload_adapter(kept=kept)
        self.engine.load_adapter(adapter, version=version)
        self.ledger.receive(list(adapter))

    def read_files(self, reader: FileReader, folder: Path) -> None:
        """Let the engine load its part from files, unless it has it for good."""
        if not (reader.is_frozen and self.ledger.is_covered):
            self.ledger.boot()
            reader.read_files(folder)
            self.ledger.receive([tensor.name for tensor in self.engine.weight_memory()])

    def finish_update(self, *, version: int) -> None:
        """Close a sync; LedgerError if a tensor is still lost."""
        self.ledger.require_covered()
        self.engine.finish_update(version=version)

    def join(self) -> Receiver:
        """Let weights come through a group, past this ledger."""
        return self._receiving().join()

    def compare_with_files(self, folder: Path) -> None:
        """Compare what came through a group; this start of the engine is verified then."""
        self._receiving().compare_with_files(folder)
        self.is_proved = True

    def _receiving(self) -> WeightReceiver:
        if not isinstance(self.engine, WeightReceiver):
            raise PhaseError("this engine has no server that could join; set serving.weights=files")
        return self.engine

    @property
    def is_proof_due(self) -> bool:
        """Whether the next weights are compared with the trainer's."""
        verified = self._config.verify_weights
        return verified == "always" or (verified == "first" and not self.is_proved)

    def load_reference_weights(self, folder: Path) -> None:
        """Let the engine record the weights in ``folder``; they are lost until sent."""
        self.ledger.boot()
        self.engine.load_reference_weights(folder)

    def verify_weights(self) -> None:
        """Compare sent weights with recorded ones; this start of the engine is verified then."""
        begin = time.perf_counter()
        self.engine.verify_weights()
        self.is_proved = True
        log.info("sync proved: engine == trainer, compare_s=%.2f", time.perf_counter() - begin)

    def profile(self, stem: Path | None) -> None:
        """Let the engine profile itself, if it is a server; see ``ProfilesItself``."""
        if isinstance(self.engine, ProfilesItself):
            self.engine.profile(stem)

    def restart(self) -> None:
        """Boot the engine again."""
        self.is_proved = False
        self.ledger.boot()  # before the boot, as on release
        self.engine.restart()
        self._adapter = {}
        self._released.clear()

    def _release(self, part: MemoryTag, backup: frozenset[str]) -> None:
        if part in self._released:
            return
        said = self.engine.resident_bytes(part)
        # What torch keeps of this process is neither taken for the engine's nor hides it: the
        # embedded engine's memory is torch's.
        self.memory.empty_cache()
        before = self.memory.free_bytes()
        self.engine.release(part, backup=backup)
        self.memory.empty_cache()
        self._released[part] = 0
        if not self.engine.frees_memory:
            self._add("memory/noop_releases", 1)
            return
        seen = await_release(
            part,
            said,
            resident_bytes=lambda: self.engine.resident_bytes(part),
            memory=self.memory,
            free_before=before,
            timeout_s=left_s(self._config.stage_timeout_s),
        )
        # Others may have freed memory meanwhile: the need is at most the engine's own figure.
        self._released[part] = min(seen, said) if demanded_bytes(part, said) else 0
        self._add("memory/released_bytes", seen)
        if seen < said:
            self._add("memory/unseen_release_bytes", said - seen)
        residue = self.memory.residue_bytes()
        if residue is not None and self._released.keys() == set(MemoryTag):
            self._metrics = merge([self._metrics, {"memory/unreclaimed_bytes": Max(residue)}])

    def _resume(self, part: MemoryTag) -> None:
        """Allocate released memory only: an engine may refuse, or leak, a second allocation."""
        if part in self._released:
            self.memory.empty_cache()
            try:
                engine = self._config.engine
                require_room(part, self._released[part], memory=self.memory, engine=engine)
                self.engine.resume(part)
            except EngineError as error:
                holders = memory_table(
                    f"the rollout engine could not resume its {part.value}; "
                    f"memory of {self._device}",
                    [Holder(f"engine {p.value}", self.engine.resident_bytes(p)) for p in MemoryTag],
                    self.neighbours(),
                    self.memory.figures(),
                )
                raise EngineError(f"{error}\n{holders}") from error
            del self._released[part]

    def _add(self, name: str, amount: int) -> None:
        self._metrics = merge([self._metrics, {name: Sum(amount)}])
        trace.note(**{name.rpartition("/")[2]: amount})
