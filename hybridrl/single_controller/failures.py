"""What went wrong on a rank, told so that the person at the driver can act on it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import (
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
)

from hybridrl.errors import RemoteCallError, WorkerDiedError

_MISSING_MODULE = re.compile(r"No module named '([\w.]+)'")
_GONE = (RayActorError, OutOfMemoryError)
"""What Ray raises when the process of a rank is gone."""
STORE_IS_FULL = (
    "the object store and the disk under it are full, so a batch or a result has no place; free "
    "space in Ray's folder (/tmp/ray), or give the store more memory: cluster.object_store_mib=N, "
    "with cluster.ray_address `ray start --object-store-memory=BYTES` on each node"
)

_NOISE = re.compile(r"\x1b\[[0-9;]*m|^[ ^~]*\^[ ^~]*\n", re.MULTILINE)
"""Colours, and the carets that Ray leaves of the frames it drops."""


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
        return [rank for rank, error in self.failures.items() if isinstance(error, _GONE)]


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


def remote_call_error(settled: Settled, hosts: Sequence[str], method: str) -> RemoteCallError:
    """Return one error for the rank at the root; a note on it lists the other ranks.

    Args:
        settled: with at least one failure.
        hosts: by rank.
        method: name, for the message.
    """
    # A death breaks the collectives of the others, whose errors can arrive before it is known.
    rank = (settled.dead or list(settled.failures))[0]
    error = _translate(settled.failures[rank], rank=rank, host=hosts[rank], method=method)
    for other, failure in settled.failures.items():
        if other != rank:
            error.add_note(f"rank {other} on {hosts[other]} failed too: {_one_line(failure)}")
    if settled.late:
        error.add_note(f"ranks {list(settled.late)} did not return and were stopped")
    return error


def _translate(error: Exception, *, rank: int, host: str, method: str) -> RemoteCallError:
    cls = WorkerDiedError if isinstance(error, _GONE) else RemoteCallError
    translated = cls(
        rank=rank,
        host=host,
        method=method,
        cause=_one_line(error),
        traceback=_NOISE.sub("", str(error)),
    )
    # So that `except RemoteCallError as e: e.__cause__` is the very exception of the worker.
    translated.__cause__ = error.cause if isinstance(error, RayTaskError) else error
    return translated


def _one_line(error: Exception) -> str:
    cause = error.cause if isinstance(error, RayTaskError) else error
    missing = _MISSING_MODULE.search(str(error))
    if missing is not None and isinstance(cause, (*_GONE, RaySystemError)):
        return (
            f"its node has no Python module {missing[1]!r}; install it on every node, or send it "
            "along with `ray job submit --working-dir FOLDER` (docs/multi-node.md). Ray says:"
        )
    if isinstance(error, OutOfMemoryError):
        return (
            "Ray's memory monitor killed its process, because the node ran out of memory; lower "
            "actor.max_tokens_per_microbatch or rollout.num_slots, or run fewer ranks a node. "
            "Ray says:"
        )
    if isinstance(error, RayActorError):
        # Ray's own words, which follow as the traceback, tell neither what it means nor what helps.
        return (
            "its process is gone: it was killed, ran out of memory, or its node was lost; look at "
            "the memory of the node first. Ray says:"
        )
    if isinstance(cause, OutOfDiskError):
        return STORE_IS_FULL
    text = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {text[0] if text else ''}"


def _done(refs_by_rank: Mapping[int, Any], wait_s: float) -> list[int]:
    refs = list(refs_by_rank.values())
    done, _ = ray.wait(refs, num_returns=len(refs), timeout=wait_s, fetch_local=False)
    return [rank for rank, ref in refs_by_rank.items() if ref in set(done)]


def _failures_among(refs_by_rank: Mapping[int, Any], ranks: list[int]) -> dict[int, Exception]:
    failures: dict[int, Exception] = {}
    for rank in ranks:
        try:
            ray.get(refs_by_rank[rank])
        except RayError as error:
            failures[rank] = error
    return failures
