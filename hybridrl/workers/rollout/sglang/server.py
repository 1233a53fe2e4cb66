"""One SGLang server as a child of this process, and its release.

Tested releases answer alike (docs/versions.md).
"""

from __future__ import annotations

import logging
import re
import secrets
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from hybridrl.errors import DeadlineError, EngineError
from hybridrl.workers.rollout.sglang.arguments import (
    Arguments,
    KeyedAddress,
    ServingSpec,
    build_arguments,
    environment,
)
from hybridrl.workers.rollout.sglang.client import (
    PROBE_TIMEOUT_S,
    Body,
    ControlCalls,
    ControlClient,
)
from hybridrl.workers.rollout.sglang.process import ChildProcess, free_port

log = logging.getLogger(__name__)

Json = Mapping[str, object]

TESTED_VERSIONS = ("0.5.21", "0.5.23")
"""The first is the oldest accepted."""

_KEPT = (
    *("model_path", "dtype", "tp_size", "context_length", "enable_memory_saver"),
    *("enable_weights_cpu_backup", "enable_return_routed_experts", "enable_lora", "max_lora_rank"),
)
"""Arguments that the trainer relies on; SGLang may adapt others to the machine."""

_POLL_S = 0.2
_CHILD = "hybridrl.workers.rollout.sglang.child"
_NUM_STARTS = 3
_IN_USE = ("address already in use", "Address already in use", "EADDRINUSE")


def require_known_version(server_info: Json) -> str:
    """Return the version in ``/server_info``, warn if untested; an EngineError if it is too old."""
    version = server_info.get("version")
    if not isinstance(version, str) or not re.match(r"\d+\.\d+\.\d+", version):
        raise EngineError(
            f"the rollout server reports version {version!r} in /server_info, which is none of "
            "SGLang: is another program on its port?"
        )
    if _numbers(version) < _numbers(TESTED_VERSIONS[0]):
        raise EngineError(
            f"SGLang {version} is too old; {TESTED_VERSIONS[0]} is the oldest that is driven: "
            f"pip install 'sglang=={TESTED_VERSIONS[0]}'"
        )
    _warn_if_untested(version)
    return version


@cache
def _warn_if_untested(version: str) -> None:
    is_release = re.fullmatch(r"\d+\.\d+\.\d+(\.post\d+)?(\+.*)?", version) is not None
    if not is_release or _numbers(version) not in map(_numbers, TESTED_VERSIONS):
        log.warning(
            "SGLang %s is not tested with this version of hybridrl; tested are %s",
            version,
            ", ".join(TESTED_VERSIONS),
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def require_as_asked(arguments: Json, info: Json) -> None:
    """Raise an EngineError if ``/server_info`` has other arguments than the server was given."""
    differing = [
        f"{name}={info[name]!r} instead of {arguments[name]!r}"
        for name in _KEPT
        if name in arguments and name in info and info[name] != arguments[name]
    ]
    if differing:
        raise EngineError(
            f"SGLang does not run as it was started: {', '.join(differing)}; it changes what the "
            "model or the device cannot do: see its log, and ask for what it can"
        )


class StartedServer(ControlCalls):
    """A running server, which ends with this process."""

    _is_profiled = False

    def __init__(self, spec: ServingSpec, *, variables: Mapping[str, str]) -> None:
        """Start it with these variables besides those of every server, and wait for its answer.

        An EngineError, with its last lines, if it did not start, is too old, or has other
        arguments; a DeadlineError after ``rollout.start_timeout_s``.
        """
        super().__init__(spec)
        self.num_ranks = spec.rollout.tensor_parallel_size
        for attempt in range(1, _NUM_STARTS + 1):
            try:
                self._start(spec, variables)
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
        arguments = build_arguments(spec, name=self.name, port=address.port, key=address.key)
        self.process = start_child(arguments, variables={**environment(spec), **variables})
        require_alive = self.process.require_alive
        self.client = ControlClient(
            address.url, name="SGLang", require_alive=require_alive, key=address.key
        )
        try:
            self.start_s = self.process.wait_until_ready(
                self._answers, timeout_s=self._start_timeout_s
            )
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
            self.client.call("/health", timeout_s=PROBE_TIMEOUT_S, method="GET")
            info: Body = self.client.call("/server_info", timeout_s=PROBE_TIMEOUT_S, method="GET")
        except (EngineError, DeadlineError):  # the caller's wait detects that it is gone
            return False
        if info.get("served_model_name") != self.name:
            raise EngineError(f"another server answers on the port of SGLang: {_IN_USE[0]}")
        self.info = info
        return True

    def has_died(self) -> bool:
        """Whether its process is gone."""
        return self.process.exit_status() is not None

    def profile(self, stem: Path | None) -> None:
        """See ``ProfilesItself``. Each scheduler writes ``STEM-TIME-TP-RANK.trace.json.gz``.

        It computes nothing while it writes: within ``rollout.start_timeout_s``.
        """
        if stem is not None:
            place = {"output_dir": str(stem.parent), "profile_prefix": stem.name}
            # Without the stacks of Python that are SGLang's default, as the profiles of the ranks.
            self.post("/start_profile", **place, with_stack=False, record_shapes=False)
        elif self._is_profiled and not self.has_died():
            self.client.call("/stop_profile", timeout_s=self._start_timeout_s)
        self._is_profiled = stem is not None

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

    SGLang opens a port of HTTP here, too, which answers health checks alone. Only a ServerDiedError
    ends it. The arguments of this node are in ``rollout.engine_args``.
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
