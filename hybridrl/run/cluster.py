"""Connects to the Ray cluster of the ``cluster`` section, or starts one on this machine."""

from __future__ import annotations

import faulthandler
import logging
import os
import secrets
import select
import signal
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import ray
from ray._private import services
from ray._private.ray_logging import global_worker_stdstream_dispatcher

from hybridrl import env
from hybridrl.config.cluster import ClusterConfig
from hybridrl.diagnostics import trace
from hybridrl.errors import ResourceError, shorten
from hybridrl.processes import guard
from hybridrl.single_controller.actors import require_head
from hybridrl.trainer.interrupt import handled_by

log = logging.getLogger(__name__)

_STDERR = 2
_START_LIMIT_S = 300.0
_RAYLET_LIMIT_S, _LOOK_S = 150.0, 0.2


@contextmanager
def ray_cluster(cluster: ClusterConfig, *, num_more_ranks: int = 0) -> Iterator[None]:
    """Connect to ``cluster.address``, or start Ray on this machine and end it afterwards.

    ``num_more_ranks`` are those besides the policy's: a critic's own, and servers' devices.

    Raises:
        ResourceError: no cluster answers at the address; or on this machine Ray does not start, or
            resources are missing.
    """
    if ray.is_initialized():  # the caller started it: a test, a notebook
        yield
        return
    with trace.span("start Ray"):
        if cluster.address is None:
            require_device(cluster)
            _start_ray(cluster, num_ranks=cluster.num_ranks_per_node + num_more_ranks)
        else:
            _connect(cluster.address)
    try:
        with ended_with_ray() if cluster.address is None else nullcontext():
            yield
    finally:
        ray.shutdown()


def show_workers_no_more() -> None:
    """Stop Ray's copy of worker output: if it is ended during its start, it dumps C++ stacks."""
    # The name in ray.init of the function that writes it to stderr.
    global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")


def require_device(cluster: ClusterConfig) -> None:
    """Refuse at once a request for GPUs; Ray itself would wait for a node with a GPU."""
    if cluster.address is None and cluster.device == "cuda" and not Path("/dev/nvidiactl").exists():
        raise ResourceError(
            "cluster.device=cuda, but this machine has no NVIDIA device; set cluster=cpu, or "
            "cluster.ray_address to a Ray cluster that has GPUs"
        )


def _start_ray(cluster: ClusterConfig, *, num_ranks: int) -> None:
    # A rank sees only the GPU that Ray gives it; ranks on CPUs see none, which needs no warning.
    env.set_default("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ranks import the same packages as this process, from an installation or a checkout.
    env.set_value("PYTHONPATH", env.python_path())
    # Ray's idle processes import what ranks need while this one still imports: 3 s less to step 1.
    env.set_default("RAY_preload_python_modules", "hybridrl.workers.actor_rollout")
    # Once the ranks' resources are reserved Ray ends what is idle for a second: those processes.
    env.set_default("RAY_idle_worker_killing_time_threshold_ms", "60000")
    arguments: dict[str, Any] = {
        "address": "local",
        # As many as the ranks ask for: more ranks than cores is a choice, not an error.
        "num_cpus": num_ranks,
        "include_dashboard": False,
        "logging_level": logging.WARNING,
    }
    keep_token_private()
    try:
        # Within C++ it may wait for a busy machine without end; then the supervisor starts another.
        faulthandler.dump_traceback_later(_START_LIMIT_S, exit=True, file=_STDERR)
        # Processes that start here outlive the terminal: this one ends them in order.
        with handled_by(signal.SIG_IGN, (signal.SIGHUP,)), _late_raylet_awaited():
            ray.init(**arguments)
    except Exception as error:  # of a raylet that is late Ray raises just that
        reason = shorten(" ".join(str(error).split()).rstrip("."))
        folder = env.get("RAY_TMPDIR", "/tmp")
        raise ResourceError(
            f"Ray does not start on this machine: {reason}; the load is {os.getloadavg()[0]:.0f} "
            f"on {os.cpu_count()} cores: if that is busy, type the command again later; or type "
            "`ray start --head`, then set cluster.ray_address=auto; Ray's logs are in "
            f"{folder}/ray/session_latest/logs"
        ) from error
    finally:
        faulthandler.cancel_dump_traceback_later()
    # No node will ever join this Ray, so there is nothing to wait for.
    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    if cluster.device == "cuda" and num_gpus < cluster.num_ranks_per_node:
        ray.shutdown()
        raise ResourceError(
            f"cluster.num_ranks_per_node={cluster.num_ranks_per_node} needs as many GPUs, and Ray "
            f"sees {num_gpus} on this machine; set cluster.num_ranks_per_node={num_gpus}, or "
            "cluster.ray_address to a Ray cluster that has more"
        )


@contextmanager
def _late_raylet_awaited() -> Iterator[None]:
    """Wait for a raylet that a busy machine delays; Ray gives it 30 s, and has no setting."""
    get_node, deadline_s = services.get_node, time.monotonic() + _RAYLET_LIMIT_S

    def wait(*of_node: object) -> object:
        while True:
            try:
                return get_node(*of_node)
            except RuntimeError as error:
                if time.monotonic() >= deadline_s:
                    reason = f"its raylet did not start within {_RAYLET_LIMIT_S:g} s"
                    raise TimeoutError(reason) from error
                time.sleep(_LOOK_S)

    services.get_node = wait
    try:
        yield
    finally:
        services.get_node = get_node


def _connect(address: str) -> None:
    key = f"cluster.ray_address={address}"
    remedy = (
        "start a cluster with `ray start --head`, correct the address, or set "
        "cluster.ray_address=null to start Ray on this machine"
    )
    # If a head refuses, for example for lack of a token, Ray retries 20 times, up to 41 s each.
    env.set_default("RAY_gcs_server_port_wait_time_s", "2")
    try:
        host_port: str | None = address
        if address == "auto":  # the cluster last started here; Ray has no public function for this
            host_port = services.canonicalize_bootstrap_address(address)
        if host_port is None:  # a cluster of another machine
            raise ResourceError("no Ray runs on this machine")
        require_head(host_port)
        ray.init(address=address, logging_level=logging.WARNING)
    except ResourceError as error:
        raise ResourceError(f"no Ray cluster answers at {key}: {error}; {remedy}") from error
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ResourceError(
            f"no Ray cluster takes this driver at {key}: {error}; if it asks for a token, set "
            f"RAY_AUTH_MODE=token and give the token that its nodes have; else {remedy}"
        ) from error


def keep_token_private() -> None:
    """Make the token's file before Ray would, readable by its owner alone.

    A process that reads the token of a Ray that is started here may run code as this user. Ray
    (2.60) makes it as any file, which on most machines everybody may read. An existing file is left
    unchanged; if others may read it, the log warns. A home folder that cannot be written is left to
    Ray.
    """
    has_token = env.get("RAY_AUTH_TOKEN") or env.get("RAY_AUTH_TOKEN_PATH")
    if env.get("RAY_AUTH_MODE", "token").lower() != "token" or has_token:
        return
    path = Path.home() / ".ray" / "auth_token"
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if not path.exists():
            _write_token(path)
            return
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & (stat.S_IRGRP | stat.S_IROTH):
            log.warning(
                "others may read %s (mode %o), and run code as you wherever Ray runs; chmod 600 %s",
                *(path, mode, path),
            )


def _write_token(path: Path) -> None:
    # Atomically: another Ray may start at this moment, and would read an empty file.
    unfinished = path.with_name(f".{path.name}.unfinished-{os.getpid()}")
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):  # another process was faster; both use its token
            path.hardlink_to(unfinished)
    finally:
        unfinished.unlink(missing_ok=True)


RAY_PROCESSES = ("gcs_server", "raylet")
"""Processes that a Ray on one machine needs."""


@contextmanager
def ended_with_ray() -> Iterator[None]:
    """End this process, with status 1 and no exception, if a process of its Ray ends in the block.

    Ray does the same from C++, 0 to 60 s after the raylet beside the driver is gone (Ray 2.60).
    Until then calls fail, and workers would be started again in a cluster that is ending.
    Leave the block before ``ray.shutdown()``.
    """
    names = {pid: guard.process_name(pid) for pid in guard.descendants()}
    watched = {os.pidfd_open(pid): name for pid, name in names.items() if name in RAY_PROCESSES}
    stop = os.eventfd(0)
    thread = Thread(target=_watch, args=(watched, stop), name="ray processes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.eventfd_write(stop, 1)
        thread.join()
        for descriptor in (*watched, stop):
            os.close(descriptor)


def _watch(watched: Mapping[int, str], stop: int) -> None:
    poll = select.poll()
    for descriptor in (*watched, stop):
        poll.register(descriptor, select.POLLIN)
    ended = {descriptor for descriptor, _ in poll.poll()}
    if stop not in ended:
        names = " and ".join(sorted(watched[descriptor] for descriptor in ended))
        log.error("Ray's %s ended: it was killed, or ran out of memory; the driver ends", names)
        os._exit(1)
