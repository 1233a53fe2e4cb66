"""The rollout engines of a fused worker group as one set: each rank starts and drives its own."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from hybridrl.config.rollout import RolloutConfig
from hybridrl.config.topology import LedDevices
from hybridrl.diagnostics import trace
from hybridrl.errors import EngineError, PhaseError
from hybridrl.metrics import Metrics, Sum, merge
from hybridrl.models.load import DTYPES
from hybridrl.workers.rollout.protocol import RolloutEngine, WeightSender, stage_time
from hybridrl.workers.sharding.control import ControlGroup, Failures, Limit, StageError, attempt
from hybridrl.workers.sharding.lifecycle import RESTART, SYNC
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.publishing import Publisher
from hybridrl.workers.sharding.weight_files import FROZEN_VERSION, folder_on_each_node, load_weights
from hybridrl.workers.sharding.weight_stream import (
    Load,
    StreamReport,
    bucket_bytes_for,
    common_bucket_bytes,
    stream_weights,
)
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import WeightSet

_START = "start of the rollout engines"


class FusedEngines:
    """``LifeCycleMembers`` that live in the ranks of one worker group.

    Adjacent ranks share an engine, which the first one owns; all take part in every exchange and
    gather. Frozen engines have the weights of their folder, and a host copy while they sleep.
    """

    def __init__(
        self,
        managed: ManagedEngine | None,
        *,
        engines: Sequence[LedDevices],
        config: RolloutConfig,
        device: torch.device,
        control: ControlGroup,
        others: Publisher | None = None,
        follower: WeightSender | None = None,
    ) -> None:
        """Assemble the set of all ranks' ``engines``; this rank owns ``managed``, or none.

        ``others`` brings the weights to engines that no rank owns. ``follower`` stages the bytes of
        a rank that shares an engine and owns none, if needed.
        """
        self.managed = managed
        self.num_engines = len(engines)
        self._engines = engines
        self._index_of = {rank: i for i, engine in enumerate(engines) for rank in engine.ranks}
        self._own_index = self._index_of.get(control.rank)
        own = None if self._own_index is None else engines[self._own_index]
        self._ranks = None if own is None else own.ranks
        self._folder = None if own is None else own.folder
        self._learns = managed if self._folder is None else None
        """The engine of this rank, if it gets the weights of the policy."""
        self._policy = [index for index, engine in enumerate(engines) if engine.folder is None]
        self._frozen = [index for index, engine in enumerate(engines) if engine.folder is not None]
        self.has_frozen = bool(self._frozen)
        """Whether some are frozen models, which answer after a phase, too."""
        self.trained_version = 0
        self._synced_version: int | None = None
        self._source: PolicyEngine | None = None
        self._names: dict[WeightSet, frozenset[str]] = {}
        self._config = config
        self._dtype = DTYPES[config.dtype]
        self._device = device
        self._control = control
        self._others = others
        self._sender = follower if self._learns is None else self._learns.engine
        self._metrics: Metrics = {}
        self._unanswered_bytes = 0

    def attach(self, source: PolicyEngine, *, resends_base: bool) -> None:
        """Make ``source`` the training engine whose weights a sync sends.

        With ``resends_base`` weights that no step changes are sent again after their release,
        instead of being kept on the host.
        """
        self._source = source
        self._names = {
            part: frozenset(spec.name for spec in source.weight_specs(part))
            for part in source.weight_sets
        }
        if self._learns is not None:
            resent = source.weight_sets if resends_base else source.weight_sets[-1:]
            self._learns.sent_names = frozenset().union(*(self._names[part] for part in resent))

    def run(
        self,
        stage: str,
        action: Callable[[ManagedEngine], object],
        *,
        members: Collection[int],
        loads_files: bool = False,
    ) -> Failures:
        """Run ``action`` on the engines ``members``; every rank gets the failed ones."""
        managed, error = self.managed, None
        is_start = stage == RESTART.name
        limit = start_limit(self._config) if is_start or loads_files else None
        own_s = self._config.start_timeout_s if loads_files else self._control.timeout_s
        if managed is not None and self._own_index in members:
            with nullcontext() if is_start else stage_time(own_s):
                _, error = attempt(lambda: action(managed))
        return self._of_engines(self._control.exchange(stage, error, limit=limit))

    def require_source(self) -> PolicyEngine:
        """Return the training engine whose weights a sync sends; PhaseError before ``attach``."""
        if self._source is None:
            raise PhaseError("there are no weights to sample from: call attach_policy first")
        return self._source

    def sync(self) -> Failures:
        """Bring the weights to all engines that lack them; a StageError if other ranks failed."""
        source = self.require_source()
        failures = self._load_frozen()
        if self._policy and not failures:
            unproved = self._unproved()
            if unproved:
                failures = self._load_reference(source, unproved)
            failures = failures or self._stream(source)
            if unproved and not failures:
                verify = ManagedEngine.verify_weights
                failures = self.run("compare_weights", verify, members=unproved)
        if not failures and self._others is not None:
            self._others.bring(source, version=self.trained_version)
        return failures

    def _load_frozen(self) -> Failures:
        """Let frozen models read their folders that have no copy on the host: new engines."""
        managed, folder = self.managed, self._folder
        lacks = managed is not None and folder is not None and not managed.ledger.is_covered
        stage = "load_frozen"
        if not self._frozen or not self._control.is_true_anywhere(stage, flag=lacks):
            return {}

        def load(managed: ManagedEngine) -> None:
            if folder is not None and lacks:
                size = bucket_bytes_for(self._config.bucket_mib, self._device)
                load_weights(managed, source=folder, version=FROZEN_VERSION, bucket_bytes=size)

        return self.run(stage, load, members=self._frozen, loads_files=True)

    def _stream(self, source: PolicyEngine) -> Failures:
        """Stream the weight sets one by one, base before adapter.

        The last set changes in every step: it is sent unless all engines hold this version. The set
        before it is sent if an engine has lost it or never had it.
        """
        due = [part for part in source.weight_sets if self._is_due(part, source.weight_sets[-1])]
        if not due:
            return {}
        self._synced_version = None
        num_bytes = 0
        for part in due:
            report = self._send(part, source)
            if report.failures:
                return self._of_engines(report.failures)
            num_bytes += 0 if self._learns is None else report.num_bytes
        if WeightSet.ADAPTER in due:
            load = partial(ManagedEngine.load_adapter, version=self.trained_version)
            if failures := self.run("load_adapter", load, members=self._policy):
                return failures
        failures = self.run(
            "finish_sync",
            partial(ManagedEngine.finish_update, version=self.trained_version),
            members=self._policy,
            loads_files=self._config.transport == "disk",
        )
        if not failures:
            self._synced_version = self.trained_version
            self._metrics = merge([self._metrics, {"memory/synced_bytes": Sum(num_bytes)}])
            trace.note(synced_bytes=num_bytes)
        return failures

    def take_metrics(self) -> Metrics:
        """Return the metrics of the syncs since the last call, and reset them."""
        metrics, self._metrics = [self._metrics], {}
        metrics += [] if self.managed is None else [self.managed.take_metrics()]
        metrics += [] if self._others is None else [self._others.take_metrics()]
        return merge(metrics)

    def close(self) -> None:
        """End this rank's engine, and leave the others. Idempotent."""
        if self._others is not None:
            self._others.close()
        if self.managed is not None:
            self.managed.engine.shutdown()

    def _unproved(self) -> list[int]:
        """Return, alike on all ranks, the engines whose next weights are compared."""
        is_unproved = self._learns is not None and self._learns.is_proof_due
        stage = "proof needed"
        is_off = self._config.verify_weights == "never"
        if is_off or not self._control.is_true_anywhere(stage, flag=is_unproved):
            return []
        flags = self._control.gather(stage, is_unproved)
        return [self._index_of[rank] for rank, flag in enumerate(flags) if flag]

    def _load_reference(self, source: PolicyEngine, unproved: Sequence[int]) -> Failures:
        """Write the weights to files first, and let engines load them from there."""
        leaders = [self._engines[engine].leader for engine in unproved]
        with folder_on_each_node(leaders, dtype=self._dtype, control=self._control) as made:
            folder, path = made
            weights = source.full_weights(source.weight_sets[0], dtype=self._dtype)
            report = self._send_to(None if folder is None else folder.write, weights)
            if report.failures:
                return self._of_engines(report.failures)

            def load(managed: ManagedEngine) -> None:
                if path is not None:  # every rank with an unverified engine has the path
                    managed.load_reference_weights(path)

            return self.run("load_reference_weights", load, members=unproved, loads_files=True)

    def _send(self, part: WeightSet, source: PolicyEngine) -> StreamReport:
        managed, load = self._learns, None
        is_adapter = part is WeightSet.ADAPTER
        if managed is not None:
            managed.begin_part(self._names[part])
            load = managed.keep_adapter if is_adapter else managed.load
        weights = source.full_weights(part, dtype=None if is_adapter else self._dtype)
        return self._send_to(load, weights, sender=None if is_adapter else self._sender)

    def _send_to(
        self,
        load: Load | None,
        weights: Iterator[tuple[str, Tensor]],
        *,
        sender: WeightSender | None = None,
    ) -> StreamReport:
        size = common_bucket_bytes(self._config.bucket_mib, self._device, control=self._control)
        report = stream_weights(
            weights,
            load,
            sender=sender,
            bucket_bytes=size,
            control=self._control,
            ranks=self._ranks,
        )
        self._unanswered_bytes += report.unanswered_bytes
        return report

    def torch_bytes(self) -> int:
        """Return this process's memory of engines: of an embedded one, and what torch keeps.

        It keeps buckets on a GPU whose handle a server got, and did not load.
        """
        is_embedded = self._config.engine == "hf"
        own_bytes = self.managed.resident_bytes() if self.managed and is_embedded else 0
        return own_bytes + self._unanswered_bytes

    def _is_due(self, part: WeightSet, trained: WeightSet) -> bool:
        """Return, alike on all ranks, whether an engine of any rank lacks the weight set."""
        ledger = None if self._learns is None else self._learns.ledger
        is_due = ledger is not None and not ledger.covers(self._names[part])
        if part is trained:
            is_due |= self._synced_version != self.trained_version
            is_due |= ledger is not None and not ledger.is_covered  # finish_sync raises the error
        return self._control.is_true_anywhere(f"sync of {part.value} needed", flag=is_due)

    def _of_engines(self, failures: Failures) -> Failures:
        """Name engines instead of ranks; of several failed ranks of one engine the first counts."""
        if not failures.keys() <= self._index_of.keys():
            raise StageError(SYNC.name, failures)
        return {self._index_of[rank]: failures[rank] for rank in sorted(failures, reverse=True)}


def start_limit(config: RolloutConfig) -> Limit:
    """Return how long ranks wait for an engine that starts or loads files, and control calls."""
    return Limit(config.start_timeout_s + config.stage_timeout_s, "rollout.start_timeout_s")


def start_engine(
    build: Callable[[], RolloutEngine] | None,
    *,
    ranks: range | None,
    config: RolloutConfig,
    control: ControlGroup,
) -> RolloutEngine | None:
    """Start the engine of this rank by ``build``, and wait until all have started.

    A collective call. ``ranks`` are those that share an engine with this one. All raise the error
    of the first rank that failed, and engines that did start are ended; a DeadlineError if a rank
    is later than ``rollout.start_timeout_s`` after the first.
    """
    if ranks is not None and len(ranks) > 1:
        # Now, while all ranks are here: to make a group, ranks wait for each other no longer than
        # a stage, and to start a server takes longer.
        control.subgroup(ranks)
    engine, error = (None, None) if build is None else attempt(build)
    # One that cannot be pickled and read again travels as its words, in an error of ours.
    _, unfit = attempt(lambda: pickle.loads(pickle.dumps(error)))
    sent = error if unfit is None else EngineError(f"{type(error).__name__}: {error}")
    control.meet(_START, start_limit(config))
    errors = control.gather(_START, sent)
    failed = [(rank, known) for rank, known in enumerate(errors) if known is not None]
    if not failed:
        return engine
    if engine is not None:
        engine.shutdown()
    rank, known = failed[0]
    known.add_note(f"the rollout engine of rank {rank} did not start")
    raise known from error
