"""One SGLang server as a child of this process: started, compared with its arguments, ended."""

from __future__ import annotations

import json
import logging
import secrets
import sys
import tempfile
import uuid
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from hybridrl import env
from hybridrl.errors import ConfigError, ConfigErrors, DeadlineError, EngineError
from hybridrl.json_text import to_json_text
from hybridrl.workers.rollout.sglang.arguments import (
    Arguments,
    KeyedAddress,
    ServerSpec,
    build_arguments,
    environment,
)
from hybridrl.workers.rollout.sglang.capabilities import require_as_asked
from hybridrl.workers.rollout.sglang.client import PROBE_TIMEOUT_S, ControlClient
from hybridrl.workers.rollout.sglang.memory_saver import require_no_obstacle
from hybridrl.workers.rollout.sglang.process import ServerProcess, free_port
from hybridrl.workers.rollout.sglang.server_calls import ControlCalls

log = logging.getLogger(__name__)

_CHILD = "hybridrl.workers.rollout.sglang.child"
_MEMORY_SAVER = "torch_memory_saver"
_NUM_STARTS = 3
_REFUSED = "refused: "
_IN_USE = ("address already in use", "Address already in use", "EADDRINUSE")


class Server(ControlCalls):
    """A running server, which ends with this process."""

    def __init__(self, spec: ServerSpec, *, variables: Mapping[str, str]) -> None:
        """Start it and wait until it answers.

        Args:
            variables: environment besides that of every server, for example its visible devices.

        Raises:
            EngineError: it did not start, with the last lines of its log; or it lacks a capability,
                or runs with other arguments.
            DeadlineError: it did not answer within ``rollout.start_timeout_s``.
            ConfigErrors: it has no argument of a name in ``rollout.engine_args``.
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

    def _start(self, spec: ServerSpec, variables: Mapping[str, str]) -> None:
        address = spec.address or KeyedAddress(
            host=spec.door.host,
            port=free_port(),
            key=spec.door.key or secrets.token_urlsafe(),
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
            require_as_asked(arguments, self.info)
            self.capabilities = self.read_capabilities()
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
        """Raise if its process is gone; see ``ServerProcess``."""
        self.process.require_alive(what)

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


def refused_arguments(log_text: str, arguments: Mapping[str, object]) -> list[ConfigError]:
    """Find the arguments that a server does not have in its log; ``refusal_of`` wrote the lines."""
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
