"""A call that failed on some ranks becomes one error, for the person at the driver."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
    WorkerCrashedError,
)

from hybridrl.diagnostics.process_report import (
    RankReport,
    attach_reports,
    describe_ranks,
    failed_ranks_first,
)
from hybridrl.errors import DeadlineError, RemoteCallError, WorkerDiedError, is_peer_failure

_MISSING_MODULE = re.compile(r"No module named '([\w.]+)'")
STORE_IS_FULL = (
    "the object store and the disk under it are full, so a batch or a result has no place; free "
    "space in Ray's folder (/tmp/ray, or in RAY_TMPDIR), or give the store more memory: "
    "RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION=0.5 (0.3 of the machine's is usual), with "
    "cluster.ray_address `ray start --object-store-memory=BYTES`"
)
_OUT_OF_MEMORY = (
    "Ray's memory monitor killed its process, because the node ran out of memory; lower "
    "actor.max_tokens_per_microbatch or rollout.num_slots, or run fewer ranks a node. Ray says:"
)
_GONE = (
    "its process is gone: it was killed, ran out of memory, or its node was lost; look at the "
    "memory of the node first. Ray says:"
)
_NOISE = re.compile(r"\x1b\[[0-9;]*m|^[ ^~]*\^[ ^~]*\n", re.MULTILINE)
"""Colours, and the carets of the frames that Ray drops."""

_DEATHS = (RayActorError, WorkerCrashedError, OutOfMemoryError)
"""Exceptions of Ray for a rank whose process has died."""

_FETCH_S = 5.0


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A call that raised on at least one rank, once every rank had its chance to return."""

    method: str
    hosts: Sequence[str]
    """By rank."""
    failures: Mapping[int, Exception]
    """By rank, in order of failure: later errors are mostly consequences of the first."""
    late: Sequence[int]
    """Ranks that did not return: most likely in a collective that waits for a failed rank."""

    @property
    def dead(self) -> list[int]:
        """Ranks whose process has died."""
        return [rank for rank, error in self.failures.items() if isinstance(error, _DEATHS)]

    @property
    def failed_ranks(self) -> list[int]:
        """Ranks that failed, sorted by cause: dead ranks, then ranks whose error is their own.

        A death breaks the collectives of the others, whose errors can arrive before it is known.
        """
        dead = self.dead
        return sorted(
            self.failures,
            key=lambda rank: (rank not in dead, is_peer_failure(_cause(self.failures[rank]))),
        )

    def error(self, reports: Sequence[RankReport] = ()) -> RemoteCallError | DeadlineError:
        """Return one error for the rank at fault, with notes on the others and reports of all.

        A ``DeadlineError`` if every rank that raised had given up waiting for ranks that hang.
        """
        first, *others = self.failed_ranks
        late = failed_ranks_first(reports, self.late)
        gave_up = self.late and not self.dead and is_peer_failure(_cause(self.failures[first]))
        error: RemoteCallError | DeadlineError
        if gave_up:
            rank = late[0].rank if late else self.late[0]
            error = DeadlineError(
                f"rank {rank} on {self.hosts[rank]} hangs in {self.method}(): others gave up "
                f"waiting for it, and the group was stopped{describe_ranks(late)}"
            )
            others = [first, *others]
        else:
            error = self._of_rank(first, reports)
        verb = "gave up" if gave_up else "failed too"
        for rank in others:
            cause = _describe(self.failures[rank])
            error.add_note(f"rank {rank} on {self.hosts[rank]} {verb}: {cause}")
        if self.late and not gave_up:
            where = describe_ranks([report for report in late if report.rank in self.late])
            error.add_note(f"ranks {list(self.late)} did not return and were stopped{where}")
        attach_reports(error, reports)
        return error

    def _of_rank(self, rank: int, reports: Sequence[RankReport]) -> RemoteCallError:
        failure = self.failures[rank]
        is_death = isinstance(failure, _DEATHS)
        report = next((report for report in reports if report.rank == rank), None)
        error = (WorkerDiedError if is_death else RemoteCallError)(
            rank=rank,
            host=self.hosts[rank],
            method=self.method,
            cause=_describe_death(failure, report) if is_death else _describe(failure),
            traceback=_NOISE.sub("", str(failure)),
        )
        # So that `except RemoteCallError as e: e.__cause__` is the very exception of the worker.
        error.__cause__ = _cause(failure)
        error.is_peer_failure = is_peer_failure(error.__cause__)
        return error


def wait_for_ranks(
    refs: Sequence[Any], method: str, hosts: Sequence[str], *, grace_s: float
) -> FailedCall:
    """Wait until every rank returned, at most ``grace_s`` seconds, and gather the failures."""
    failures = _failures(refs, _returned(refs, 0.0))
    returned = _returned(refs, grace_s)
    failures |= _failures(refs, [rank for rank in returned if rank not in failures])
    late = [rank for rank in range(len(refs)) if rank not in returned]
    return FailedCall(method, hosts, failures, late)


def _describe_death(error: Exception, report: RankReport | None) -> str:
    # Ray's own message, which follows as the traceback, gives neither a meaning nor a remedy.
    if (missing := _MISSING_MODULE.search(str(error))) is not None:
        return _name_missing(missing[1])
    if isinstance(error, OutOfMemoryError):
        return _OUT_OF_MEMORY
    if report is None or not report.is_gone:
        return _GONE
    memory = f", memory {report.memory[-1][1] / 2**30:.2f} GiB" if report.memory else ""
    return (
        f"its process is gone: pid {report.pid}, {report.exit}; it did: {report.where}{memory}. "
        "Ray says:"
    )


def _cause(error: Exception) -> Exception:
    return error.cause if isinstance(error, RayTaskError) else error


def _describe(error: Exception) -> str:
    if isinstance(error, _DEATHS):
        return "its process is gone"
    cause = _cause(error)
    missing = _MISSING_MODULE.search(str(error))
    if missing is not None and isinstance(cause, RaySystemError):
        return _name_missing(missing[1])
    if isinstance(cause, OutOfDiskError):
        return STORE_IS_FULL
    text = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {text[0] if text else ''}"


def _name_missing(module: str) -> str:
    return (
        f"its node has no Python module {module!r}; install it on every node, or send it "
        "along with `ray job submit --working-dir FOLDER` (docs/multi-node.md). Ray says:"
    )


def _returned(refs: Sequence[Any], wait_s: float) -> list[int]:
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=wait_s, fetch_local=False)
    return [rank for rank, ref in enumerate(refs) if ref in set(done)]


def _failures(refs: Sequence[Any], ranks: Sequence[int]) -> dict[int, Exception]:
    failures: dict[int, Exception] = {}
    for rank in ranks:
        try:
            ray.get(refs[rank], timeout=_FETCH_S)
        except GetTimeoutError:
            continue  # it returned, and its node sends the result slowly: the rank is fine
        except RayError as error:
            failures[rank] = error
    return failures
