"""The control group: ranks exchange the status of each stage, so that all leave it together.

It is a gloo group of its own. A failing rank must report while the training group waits in a
collective, and on GPUs a status must not queue behind NCCL kernels.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from hybridrl.diagnostics import activity
from hybridrl.errors import DeadlineError, EngineError, PhaseError

log = logging.getLogger(__name__)
T = TypeVar("T")

Failures = Mapping[int, str]

_PATIENCE = 1.5
"""Ranks wait for each other this many times as long as each may wait for its engine."""


@dataclass(frozen=True, slots=True)
class Limit:
    """How long ranks wait for each other after work that takes longer than a stage."""

    timeout_s: float
    key: str  # configuration key to raise if that is too short


class StageError(EngineError):
    """A stage failed on some ranks or engines; the same error is raised on all of them."""

    def __init__(self, stage: str, failures: Failures, *, of: str = "rank") -> None:
        parts = "; ".join(f"{of} {index}: {reason}" for index, reason in sorted(failures.items()))
        super().__init__(f"{stage} failed on {parts}")
        self.stage = stage
        self.failures = dict(failures)


class ControlGroup:
    """Status exchange between all ranks of a worker group, with a deadline."""

    def __init__(self, *, timeout_s: float) -> None:
        """Create the group; a collective call when ``torch.distributed`` is initialised."""
        self.timeout_s = timeout_s
        """Seconds that a rank's own work in a stage may take (``rollout.stage_timeout_s``). The
        others wait half as long again, so that a late rank can still report the reason."""
        self._wait_s = timeout_s * _PATIENCE
        self._subgroups: dict[range, dist.ProcessGroup] = {}
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._group = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=self._wait_s))
            if self.world_size > 1
            else None
        )

    def exchange(
        self, stage: str, error: BaseException | None, *, limit: Limit | None = None
    ) -> Failures:
        """Return failed ranks with their reasons, the same on every rank; empty if all is well.

        ``error`` is the failure of this rank; ``limit`` is for work that takes longer than a stage.
        A DeadlineError if a rank is late, a PhaseError if one is at another stage.
        """
        reason = None if error is None else f"{type(error).__name__}: {error}"
        if error is not None:
            # The other ranks, and the error that all raise, have the reason but not the traceback.
            log.warning("stage failed here: stage=%s error=%s", stage, reason, exc_info=error)
        if limit is not None:
            self.meet(stage, limit)
        if not self.is_true_anywhere(stage, flag=reason is not None):
            return {}
        reasons = self._gather(stage, reason)
        return {rank: text for rank, text in enumerate(reasons) if text is not None}

    def is_true_anywhere(self, stage: str, *, flag: bool) -> bool:
        """Return, on every rank, whether ``flag`` is True on any. Fails as ``largest`` does."""
        return bool(self.largest(stage, int(flag)))

    def largest(self, stage: str, value: int) -> int:
        """Return the largest ``value`` of all ranks (24 bytes travel). Fails as ``exchange``."""
        if self._group is None:
            return value
        stage_id = zlib.crc32(stage.encode())
        votes = torch.tensor([value, stage_id, -stage_id])
        with self._deadline(stage):
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group)
        largest, highest_id, minus_lowest_id = (int(vote) for vote in votes)
        if highest_id != -minus_lowest_id:
            raise PhaseError(
                f"rank {self.rank} is at stage {stage!r} and another rank is not; all "
                f"{self.world_size} ranks must enter and leave a rollout phase together"
            )
        return largest

    def subgroup(self, ranks: range) -> dist.ProcessGroup:
        """Return the gloo group of some ranks; a collective call of these the first time.

        All of them must have made equally many groups: torch names such a group by their number.
        """
        if ranks not in self._subgroups:
            # Where the default group is bound to a GPU (checkpointed.py), torch lets each rank that
            # is asked and no member split the NCCL communicator, and no member of a gloo group
            # does: they would wait for each other. So the members alone are asked.
            self._subgroups[ranks] = dist.new_group(
                list(ranks),
                backend="gloo",
                timeout=timedelta(seconds=self._wait_s),
                use_local_synchronization=True,
            )
        return self._subgroups[ranks]

    def gather(self, stage: str, value: T) -> list[T]:
        """Return, on every rank, the ``value`` of each. Fails as ``largest`` does."""
        self.largest(stage, 0)
        return self._gather(stage, value)

    def _gather(self, stage: str, value: T) -> list[T]:
        values = [value] * self.world_size
        if self._group is not None:
            with self._deadline(stage):
                dist.all_gather_object(values, value, group=self._group)
        return values

    def gather_on_first(self, ranks: range, item: T) -> list[T]:
        """Return, on the first of ``ranks``, the items of all in order; elsewhere nothing."""
        if len(ranks) == 1:
            return [item]
        items: list[T] | None = [item] * len(ranks) if self.rank == ranks.start else None
        group = self.subgroup(ranks)
        with self._deadline("gather of offers"):
            dist.gather_object(item, items, dst=ranks.start, group=group)
        return items or []

    def meet(self, work: str, limit: Limit) -> None:
        """Wait until all ranks have done ``work``; DeadlineError if one is later than ``limit``."""
        if self._group is None:
            return
        # Not dist.barrier, which has no timeout of its own. Nor dist.monitored_barrier, where all
        # ranks wait for rank 0 no longer than the group's timeout.
        options = dist.BarrierOptions()
        options.timeout = timedelta(seconds=limit.timeout_s)
        with self._deadline(work, limit):
            self._group.barrier(options).wait()

    @contextmanager
    def _deadline(self, stage: str, limit: Limit | None = None) -> Iterator[None]:
        """Turn the timeout of a collective into a DeadlineError that names ``stage``."""
        limit = limit or Limit(self._wait_s, "rollout.stage_timeout_s")
        try:
            with activity.scope(f"wait for all ranks after {stage}", waits=True):
                yield
        except RuntimeError as err:
            raise DeadlineError(
                f"{stage}: not all {self.world_size} ranks answered within {limit.timeout_s:g} s; "
                f"a rank died or is stuck. If the stage is only slow, raise {limit.key}"
            ) from err

    def everywhere(self, stage: str, action: Callable[[], T], *, limit: Limit | None = None) -> T:
        """Run ``action`` on every rank, wait for all; StageError on all if it failed on any."""
        result, error = attempt(action)
        failures = self.exchange(stage, error, limit=limit)
        if failures:
            raise StageError(stage, failures) from error
        return result  # type: ignore[return-value]  # no failure anywhere, so none here


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Run ``action`` and return its error: the others must get it before it is raised."""
    try:
        return action(), None
    except Exception as err:
        return None, err
