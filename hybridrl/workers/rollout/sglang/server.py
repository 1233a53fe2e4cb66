"""One SGLang server as a child of this process: started, compared with its arguments, ended."""

from __future__ import annotations

import logging
import secrets
import sys
import time
import uuid
from collections.abc import Mapping

from hybridrl.errors import DeadlineError, EngineError
from hybridrl.workers.rollout.sglang.arguments import (
    Arguments,
    KeyedAddress,
    ServingSpec,
    build_arguments,
    environment,
)
from hybridrl.workers.rollout.sglang.client import PROBE_TIMEOUT_S, ControlClient
from hybridrl.workers.rollout.sglang.process import ChildProcess, free_port
from hybridrl.workers.rollout.sglang.server_calls import ControlCalls
from hybridrl.workers.rollout.sglang.versions import require_as_asked, require_known_version

log = logging.getLogger(__name__)

_POLL_S = 0.2
_CHILD = "hybridrl.workers.rollout.sglang.child"
_NUM_STARTS = 3
_IN_USE = ("address already in use", "Address already in use", "EADDRINUSE")


class StartedServer(ControlCalls):
    """A running server, which ends with this process."""

    def __init__(self, spec: ServingSpec, *, variables: Mapping[str, str]) -> None:
        """Start it and wait until it answers.

        Args:
            variables: environment besides that of every server, for example its visible devices.

        Raises:
            EngineError: it did not start, with the last lines of its log; or it is too old, or runs
                with other arguments.
            DeadlineError: it did not answer within ``rollout.start_timeout_s``.
        """
        self.name = f"hybridrl-{uuid.uuid4().hex[:12]}"
        self._timeout_s = spec.rollout.stage_timeout_s
        self._start_timeout_s = spec.rollout.start_timeout_s
        self.num_ranks = spec.rollout.tensor_parallel_size
        for attempt in range(1, _NUM_STARTS + 1):
            try:
                self._start(spec, dict(variables))
            except EngineError as error:
                if attempt == _NUM_STARTS or not any(text in str(error) for text in _IN_USE):
                    raise
                log.warning("the port was taken by another process, trying the next: %s", error)
            else:
                return

    def _start(self, spec: ServingSpec, variables: Mapping[str, str]) -> None:
        door = spec.place.door
        address = spec.place.address or KeyedAddress(
            host=door.host, port=free_port(), key=door.key or secrets.token_urlsafe()
        )
        self.key = address.key
        arguments = build_arguments(spec, name=self.name, port=address.port, key=self.key)
        self.process = start_child(arguments, variables={**environment(spec), **variables})
        self.client = ControlClient(
            address.url,
            name="SGLang",
            require_alive=self.process.require_alive,
            key=self.key,
        )
        try:
            self.start_s = self.process.wait_until_ready(
                self._answers, timeout_s=spec.rollout.start_timeout_s
            )
            self.info = self.server_info()
            version = require_known_version(self.info)
            require_as_asked(arguments, self.info)
            log.info("SGLang answers: version=%s took_s=%.1f", version, self.start_s)
        except BaseException:
            self.end()
            raise

    def _answers(self) -> bool:
        """Whether it answers and has served its own request; another server is not waited for."""
        if any(text in self.process.tail() for text in _IN_USE):  # it lives but does not listen
            raise EngineError(f"the port of SGLang is taken: {_IN_USE[0]}")
        try:
            info = self.server_info()
            self.client.call("/health", timeout_s=PROBE_TIMEOUT_S, method="GET")
        except (EngineError, DeadlineError):  # the caller's wait detects that it is gone
            return False
        if info.get("served_model_name") != self.name:
            raise EngineError(f"another server answers on the port of SGLang: {_IN_USE[0]}")
        return True

    def has_died(self) -> bool:
        """Whether its process is gone."""
        return self.process.exit_status() is not None

    def require_alive(self, what: str) -> None:
        """Raise if its process is gone; see ``ChildProcess``."""
        self.process.require_alive(what)

    def end(self) -> None:
        """Kill the process with all its children. Idempotent."""
        self.client.close()
        self.process.end()


def start_child(arguments: Arguments, *, variables: Mapping[str, str]) -> ChildProcess:
    """Start a server with these arguments."""
    command = [sys.executable, "-m", _CHILD]
    return ChildProcess(command, name="SGLang", variables=variables, arguments=arguments)


def follow(spec: ServingSpec, *, variables: Mapping[str, str]) -> None:
    """Run SGLang on a further node of an engine: it computes, and the first node's server answers.

    Only an error ends it.

    SGLang opens a port of HTTP here, too, which answers health checks alone.

    Args:
        spec: of the engine, with the arguments of this node in ``rollout.engine_args``.
        variables: environment besides that of every server, for example visible devices.

    Raises:
        ServerDiedError: the processes are gone; with the end of their log.
    """
    arguments = build_arguments(
        spec, name="hybridrl-follower", port=free_port(), key=secrets.token_urlsafe()
    )
    process = start_child(arguments, variables={**environment(spec), **variables})
    try:
        while True:
            process.require_alive(f"node {spec.rollout.engine_args['node_rank']} of an engine")
            time.sleep(_POLL_S)
    finally:
        process.end()
