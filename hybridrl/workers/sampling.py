"""Who samples for the ranks: each rank on the engine that it owns, or the rollout manager."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from hybridrl.agents.rollout import AgentRollout
from hybridrl.batch import PromptBatch
from hybridrl.config.topology import LedDevices
from hybridrl.diagnostics import trace
from hybridrl.errors import PhaseError
from hybridrl.metrics import Metrics, merge
from hybridrl.sampler import SamplingParams
from hybridrl.workers.rollout.assemble import Answered
from hybridrl.workers.rollout.protocol import RolloutEngine
from hybridrl.workers.rollout.request_listener import RequestListener
from hybridrl.workers.rollout.single_turn import OpenResponses, single_turn
from hybridrl.workers.sharding.control import ControlGroup, Limit, attempt
from hybridrl.workers.sharding.manager import ShardingManager
from hybridrl.workers.sharding.manager_client import NOBODY, Lent, ManagerClient
from hybridrl.workers.sharding.meter import PeakMeter

log = logging.getLogger(__name__)

_OPEN = "open the engines"
_TAKE_BACK = "take the engines back"


class Sampling:
    """Samples within a rollout phase; all methods but ``close`` are collective calls.

    This one belongs to a rank without an engine that nobody asks.
    """

    def __init__(self) -> None:
        self._metrics: Metrics = {}

    def sample(
        self, prompts: PromptBatch, sampling: SamplingParams, *, version: int
    ) -> Answered | None:
        """Sample with the weights of this version; None where other ranks get the answers."""
        return None

    def exchange(
        self, prompts: PromptBatch | None, sampling: SamplingParams, *, version: int
    ) -> Answered | None:
        """Admit prompts, and wait for a batch; a PhaseError if nothing is sampled ahead."""
        raise PhaseError("the ranks have the rollout engines: nothing can be sampled ahead")

    def take_metrics(self) -> Metrics:
        """Return the metrics since the last call, and reset them."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def close(self) -> None:
        """End tools and listeners. Idempotent, and no collective call."""


class RankSampling(Sampling):
    """A rank asks the engine that it owns."""

    def __init__(
        self, engine: RolloutEngine, *, agent: AgentRollout | None, meter: PeakMeter
    ) -> None:
        super().__init__()
        self._engine = engine
        self._agent = agent
        self._meter = meter
        self._open = OpenResponses()

    def sample(
        self, prompts: PromptBatch, sampling: SamplingParams, *, version: int
    ) -> Answered | None:
        """See ``Sampling``."""
        with self._meter("generate"), trace.span("sample", prompts=len(prompts)):
            if sampling.num_complete is not None:
                program = self._open.program(prompts, sampling, interrupt=self._engine.interrupt)
                answered = self._engine.run(program)
                self._metrics = merge([self._metrics, self._open.metrics()])
                return answered
            make_program = self._agent.program if self._agent else single_turn
            answered = Answered(prompts, self._engine.run(make_program(prompts, sampling)))
        if self._agent is not None:
            self._metrics = merge([self._metrics, self._agent.take_metrics()])
        return answered

    def close(self) -> None:
        """See ``Sampling``."""
        if self._agent is not None:
            self._agent.close()


class ManagerSampling(Sampling):
    """Rank 0 asks the rollout manager, to which ranks lend their engines, if any, for the phase."""

    def __init__(
        self,
        servers: ManagerClient,
        *,
        engines: tuple[LedDevices, ...] = (),
        listener: RequestListener | None = None,
        engine: RolloutEngine | None = None,
        control: ControlGroup,
        sharding: ShardingManager,
    ) -> None:
        """Lend nothing yet; ``engines`` are those of all ranks.

        ``listener`` takes requests to the engine of this rank; None if it has none that answers.
        """
        super().__init__()
        self._servers = servers
        self._engines = engines
        self._listener = listener
        self._engine = engine
        self._control = control
        self._meter = sharding.meter
        self._mark_lost = sharding.mark_lost
        self._is_lent = False
        self._answering: dict[str, list[int]] = {}
        """Engines that answer requests, by model."""
        for index, each in enumerate(engines):
            if each.answers:
                self._answering.setdefault(each.model, []).append(index)
        sharding.end_requests = self.end_phase

    def sample(
        self, prompts: PromptBatch, sampling: SamplingParams, *, version: int
    ) -> Answered | None:
        """See ``Sampling``. StageError if an engine cannot be asked."""
        if not self._engines:
            return self._ask(prompts, sampling, version=version, lent=NOBODY)
        self._is_lent = True
        admit = (lambda: None) if self._listener is None else self._listener.open
        urls = self._control.gather(_OPEN, self._control.everywhere(_OPEN, admit))
        lent = {
            model: [str(urls[self._engines[index].leader]) for index in indexes]
            for model, indexes in self._answering.items()
        }
        try:
            return self._ask(prompts, sampling, version=version, lent=lent)
        finally:
            limit = Limit(self._servers.timeout_s, "cluster.call_timeout_s")
            self._control.meet("generate", limit)

    def _ask(
        self, prompts: PromptBatch, sampling: SamplingParams, *, version: int, lent: Lent
    ) -> Answered | None:
        if self._control.rank:
            return None
        with self._meter("generate"), trace.span("sample", prompts=len(prompts)):
            samples, metrics = self._servers.sample(prompts, sampling, version=version, lent=lent)
        self._metrics = merge([self._metrics, metrics])
        return Answered(prompts, samples)

    def exchange(
        self, prompts: PromptBatch | None, sampling: SamplingParams, *, version: int
    ) -> Answered | None:
        """See ``Sampling``."""
        if self._control.rank:
            return None
        with self._meter("generate"), trace.span("exchange"):
            answered, metrics = self._servers.exchange(prompts, sampling, version=version)
        self._metrics = merge([self._metrics, metrics])
        return answered

    def end_phase(self) -> None:
        """Close all lent engines, and let all ranks know which are lost. Idempotent.

        The manager says so, or they are gone. No more requests come until the next phase.
        """
        if not self._is_lent:
            return
        self._is_lent = False
        reported: Mapping[str, Collection[int]] = {}
        if not self._control.rank:
            answer, error = attempt(self._servers.lost_engines)
            if error is not None:
                log.warning("the manager does not say which engines it lost: %s", error)
            reported = answer or {}
        # No error may leave this: the other ranks are about to exchange what they know.
        _, error = attempt(self._close_engine)
        is_gone = error is not None
        if is_gone:
            log.warning("the engine of this rank is gone: %s", error)
        if not self._control.is_true_anywhere(_TAKE_BACK, flag=is_gone or any(reported.values())):
            return
        lost = {
            self._answering[model][number]
            for model, numbers in self._control.gather(_TAKE_BACK, dict(reported))[0].items()
            for number in numbers
        }
        gone = self._control.gather(_TAKE_BACK, is_gone)
        lost |= {index for index, engine in enumerate(self._engines) if gone[engine.leader]}
        self._mark_lost(sorted(lost))

    def close(self) -> None:
        """See ``Sampling``."""
        if self._listener is not None:
            self._listener.end()

    def _close_engine(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._engine is not None:
            self._engine.progress()
