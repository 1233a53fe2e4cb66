"""The actors of a group, one process per rank: start, order, wait for, stop."""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from hybridrl.diagnostics import trace
from hybridrl.diagnostics.process_report import (
    MonitoredRank,
    attach_reports,
    describe_ranks,
    failed_ranks_first,
)
from hybridrl.diagnostics.rank_monitor import RankMonitor
from hybridrl.errors import (
    ClusterLostError,
    DeadlineError,
    DispatchError,
    RemoteCallError,
    ResourceError,
    WorkerGroupError,
)
from hybridrl.network import rendezvous_address
from hybridrl.single_controller.dispatch import RankLayout
from hybridrl.single_controller.failures import wait_for_ranks
from hybridrl.single_controller.payload import install_reducers
from hybridrl.single_controller.resource_pool import RayResourcePool
from hybridrl.single_controller.worker import Location, MeshPosition, WorkerSpec, build_host_class

log = logging.getLogger(__name__)

_STOP_WAIT_S = 10.0
_FETCH_S = 60.0

# Measured with Ray 2.60: `ray.init` on an address without a listener retries for minutes. When the
# head of a running cluster is killed, calls on ranks of other nodes continue. After 60 s
# (RAY_gcs_rpc_server_reconnect_timeout_s) Ray ends the driver's process from C++: no exception, no
# exit handler. So the driver checks the head itself, more often than that.
PATIENCE_S = 20.0
"""Seconds of silence after which a head counts as lost; the remaining ones end the run."""

LOOK_EVERY_S = 5.0
_CONNECT_S = 2.0


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time limit of a call, and the key that sets it."""

    limit_s: float
    key: str
    at_s: float
    """On the clock of `time.monotonic`."""

    @classmethod
    def after(cls, limit_s: float, key: str) -> Deadline:
        """Return the deadline ``limit_s`` seconds from now."""
        return cls(limit_s, key, time.monotonic() + limit_s)

    @property
    def remaining_s(self) -> float:
        """Seconds left, not below 0."""
        return max(0.0, self.at_s - time.monotonic())


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """How long a group waits, in seconds, and the set-up of its processes."""

    timeout_s: float
    grace_s: float
    start_timeout_s: float
    env_vars: Mapping[str, str]
    set_up: Callable[[], object] | None = None
    """Called in each process before its workers are constructed."""


class RankActors:
    """Actors in rank order, shared by a group and the groups spawned from it.

    If a rank does not return from a failed or late call, all ranks are killed: nothing else frees
    a rank in a collective. From then on every call raises `WorkerGroupError`.
    """

    def __init__(
        self, pool: RayResourcePool, roles: Mapping[str, WorkerSpec], limits: GroupLimits
    ) -> None:
        self.limits = limits
        self.actors: list[Any] = []
        self.hosts: list[str] = []
        self._pool = pool
        self._layouts: dict[tuple[str, str | None], RankLayout] = {}
        self._why_unusable = ""
        self._head = HeadMonitor()
        self._watch = RankMonitor()
        host_class = build_host_class({prefix: role.cls for prefix, role in roles.items()})
        install_reducers()
        options = pool.lease()
        try:
            self._start(host_class, options)
            self._build(dict(roles))
        except BaseException:
            self.stop("its start failed")
            raise

    def _start(self, host_class: type, options: Sequence[dict[str, Any]]) -> None:
        deadline = Deadline.after(self.limits.start_timeout_s, "start_timeout_s")
        environment = {"env_vars": dict(self.limits.env_vars)} if self.limits.env_vars else {}
        actor_class = ray.remote(host_class)
        self.actors = [
            actor_class.options(**placed, runtime_env=environment).remote() for placed in options
        ]
        self.hosts = ["its node"] * len(self.actors)  # until they report it
        refs = [actor.host_locate.remote() for actor in self.actors]
        locations: list[Location] = self.gather(refs, method="start", deadline=deadline)
        order = rank_order(locations)
        self.actors = [self.actors[index] for index in order]
        self._locations = [locations[index] for index in order]
        self.hosts = [location.host for location in self._locations]
        self._watch = RankMonitor(
            [
                MonitoredRank(rank, location.host, location.node_id, location.files)
                for rank, location in enumerate(self._locations)
            ]
        )

    def _build(self, roles: dict[str, WorkerSpec]) -> None:
        deadline = Deadline.after(self.limits.start_timeout_s, "start_timeout_s")
        reserve = [self.actors[0].host_reserve_port.remote(_meeting_address(self._locations))]
        [port] = self.gather(reserve, method="reserve_port", deadline=deadline)
        try:
            shared_roles = ray.put(roles)
        except TypeError as error:
            raise DispatchError(
                f"the arguments of a constructor cannot be pickled: {error.__cause__ or error}; "
                "pass plain data and build the object in the worker"
            ) from error
        refs = [
            actor.host_build.remote(
                environment,
                shared_roles,
                set_up=self.limits.set_up,
                traced_run=trace.process.run_folder,
            )
            for actor, environment in zip(
                self.actors, rank_environments(self._locations, port), strict=True
            )
        ]
        self.gather(refs, method="__init__", deadline=deadline)

    def describe_places(self) -> str:
        """Describe which ranks are on which node, with the first digits of its Ray id."""
        ranks_of: dict[tuple[str, str], list[int]] = {}
        for rank, location in enumerate(self._locations):
            ranks_of.setdefault((location.host, location.node_id[:8]), []).append(rank)
        return "; ".join(
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} on {host} "
            f"(node {node_id})"
            for (host, node_id), ranks in ranks_of.items()
        )

    def raise_if_unusable(self) -> None:
        """Raise `WorkerGroupError` if the group was stopped, on purpose or after a failure."""
        if self._why_unusable:
            raise WorkerGroupError(
                f"this worker group was stopped: {self._why_unusable}; build a new RayWorkerGroup"
            )

    def layout(self, prefix: str, mesh: str | None) -> RankLayout:
        """Return the slice of each rank; ranks are asked at the first use of a mesh name."""
        key = (prefix, mesh)
        if key not in self._layouts:
            if mesh is None:
                self._layouts[key] = RankLayout.flat(len(self.actors))
            else:
                self._layouts[key] = self._ask_for_layout(prefix, mesh)
        return self._layouts[key]

    def _ask_for_layout(self, prefix: str, mesh: str) -> RankLayout:
        refs = [actor.host_mesh.remote(prefix, mesh) for actor in self.actors]
        deadline = Deadline.after(self.limits.timeout_s, "timeout_s")
        positions: list[MeshPosition | None] = self.gather(
            refs, method="host_mesh", deadline=deadline
        )
        missing = [rank for rank, position in enumerate(positions) if position is None]
        if missing:
            raise DispatchError(
                f"ranks {missing} have not registered the mesh {mesh!r}; call "
                f"self.register_mesh({mesh!r}, dp_rank=, dp_size=, is_output_rank=) on every "
                "rank first"
            )
        known = [position for position in positions if position is not None]
        layout = RankLayout(
            tuple(position.dp_rank for position in known),
            tuple(position.is_output_rank for position in known),
        )
        wrong = [rank for rank, position in enumerate(known) if position.dp_size != layout.dp_size]
        if wrong:
            raise DispatchError(
                f"mesh {mesh!r} has {layout.dp_size} dp ranks, but ranks {wrong} say dp_size="
                f"{known[wrong[0]].dp_size}; pass the same dp_size to register_mesh() everywhere"
            )
        return layout

    def gather(
        self, refs: Sequence[Any], *, method: str, deadline: Deadline, wait_s: float | None = None
    ) -> list[Any]:
        """Return the results of ranks ``0..len(refs)-1``; raises at the first failure.

        Past ``deadline``, or if a rank died, the group is stopped; if one raised, the group stays
        usable if all others returned in time. A shorter ``wait_s`` leaves the call running.
        """
        remaining_s = deadline.remaining_s
        is_final = wait_s is None or wait_s >= remaining_s
        try:
            return self._get(
                refs, method, remaining_s if wait_s is None else min(wait_s, remaining_s)
            )
        except GetTimeoutError:
            _, pending = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        late = [rank for rank, ref in enumerate(refs) if ref in set(pending)]
        if not late:  # it returned at the last moment
            return self._get(refs, method, _FETCH_S)
        fact = f"ranks {late} of {len(refs)} have not answered {method}() within"
        if not is_final:
            raise DeadlineError(f"{fact} {wait_s:g} s; it still runs: call get(timeout_s=) again")
        reports = self._watch.examine()
        self.stop(f"{method}() was late on ranks {late}")
        error = DeadlineError(
            f"{fact} {deadline.limit_s:g} s, the group was stopped; raise {deadline.key} if that "
            f"is not enough{describe_ranks(failed_ranks_first(reports, late))}"
        )
        attach_reports(error, reports)
        raise error

    def _get(self, refs: Sequence[Any], method: str, timeout_s: float) -> list[Any]:
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            try:
                # Of all ways to wait in Ray this is the fastest, and it returns at the first error
                # of any of the refs, not of the first ref.
                results: list[Any] = ray.get(list(refs), timeout=min(left_s, LOOK_EVERY_S))
            except GetTimeoutError:
                if left_s <= LOOK_EVERY_S:
                    raise
                if self._head.is_lost():
                    raise self._head_lost(method) from None
            except RayError:
                error = self._failed(refs, method)
                raise error from error.__cause__
            else:
                return results

    def _failed(
        self, refs: Sequence[Any], method: str
    ) -> RemoteCallError | DeadlineError | ClusterLostError:
        failed = wait_for_ranks(refs, method, self.hosts, grace_s=self.limits.grace_s)
        if not failed.late and not failed.dead:
            return failed.error()
        if failed.dead and self._head.is_silent:
            lost = self._head_lost(method)
            lost.__cause__ = failed.error()
            return lost
        error = failed.error(self._watch.examine())
        self.stop(f"{method}() failed on rank {failed.failed_ranks[0]}")
        return error

    def _head_lost(self, method: str) -> ClusterLostError:
        """Leave the ranks to their nodes: without the head, to release resources waits forever."""
        self._why_unusable = f"the head of the cluster was lost during {method}()"
        return self._head.lost()

    def report_on(self, error: BaseException) -> None:
        """Record on an error the state of the ranks that survive it; takes 10 s at most."""
        if not self._why_unusable:
            attach_reports(error, self._watch.examine())

    def stop(self, why: str) -> None:
        """Kill every rank and give the resources back. Doing it twice changes nothing."""
        if self._why_unusable:
            return
        self._why_unusable = why
        log.debug("stopping %d ranks: %s", len(self.actors), why)
        for actor in self.actors:
            ray.kill(actor)
        # A call on a dead actor fails; once all have failed, Ray knows that the processes are gone.
        pings = [actor.host_close.remote() for actor in self.actors]
        if pings:
            ray.wait(pings, num_returns=len(pings), timeout=_STOP_WAIT_S)
        self._watch.end()
        self._pool.give_back()

    def close(self) -> None:
        """Let the workers close, for at most ``grace_s`` seconds, and stop."""
        if self._why_unusable:
            return
        refs = [actor.host_close.remote() for actor in self.actors]
        done, pending = ray.wait(refs, num_returns=len(refs), timeout=self.limits.grace_s)
        if pending:
            late = [rank for rank, ref in enumerate(refs) if ref in set(pending)]
            log.warning(
                "%d of %d ranks did not close within %g s and are killed%s",
                *(len(late), len(refs), self.limits.grace_s),
                describe_ranks(failed_ranks_first(self._watch.examine(), late)),
            )
        try:
            ray.get(done)
        except RayError as error:
            log.warning("a worker failed to close: %s", error)
        self.stop("it was shut down")


def rank_environments(locations: Sequence[Location], port: int) -> list[dict[str, str]]:
    """Return the variables of the rendezvous for each rank, in rank order."""
    ranks_on_node = Counter(location.node_id for location in locations)
    seen: Counter[str] = Counter()
    environments = []
    for rank, location in enumerate(locations):
        index_on_node = seen[location.node_id]
        seen[location.node_id] += 1
        device = index_on_node if location.device_index is None else location.device_index
        environments.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(locations)),
                "LOCAL_RANK": str(device),
                "LOCAL_WORLD_SIZE": str(ranks_on_node[location.node_id]),
                "MASTER_ADDR": _meeting_address(locations),
                "MASTER_PORT": str(port),
            }
        )
    return environments


def _meeting_address(locations: Sequence[Location]) -> str:
    return rendezvous_address(locations[0].host, [location.node_id for location in locations])


def rank_order(locations: Sequence[Location]) -> list[int]:
    """Return the indices of ``locations`` in rank order: by node address and id, then GPU."""

    def sort_key(index: int) -> tuple[int, str, int, str]:
        location = locations[index]
        gpu_id = location.gpu_id or ""
        number = int(gpu_id) if gpu_id.isdigit() else 0  # 10 comes after 9
        return int(ipaddress.ip_address(location.host)), location.node_id, number, gpu_id

    return sorted(range(len(locations)), key=sort_key)


def require_head(address: str) -> None:
    """Refuse an address, ``HOST:PORT`` or ``ray://HOST:PORT``, where nothing listens."""
    host_port = address.removeprefix("ray://")
    if not _answers(host_port, timeout_s=3 * _CONNECT_S):
        raise ResourceError(f"nothing listens at {host_port}")


def _answers(address: str, *, timeout_s: float = _CONNECT_S) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
            return True
    except OSError:
        return False


class HeadMonitor:
    """Checks the head of the connected cluster while the driver waits for ranks."""

    def __init__(self) -> None:
        """Take the address of the present connection. Over ``ray://`` nothing is checked:
        Ray's client has its own deadlines.
        """
        is_client = ray.util.client.ray.is_connected()
        self.address = "" if is_client else ray.get_runtime_context().gcs_address
        self._silent_since_s: float | None = None

    @property
    def is_silent(self) -> bool:
        """Whether the head does not answer at this moment."""
        return bool(self.address) and not _answers(self.address)

    def is_lost(self) -> bool:
        """Check once; return whether the head has been silent for ``PATIENCE_S`` seconds."""
        now_s = time.monotonic()
        if not self.is_silent:
            self._silent_since_s = None
        elif self._silent_since_s is None:
            self._silent_since_s = now_s
        return self._silent_since_s is not None and now_s - self._silent_since_s >= PATIENCE_S

    def lost(self) -> ClusterLostError:
        """Return the error of a lost head."""
        return ClusterLostError(
            f"the head of the Ray cluster at {self.address} does not answer any more: it was "
            "killed, or its machine is lost; start the cluster again (`ray start --head`), then "
            "the run"
        )
