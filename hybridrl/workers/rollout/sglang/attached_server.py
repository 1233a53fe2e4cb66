"""A server that others started and that gets the policy's weights: compared, used, left running.

Its process is another machine's, so a server whose connections fail in a row counts as gone. Names
of its weights contain a name of this attachment: versions of two runs are never taken for equal.
"""

from __future__ import annotations

import logging
import time
import uuid
from contextlib import suppress
from pathlib import Path

from hybridrl.config.rollout import FLUSH_TIMEOUT_S
from hybridrl.errors import (
    DeadlineError,
    DriftError,
    EngineError,
    ExternalEngineError,
    ServerDiedError,
)
from hybridrl.workers.rollout.sglang import comparison
from hybridrl.workers.rollout.sglang.arguments import Elsewhere, ServingSpec
from hybridrl.workers.rollout.sglang.client import (
    ConnectionLostError,
    ControlClient,
    RefusedError,
)
from hybridrl.workers.rollout.sglang.comparison import (
    REFUSED,
    Questions,
    differences,
    expect_policy_server,
)
from hybridrl.workers.rollout.sglang.server import ControlCalls

log = logging.getLogger(__name__)

_APPEARS_S = 20.0
"""Seconds until a server must listen: one that was ended may be about to start again."""

_POLL_S = 0.5
_NUM_LOST = 3
"""Connections that fail in a row before a server counts as gone."""

_LEAVE_S = 5.0


class AttachedServer(ControlCalls):
    """A server elsewhere while this process uses it."""

    def __init__(self, spec: ServingSpec, elsewhere: Elsewhere) -> None:
        """Compare it with what is needed, and stop it until it gets weights.

        Raises:
            ExternalEngineError: all differences, a line each; the server is as it was.
            DeadlineError: requests of others do not end.
        """
        self.name = f"hybridrl-{uuid.uuid4().hex[:12]}"
        self._timeout_s = spec.rollout.stage_timeout_s
        self._start_timeout_s = spec.rollout.start_timeout_s
        self._may_be_paused = False
        self.client = ControlClient(
            elsewhere.url.rstrip("/"),
            name=f"SGLang at {elsewhere.url}",
            key=elsewhere.key,
        )
        self.start_s = 0.0
        begin = time.monotonic()
        try:
            self._compare(spec, elsewhere)
            self._may_be_paused = True
            self.hold(timeout_s=FLUSH_TIMEOUT_S)
        except BaseException:
            self.end()
            raise
        self.start_s = time.monotonic() - begin

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.client.base_url

    def has_died(self) -> bool:
        """Whether it could not be reached several times in a row."""
        return self.client.num_lost >= _NUM_LOST

    def require_alive(self, what: str) -> None:
        """Raise if it could not be reached several times in a row."""
        if self.has_died():
            raise ServerDiedError(f"{what}: {self.url}, which others run, does not answer")

    def end(self) -> None:
        """Let it serve others, and close the connections. Idempotent."""
        if self._may_be_paused and not self.has_died():
            with suppress(EngineError, DeadlineError):
                self.client.call("/continue_generation", {}, timeout_s=_LEAVE_S)
        self._may_be_paused = False
        self.client.close()

    # -- comparison ------------------------------------------------------------------------------

    def _compare(self, spec: ServingSpec, elsewhere: Elsewhere) -> None:
        expected = expect_policy_server(spec, elsewhere.section)
        questions = Questions(
            self.client,
            expected,
            has_key=bool(elsewhere.key),
            timeout_s=spec.rollout.stage_timeout_s,
        )
        server_info, model_info = self._facts(questions)
        lines = differences(expected, server_info, model_info)
        if lines or not isinstance(server_info, dict) or not isinstance(model_info, dict):
            raise self._unlike(lines)
        self.info = server_info
        self.num_ranks = int(server_info.get("tp_size") or 1)
        self._weight_version = str(model_info.get("weight_version"))
        if lines := self._unusable() or self.client.run(questions.unlike_in_use(model_info)):
            raise self._unlike(lines)

    def _facts(self, questions: Questions) -> tuple[object, object]:
        """Ask what it is, as soon as it listens."""
        deadline = time.monotonic() + _APPEARS_S
        while True:
            try:
                return self.client.run(questions.facts())
            except (EngineError, DeadlineError) as error:
                is_gone = isinstance(error, ConnectionLostError)
                if not is_gone or time.monotonic() > deadline:
                    raise self._unlike([questions.advice(error)]) from error
            time.sleep(_POLL_S)

    def _unusable(self) -> list[str]:
        """Return why it cannot be moved along the life cycle; it serves again if it was paused."""
        try:
            self.post("/continue_generation")
            with suppress(RefusedError):  # no update is open, as that of a run that was killed
                self.post("/end_weight_update")
        except RefusedError as error:
            if error.status in REFUSED:
                return [
                    "its control routes refuse the key: start it with --api-key alone, without "
                    "--admin-api-key"
                ]
            return [str(error)]
        except (EngineError, DeadlineError) as error:
            return [str(error)]
        return []

    def _unlike(self, lines: list[str]) -> ExternalEngineError:
        return ExternalEngineError("\n".join(f"{self.url}: {line}" for line in lines))

    # -- weights ---------------------------------------------------------------------------------

    def version_name(self, version: int) -> str:
        """Return the server's name of the weights of a policy version: of this attachment alone."""
        return f"{self.name}-{version}"

    def begin_update(self) -> None:
        """Mark the server, so that another run that updates it meanwhile is noticed. Idempotent.

        Raises:
            DriftError: it does not have the weights that this process sent last.
        """
        mark = f"{self.name}-update"
        if self._weight_version != mark:
            self._require_known_weights()
            self._stamp(mark)

    def finish_update(self, version: int) -> None:
        """Stamp all later responses with a version: all weights were loaded.

        Raises:
            DriftError: somebody else updated it meanwhile.
        """
        self._require_known_weights()
        self._stamp(self.version_name(version))

    def _stamp(self, name: str) -> None:
        self.post("/update_weight_version", new_version=name, abort_all_requests=False)
        self._weight_version = name

    def _require_known_weights(self) -> None:
        timeout_s = comparison.CALL_S
        answer = self.client.call("/model_info", timeout_s=timeout_s, method="GET")
        version = str(answer.get("weight_version")) if isinstance(answer, dict) else "unknown"
        if version != self._weight_version:
            raise DriftError(
                f"{self.url}: weight_version={version}, must be {self._weight_version}: it was "
                "started again, or somebody else updates it; a server takes the weights of one run"
            )

    def load_folder(self, folder: Path, *, load_format: str) -> None:
        """Load all weights of a folder; see ``ControlCalls``."""
        try:
            super().load_folder(folder, load_format=load_format)
        except ConnectionLostError:
            raise
        except EngineError as error:
            raise EngineError(
                f"{self.url}: {error}; it must see the same folder ({folder}): point TMPDIR at a "
                "disk that both share, start it as the same user, or set serving.weights=broadcast"
            ) from error
