"""One SGLang server: its release, its control calls, and one that is a child of this process.

The life cycle decides when a call is legal. Tested releases answer alike (docs/versions.md).
"""

from __future__ import annotations

import logging
import re
import secrets
import sys
import time
import uuid
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hybridrl.errors import DeadlineError, EngineError
from hybridrl.workers.rollout.protocol import LEAST_WAIT_S, left_s
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
    ControlClient,
    RefusedError,
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

_FLUSH_WAIT_S = 1.0

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


class ControlCalls:
    """A server that answers, started here or elsewhere, and the calls that an engine makes."""

    client: ControlClient
    info: Body  # its first answer to ``/server_info``: arguments in effect, version, internal state
    start_s: float  # seconds until it answered
    num_ranks: int  # processes that share its model

    def __init__(self, spec: ServingSpec) -> None:
        self.name = f"hybridrl-{uuid.uuid4().hex[:12]}"
        self._timeout_s = spec.rollout.stage_timeout_s
        self._start_timeout_s = spec.rollout.start_timeout_s

    def has_died(self) -> bool:
        """Whether it is gone, as far as is known."""
        raise NotImplementedError

    def require_alive(self, what: str) -> None:
        """Raise a ServerDiedError if it is gone: what was asked, and why nobody answers."""
        raise NotImplementedError

    def end(self) -> None:
        """Use it no more. Idempotent."""
        raise NotImplementedError

    # -- names of its weights --------------------------------------------------------------------

    def version_name(self, version: int) -> str:
        """Return the server's name of the weights of a policy version."""
        return str(version)

    def begin_update(self) -> None:
        """Weights are about to be sent. Idempotent until ``stamp``."""

    def stamp(self, name: str) -> None:
        """Name the weights of all later responses."""
        self.post("/update_weight_version", new_version=name, abort_all_requests=False)

    # -- control calls ---------------------------------------------------------------------------

    def post(self, path: str, **body: object) -> Any:  # noqa: ANN401 - as ControlClient.call
        """Do one control call within ``rollout.stage_timeout_s`` and the time left of its stage."""
        return self.client.call(path, body, timeout_s=left_s(self._timeout_s))

    def require_success(self, path: str, **body: object) -> Body:
        """Do one control call as ``post``, whose answer contains its own success."""
        return self.client.run(self.client.succeed(path, body, timeout_s=left_s(self._timeout_s)))

    def load_folder(self, folder: Path, *, load_format: str) -> None:
        """Load all weights of a folder, as in a start: within ``rollout.start_timeout_s``."""
        body = {"model_path": str(folder), "load_format": load_format, "flush_cache": False}
        timeout_s = left_s(self._start_timeout_s)
        self.client.run(self.client.succeed("/update_weights_from_disk", body, timeout_s=timeout_s))

    def hold(self, *, timeout_s: float) -> None:
        """Admit no request, and verify that none runs and no cache of old weights is left.

        Requests that still run are cut off, whatever their sender, also those kept by the pause of
        another client. A DeadlineError says how many run and wait if it is busy at the deadline.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._empty(deadline)
            except (RefusedError, DeadlineError) as error:
                log.info("SGLang is still busy: %s", error)
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"SGLang is still busy {timeout_s:g} s after its requests were aborted "
                        f"({self._describe_load()}), so its memory cannot be released: {error}"
                    ) from error
                self.post("/continue_generation")  # paused requests cannot end
            else:
                return

    def _empty(self, deadline: float) -> None:
        """Abort all, stop admission, and let the server itself verify that it is idle.

        In this order because ``/pause_generation`` looks only once a second whether all requests
        have ended (0.5.21 to 0.5.23); on an idle server it returns at once.
        """

        def until_deadline_s() -> float:
            return max(LEAST_WAIT_S, deadline - time.monotonic())

        self.client.call("/abort_request", {"abort_all": True}, timeout_s=until_deadline_s())
        wait_s = min(_FLUSH_WAIT_S, until_deadline_s())
        path = f"/flush_cache?timeout={wait_s:.2f}"
        self.client.call(path, timeout_s=wait_s + until_deadline_s())
        # With other modes some requests stay, and the server asserts that there are none when its
        # memory is released.
        self.client.call("/pause_generation", {"mode": "abort"}, timeout_s=until_deadline_s())
        # Again: a request may have arrived before the admission stopped.
        self.client.call("/flush_cache", timeout_s=until_deadline_s())

    def progress(self) -> object:
        """Return its loads with their times, which a paused or hung server does not change."""
        return self.client.run(self.client.loads())

    def _describe_load(self) -> str:
        """Describe how many requests run and wait: figures may be seconds old."""
        try:
            loads = self.client.run(self.client.loads())
        except (EngineError, DeadlineError) as error:
            return f"it does not say how many requests run: {error}"
        return ", ".join(
            f"{load.get('num_running_reqs')} requests running and "
            f"{load.get('num_waiting_reqs')} waiting"
            for load in loads
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
