"""The engines of the ranks in the hands of the rollout manager: within a rollout phase alone.

The ranks hold the device and lead the engines; the manager has the requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from hybridrl.batch import PromptBatch
from hybridrl.metrics import Metrics
from hybridrl.sampler import Sample, SamplingParams
from hybridrl.workers.rollout.protocol import RolloutEngine
from hybridrl.workers.rollout.request_listener import RequestListener
from hybridrl.workers.sharding.control import ControlGroup, StageError, attempt
from hybridrl.workers.sharding.served_engines import Servers

log = logging.getLogger(__name__)

_OPEN = "open the engines"
_TAKE_BACK = "take the engines back"


class LentEngines:
    """Lends the engines in each rollout phase. ``sample`` is a collective call."""

    def __init__(
        self,
        servers: Servers,
        *,
        listener: RequestListener | None,
        engine: RolloutEngine | None,
        control: ControlGroup,
        mark_lost: Callable[[Collection[int]], None],
    ) -> None:
        """Lend nothing yet.

        Args:
            servers: that get the requests.
            listener: for requests to the engine of this rank; None on a rank without one.
            engine: of this rank; None likewise.
            mark_lost: takes the engines of the group that were lost; called on all ranks alike.
        """
        self._servers = servers
        self._listener = listener
        self._engine = engine
        self._control = control
        self._mark_lost = mark_lost

    def sample(
        self, prompts: PromptBatch, sampling: SamplingParams, *, version: int
    ) -> tuple[list[Sample], Metrics] | None:
        """Let the manager sample with the engines of all ranks; see ``Servers.sample``.

        Call it within a rollout phase: all engines serve the newest weights. When it returns, on
        all ranks alike, no request is open, and engines that were lost are known as such.

        Returns:
            Rank 0: samples and metrics. Others: None.

        Raises:
            StageError: an engine cannot be asked.
            EngineError: on rank 0, as ``Servers.sample``.
            DeadlineError: a rank is gone, or late.
        """
        listener = self._listener
        url, error = (None, None) if listener is None else attempt(listener.open)
        try:
            failures = self._control.exchange(_OPEN, error)
            if failures:
                raise StageError(_OPEN, failures)
            urls = [known for known in self._control.gather(_OPEN, url) if known is not None]
            try:
                if self._control.rank:
                    return None
                return self._servers.sample(prompts, sampling, version=version, fused=urls)
            finally:
                self._control.meet(
                    "generate", timeout_s=self._servers.timeout_s, key="cluster.call_timeout_s"
                )
        finally:
            self._take_back()

    def end(self) -> None:
        """Listen no more on this rank. Idempotent, and no collective call."""
        if self._listener is not None:
            self._listener.end()

    def _take_back(self) -> None:
        """Let all ranks know which engines the manager lost, and which are gone."""
        reported: Collection[int] = ()
        if not self._control.rank:
            answer, error = attempt(self._servers.lost_engines)
            if answer is None:
                log.warning("the manager does not say which engines it lost: %s", error)
            reported = answer or ()
        is_gone = self._is_gone()
        if not self._control.is_true_anywhere(_TAKE_BACK, flag=bool(reported or is_gone)):
            return
        reports = self._control.gather(_TAKE_BACK, tuple(reported))
        gone = self._control.gather(_TAKE_BACK, is_gone)
        of_engines = [flag for flag in gone if flag is not None]
        self._mark_lost(
            sorted({*reports[0], *(index for index, flag in enumerate(of_engines) if flag)})
        )

    def _is_gone(self) -> bool | None:
        """Close the engine of this rank; return whether that, or the engine, fails. None: no one.

        No error may leave this: the other ranks are about to exchange what they know.
        """
        if self._listener is None or self._engine is None:
            return None
        for work in (self._listener.close, self._engine.progress):
            _, error = attempt(work)
            if error is not None:
                log.warning("the engine of this rank is gone: %s", error)
                return True
        return False
