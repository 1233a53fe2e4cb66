"""One SGLang server: its process, and the control calls that a rollout engine makes.

The life cycle decides when a call is legal. This file holds the form of each call, its time limit,
and the text of a refusal.
"""

from __future__ import annotations

import json
import logging
import secrets
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybridrl import env
from hybridrl.errors import ConfigError, ConfigErrors, DeadlineError, EngineError
from hybridrl.json_text import to_json_text
from hybridrl.workers.rollout.directory import Door
from hybridrl.workers.rollout.sglang.arguments import (
    Arguments,
    ServerAddress,
    ServerSpec,
    build_arguments,
    environment,
)
from hybridrl.workers.rollout.sglang.capabilities import (
    OPENAPI_ROUTE,
    PAUSE_MODE,
    Capability,
    ServerCapabilities,
    read_capabilities,
    require_as_asked,
)
from hybridrl.workers.rollout.sglang.client import ServerClient, ServerError
from hybridrl.workers.rollout.sglang.memory_saver import require_no_obstacle
from hybridrl.workers.rollout.sglang.process import ServerProcess, free_port
from hybridrl.workers.rollout.stage_time import LEAST_WAIT_S, left_s

log = logging.getLogger(__name__)

Body = dict[str, Any]

_CHILD = "hybridrl.workers.rollout.sglang.child"
_MEMORY_SAVER = "torch_memory_saver"
_NUM_STARTS = 3
_PROBE_TIMEOUT_S = 5.0
_FLUSH_WAIT_S = 1.0
_REFUSED = "refused: "
_IN_USE = ("address already in use", "Address already in use", "EADDRINUSE")


class Server:
    """A running server."""

    def __init__(
        self, spec: ServerSpec, *, variables: Mapping[str, str], door: Door | None = None
    ) -> None:
        """Start it and wait until it answers.

        Args:
            spec: what it serves.
            variables: environment besides that of every server, for example its visible devices.
            door: where it listens, and its key; None: loopback, with a key of its own.

        Raises:
            EngineError: it did not start, with the last lines of its log; or it lacks a capability,
                or runs with other arguments.
            DeadlineError: it did not answer within ``rollout.start_timeout_s``.
            ConfigErrors: it has no argument of a name in ``rollout.engine_args``.
        """
        self.name = f"hybridrl-{uuid.uuid4().hex[:12]}"
        self._timeout_s = spec.rollout.stage_timeout_s
        self._door = door or Door()
        for attempt in range(1, _NUM_STARTS + 1):
            try:
                self._start(spec, dict(variables))
            except EngineError as error:
                if attempt == _NUM_STARTS or not any(text in str(error) for text in _IN_USE):
                    raise
                log.warning("the port was taken by another process, trying the next: %s", error)
            else:
                return

    def _start(self, spec: ServerSpec, variables: Mapping[str, str]) -> None:
        address = spec.address or ServerAddress(
            host=self._door.host,
            port=free_port(),
            key=self._door.key or secrets.token_urlsafe(),
        )
        self.key = address.key
        arguments = build_arguments(spec, name=self.name, port=address.port, key=self.key)
        arguments["host"] = address.host
        variables = {**environment(spec), **variables}
        require_no_obstacle(
            device=spec.device,
            variables=env.everything() | variables,
            is_on=arguments.get("enable_memory_saver") is True,
            is_installed=find_spec(_MEMORY_SAVER) is not None,
        )
        self.process, file = start_child(arguments, variables=variables)
        self.client = ServerClient(
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
            require_as_asked(arguments, self.info)
            self.capabilities = self._read_capabilities()
            self.capabilities.require_for(spec)
        except EngineError as error:
            refused = refused_arguments(self.process.tail(), arguments)
            self.end()
            if refused:
                raise ConfigErrors(refused) from error
            raise
        except BaseException:
            self.end()
            raise
        finally:
            file.unlink(missing_ok=True)

    def _read_capabilities(self) -> ServerCapabilities:
        try:
            openapi = self.client.call(OPENAPI_ROUTE, timeout_s=self._timeout_s, method="GET")
        except ServerError:  # hidden by the user: DISABLE_OPENAPI_DOC
            openapi = None
        capabilities = read_capabilities(self.info, openapi)
        lacking = [each.name.lower() for each in Capability if not capabilities.can(each)]
        log.info(
            "SGLang answers: version=%s took_s=%.1f without=%s",
            capabilities.version,
            self.start_s,
            ",".join(lacking) or "nothing",
        )
        return capabilities

    def _answers(self) -> bool:
        """Whether it answers and has served its own request; another server is not waited for."""
        if any(text in self.process.tail() for text in _IN_USE):  # it lives but does not listen
            raise EngineError(f"the port of SGLang is taken: {_IN_USE[0]}")
        try:
            info = self.server_info()
            self.client.call("/health", timeout_s=_PROBE_TIMEOUT_S, method="GET")
        except (EngineError, DeadlineError):  # the caller's wait detects that it is gone
            return False
        if info.get("served_model_name") != self.name:
            raise EngineError(f"another server answers on the port of SGLang: {_IN_USE[0]}")
        return True

    # -- control calls ---------------------------------------------------------------------------

    def server_info(self) -> Body:
        """Return arguments in effect, version and internal state."""
        info: Body = self.client.call("/server_info", timeout_s=_PROBE_TIMEOUT_S, method="GET")
        return info

    def post(self, path: str, **body: object) -> Any:  # noqa: ANN401 - as ServerClient.call
        """Do one control call within ``rollout.stage_timeout_s``, and the time left of its stage.

        Raises:
            EngineError: it was refused, or the server is gone.
            DeadlineError: it was not answered.
        """
        return self.client.call(path, body, timeout_s=left_s(self._timeout_s))

    def require_success(self, path: str, **body: object) -> Body:
        """Do one control call whose answer contains its own success.

        Raises:
            EngineError: the answer is a failure, with its reason.
        """
        return _successful(path, self.post(path, **body))

    def start(self, path: str, **body: object) -> Future[Body]:
        """Begin the call of ``require_success``, without waiting."""
        timeout_s = left_s(self._timeout_s)  # here: the client's own thread has no stage

        async def call() -> Body:
            answer = await self.client.request(path, body, timeout_s=timeout_s)
            return _successful(path, answer)

        return self.client.start(call())

    def hold(self, *, timeout_s: float) -> None:
        """Admit no request, and verify that none runs and no cache of old weights is left.

        Requests that still run are cut off, whatever their sender, also those kept by the pause of
        another client.

        Raises:
            DeadlineError: it is still busy at the deadline; how many run and wait.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._empty(deadline)
            except (ServerError, DeadlineError) as error:
                log.info("SGLang is still busy: %s", error)
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"SGLang is still busy {timeout_s:g} s after its requests were aborted "
                        f"({self.load()}), so its memory cannot be released: {error}"
                    ) from error
                self.post("/continue_generation")  # paused requests cannot end
            else:
                return

    def _empty(self, deadline: float) -> None:
        """Abort all, stop admission, and let the server itself verify that it is idle.

        In this order because ``/pause_generation`` looks only once a second whether all requests
        have ended (0.5.17 to 0.5.23); on an idle server it returns at once.

        Raises:
            ServerError: requests are left.
            DeadlineError: no answer until the deadline.
        """

        def until_deadline_s() -> float:
            return max(LEAST_WAIT_S, deadline - time.monotonic())

        self.client.call("/abort_request", {"abort_all": True}, timeout_s=until_deadline_s())
        wait_s = min(_FLUSH_WAIT_S, until_deadline_s())
        path = f"/flush_cache?timeout={wait_s:.2f}"
        self.client.call(path, timeout_s=wait_s + until_deadline_s())
        self.client.call("/pause_generation", {"mode": PAUSE_MODE}, timeout_s=until_deadline_s())
        # Again: a request may have arrived before the admission stopped.
        self.client.call("/flush_cache", timeout_s=until_deadline_s())

    def load(self) -> str:
        """Describe how many requests run and wait, for a message: figures may be seconds old."""
        try:
            answer = self.client.call("/v1/loads", timeout_s=_PROBE_TIMEOUT_S, method="GET")
        except (EngineError, DeadlineError) as error:
            return f"it does not say how many requests run: {error}"
        loads = answer.get("loads", []) if isinstance(answer, dict) else []
        return (
            ", ".join(
                f"{load.get('num_running_reqs')} requests running and "
                f"{load.get('num_waiting_reqs')} waiting"
                for load in loads
            )
            or f"it does not say how many requests run: {answer}"
        )

    def progress(self) -> object:
        """Return when the scheduler last wrote its load, and its decode steps; each data rank's.

        An idle scheduler writes once a second, a paused or hung one never.

        Raises:
            EngineError: the server is gone, or refuses.
            DeadlineError: it does not answer.
        """
        answer = self.client.call("/v1/loads", timeout_s=_PROBE_TIMEOUT_S, method="GET")
        return [(load.get("timestamp"), load.get("decode_moments")) for load in answer["loads"]]

    def end(self) -> None:
        """Kill the process with all its children. Idempotent."""
        self.client.close()
        self.process.end()


def start_child(
    arguments: Arguments, *, variables: Mapping[str, str]
) -> tuple[ServerProcess, Path]:
    """Start a server; return its process and the file of its arguments, which it reads first.

    The file is for its owner alone: a command line would show the key to everybody.
    """
    with tempfile.NamedTemporaryFile(
        "w", prefix="hybridrl-server-", suffix=".json", delete=False
    ) as file:
        json.dump(arguments, file, allow_nan=False)
    command = [sys.executable, "-m", _CHILD, file.name]
    return ServerProcess(command, name="SGLang", variables=variables), Path(file.name)


def _successful(path: str, answer: Any) -> Body:  # noqa: ANN401 - as ServerClient.call
    if not isinstance(answer, dict) or not answer.get("success", True):
        reason = answer.get("message") or answer.get("error_message") or answer
        raise EngineError(f"{path} failed: {reason}")
    return answer


def refused_arguments(log_text: str, arguments: Mapping[str, object]) -> list[ConfigError]:
    """Find the arguments that a server does not have in its log; ``refusal_of`` wrote the lines.

    Args:
        log_text: the server's output.
        arguments: that it was started with.
    """
    lines = [line.strip() for line in log_text.splitlines()]
    refusals = [
        json.loads(line.removeprefix(_REFUSED)) for line in lines if line.startswith(_REFUSED)
    ]
    return [
        ConfigError(
            f"rollout.engine_args.{name}",
            arguments[name],
            "the installed SGLang has no such argument",
            fix,
        )
        for name, fix in refusals
    ]


def refusal_of(name: str, fix: str) -> str:
    """Write the line that ``refused_arguments`` reads."""
    return _REFUSED + to_json_text([name, fix])
