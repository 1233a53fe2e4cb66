"""What went wrong on a rank, told so that the person at the driver can act on it."""

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

from hybridrl.diagnostics.process_report import RankReport
from hybridrl.diagnostics.rank_monitor import describe_ranks, find_culprits
from hybridrl.errors import DeadlineError, RemoteCallError, WorkerDiedError, is_peer_failure

_MISSING_MODULE = re.compile(r"No module named '([\w.]+)'")
STORE_IS_FULL = (
    "the object store and the disk under it are full, so a batch or a result has no place; free "
    "space in Ray's folder (/tmp/ray), or give the store more memory: cluster.object_store_mib=N, "
    "with cluster.ray_address `ray start --object-store-memory=BYTES` on each node"
)

_NOISE = re.compile(r"\x1b\[[0-9;]*m|^[ ^~]*\^[ ^~]*\n", re.MULTILINE)
"""Colours, and the carets that Ray leaves of the frames it drops."""

_DEATHS = (RayActorError, WorkerCrashedError, OutOfMemoryError)
"""What Ray raises when the process of a rank is gone."""
_FETCH_S = 5.0


@dataclass(frozen=True, slots=True)
class Settled:
    """The state of a failed call once every rank had its chance to return."""

    failures: Mapping[int, Exception]
    """By rank."""
    late: Sequence[int]
    """Ranks that did not return: most likely in a collective that waits for the one that failed."""

    @property
    def dead(self) -> list[int]:
        """Ranks whose process is gone."""
        return [rank for rank, error in self.failures.items() if isinstance(error, _DEATHS)]

    @property
    def roots(self) -> list[int]:
        """Ranks that failed, those at fault first: the dead, then who failed of its own accord.

        A death breaks the collectives of the others, whose errors can arrive before it is known.
        """
        dead = self.dead
        return sorted(
            self.failures,
            key=lambda rank: (rank not in dead, _is_consequence(self.failures[rank])),
        )


def settle(refs_by_rank: Mapping[int, Any], grace_s: float) -> Settled:
    """Wait until every rank returned, at most ``grace_s`` seconds, and gather what failed.

    Args:
        refs_by_rank: the pending results of one call.
        grace_s: seconds.
    """
    # The first to fail comes first in `failures`: what follows is mostly its consequence.
    failures = _failures_among(refs_by_rank, _done(refs_by_rank, 0.0))
    done = _done(refs_by_rank, grace_s)
    failures |= _failures_among(refs_by_rank, [rank for rank in done if rank not in failures])
    return Settled(failures, [rank for rank in refs_by_rank if rank not in done])


def call_error(
    settled: Settled, hosts: Sequence[str], method: str, *, reports: Sequence[RankReport] = ()
) -> RemoteCallError | DeadlineError:
    """Return one error for the rank at the root; notes on it tell of the other ranks.

    Args:
        settled: with at least one failure.
        hosts: by rank.
        method: name, for the message.
        reports: of all ranks, if somebody looked.

    Returns:
        A ``DeadlineError`` if all that raised had given up waiting for ranks that hang.
    """
    failed_ranks = find_culprits(reports, settled.late)
    roots = settled.roots
    if settled.late and not settled.dead and _is_consequence(settled.failures[roots[0]]):
        return _hang(settled, hosts, method, failed_ranks=failed_ranks)
    rank = roots[0]
    report = next((report for report in reports if report.rank == rank), None)
    error = _translate(
        settled.failures[rank], rank=rank, host=hosts[rank], method=method, report=report
    )
    for other in roots[1:]:
        cause = _one_line(settled.failures[other])
        error.add_note(f"rank {other} on {hosts[other]} failed too: {cause}")
    if settled.late:
        where = describe_ranks([report for report in failed_ranks if report.rank in settled.late])
        error.add_note(f"ranks {list(settled.late)} did not return and were stopped{where}")
    return error


def _hang(
    settled: Settled, hosts: Sequence[str], method: str, *, failed_ranks: Sequence[RankReport]
) -> DeadlineError:
    late = [report.rank for report in failed_ranks] or list(settled.late)
    error = DeadlineError(
        f"rank {late[0]} on {hosts[late[0]]} hangs in {method}(): others gave up waiting for it, "
        f"and the group was stopped{describe_ranks(failed_ranks)}"
    )
    for rank in settled.roots:
        cause = _one_line(settled.failures[rank])
        error.add_note(f"rank {rank} on {hosts[rank]} gave up: {cause}")
    return error


def _translate(
    error: Exception, *, rank: int, host: str, method: str, report: RankReport | None
) -> RemoteCallError:
    is_death = isinstance(error, _DEATHS)
    cls = WorkerDiedError if is_death else RemoteCallError
    translated = cls(
        rank=rank,
        host=host,
        method=method,
        cause=_describe_death(error, report) if is_death else _one_line(error),
        traceback=_NOISE.sub("", str(error)),
    )
    # So that `except RemoteCallError as e: e.__cause__` is the very exception of the worker.
    translated.__cause__ = error.cause if isinstance(error, RayTaskError) else error
    return translated


def _describe_death(error: Exception, report: RankReport | None) -> str:
    # Ray's own words, which follow as the traceback, tell neither what it means nor what helps.
    if (missing := _MISSING_MODULE.search(str(error))) is not None:
        return _name_missing(missing[1])
    if isinstance(error, OutOfMemoryError):
        return (
            "Ray's memory monitor killed its process, because the node ran out of memory; lower "
            "actor.max_tokens_per_microbatch or rollout.num_slots, or run fewer ranks a node. "
            "Ray says:"
        )
    if report is None or not report.is_gone:
        return (
            "its process is gone: it was killed, ran out of memory, or its node was lost; look at "
            "the memory of the node first. Ray says:"
        )
    memory = f", memory {report.memory[-1][1] / 2**30:.2f} GiB" if report.memory else ""
    return (
        f"its process is gone: pid {report.pid}, {report.exit}; it did: {report.where}{memory}. "
        "Ray says:"
    )


def _is_consequence(error: Exception) -> bool:
    return is_peer_failure(_one_line(error))


def _one_line(error: Exception) -> str:
    if isinstance(error, _DEATHS):
        return "its process is gone"
    cause = error.cause if isinstance(error, RayTaskError) else error
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


def _done(refs_by_rank: Mapping[int, Any], wait_s: float) -> list[int]:
    refs = list(refs_by_rank.values())
    done, _ = ray.wait(refs, num_returns=len(refs), timeout=wait_s, fetch_local=False)
    return [rank for rank, ref in refs_by_rank.items() if ref in set(done)]


def _failures_among(refs_by_rank: Mapping[int, Any], ranks: list[int]) -> dict[int, Exception]:
    failures: dict[int, Exception] = {}
    for rank in ranks:
        try:
            ray.get(refs_by_rank[rank], timeout=_FETCH_S)
        except GetTimeoutError:
            continue  # it returned, and its node is slow to send what: no failure of the rank
        except RayError as error:
            failures[rank] = error
    return failures
