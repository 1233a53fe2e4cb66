"""One SGLang server: its process, and the control calls that a rollout engine makes.

What a call means, and when it is legal, is the life cycle's matter; here is how it is spelled, how
long it may take, and what a refusal says.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from hybridrl.errors import DeadlineError, EngineError
from hybridrl.workers.rollout.server_arguments import ServerSpec, build_arguments, environment
from hybridrl.workers.rollout.server_client import ConnectionLostError, ServerClient, ServerError
from hybridrl.workers.rollout.server_process import ServerProcess, free_port

log = logging.getLogger(__name__)

Body = dict[str, Any]

_CHILD = "hybridrl.workers.rollout.sglang"
_NUM_STARTS = 3
_PROBE_TIMEOUT_S = 5.0
_FLUSH_EVERY_S = 0.2
_IN_USE = ("address already in use", "Address already in use", "EADDRINUSE")


class Server:
    """A running server."""

    def __init__(self, spec: ServerSpec, *, variables: Mapping[str, str]) -> None:
        """Start it and wait until it answers.

        Args:
            spec: what it serves.
            variables: environment besides what every server gets, as the devices that it sees.

        Raises:
            EngineError: it did not start; with the last lines of its log.
            DeadlineError: it did not answer within ``rollout.start_timeout_s``.
        """
        self.name = f"hybridrl-{uuid.uuid4().hex[:12]}"
        self._timeout_s = spec.rollout.stage_timeout_s
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
        port = free_port()
        arguments = build_arguments(spec, name=self.name, port=port)
        with tempfile.NamedTemporaryFile(
            "w", prefix="hybridrl-server-", suffix=".json", delete=False
        ) as file:
            json.dump(arguments, file)
        self.process = ServerProcess(
            [sys.executable, "-m", _CHILD, file.name],
            name="SGLang",
            variables={**environment(spec), **variables},
        )
        self.client = ServerClient(
            f"http://127.0.0.1:{port}", name="SGLang", require_alive=self.process.require_alive
        )
        try:
            self.start_s = self.process.wait_until_ready(
                self._answers, timeout_s=spec.rollout.start_timeout_s
            )
            self.info = self.server_info()
        except BaseException:
            self.end()
            raise
        finally:
            Path(file.name).unlink(missing_ok=True)
        log.info("SGLang answers: version=%s took_s=%.1f", self.info["version"], self.start_s)

    def _answers(self) -> bool:
        """Whether it is there and has served a request of its own; a stranger is not waited for."""
        if any(text in self.process.tail() for text in _IN_USE):  # it lives on, deaf
            raise EngineError(f"the port of SGLang is taken: {_IN_USE[0]}")
        try:
            info = self.server_info()
            self.client.call("/health", timeout_s=_PROBE_TIMEOUT_S, method="GET")
        except (ConnectionLostError, ServerError, DeadlineError):
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
        """Do one control call within ``rollout.stage_timeout_s``.

        Raises:
            EngineError: it was refused, or the server is gone.
            DeadlineError: it was not answered.
        """
        return self.client.call(path, body, timeout_s=self._timeout_s)

    def require_success(self, path: str, **body: object) -> Body:
        """Do one control call whose answer says itself whether it succeeded.

        Raises:
            EngineError: it says no, and why.
        """
        return _successful(path, self.post(path, **body))

    def start(self, path: str, **body: object) -> Future[Body]:
        """Begin what ``require_success`` does, and go on meanwhile."""

        async def call() -> Body:
            answer = await self.client.request(path, body, timeout_s=self._timeout_s)
            return _successful(path, answer)

        return self.client.start(call())

    def abort_all(self) -> None:
        """Make all requests end where they are."""
        self.post("/abort_request", abort_all=True)

    def hold(self, *, timeout_s: float) -> None:
        """Let nobody in any more, and see that nothing runs and no cache of old weights is left.

        Requests that are still running are cut off, whoever sent them.

        Raises:
            DeadlineError: it is still busy at the deadline; how many run and wait.
        """
        deadline = time.monotonic() + timeout_s
        self.post("/pause_generation", mode="abort")
        while True:
            try:
                self.client.call("/flush_cache", timeout_s=self._timeout_s)
            except ServerError as error:
                log.info("SGLang is still busy: %s", error)
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"SGLang is still busy {timeout_s:g} s after its requests were aborted "
                        f"({self.load()}), so its memory cannot be released: {error.text}"
                    ) from error
                time.sleep(_FLUSH_EVERY_S)
            else:
                return

    def let_in(self) -> None:
        """Serve again."""
        self.post("/continue_generation")

    def release_memory(self, tag: str) -> None:
        """Unmap the memory under a tag."""
        self.post("/release_memory_occupation", tags=[tag])

    def resume_memory(self, tag: str) -> None:
        """Map it again."""
        self.post("/resume_memory_occupation", tags=[tag])

    def load(self) -> str:
        """Say how many requests run and wait, for a message."""
        try:
            loads = self.client.call("/v1/loads", timeout_s=_PROBE_TIMEOUT_S, method="GET")
        except (EngineError, DeadlineError) as error:
            return f"it does not say how many requests run: {error}"
        return f"{loads}"

    def require_alive(self, what: str) -> None:
        """Raise EngineError with the end of its log if the process is gone."""
        self.process.require_alive(what)

    def end(self) -> None:
        """Kill the process with all its children. Idempotent."""
        self.client.close()
        self.process.end()


def _successful(path: str, answer: Any) -> Body:  # noqa: ANN401 - as ServerClient.call
    if not isinstance(answer, dict) or not answer.get("success", True):
        reason = answer.get("message") or answer.get("error_message") or answer
        raise EngineError(f"{path} failed: {reason}")
    return answer
